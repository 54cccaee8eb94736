"""What the arguments of a head must be, and what all heads make of them."""

import math
from typing import Literal

import jax
import jax.numpy as jnp

Reduction = Literal["token_mean", "mean", "sum", "none"]
NO_ITEM = -1e30  # a bias that no logit survives


def as_arrays(*arrays):
    """JAX arrays of whatever numpy takes for an array; None stays None."""
    return [None if x is None else jnp.asarray(x) for x in arrays]


def check_shapes(hidden, table, targets, bias, weights, reduction) -> tuple[int, ...]:
    """The leading shape [...] of a head's arguments; raises ValueError where they don't fit each other."""
    shape, (items, width) = hidden.shape[:-1], table.shape
    expected = {"hidden": (hidden, (*shape, width)), "targets": (targets, (*shape, targets.shape[-1]))}
    expected |= {"bias": (bias, (items,)), "weights": (weights, shape)}
    for name, (array, wanted) in expected.items():
        if array is not None and array.shape != wanted:
            raise ValueError(f"{name} must be {list(wanted)} to fit hidden and table, got {list(array.shape)}")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be integer item ids, got {targets.dtype}")
    if reduction not in ("token_mean", "mean", "sum", "none"):
        raise ValueError(f"reduction must be 'token_mean', 'mean', 'sum' or 'none', got {reduction!r}")
    return shape


def without_padding(targets, bias, rows: int, num_items: int | None):
    """(targets, bias, V) of a table of so many rows: those from ``num_items`` on get a bias that no logit survives."""
    if num_items is None or num_items == rows:
        return targets, bias, rows
    if not 0 < num_items < rows:
        raise ValueError(f"num_items must be 1 to {rows}, the rows of the table, got {num_items}")
    bias = jnp.zeros(rows) if bias is None else bias.astype(jnp.float32)
    bias = jnp.where(jnp.arange(rows) < num_items, bias, NO_ITEM)
    return jnp.where(targets.astype(jnp.int32) < num_items, targets, -1), bias, num_items


def flatten(hidden, targets, weights, temperature) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens on one axis: h_TD divided by the temperature, targets_TL, float32 weight_T."""
    # sizes are named, not left to -1, which a batch without tokens would leave open
    h_TD = hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])
    if not (isinstance(temperature, int | float) and temperature == 1):
        h_TD = (h_TD.astype(jnp.float32) / temperature).astype(h_TD.dtype)
    targets_TL = targets.astype(jnp.int32).reshape(h_TD.shape[0], targets.shape[-1])
    weight_T = jnp.ones(h_TD.shape[0]) if weights is None else weights.reshape(-1).astype(jnp.float32)
    return h_TD, targets_TL, weight_T


def normaliser(weight_T: jax.Array, reduction: str, items: int) -> jax.Array | float:
    """What multiplies sum_t w_t loss_t: 1 over sum_t w_t (0 if that is 0), for "mean" also over V; else 1."""
    if reduction in ("sum", "none"):
        return 1.0
    weight = weight_T.sum()
    # Both branches of a where are differentiated: the denominator has to be safe on its own.
    mean = jnp.where(weight != 0, 1 / jnp.where(weight != 0, weight, 1.0), 0.0)
    return mean / items if reduction == "mean" else mean


def positive_set(targets_TL: jax.Array, items: int) -> tuple[jax.Array, jax.Array]:
    """(ids_TL, mask_TL): each valid id of a token once. Masked slots hold ``items``: gathers and scatters drop it."""
    valid_TL = (targets_TL >= 0) & (targets_TL < items)
    ids_TL = jnp.where(valid_TL, targets_TL, items).astype(jnp.int32)
    if ids_TL.shape[1] > 32:  # comparing all pairs is quadratic in L
        ids_TL = jnp.sort(ids_TL, axis=1)
        repeat_TL = jnp.pad(ids_TL[:, 1:] == ids_TL[:, :-1], [(0, 0), (1, 0)])
    else:
        earlier_LL = jnp.tril(jnp.ones((ids_TL.shape[1],) * 2, bool), -1)
        repeat_TL = ((ids_TL[:, :, None] == ids_TL[:, None, :]) & earlier_LL).any(2)
    ids_TL = jnp.where(repeat_TL, items, ids_TL)
    return ids_TL, ids_TL < items

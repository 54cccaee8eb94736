"""The head on a mesh: the item table split by rows over one axis, tokens over another or over both.

Each device sweeps its own items for all tokens of its group: hidden states, targets and weights are gathered once, then
what a sweep gives per token is summed over the shards, and the table's gradient over the groups. Or each device sweeps
the whole table, gathered once, for its own tokens. No collective is inside a tile loop, and the custom derivative is
outside of the shards.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from recml_sasrec.heads import rows

DATA, ITEMS = "data", "items"


class Placement(NamedTuple):
    """Where a head's arguments lie; hashable.

    mesh: with the axes ``data`` and ``items``; table and bias are split by rows over ``items``.
    tokens: the axes over which the first axis of hidden, targets and weights is split.
    gather: what moves between the devices of an ``items`` axis; the table only where each has tokens of its own.
    """

    mesh: Mesh
    tokens: tuple[str, ...] = (DATA, ITEMS)
    gather: Literal["hidden", "table"] = "hidden"

    def for_rows(self, rows: int) -> "Placement":
        """Split over as many axes as so many rows divide among."""
        ways = ((DATA, ITEMS), (DATA,), ())
        sizes = [math.prod(self.mesh.shape[axis] for axis in axes) for axes in ways]
        return self._replace(tokens=next(axes for axes, size in zip(ways, sizes, strict=True) if rows % size == 0))

    def best(self, reference_T: jax.Array) -> jax.Array:
        """The highest of the shards' references, inside ``over_shards``."""
        return reference_T if self.gathers_table else lax.pmax(reference_T, ITEMS)

    @property
    def gathers_table(self) -> bool:
        return self.gather == "table" and ITEMS in self.tokens


def over_shards(local: Callable, placement: Placement | None, h_TD, table_VD, bias_V, targets_TL, weight_T):
    """``local(h, table, bias, targets, weight) -> (sums per token, (dh, dtable, dbias) or None)`` over all shards."""
    if placement is None:
        return local(h_TD, table_VD, bias_V, targets_TL, weight_T)
    over = _over_table if placement.gathers_table else _over_hidden
    tokens, items = P(placement.tokens), P(ITEMS)
    body = lambda *arguments: over(local, placement.tokens, *arguments)  # noqa: E731
    return jax.shard_map(
        body,
        mesh=placement.mesh,
        in_specs=(tokens, items, items, tokens, tokens),
        out_specs=(tokens, (tokens, items, items)),
        check_vma=False,  # the kernel is a primitive that knows nothing of varying axes
    )(h_TD, table_VD, bias_V, targets_TL, weight_T)


def _over_hidden(local, tokens, h_TD, table_VD, bias_V, targets_TL, weight_T):
    """Own items, all tokens of the group."""
    split = ITEMS in tokens
    if split:
        gathered = [lax.all_gather(x, ITEMS, tiled=True) for x in (h_TD, targets_TL, weight_T)]
        h_TD, targets_TL, weight_T = gathered
    own_TL = _own_ids(targets_TL, table_VD.shape[0])
    sums, gradients = local(h_TD, table_VD, bias_V, own_TL, weight_T)
    add = functools.partial(_over_items, split=split)
    sums = jax.tree.map(add, sums)
    if gradients is None:
        return sums, (None, None, None)
    dh_TD, *others = gradients
    if DATA in tokens:  # else every group has all tokens
        others = jax.tree.map(lambda x: lax.psum(x, DATA), others)
    return sums, (add(dh_TD), *others)


def _over_table(local, tokens, h_TD, table_VD, bias_V, targets_TL, weight_T):
    """All items, own tokens."""
    table_VD, bias_V = jax.tree.map(lambda x: lax.all_gather(x, ITEMS, tiled=True), (table_VD, bias_V))
    sums, gradients = local(h_TD, table_VD, bias_V, targets_TL, weight_T)
    if gradients is None:
        return sums, (None, None, None)
    dh_TD, *others = gradients
    return sums, (dh_TD, *jax.tree.map(lambda x: lax.psum(lax.psum_scatter(x, ITEMS, tiled=True), DATA), others))


def _over_items(x, split: bool):
    """The sum over the shards: each device's own part of it where the tokens are split over them."""
    return lax.psum_scatter(x, ITEMS, tiled=True) if split else lax.psum(x, ITEMS)


def _own_ids(ids, items: int):
    """Global ids as rows of this shard of so many items; ``items``, which is padding, for those of other shards."""
    own = ids - lax.axis_index(ITEMS) * items
    return jnp.where((own >= 0) & (own < items), own, items)


def lookup(table_VD: jax.Array, ids: jax.Array, placement: Placement | None = None) -> jax.Array:
    """[..., D] rows of a float32 table split over ``items`` for int32 ids [...] split as the tokens; zeros for others.

    The ids are gathered, every shard gives the rows it has, and the sum of all shards' is split again. The gradient
    gathers the cotangents and adds them up in the shard they belong to. On a narrow table both go by ``rows``.
    """
    return _lookup(table_VD, ids, placement, table_VD.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table_VD, ids, placement, items):
    if placement is None:
        return rows.take(table_VD, ids)
    split, tokens = ITEMS in placement.tokens, P(placement.tokens)

    def body(table_VD, ids):
        if split:
            ids = lax.all_gather(ids, ITEMS, tiled=True)
        own = rows.take(table_VD, _own_ids(ids, table_VD.shape[0]))
        return _over_items(own, split)

    specs = {"mesh": placement.mesh, "in_specs": (P(ITEMS), tokens), "out_specs": tokens, "check_vma": False}
    return jax.shard_map(body, **specs)(table_VD, ids)


def _lookup_fwd(table_VD, ids, placement, items):
    return _lookup(table_VD, ids, placement, items), ids


def _lookup_bwd(placement, items, ids, gradient):
    def added(items, ids, gradient):
        return rows.add(jnp.zeros((items, gradient.shape[-1]), gradient.dtype), ids, gradient)

    if placement is None:
        return added(items, ids, gradient), None
    shards, tokens = placement.mesh.shape[ITEMS], P(placement.tokens)
    # of all groups: their cotangents, or what they add up to, whatever is less
    gathers = DATA in placement.tokens and ids.size < 2 * items // shards
    axes = tuple(axis for axis in placement.tokens if axis == ITEMS or gathers)

    def body(ids, gradient):
        if axes:
            ids, gradient = (lax.all_gather(x, axes, tiled=True) for x in (ids, gradient))
        own_VD = added(items // shards, _own_ids(ids, items // shards), gradient)
        return own_VD if gathers or DATA not in placement.tokens else lax.psum(own_VD, DATA)

    specs = {"mesh": placement.mesh, "in_specs": (tokens, tokens), "out_specs": P(ITEMS), "check_vma": False}
    return jax.shard_map(body, **specs)(ids, gradient), None


_lookup.defvjp(_lookup_fwd, _lookup_bwd)

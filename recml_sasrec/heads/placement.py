"""The head on a mesh: the item table split by rows over one axis, tokens over another or over both.

Each device sweeps its own items for all tokens of its group: hidden states, targets and weights are gathered once, then
what a sweep gives per token is summed over the shards, and the table's gradient over the groups. Or each device sweeps
the whole table, gathered once, for its own tokens. No collective is inside a tile loop, and the custom derivative is
outside of the shards.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

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

    def add(x):
        return lax.psum_scatter(x, ITEMS, tiled=True) if split else lax.psum(x, ITEMS)

    sums = jax.tree.map(add, sums)
    if gradients is None:
        return sums, (None, None, None)
    dh_TD, *others = gradients
    return sums, (add(dh_TD), *jax.tree.map(lambda x: lax.psum(x, DATA), others))


def _over_table(local, tokens, h_TD, table_VD, bias_V, targets_TL, weight_T):
    """All items, own tokens."""
    table_VD, bias_V = jax.tree.map(lambda x: lax.all_gather(x, ITEMS, tiled=True), (table_VD, bias_V))
    sums, gradients = local(h_TD, table_VD, bias_V, targets_TL, weight_T)
    if gradients is None:
        return sums, (None, None, None)
    dh_TD, *others = gradients
    return sums, (dh_TD, *jax.tree.map(lambda x: lax.psum(lax.psum_scatter(x, ITEMS, tiled=True), DATA), others))


def _own_ids(ids, items: int):
    """Global ids as rows of this shard of so many items; -1 for those of other shards."""
    own = ids - lax.axis_index(ITEMS) * items
    return jnp.where((own >= 0) & (own < items), own, -1)


def lookup(table_VD: jax.Array, ids: jax.Array, placement: Placement) -> jax.Array:
    """[..., D] rows of a table split over ``items`` for int32 ids [...] split as the tokens; zeros for other ids.

    The ids are gathered, every shard gives the rows it has, and the sum of all shards' is split again.
    """
    split, tokens = ITEMS in placement.tokens, P(placement.tokens)

    def body(table_VD, ids):
        if split:
            ids = lax.all_gather(ids, ITEMS, tiled=True)
        own = _own_ids(ids, table_VD.shape[0])
        rows = jnp.where((own >= 0)[..., None], table_VD[jnp.maximum(own, 0)], 0)
        return lax.psum_scatter(rows, ITEMS, tiled=True) if split else lax.psum(rows, ITEMS)

    return jax.shard_map(body, mesh=placement.mesh, in_specs=(P(ITEMS), tokens), out_specs=tokens)(table_VD, ids)

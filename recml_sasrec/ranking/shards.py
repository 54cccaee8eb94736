"""Exact top-k of a catalogue split over devices: each ranks its own items, and the k best of each are merged."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from recml_sasrec.heads.placement import ITEMS
from recml_sasrec.ranking.topk import top_k, top_k_jit
from recml_sasrec.sharding import Layout


def top_k_over(layout: Layout) -> Callable[..., tuple[Array, Array]]:
    """``topk.top_k`` of a table of the layout: the same lists and order of ties; rows beyond V are no items."""
    if layout.placement is None:
        return top_k_jit
    padding = layout.table_rows - layout.num_items

    def ranked(hidden_QD, table_VD, k, *, bias=None, exclude=None, candidates=None):
        candidates = jnp.ones(layout.num_items, bool) if candidates is None else candidates
        candidates = jnp.pad(candidates, (0, padding))
        queries = P(layout.of_rows(hidden_QD.shape[0]).data_axes)

        def shard(hidden_QD, table_VD, bias, exclude, candidates):
            first = lax.axis_index(ITEMS) * table_VD.shape[0]
            if exclude is not None:
                own = exclude - first
                exclude = jnp.where((own >= 0) & (own < table_VD.shape[0]), own, -1)
            scores, ids = top_k(hidden_QD, table_VD, k, bias=bias, exclude=exclude, candidates=candidates)
            ids = jnp.where(ids >= 0, ids + first, -1)
            # Shards in their order, each by score, then id: among equal scores the first column has the smallest id.
            scores, ids = (lax.all_gather(x, ITEMS, axis=1, tiled=True) for x in (scores, ids))
            scores, place = lax.top_k(scores, k)
            return scores, jnp.take_along_axis(ids, place, 1)

        specs = (queries, P(ITEMS), P(ITEMS), queries, P(ITEMS))
        run = jax.shard_map(shard, mesh=layout.mesh, in_specs=specs, out_specs=queries, check_vma=False)
        return run(hidden_QD, table_VD, bias, exclude, candidates)

    return jax.jit(ranked, static_argnames="k", out_shardings=layout.replicated)

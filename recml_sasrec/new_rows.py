"""Where the rows of items start that the run to start from does not have (``config.init.new_items``).

A new row is the mean of kept rows plus noise of their spread in each dimension, its bias the mean of their biases. So a
new item scores like an average kept one: it does not float to the top as a row of larger scores would, and its
predicted probability is about that of any item, so that the loss and its gradients do not jump at the first step.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from recml_sasrec.model import INIT_STDDEV

RIDGE = 0.01  # of the content's mean variance, added to each of its dimensions
_ROUNDING = 1e-10  # likewise, of its mean square: what is left of sums that cancel says nothing
_CHUNK = 1 << 16  # rows fitted at once


def usable(categories: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """int32 [V] the categories that have at least two kept rows, and so a spread, as 0, 1, ...; -1: none.

    Args:
        categories: int32 [V], -1: none.
        kept: bool [V].
    """
    counts = np.bincount(categories[kept & (categories >= 0)], minlength=categories.max(initial=-1) + 1)
    numbers = np.where(counts >= 2, np.cumsum(counts >= 2) - 1, -1).astype(np.int32)
    return np.where(categories >= 0, numbers[categories] if len(numbers) else -1, -1).astype(np.int32)


def described(content: np.ndarray) -> np.ndarray:
    """bool [V] which items have content; those without have zeros."""
    return np.concatenate([content[i : i + _CHUNK].any(1) for i in range(0, len(content), _CHUNK)])


def drawn(
    table: jax.Array,
    bias: jax.Array | None,
    noise: jax.Array,
    source: jax.Array,
    categories: jax.Array | None = None,
    num_categories: int = 0,
) -> tuple[jax.Array, jax.Array | None]:
    """Table and bias whose rows without a source are drawn around the kept ones.

    Args:
        table, bias: float32 [V', D] and [V'], kept rows in place.
        noise: float32 [V', D] of standard deviation ``INIT_STDDEV``, as the rows of a fresh table are.
        source: int32 [V'], -1: not kept.
        categories: int32 [V'] below ``num_categories``, see ``usable``: an item is drawn around the kept rows of its
            category, with -1, or without any categories, around all of them.
    """
    kept = source >= 0
    everything = jnp.full(source.shape, num_categories, jnp.int32)
    group = everything if categories is None else jnp.where(categories >= 0, categories, num_categories)

    def means(x_VD: jax.Array) -> jax.Array:
        """[categories + 1, D] of the kept rows, the last of all."""
        x_VD = jnp.where(kept[:, None], x_VD, 0)
        of_all = x_VD.sum(0, keepdims=True) / kept.sum()
        if not num_categories:
            return of_all
        segment = jnp.where(kept, group, num_categories)
        sums, counts = (jax.ops.segment_sum(x, segment, num_categories + 1) for x in (x_VD, kept.astype(jnp.float32)))
        return jnp.concatenate([sums[:-1] / jnp.maximum(counts[:-1, None], 1), of_all])

    mean = means(table)
    variance = means(jnp.square(table - mean[group]))
    variance = variance.at[-1].set(means(jnp.square(table - mean[-1]))[-1])  # around the mean of all
    spread = jnp.sqrt(variance)
    table = jnp.where(kept[:, None], table, mean[group] + spread[group] * (noise / INIT_STDDEV))
    return table, None if bias is None else jnp.where(kept, bias, means(bias[:, None])[group, 0])


def fitted(
    content: np.ndarray, source: np.ndarray, base_table: jax.Array, rows: int, sharding: NamedSharding
) -> jax.Array:
    """float32 [rows, D], split as told: what content says a row is, by ridge regression on the kept rows.

    Minimises ``|X W - Y|^2 + s |W|^2`` over kept items that have content, X their content and Y their rows, both less
    their means; s is ``RIDGE`` times the mean square of X's columns. The normal equations are summed in float64 over
    chunks of items; the fit is made for one shard of the result at a time. Items without content get zeros, all others
    the mean where the kept items' content is all the same.

    Args:
        content: float32 [V, C], zeros: none.
        source: int32 [V], rows of the base's table, -1: not kept.
        base_table: float32 [rows of the base, D], on the devices.
    """
    take = jax.jit(lambda table, index: table[index], out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))
    C, D = content.shape[1], base_table.shape[1]
    sums = np.zeros((C + D + 1, C + D + 1))  # of the products of (x, y, 1) with itself
    for start in range(0, len(content), _CHUNK):
        x, index = content[start : start + _CHUNK], source[start : start + _CHUNK]
        y = np.asarray(take(base_table, np.resize(np.maximum(index, 0), _CHUNK)))[: len(x)]  # one shape to compile for
        use = (index >= 0) & x.any(1)
        z = np.concatenate([x[use], y[use], np.ones((int(use.sum()), 1))], 1, dtype=np.float64)
        sums += z.T @ z
    mean = sums[-1] / sums[-1, -1]
    centred = sums - sums[-1, -1] * np.outer(mean, mean)
    gram = centred[:C, :C]
    ridge = RIDGE * max(np.trace(gram), 0) + _ROUNDING * np.trace(sums[:C, :C])
    weights = np.linalg.solve(gram + ridge / C * np.eye(C), centred[:C, C:-1])

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        first, last, _ = (index[0] if index else slice(None)).indices(rows)
        result = np.zeros((last - first, D), np.float32)
        for start in range(first, min(last, len(content)), _CHUNK):
            x = content[start : min(start + _CHUNK, last)]
            y = (x.astype(np.float64) - mean[:C]) @ weights + mean[C:-1]
            result[start - first : start - first + len(x)] = np.where(described(x)[:, None], y, 0)
        return result

    return jax.make_array_from_callback((rows, D), sharding, block)

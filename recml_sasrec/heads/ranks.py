"""Exact ranks over the catalogue from the sweep that gives the loss: one more comparison a logit.

A token's rank is that of its best target: 1 + the number of items whose logit is **above** that target's (ties do not
count). The target's logit is known before the sweep, from its own dot product, which adds in another order than the
sweep's matmul. So the sweep counts what exceeds it by more than both can be wrong: a target never beats itself, and an
item must lead by more than rounding to lead at all.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from recml_sasrec.heads.rows import rounded

KS = (1, 10, 100)
_SEVERAL_PASSES = ("high", "highest", "float32", "bfloat16_3x", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "F32_F32_F32")


class RankSums(NamedTuple):
    """Sums over ranked tokens: Hit@k is ``hits / tokens``, MRR ``reciprocal / tokens``."""

    tokens: jax.Array  # int32, tokens of positive weight with a target
    hits: jax.Array  # int32 [len(KS)], ranks of at most k
    reciprocal: jax.Array  # float32, sum of 1 / rank

    @classmethod
    def zeros(cls) -> "RankSums":
        """Nothing ranked yet, in buffers of their own so that a donated state may hold them."""
        return cls(jnp.zeros((), jnp.int32), jnp.zeros(len(KS), jnp.int32), jnp.zeros((), jnp.float32))

    @classmethod
    def of(cls, ranks: jax.Array) -> "RankSums":
        """The sums of int32 ``ranks`` [...]; 0 is not a rank."""
        ranked = ranks > 0
        hits = [jnp.sum(ranked & (ranks <= k), dtype=jnp.int32) for k in KS]
        reciprocal = jnp.where(ranked, 1 / jnp.maximum(ranks, 1).astype(jnp.float32), 0).sum()
        return cls(ranked.sum(dtype=jnp.int32), jnp.stack(hits), reciprocal)

    def __add__(self, other: "RankSums") -> "RankSums":  # type: ignore[override]
        return RankSums(*(a + b for a, b in zip(self, other, strict=True)))

    def metrics(self) -> dict[str, float]:
        """``{"hit@1": ..., "mrr": ...}`` on the host; empty where nothing was ranked."""
        tokens = int(self.tokens)
        if not tokens:
            return {}
        hits = {f"hit@{k}": int(hits) / tokens for k, hits in zip(KS, self.hits, strict=True)}
        return hits | {"mrr": float(self.reciprocal) / tokens}


def reference(h_TD: jax.Array, rows_TLD: jax.Array, bias_TL: jax.Array | None, mask_TL: jax.Array) -> jax.Array:
    """float32 [T]: what a sweep's logit must exceed to rank above the token's best target; -inf without a target.

    A sum of D products and a bias is off by at most (D + 4) 2**-24 of the sum of their magnitudes in any order, and
    two such sums are compared. Where one pass of a matrix unit rounds float32 operands, the target's are rounded alike
    (TPU, to bfloat16), or their rounding is allowed for (GPU, TF32: 2**-10 an operand).
    """
    operand: float | jax.Array = 0.0  # relative error of a product whose operands are rounded
    if h_TD.dtype == jnp.float32 and jax.config.jax_default_matmul_precision not in _SEVERAL_PASSES:  # type: ignore[attr-defined]
        h_TD, rows_TLD, operand = jax.lax.platform_dependent(
            h_TD,
            rows_TLD,
            tpu=lambda h, rows: (rounded(h, jnp.bfloat16), rounded(rows, jnp.bfloat16), jnp.float32(0)),
            cuda=lambda h, rows: (h, rows, jnp.float32(2.0**-9)),
            default=lambda h, rows: (h, rows, jnp.float32(0)),
        )
    h_TD, rows_TLD = h_TD.astype(jnp.float32), rows_TLD.astype(jnp.float32)
    products_TLD = h_TD[:, None] * rows_TLD
    z_TL, magnitude_TL = products_TLD.sum(2), jnp.abs(products_TLD).sum(2)
    if bias_TL is not None:
        z_TL, magnitude_TL = z_TL + bias_TL, magnitude_TL + jnp.abs(bias_TL)
    limit_TL = z_TL + (operand + (h_TD.shape[1] + 4) * 2.0**-23) * magnitude_TL
    return jnp.where(mask_TL, limit_TL, -jnp.inf).max(1)


def from_better(better_T: jax.Array, has_target_T: jax.Array, weight_T: jax.Array) -> jax.Array:
    """int32 [T]: the ranks, 0 for tokens without targets or positive weight."""
    return jnp.where(has_target_T & (weight_T > 0), 1 + better_T, 0)

"""Confusion counts over T*V decisions, exact beyond 2^31 without 64-bit arrays.

JAX runs with x64 off, so a step's counts, let alone a run's, overflow int32 and lose units in float32 from 2^24. A
``Count`` holds an integer as two uint32 limbs, ``high * 2**bits + low`` with ``low < 2**bits``; 31 bits leave room for
the carry of one addition. A ``Counts`` is four of them. Both are pytrees: outputs of a jitted step, carries of a scan,
leaves of a checkpoint. The host reads them as Python integers, only when it logs.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BITS = 31


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Count:
    """A non-negative integer below ``2**(32 + bits)``, or an array of them (under vmap): uint32 limbs of one shape."""

    low: jax.Array
    high: jax.Array
    bits: int = dataclasses.field(default=BITS, metadata={"static": True})

    @classmethod
    def of(cls, value: int = 0, bits: int = BITS) -> "Count":
        """The count of a Python integer. Raises ValueError where it does not fit the limbs."""
        if not 0 <= value < 2 ** (32 + bits):
            raise ValueError(f"a count with limbs of {bits} bits holds 0 to 2**{32 + bits} - 1, got {value}")
        return cls(jnp.uint32(value & (2**bits - 1)), jnp.uint32(value >> bits), bits)

    def __add__(self, other: "Count") -> "Count":
        if not isinstance(other, Count):
            return NotImplemented
        if self.bits != other.bits:
            raise ValueError(f"counts with limbs of {self.bits} and of {other.bits} bits can't be added")
        return _normalise(self.low + other.low, self.high + other.high, self.bits)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        low, high = jax.device_get((self.low, self.high))
        exact = (np.asarray(high, object) << self.bits) + np.asarray(low, object)
        return np.asarray(exact, np.int64 if dtype is None else dtype)

    def __int__(self) -> int:
        low, high = jax.device_get((self.low, self.high))
        return (int(high) << self.bits) + int(low)

    __index__ = __int__

    def __float__(self) -> float:
        return float(int(self))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Count | int | np.integer):
            return int(self) == int(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to the integer it holds, which only the host knows

    def __repr__(self) -> str:
        traced = isinstance(self.low, jax.core.Tracer)
        return f"Count({self.low}, {self.high})" if traced or jnp.ndim(self.low) else f"Count({int(self)})"


class Counts(NamedTuple):
    """True positives, false positives, false negatives and true negatives. ``a + b`` adds field by field."""

    tp: Count
    fp: Count
    fn: Count
    tn: Count

    @classmethod
    def zeros(cls, bits: int = BITS) -> "Counts":
        """Four zeros, with buffers of their own so that a donated state may hold them."""
        return cls(*(Count.of(0, bits) for _ in cls._fields))

    def __add__(self, other: "Counts") -> "Counts":  # type: ignore[override]
        return add(self, other)


def add(a: Counts, b: Counts) -> Counts:
    """The field-wise sum, on the device or the host."""
    return Counts(*(x + y for x, y in zip(a, b, strict=True)))


def total(values_T: jax.Array, bits: int = BITS) -> Count:
    """The exact sum of non-negative int32 ``values_T`` [T].

    Each value splits into half-limbs; the halves of a chunk of tokens sum without overflow in ``bits + 1`` bits. Plain
    sums keep the reduction local under a sharded token axis.
    """
    mask, half = 2**bits - 1, (bits + 1) // 2
    low, high = values_T.astype(jnp.uint32), jnp.zeros_like(values_T, jnp.uint32)
    while True:
        low, high = low & mask, high + (low >> bits)  # artificial limbs may be narrower than a value
        chunks = -(-low.shape[0] // 2**half)
        pad = [(0, chunks * 2**half - low.shape[0])] if chunks > 1 else [(0, 0)]
        low, high = (jnp.pad(x, pad).reshape(max(chunks, 1), -1) for x in (low, high))
        fine = (low & (2**half - 1)).sum(1, dtype=jnp.uint32)
        coarse = (low >> half).sum(1, dtype=jnp.uint32)
        low = (fine & mask) + ((coarse << half) & mask)
        high = high.sum(1, dtype=jnp.uint32) + (fine >> bits) + (coarse >> (bits - half))
        if chunks <= 1:
            return _normalise(low[0], high[0], bits)


def from_tokens(stats: tuple[jax.Array, ...], weight_T: jax.Array, items: int | jax.Array) -> Counts:
    """Counts over the tokens of positive weight; arguments as for ``by_token``."""
    return Counts(*(total(jnp.where(weight_T > 0, column_T, 0)) for column_T in by_token(stats, items)))


def by_token(stats: tuple[jax.Array, ...], items: int | jax.Array) -> tuple[jax.Array, ...]:
    """int32 [T]: true and false positives, false and true negatives of each token.

    ``stats`` are int32 [T]: a token's positives above the threshold, its items above it, its positives; ``items`` are
    those scored, one number or [T]. Positives are scored by another dot product than the sweep's, so a logit on the
    threshold may fall on either side: false positives are held at 0 or more, and the four still sum to ``items``.
    """
    true_T, above_T, positives_T = stats
    false_T = jnp.maximum(above_T - true_T, 0)
    return true_T, false_T, positives_T - true_T, items - positives_T - false_T


def accuracy(counts: Counts) -> float:
    """(tp + tn) / all, 0 where nothing was counted."""
    tp, fp, fn, tn = map(int, counts)
    return _ratio(tp + tn, tp + fp + fn + tn)


def precision(counts: Counts) -> float:
    """tp / (tp + fp), 0 where nothing was predicted."""
    return _ratio(int(counts.tp), int(counts.tp) + int(counts.fp))


def recall(counts: Counts) -> float:
    """tp / (tp + fn), 0 where nothing is positive."""
    return _ratio(int(counts.tp), int(counts.tp) + int(counts.fn))


def f_beta(counts: Counts, beta: float = 1.0) -> float:
    """(1 + beta^2) tp / ((1 + beta^2) tp + beta^2 fn + fp); beta > 1 weighs recall more than precision."""
    tp, fp, fn = int(counts.tp), int(counts.fp), int(counts.fn)
    return _ratio((1 + beta**2) * tp, (1 + beta**2) * tp + beta**2 * fn + fp)


def _normalise(low: jax.Array, high: jax.Array, bits: int) -> Count:
    return Count(low & (2**bits - 1), high + (low >> bits), bits)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

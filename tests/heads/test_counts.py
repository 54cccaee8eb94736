"""Counts: exact integers on the device, whatever their size."""

import operator

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recml_sasrec.heads import Count, Counts, accuracy, add, f_beta, precision, recall
from recml_sasrec.heads.counts import from_tokens, total


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(size=st.sampled_from([1, 17, 300]), seed=st.integers(0, 99), bits=st.sampled_from([4, 7, 16, 31]))
def test_total_is_exact_with_any_limb(size, seed, bits):
    values = np.random.default_rng(seed).integers(0, 5000, size)
    assert total(jnp.array(values, jnp.int32), bits) == values.sum()


def test_total_beyond_32_bits():
    values = np.random.default_rng(0).integers(2**30, 2**31 - 1, 70_000).astype(np.int32)  # two levels of chunks
    count = jax.jit(total)(values)
    assert int(count) == values.astype(np.int64).sum() > 2**46
    assert count.low.dtype == jnp.uint32


def test_sums_on_the_device_carry_over():
    big = 2**31 - 1

    def step(carry, _):
        return carry + total(jnp.full(3, big, jnp.int32)), None

    count, _ = jax.jit(lambda c: jax.lax.scan(step, c, length=1000))(Count.of(2**40 + 7))
    assert count == 2**40 + 7 + 3000 * big


def test_a_count_reads_as_an_integer():
    count = Count.of(2**33 + 1)
    assert count == 2**33 + 1 and count == Count.of(2**33 + 1) and count != 0
    assert operator.index(count) == int(count) == 2**33 + 1
    assert float(count) == 2.0**33 + 1
    assert np.asarray(count).dtype == np.int64 and np.asarray(count) == 2**33 + 1
    assert f"{count}" == f"Count({2**33 + 1})"
    with pytest.raises(ValueError, match="holds 0 to"):
        Count.of(-1)
    with pytest.raises(ValueError, match="can't be added"):
        Count.of(1, bits=4) + Count.of(1)


def test_counts_of_tokens_with_weight():
    columns = [jnp.array(x, jnp.int32) for x in ([1, 2, 0], [4, 2, 9], [2, 2, 1])]
    counts = from_tokens(columns, jnp.array([1.0, 0.5, 0.0]), items=10)
    assert list(map(int, counts)) == [3, 3, 1, 13]
    assert list(map(int, add(counts, Counts.zeros()))) == [3, 3, 1, 13]


def test_a_logit_on_the_threshold_never_makes_a_count_negative():
    counts = from_tokens([jnp.array([x], jnp.int32) for x in (1, 0, 1)], jnp.ones(1), items=5)
    assert list(map(int, counts)) == [1, 0, 0, 4]


def test_ratios():
    counts = Counts(*map(Count.of, (6, 2, 4, 88)))
    assert accuracy(counts) == 0.94
    assert precision(counts) == 0.75
    assert recall(counts) == 0.6
    assert f_beta(counts) == pytest.approx(2 * 0.75 * 0.6 / 1.35)
    assert f_beta(counts, 2.0) == pytest.approx(5 * 0.75 * 0.6 / (4 * 0.75 + 0.6))
    assert accuracy(Counts.zeros()) == precision(Counts.zeros()) == recall(Counts.zeros()) == 0

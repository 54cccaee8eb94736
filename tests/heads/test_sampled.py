"""BCE with sampled negatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recml_sasrec.heads import sampled_bce
from recml_sasrec.heads.arguments import positive_set
from recml_sasrec.heads.sampled import draw_negatives
from tests.heads.reference import problem


def test_negatives_are_uniform_over_the_other_items():
    positives, mask = positive_set(jnp.array([[5, 0, 5, -1]] * 4000, jnp.int32), 8)
    ids, drawn = draw_negatives(jax.random.key(0), positives, mask, 8, 10)
    share = np.bincount(np.asarray(ids).ravel(), minlength=8) / ids.size
    assert drawn.all()
    np.testing.assert_allclose(share, [0, *[1 / 6] * 4, 0, *[1 / 6] * 2], atol=0.01)


def test_loss_and_counts_are_those_of_the_drawn_pairs():
    hidden, table, targets, bias, weights = problem(0)
    key = jax.random.key(1)
    loss, counts = sampled_bce(hidden, table, targets, bias, weights, key=key, negatives=3, reduction="none")
    ids, mask = positive_set(jnp.asarray(targets), 37)
    negatives, _ = draw_negatives(key, ids, mask, 37, 3)
    wanted, tp, fp = [], 0, 0
    for t in range(7):
        z = table.astype(np.float64) @ hidden[t] + bias
        positive, negative = sorted({i for i in targets[t] if 0 <= i < 37}), list(np.asarray(negatives[t]))
        assert not set(positive) & set(negative)
        wanted.append(weights[t] * (np.logaddexp(0, -z[positive]).sum() + np.logaddexp(0, z[negative]).sum()))
        tp += (weights[t] > 0) * (z[positive] > 0).sum()
        fp += (weights[t] > 0) * (z[negative] > 0).sum()
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert (int(counts.tp), int(counts.fp)) == (tp, fp)
    assert int(counts.fp) + int(counts.tn) == 3 * (weights > 0).sum()


def test_a_catalogue_of_positives_has_no_negatives():
    loss, counts = sampled_bce(
        jnp.ones((1, 2)), jnp.ones((2, 2)), jnp.array([[0, 1]]), key=jax.random.key(0), reduction="sum"
    )
    assert loss == pytest.approx(2 * np.log1p(np.exp(-2.0)), rel=1e-6)
    assert counts.tn == 0 and counts.fp == 0


def test_gradients_are_finite_and_masked():
    hidden, table, targets, bias, _ = problem(2)
    call = jax.grad(lambda h, w: sampled_bce(h, table, targets, bias, w, key=jax.random.key(0))[0])
    assert np.abs(call(hidden, jnp.ones(7))).min(axis=1).max() > 0
    assert not np.any(call(hidden, jnp.zeros(7)))

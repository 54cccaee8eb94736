"""RecML's call, against a float64 reference written from the operator's definitions."""

import jax
import numpy as np
import pytest

from recml_sasrec.heads import cut_binary_cross_entropy
from tests.heads.reference import labels_of

B, N, V, D, L = 2, 7, 41, 8, 4


def problem(seed=0, binary=True):
    rng = np.random.default_rng(seed)
    activations, embeddings = rng.normal(size=(B, N, D)), rng.normal(size=(V, D))
    targets = rng.integers(-2, V + 2, (B, N, L)).astype(np.int32)
    targets[..., -1] = targets[..., 0]
    weights = rng.integers(0, 2, (B, N)) if binary else rng.random((B, N))
    return activations.astype(np.float32), embeddings.astype(np.float32), targets, weights.astype(np.float32)


def definition(activations, embeddings, targets, weights):
    """(loss, losses, tp, fp, fn, tn): a position's mean over V times its weight; sums over positions by weight."""
    h, table, w = (np.asarray(x, np.float64) for x in (activations, embeddings, weights))
    z = h @ table.T
    y = labels_of(targets.reshape(-1, L), V).reshape(z.shape)
    losses = (np.logaddexp(0, z) - y * z).mean(-1) * w
    above, true = z > 0, y > 0
    counts = [((a & b).sum(-1) * w).sum() for a, b in ((above, true), (above, ~true), (~above, true), (~above, ~true))]
    return losses.sum() / w.sum(), losses, *counts


def test_results_come_in_the_operator_s_order_and_counts_are_exact():
    arguments = problem()
    loss, losses, *counts = definition(*arguments)
    alone = cut_binary_cross_entropy(*arguments)
    np.testing.assert_allclose(alone, loss, rtol=1e-5)
    with_losses = cut_binary_cross_entropy(*arguments, return_per_target_losses=True)
    with_counts = cut_binary_cross_entropy(*arguments, return_metrics=True, block_v=16)
    with_both = cut_binary_cross_entropy(*arguments, return_per_target_losses=True, return_metrics=True)
    assert [len(x) for x in (with_losses, with_counts, with_both)] == [2, 5, 6]
    for results in (with_losses, with_counts, with_both):
        np.testing.assert_allclose(results[0], loss, rtol=1e-5)
    np.testing.assert_allclose(with_both[1], losses, rtol=1e-5)
    assert [float(c) for c in with_counts[1:]] == [float(c) for c in with_both[2:]] == counts
    assert sum(counts) == arguments[3].sum() * V


def test_fractional_weights_weigh_the_counts():
    arguments = problem(1, binary=False)
    results = cut_binary_cross_entropy(*arguments, return_metrics=True)
    expected = definition(*arguments)
    np.testing.assert_allclose(results, [expected[0], *expected[2:]], rtol=1e-5)


def test_gradients_are_the_same_with_and_without_the_losses():
    activations, embeddings, targets, weights = problem(2)
    step = 1e-6
    for options in ({}, {"return_per_target_losses": True}):

        def loss(h, table, options=options):
            result = cut_binary_cross_entropy(h, table, targets, weights, **options)
            return result[0] if options else result

        for i, grad in enumerate(jax.grad(loss, (0, 1))(activations, embeddings)):
            direction = np.random.default_rng(3).normal(size=grad.shape)
            ends = []
            for sign in (1, -1):
                moved = [np.asarray(x, np.float64) for x in (activations, embeddings)]
                moved[i] = moved[i] + sign * step * direction
                ends.append(definition(*moved, targets, weights)[0])
            assert (np.asarray(grad) * direction).sum() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4)


def test_no_weights_shared_targets_and_masked_batches():
    activations, embeddings, targets, weights = problem(4)
    ones = definition(activations, embeddings, targets, np.ones((B, N)))[0]
    np.testing.assert_allclose(cut_binary_cross_entropy(activations, embeddings, targets), ones, rtol=1e-5)
    stacked = np.stack([activations, activations])
    np.testing.assert_allclose(cut_binary_cross_entropy(stacked, embeddings, targets), ones, rtol=1e-5)
    assert cut_binary_cross_entropy(activations, embeddings, targets, weights * 0) == 0


def test_one_weight_a_target_is_refused():
    activations, embeddings, targets, _ = problem(5)
    with pytest.raises(ValueError, match="weights must be"):
        cut_binary_cross_entropy(activations, embeddings, targets, np.ones(targets.shape, np.float32))

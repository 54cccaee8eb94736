"""The step: what it accumulates, and that micro-batches, devices and restarts don't change what it learns."""

import functools

import jax
import numpy as np
import optax
import pytest

from recml_sasrec import heads, optim
from recml_sasrec.config import Config
from recml_sasrec.config_file import from_json, to_json
from recml_sasrec.data.batch import Batch
from recml_sasrec.step import Metrics, init_state, make_model, make_train_step

V, N, B, L = 40, 8, 8, 3


def make_config(**head):
    config = Config()
    config.split.test_start = 1
    config.data.length, config.data.targets = N, L
    config.model.width, config.model.blocks, config.model.dropout = 16, 1, 0.0
    config.train.batch_size = B
    for name, value in head.items():
        setattr(config.head, name, value)
    return config


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, N + 1, B)
    real = np.arange(N) < lengths[:, None]
    targets = np.where(real[..., None], rng.integers(-1, V, (B, N, L)), -1)
    return Batch(
        items=np.where(real, rng.integers(0, V, (B, N)), 0).astype(np.int32),
        positions=np.where(real, np.arange(N), 0).astype(np.int32),
        segment_ids=real.astype(np.int32),
        targets=targets.astype(np.int32),
        weights=(real & (targets >= 0).any(-1)).astype(np.float32),
    )


@functools.cache
def compiled(config_json):
    """(initialised state, step) of a config, compiled once for all tests."""
    config = from_json(config_json)
    graphdef, init = make_model(config, V, 2.0)
    optimizer = optim.make_optimizer(config.optimizer, 100)
    return jax.jit(lambda: init_state(init, optimizer))(), jax.jit(make_train_step(config, graphdef, optimizer))


def run(config, steps=1, batch=make_batch, state=None):
    start, step = compiled(to_json(config))
    state = start if state is None else state
    for i in range(steps):
        state = step(state, batch(i))
    return state


def assert_same(a, b, tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def test_dense_and_cut_heads_train_alike():
    dense, cut = (run(make_config(name=name), steps=20) for name in ("dense_bce", "cut_bce"))
    np.testing.assert_allclose(float(dense.metrics.loss), float(cut.metrics.loss), rtol=1e-5)
    assert_same(dense.params, cut.params, 1e-4)
    assert [int(c) for c in dense.metrics.counts] == [int(c) for c in cut.metrics.counts]
    assert dense.metrics.ranks.metrics() == pytest.approx(cut.metrics.ranks.metrics(), rel=1e-3)  # near ties


def logits_and_labels(config, batch):
    """Float64 [B, N, V] of the freshly initialised model."""
    model = make_model(config, V, 2.0)[1]()
    hidden = np.asarray(model(*batch[:3]), np.float64)
    logits = hidden @ np.asarray(model.item_table[...], np.float64).T + np.asarray(model.item_bias[...], np.float64)
    labels = np.zeros_like(logits)
    for b, n, slot in zip(*np.nonzero(batch.targets >= 0), strict=True):
        labels[b, n, batch.targets[b, n, slot]] = 1
    return logits, labels


def test_the_loss_is_the_published_mean_over_tokens_and_the_counts_cover_every_pair():
    config = make_config()
    config.optimizer.learning_rate = 1e-12
    state, batch = run(config), make_batch(0)
    logits, labels = logits_and_labels(config, batch)
    losses = (np.logaddexp(0, logits) - labels * logits).sum(-1)
    expected = (losses * batch.weights).sum() / batch.weights.sum()
    np.testing.assert_allclose(float(state.metrics.loss), expected, rtol=1e-6)
    kept = batch.weights > 0
    assert int(state.metrics.counts.tp) == ((logits > 0) & (labels == 1))[kept].sum()
    assert sum(int(c) for c in state.metrics.counts) == kept.sum() * V
    assert int(state.metrics.tokens) == (batch.segment_ids > 0).sum()


@pytest.mark.parametrize("name", ["cut_bce", "dense_bce"])
def test_hits_and_reciprocal_ranks_are_those_of_each_position_s_best_target(name):
    config, batch = make_config(name=name), make_batch(0)
    logits, labels = logits_and_labels(config, batch)
    best = np.where(labels > 0, logits, -np.inf).max(-1, keepdims=True)
    ranks = 1 + (logits > best).sum(-1)[batch.weights > 0]
    config.train.accumulate = 2
    metrics = run(config).metrics.ranks.metrics()
    assert set(metrics) == {"hit@1", "hit@10", "hit@100", "mrr"}
    for k in (1, 10, 100):
        assert metrics[f"hit@{k}"] == (ranks <= k).mean()
    assert 0 < metrics["hit@1"] < metrics["hit@10"] < 1
    np.testing.assert_allclose(metrics["mrr"], (1 / ranks).mean(), rtol=1e-6)


@pytest.mark.parametrize("head", [{"ranks": False}, {"name": "sampled_bce"}])
def test_a_head_without_ranks_logs_none(head):
    assert run(make_config(**head)).metrics.ranks.metrics() == {}


def test_the_mean_reduction_also_divides_by_the_catalogue():
    per_token, mean = (run(make_config(reduction=r)).metrics.loss for r in ("token_mean", "mean"))
    np.testing.assert_allclose(float(per_token) / V, float(mean), rtol=1e-6)


def test_micro_batches_give_the_whole_batch_gradient_though_their_weights_differ():
    whole, parts = make_config(), make_config()
    parts.train.accumulate = 4
    a, b = run(whole, steps=3), run(parts, steps=3)
    assert_same(a.params, b.params, 1e-5)
    assert [int(c) for c in a.metrics.counts] == [int(c) for c in b.metrics.counts]
    np.testing.assert_allclose(float(a.metrics.loss), float(b.metrics.loss), rtol=1e-6)


def test_dropout_depends_on_seed_and_step_alone():
    config = make_config()
    config.model.dropout = 0.5
    straight = run(config, steps=4)
    half = run(config, steps=2)
    resumed = run(config, steps=2, batch=lambda i: make_batch(i + 2), state=half)
    assert_same(straight.params, resumed.params, 0)
    config.train.seed = 1
    assert float(run(config).metrics.loss) != float(run(make_config()).metrics.loss)


def test_a_batch_without_targets_changes_no_gradient_into_nan():
    config = make_config()
    empty = make_batch()._replace(targets=np.full((B, N, L), -1, np.int32), weights=np.zeros((B, N), np.float32))
    state = run(config, batch=lambda i: empty)
    assert float(state.metrics.loss) == 0 and int(state.metrics.bad_step) == -1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_the_first_step_that_is_not_finite_is_remembered():
    config = make_config()

    def batch(i):
        weights = make_batch(i).weights
        return make_batch(i)._replace(weights=weights * (np.inf if i == 2 else 1))

    assert int(run(config, steps=2, batch=batch).metrics.bad_step) == -1
    assert int(run(config, steps=5, batch=batch).metrics.bad_step) == 3


def test_sampled_bce_trains():
    config = make_config(name="sampled_bce", negatives=4)
    config.optimizer.learning_rate = 1e-2
    batch = make_batch()
    first = float(run(config, batch=lambda i: batch).metrics.loss)
    state = run(config, steps=60, batch=lambda i: batch)
    last = float(
        run(config, steps=1, batch=lambda i: batch, state=state._replace(metrics=Metrics.zeros())).metrics.loss
    )
    assert last < 0.7 * first


def test_the_schedule_warms_up_and_decays():
    config = Config().optimizer
    config.learning_rate, config.warmup_steps, config.final_fraction = 1.0, 10, 0.1
    rates = [float(optim.make_schedule(config, 110)(i)) for i in range(111)]
    np.testing.assert_allclose(rates[:11], [min((i + 1) / 10, 1) for i in range(11)], rtol=1e-5)
    np.testing.assert_allclose(rates[60], 0.1 + 0.9 * 0.5, rtol=1e-5)
    np.testing.assert_allclose(rates[110], 0.1, rtol=1e-5)
    config.schedule = "constant"
    assert float(optim.make_schedule(config, 110)(100)) == 1.0


def test_weight_decay_spares_biases_and_norms():
    config = Config().optimizer
    config.weight_decay, config.learning_rate, config.schedule = 0.5, 0.1, "constant"
    optimizer = optim.make_optimizer(config, 10)
    params = {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}
    zero = jax.tree.map(np.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_allclose(new["kernel"], 0.95, rtol=1e-6)
    np.testing.assert_allclose(new["bias"], 1.0)


def test_counts_in_the_state_are_plain_arrays_that_a_checkpoint_can_hold():
    leaves = jax.tree.leaves(Metrics.zeros())
    assert all(isinstance(x, jax.Array) for x in leaves)
    assert isinstance(Metrics.zeros().counts, heads.Counts)

"""A position's output depends on its own history and on nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recml_sasrec import model as model_module
from recml_sasrec.config import ModelConfig
from recml_sasrec.model import SASRec, prior_log_odds

V, N = 50, 12
VARIANTS = list(itertools.product(["pre", "post"], ["gelu", "relu"]))


def make_model(norm="pre", activation="gelu", dtype="float32", **fields):
    config = ModelConfig(width=16, blocks=2, heads=2, norm=norm, activation=activation, dtype=dtype, **fields)
    model = SASRec(V, N, config, mean_positives=2.0, rngs=nnx.Rngs(0))
    # weights of the initial scale hardly mix positions: a leak would hide below the tolerance
    params = jax.tree.map(lambda p: p * 20 if p.ndim > 1 else p, nnx.state(model, nnx.Param))
    nnx.update(model, params)
    return model


def row(*histories):
    """items, positions, segment_ids of a row that holds the histories one after the other."""
    items, positions, segments = (np.zeros((1, N), np.int32) for _ in range(3))
    at = 0
    for segment, history in enumerate(histories, start=1):
        span = slice(at, at + len(history))
        items[0, span], positions[0, span], segments[0, span] = history, np.arange(len(history)), segment
        at += len(history)
    return items, positions, segments


@pytest.mark.parametrize(("norm", "activation"), VARIANTS)
def test_packed_histories_give_what_they_give_alone(norm, activation):
    model = make_model(norm, activation)
    a, b, c = [3, 1, 4], [1, 5, 9, 2, 6], [5, 3]
    packed = np.asarray(model(*row(a, b, c)))[0]
    alone = np.concatenate([np.asarray(model(*row(h)))[0, : len(h)] for h in (a, b, c)])
    np.testing.assert_allclose(packed[: len(alone)], alone, atol=2e-5, rtol=2e-5)
    assert np.ptp(alone, axis=0).min() > 1e-2  # positions do differ


@pytest.mark.parametrize(("norm", "activation"), VARIANTS)
def test_later_events_never_change_an_earlier_output(norm, activation):
    model = make_model(norm, activation)
    before = np.asarray(model(*row([3, 1, 4, 1, 5])))[0]
    after = np.asarray(model(*row([3, 1, 4, 9, 2])))[0]
    np.testing.assert_array_equal(before[:3], after[:3])
    assert np.abs(before[3:5] - after[3:5]).max() > 1e-2


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_what_stands_in_the_padding_changes_nothing(norm):
    model = make_model(norm)
    items, positions, segments = row([3, 1, 4, 1])
    clean = np.asarray(model(items, positions, segments))[0, :4]
    items[0, 4:], positions[0, 4:] = 7, 3
    np.testing.assert_array_equal(clean, np.asarray(model(items, positions, segments))[0, :4])


def test_other_rows_of_the_batch_change_nothing():
    model = make_model()
    one, other = row([3, 1, 4]), row([2, 7, 1, 8])
    both = [np.concatenate(pair) for pair in zip(one, other, strict=True)]
    np.testing.assert_allclose(np.asarray(model(*both))[0, :3], np.asarray(model(*one))[0, :3], atol=2e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_queries_are_those_positions_of_the_whole(norm, monkeypatch):
    model = make_model(norm)
    batch = [np.concatenate(pair) for pair in zip(row([3, 1, 4], [1, 5]), row([2, 7, 1, 8]), row([6] * N), strict=True)]
    rows, columns = np.array([1, 0, 2, 0, 0, 2]), np.array([3, 4, N - 1, 2, 0, 5])
    whole = np.asarray(model(*batch))[rows, columns]
    queries = jnp.asarray(rows), jnp.asarray(columns)
    # two rows at a time, then the one that is left; and more at a time than there are
    for cached, scores in ((False, 0), (True, 2 * 2 * N * N), (True, 2**20)):
        monkeypatch.setattr(model_module, "CACHED_SCORES", scores)
        hidden = np.asarray(model(*batch, queries=queries, cached=cached))
        np.testing.assert_allclose(hidden, whole, atol=1e-6, rtol=1e-6)


def test_padding_gives_no_gradient():
    model = make_model()
    items, positions, segments = row([3, 1, 4])

    def total(model):
        return jnp.sum(jnp.where(segments[..., None] > 0, model(items, positions, segments), 0) ** 2)

    gradient = np.asarray(nnx.grad(total)(model).item_table[...])
    assert np.isfinite(gradient).all()
    assert set(np.flatnonzero(np.abs(gradient).sum(1))) == {1, 3, 4}  # not item 0, which padding holds


def test_matches_a_plain_numpy_transformer():
    model = make_model("post", "relu")
    history = [3, 1, 4, 1, 5]
    ours = np.asarray(model(*row(history)))[0, :5]
    np.testing.assert_allclose(ours, numpy_sasrec(model, history), atol=1e-4, rtol=1e-4)


def numpy_sasrec(model, history):
    """Post-norm SASRec of one history in float64, written from the paper."""

    def get(p):
        return np.asarray(p[...], np.float64)

    def norm(layer, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * get(layer.scale) + get(layer.bias)

    def linear(layer, x):
        return x @ get(layer.kernel) + get(layer.bias)

    x = norm(model.norm, get(model.item_table)[history] + get(model.position_table)[: len(history)])
    for block in model.blocks:
        q, k, v = np.split(linear(block.qkv, x), 3, axis=-1)
        outputs = []
        for head in (slice(0, 8), slice(8, 16)):
            scores = q[:, head] @ k[:, head].T / np.sqrt(8)
            scores[np.triu_indices(len(history), 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(p / p.sum(-1, keepdims=True) @ v[:, head])
        x = norm(block.attention_norm, x + linear(block.attention_out, np.concatenate(outputs, -1)))
        x = norm(block.mlp_norm, x + linear(block.mlp_out, np.maximum(linear(block.mlp_in, x), 0)))
    return x


def test_dropout_needs_a_key_and_depends_on_it():
    model = make_model(dropout=0.5)
    inputs = row([3, 1, 4])
    first, second = (np.asarray(model(*inputs, jax.random.key(k))) for k in (1, 2))
    assert np.abs(first - second).max() > 0.1
    np.testing.assert_array_equal(first, np.asarray(model(*inputs, jax.random.key(1))))
    np.testing.assert_array_equal(np.asarray(model(*inputs)), np.asarray(model(*inputs)))


def test_bfloat16_computes_in_bfloat16_over_float32_parameters():
    model = make_model(dtype="bfloat16")
    hidden = model(*row([3, 1, 4]))
    assert hidden.dtype == jnp.bfloat16
    assert {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}
    full = np.asarray(make_model()(*row([3, 1, 4])))
    np.testing.assert_allclose(np.asarray(hidden, np.float32)[0, :3], full[0, :3], atol=0.25)


def test_the_item_bias_starts_at_the_prior():
    model = make_model()
    p = 1 / (1 + np.exp(-np.asarray(model.item_bias[...], np.float64)))
    np.testing.assert_allclose(p.sum(), 2.0, rtol=1e-5)
    assert prior_log_odds(1000.0, 10) == 0.0 and np.isfinite(prior_log_odds(0.0, 10))

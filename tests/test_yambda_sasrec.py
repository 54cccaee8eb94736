"""The Yambda paper's SASRec: its config on generated listens against plain numpy, written from the paper alone."""

import pathlib

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from flax import nnx
from scipy.special import erf

from recml_sasrec import optim
from recml_sasrec.config import SyntheticConfig
from recml_sasrec.config_file import load_config
from recml_sasrec.data import synthetic
from recml_sasrec.data.loader import open_data
from recml_sasrec.heads.arguments import positive_set
from recml_sasrec.heads.sampled import draw_negatives
from recml_sasrec.model import abstract
from recml_sasrec.step import head_loss, make_model

CONFIG = pathlib.Path(__file__).parent.parent / "configs/yambda50m_sasrec.py"
N, D, ROWS = 200, 64, 3
TRAIN_END = 25_911_800  # of the benchmark's final run


@pytest.fixture(scope="module")
def miniature(tmp_path_factory):
    """(config, data, file) of listens with histories below and above 200 events."""
    folder = tmp_path_factory.mktemp("yambda")
    path = folder / "listens.parquet"
    synthetic.write(SyntheticConfig(users=40, items=300, events_per_user=250), str(path))
    overrides = [f"data.path={path}", f"data.cache={folder}", f"train.batch_size={ROWS}"]
    config = load_config(str(CONFIG), overrides)
    return config, open_data(config), path


def training_histories(path):
    """{user: items in time order, as the file orders ties}: Listen+ of the final run, read in plain Python."""
    histories: dict[int, list] = {}
    for event in pq.read_table(path).to_pylist():
        if event["played_ratio_pct"] is not None and event["played_ratio_pct"] >= 50 and event["timestamp"] < TRAIN_END:
            histories.setdefault(event["uid"], []).append((event["timestamp"], event["item_id"]))
    return {user: [item for _, item in sorted(h, key=lambda e: e[0])] for user, h in histories.items() if len(h) > 1}


def test_an_epoch_has_each_user_once_with_its_last_200_events_counted_from_the_newest(miniature):
    config, data, path = miniature
    histories = training_histories(path)
    lengths = [len(h) for h in histories.values()]
    assert min(lengths) <= N < max(lengths)
    wanted = sorted((h[-N - 1 : -1], h[-N:] if len(h) > N else h[1:]) for h in histories.values())
    raw = data.store.item_ids.to_numpy()
    source, found = data.train_source(config), []
    assert data.steps_per_epoch(config) * ROWS == len(histories)
    for row in range(len(histories)):
        batch, place = source[row // ROWS], row % ROWS
        real = batch.segment_ids[place] == 1
        count = int(real.sum())
        assert (batch.segment_ids[place] > 0).sum() == count
        np.testing.assert_array_equal(batch.positions[place][real], np.arange(count)[::-1])
        np.testing.assert_array_equal(batch.weights[place], real)
        found.append((raw[batch.items[place][real]].tolist(), raw[batch.targets[place][real][:, 0]].tolist()))
    assert sorted(found) == wanted


@pytest.fixture(scope="module")
def copied(miniature):
    """(config, batch, graph of the model, its weights): large enough that every part shows in the outputs.

    But the embeddings have their initial scale, where the epsilon of the first norm shows too.
    """
    config, data, _ = miniature
    graph, init = make_model(config, data.store.num_items, 1.0)
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda p: rng.normal(0, 0.2, p.shape).astype(np.float32), abstract(init)[1])
    for name in ("item_table", "position_table"):
        drawn[name] *= 0.1
    return config, data.train_source(config)[0], graph, drawn


def reference(w, items, positions):
    """Hidden states [n, D] of one history in float64: post-norm encoder layers as the benchmark's program has them."""

    def norm(x, p):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-9) * p["scale"] + p["bias"]

    def linear(x, p):
        return x @ p["kernel"] + p["bias"]

    w = jax.tree.map(np.float64, w)
    x = norm(w["item_table"][items] + w["position_table"][positions], w["norm"])
    later = np.triu(np.ones((len(items), len(items)), bool), 1)
    for block in (w["blocks"][0], w["blocks"][1]):
        q, k, v = np.split(linear(x, block["qkv"]), 3, -1)
        heads = []
        for part in (slice(0, 32), slice(32, 64)):
            scores = np.where(later, -np.inf, q[:, part] @ k[:, part].T / np.sqrt(32))
            share = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(share / share.sum(-1, keepdims=True) @ v[:, part])
        x = norm(x + linear(np.concatenate(heads, -1), block["attention_out"]), block["attention_norm"])
        inner = linear(x, block["mlp_in"])
        x = norm(x + linear(inner * (1 + erf(inner / np.sqrt(2))) / 2, block["mlp_out"]), block["mlp_norm"])
    return x


def test_the_forward_pass_equals_the_papers_model(copied):
    _, batch, graph, w = copied
    assert w["item_table"].shape[1] == D and w["position_table"].shape == (N, D)
    assert w["blocks"][1]["mlp_in"]["kernel"].shape == (D, 256) and "item_bias" not in w
    forward = jax.jit(lambda params, *inputs: nnx.merge(graph, params)(*inputs))
    hidden = np.asarray(forward(w, batch.items, batch.positions, batch.segment_ids))
    for row in range(ROWS):
        n = int((batch.segment_ids[row] > 0).sum())
        wanted = reference(w, batch.items[row, :n], np.arange(n)[::-1])
        np.testing.assert_allclose(hidden[row, :n], wanted, atol=1e-5, rtol=1e-5)


def test_the_loss_on_fixed_negatives_is_the_papers(copied):
    config, batch, _, w = copied
    table = 50 * w["item_table"]
    items = len(table)
    hidden = np.random.default_rng(1).normal(0, 1, (ROWS, N, D)).astype(np.float32)
    key = jax.random.key(3)
    loss_of = jax.jit(lambda *inputs: head_loss(config.head, *inputs)[0])
    loss = loss_of(hidden, {"item_table": table}, batch.targets, batch.weights, key)
    positives = batch.targets.reshape(-1, 1)
    draw = jax.jit(lambda key, ids: draw_negatives(key, *positive_set(ids, items), items, 1)[0])
    negatives = np.asarray(draw(key, positives))
    real = batch.segment_ids.ravel() > 0
    h, table = hidden.reshape(-1, D)[real].astype(np.float64), table.astype(np.float64)
    z_positive = (h * table[positives[real, 0]]).sum(-1)
    z_negative = (h * table[negatives[real, 0]]).sum(-1)
    pairs = np.concatenate([np.logaddexp(0, -z_positive), np.logaddexp(0, z_negative)])
    assert not np.any(negatives[real] == positives[real])
    np.testing.assert_allclose(float(loss) / 2, pairs.mean(), rtol=1e-6)  # theirs is the mean over both pairs


def test_a_step_is_adams_on_the_mean_over_both_pairs(miniature):
    config = miniature[0]
    optimizer = optim.make_optimizer(config.optimizer, config.train.steps)
    params = {"item_table": jax.numpy.zeros((4, D))}
    gradient = np.random.default_rng(2).normal(0, [[1e-8], [1e-7], [1e-3], [10]], (4, D))  # of the paper's loss
    state, m, v = optimizer.init(params), np.zeros((4, D)), np.zeros((4, D))
    for t in (1, 2, 3):
        ours, state = optimizer.update({"item_table": jax.numpy.float32(2 * gradient)}, state, params)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        wanted = -1e-3 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(ours["item_table"], wanted, rtol=2e-5)

"""Content vectors in the model: against numpy over the warm items alone, and whether they rank what was never seen."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx

from recml_sasrec import Recommender, export, grow, run_folder, trainer
from recml_sasrec.checkpoint import Checkpoints
from recml_sasrec.config import Config, ConfigError
from recml_sasrec.config_checks import validate
from recml_sasrec.data.loader import open_data
from recml_sasrec.model import SASRec, item_vectors, ranking_bias, split_given
from recml_sasrec.optim import make_optimizer
from recml_sasrec.run import Progress, Run
from recml_sasrec.step import head_loss

V, C, D, T, L = 23, 5, 4, 30, 3
COLD = np.array([2, 11, 22])


def params_of(rng, bias=True):
    warm = np.ones(V, np.float32)
    warm[COLD] = 0
    shapes = {"item_table": (V, D), "item_content": (V, C), "content_projection": (C, D)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return params | {"item_warm": warm} | ({"item_bias": rng.normal(size=V).astype(np.float32)} if bias else {})


def expected(params, hidden, targets):
    """(loss, gradients, counts) over the warm items alone, in float64."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    h, warm = np.asarray(hidden, np.float64), p["item_warm"] > 0
    vectors = p["item_table"] + p["item_content"] @ p["content_projection"]
    logits = (h @ vectors.T + p.get("item_bias", 0))[:, warm]
    labels = np.zeros((T, V))
    labels[np.arange(T)[:, None], targets] = 1
    labels = labels[:, warm]
    slope = np.zeros((T, V))
    slope[:, warm] = (1 / (1 + np.exp(-logits)) - labels) / T
    of_vectors = slope.T @ h
    gradients = {
        "item_table": of_vectors,
        "item_content": of_vectors @ p["content_projection"].T,
        "content_projection": p["item_content"].T @ of_vectors,
        "item_bias": slope.sum(0),
        "hidden": slope @ vectors,
    }
    above = logits > 0
    tp, predicted, positive = (above & (labels > 0)).sum(), above.sum(), labels.sum()
    tn = T * V - predicted - positive + tp  # cold items' pairs among them
    return (np.logaddexp(0, logits) - labels * logits).sum() / T, gradients, (tp, predicted - tp, positive - tp, tn)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["cut_bce", "dense_bce"])
def test_the_loss_is_that_of_the_warm_items_and_nothing_of_a_cold_one_has_a_gradient(name, bias):
    rng = np.random.default_rng(0)
    params, hidden = params_of(rng, bias), rng.normal(size=(T, D)).astype(np.float32)
    targets = rng.choice(np.setdiff1d(np.arange(V), COLD), (T, L))
    config = Config().head
    config.name = name

    def loss(params, hidden):
        value, (counts, _) = head_loss(config, hidden, params, targets, jnp.ones(T), jax.random.key(0))
        return value, counts

    (value, counts), (of_params, of_hidden) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, hidden)
    loss, gradients, pairs = expected(params, hidden, targets)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    assert tuple(map(int, counts)) == tuple(map(int, pairs))
    np.testing.assert_allclose(of_hidden, gradients["hidden"], atol=1e-6)
    for leaf, gradient in of_params.items():
        if leaf != "item_warm":
            np.testing.assert_allclose(gradient, gradients[leaf], atol=1e-6, err_msg=leaf)
            if len(gradient) == V:
                assert not np.asarray(gradient)[COLD].any(), leaf


def test_cold_items_are_ranked_with_the_mean_bias_of_the_others():
    params = params_of(np.random.default_rng(0))
    bias = np.array(params["item_bias"])
    bias[COLD] = np.delete(bias, COLD).mean()
    np.testing.assert_allclose(ranking_bias(params), bias, rtol=1e-6)
    assert ranking_bias(params_of(np.random.default_rng(0), bias=False)) is None


def test_inputs_are_the_vectors_that_hidden_states_are_scored_against():
    config = Config().model
    config.width, config.blocks, config.dropout = 8, 1, 0.0
    config.content = "fixed"
    rng = np.random.default_rng(0)
    with_content = SASRec(V, 6, config, 1.0, nnx.Rngs(0), content_width=C)
    with_content.item_content[...] = jnp.asarray(rng.normal(size=(V, C)), jnp.float32)
    params = nnx.to_pure_dict(nnx.state(with_content, nnx.Param))
    plain = Config().model
    plain.width, plain.blocks, plain.dropout = 8, 1, 0.0
    without = SASRec(V, 6, plain, 1.0, nnx.Rngs(0))
    without.item_table[...] = item_vectors(params)
    items, positions, segments = rng.integers(0, V, (2, 6)), np.tile(np.arange(6), (2, 1)), np.ones((2, 6), int)
    hidden = [nnx.jit(lambda model, *row: model(*row))(m, items, positions, segments) for m in (with_content, without)]
    np.testing.assert_allclose(*hidden, rtol=1e-5, atol=1e-6)
    assert set(split_given(params, "fixed")[1]) == {"item_content", "item_warm"}
    assert set(split_given(params, "trainable")[1]) == {"item_warm"}


CLUSTERS, ITEMS, USERS = 8, 161, 240  # an odd number of items: a table on two devices is padded
RNG = np.random.default_rng(1)
CLUSTER = np.arange(ITEMS) % CLUSTERS
UNSEEN = np.arange(ITEMS) // CLUSTERS % 4 == 3  # items that no training history has, of which some have no event at all
CONTENT = np.eye(CLUSTERS, 12)[CLUSTER] + RNG.normal(size=(ITEMS, 12)) * 0.15


@pytest.fixture(scope="module")
def taste(tmp_path_factory):
    """Users who love one cluster of items and at last, in the test, meet an unseen item of it."""
    folder = tmp_path_factory.mktemp("taste")
    rng, rows = np.random.default_rng(2), []
    for user in range(USERS):
        loved = rng.integers(0, CLUSTERS) == CLUSTER
        history = rng.choice(np.flatnonzero(loved & ~UNSEEN), 11)
        rows += [(user, item) for item in [*history, rng.choice(np.flatnonzero(loved & UNSEEN))]]
    users, items = np.array(rows).T
    pq.write_table(pa.table({"user": users, "item": items}), folder / "log.parquet")
    pq.write_table(pa.table({"item": np.arange(ITEMS), "vector": list(CONTENT)}), folder / "items.parquet")
    config = Config()
    data = config.data
    data.source, data.path, data.cache = "table", str(folder / "log.parquet"), str(folder / "cache")
    data.user_column, data.item_column, data.time_column = "user", "item", ""
    data.items_path, data.content_column = str(folder / "items.parquet"), "vector"
    data.length, data.targets = 10, 3
    config.split.kind, config.split.validation_last = "leave_last", 0
    config.model.width, config.model.blocks, config.model.dropout = 16, 1, 0.0
    config.train.steps, config.train.batch_size, config.train.log_every = 150, 16, 50
    config.optimizer.learning_rate, config.optimizer.weight_decay = 1e-2, 0.01
    config.evaluation.baselines, config.evaluation.ks = ("most_pop",), (10,)
    return folder, config, users.reshape(USERS, -1), items.reshape(USERS, -1)


@pytest.fixture(scope="module")
def fixed(taste):
    """The folder of a run with fixed content."""
    folder, config, _, _ = taste
    config.model.content = "fixed"
    trainer.train(config, folder / "fixed")
    return folder / "fixed"


def percentile(recommender, items):
    """Mean place of the users' last items among all items after their histories, 0 for the first place."""
    lists = recommender.recommend([row[:-1].tolist() for row in items], k=ITEMS)
    return np.mean([[i for i, _ in ranked].index(row[-1]) / ITEMS for ranked, row in zip(lists, items, strict=True)])


@pytest.mark.parametrize("content", ["fixed", "trainable"])
def test_items_never_seen_in_training_are_ranked_by_their_content(taste, fixed, content):
    folder, config, _, items = taste
    config.model.content = content
    trainer.train(config, folder / content)  # nothing left to do for the fixed one
    protocol = json.loads((folder / content / "evaluation.json").read_text())["protocol"]
    assert protocol["cold items"].startswith(f"{UNSEEN.sum()} without a training event")
    recommender = Recommender.load(folder / content)
    assert len(recommender.item_ids) == ITEMS
    assert percentile(recommender, items) < 0.15  # a cluster is an eighth of the items

    params = recommender._params
    assert not np.asarray(params["item_table"])[:ITEMS][UNSEEN].any()
    np.testing.assert_array_equal(np.asarray(params["item_warm"])[:ITEMS], ~UNSEEN)
    moved = np.abs(np.asarray(params["item_content"])[:ITEMS] - CONTENT.astype(np.float32)).max(1) > 0
    np.testing.assert_array_equal(moved, ~UNSEEN if content == "trainable" else np.zeros(ITEMS, bool))

    cold = int(np.flatnonzero(UNSEEN)[0])
    near = [item for item, _ in recommender.similar_items(cold, k=5)]
    assert (CLUSTER[near] == CLUSTER[cold]).mean() >= 0.8


def test_an_exported_model_needs_no_content(taste, fixed, tmp_path):
    _, _, _, items = taste
    export.export_run(fixed, tmp_path / "model")
    histories = [row[:-1].tolist() for row in items[:4]]
    lists = [Recommender.load(folder).recommend(histories, k=ITEMS) for folder in (fixed, tmp_path / "model")]
    for one, other in zip(*lists, strict=True):
        one, other = dict(one), dict(other)
        assert one.keys() == other.keys() and max(abs(one[item] - other[item]) for item in one) < 1e-5


def grow_from(base, config, workdir):
    """A recommender of the run that ``config`` starts from ``base``, before any step."""
    config = copy.deepcopy(config)
    config.init.from_run = str(base)
    opened = grow.open_base(config, workdir)
    run = Run(config, open_data(config))
    state = grow.grown_state(run, grow.plan(opened, run.data, config))
    run_folder.adopt(workdir, config, run.data.store)
    with Checkpoints(workdir, 1, "ndcg@10") as checkpoints:
        checkpoints.save(0, state, run.info(Progress()))
    return Recommender.load(workdir, "latest")


def test_items_new_to_a_trained_model_are_ranked_by_their_content_without_a_step(taste, fixed, tmp_path):
    _, config, _, items = taste
    rng, added = np.random.default_rng(3), 40
    cluster = rng.integers(0, CLUSTERS, added)
    content = np.concatenate([CONTENT, np.eye(CLUSTERS, 12)[cluster] + rng.normal(size=(added, 12)) * 0.15])
    pq.write_table(pa.table({"item": np.arange(ITEMS + added), "vector": list(content)}), tmp_path / "items.parquet")
    config = copy.deepcopy(config)
    config.data.items_path, config.model.content = str(tmp_path / "items.parquet"), "fixed"
    grown = grow_from(fixed, config, tmp_path)
    history = items[0, :-1].tolist()
    before, after = (dict(r.recommend([history], k=1_000)[0]) for r in (Recommender.load(fixed), grown))
    assert max(abs(before[item] - after[item]) for item in range(ITEMS)) <= 1e-6  # cold ones too
    places = []
    for row in items[:50]:
        ((*ranked,),) = grown.recommend([row[:-1].tolist()], k=ITEMS + added)
        loved = ITEMS + np.flatnonzero(cluster == CLUSTER[row[0]])
        places += [place for place, (item, _) in enumerate(ranked) if item in loved]
    assert np.mean(places) / (ITEMS + added) < 0.15


def test_a_checkpoint_with_content_of_another_length_is_refused(taste, fixed, tmp_path):
    _, config, _, _ = taste
    config = copy.deepcopy(config)
    pq.write_table(pa.table({"item": np.arange(ITEMS), "vector": list(CONTENT[:, :5])}), tmp_path / "items.parquet")
    config.data.items_path, config.model.content = str(tmp_path / "items.parquet"), "fixed"
    with pytest.raises(ConfigError, match=r"content of 12 numbers an item, but config\.data\.items_path has 5"):
        trainer.train(config, fixed)


def test_a_checkpoint_is_refused_with_other_content_and_not_with_the_same_elsewhere(
    taste, fixed, tmp_path, monkeypatch
):
    _, config, _, _ = taste
    config, path = copy.deepcopy(config), tmp_path / "items.parquet"
    config.data.items_path, config.model.content = str(path), "fixed"
    other = CONTENT.copy()
    other[7, 3] += 1e-3
    with Checkpoints(fixed, 1, "ndcg@10", reading=True) as checkpoints:
        pq.write_table(pa.table({"item": np.arange(ITEMS), "vector": list(CONTENT)}), path)
        info = Run(config, open_data(config)).info_of(checkpoints, 150)
        pq.write_table(pa.table({"item": np.arange(ITEMS), "vector": list(other)}), path)
        run = Run(config, open_data(config))
        with pytest.raises(ConfigError, match=r"has other content vectors than config\.data\.items_path; give"):
            run.info_of(checkpoints, 150)
        del info["content"]  # as in early checkpoints
        monkeypatch.setattr(checkpoints, "info", lambda step: info)
        assert run.info_of(checkpoints, 150) == info


@pytest.mark.parametrize("table", ["adam", "adam_bf16", "adagrad", "adafactor"])
def test_no_optimizer_moves_what_has_no_gradient(table):
    config = Config().optimizer
    config.table, config.weight_decay = table, 0.1
    optimizer = make_optimizer(config, 10)
    params, _ = split_given(params_of(np.random.default_rng(0)), "trainable")
    params["item_table"][COLD] = 0
    gradients = {name: np.ones_like(leaf) for name, leaf in params.items()}
    for name in ("item_table", "item_content", "item_bias"):
        gradients[name][COLD] = 0
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    for name in ("item_table", "item_content", "item_bias"):
        assert not np.asarray(updates[name])[COLD].any() and np.asarray(updates[name]).any(), name


def test_without_content_they_are_at_the_end_and_content_added_to_such_a_run_changes_no_score(taste, tmp_path):
    folder, config, _, items = taste
    config.model.content = "none"
    trainer.train(config, folder / "none")
    without = Recommender.load(folder / "none")
    assert percentile(without, items) > 0.7
    config.model.content = "fixed"
    histories = [row[:-1].tolist() for row in items[:3]]
    before, after = (r.recommend(histories, k=ITEMS) for r in (without, grow_from(folder / "none", config, tmp_path)))
    for one, other in zip(before, after, strict=True):
        one, other = dict(one), dict(other)
        assert max(abs(one[item] - other[item]) for item in range(ITEMS)) <= 1e-6


def test_fixed_content_has_no_moments_and_is_split_by_items_like_the_table(taste):
    _, config, _, _ = taste
    config.model.content = "fixed"
    run = Run(config, open_data(config))
    moments = jax.tree.leaves_with_path(run.abstract_state.opt_state)
    assert not [path for path, _ in moments if "item_content" in str(path) or "item_warm" in str(path)]
    state = run.init()
    assert state.params["item_content"].sharding.spec == state.params["item_table"].sharding.spec
    np.testing.assert_array_equal(np.asarray(state.params["item_content"])[:ITEMS], CONTENT.astype(np.float32))
    assert "content: 12 numbers an item, fixed; 40 items without a training event" in run.overview()
    assert f"item_content {12 * run.layout.table_rows:,}" in run.overview()


def test_on_either_mesh_of_two_devices_a_step_gives_the_same(taste):
    _, config, _, _ = taste
    config.model.content = "trainable"
    states = []
    for data, items in ((2, 1), (1, 2)):
        config.mesh.data, config.mesh.items = data, items
        run = Run(config, open_data(config))
        assert run.layout.table_rows == ITEMS + (items == 2)
        batches, step, state = run.batches(0), run.compile_step(), run.init()
        for _ in range(3):
            state = step(state, next(batches))
        batches.close()
        states.append(state)
    config.mesh.data = config.mesh.items = 0
    assert states[1].params["item_content"].sharding.spec[0] == "items"
    np.testing.assert_allclose(states[0].metrics.loss, states[1].metrics.loss, rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(state.params) for state in states), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b)[: len(a)], atol=1e-4)


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"model.content": "fixed"}, "model.content=fixed needs config.data.items_path"),
        ({"data.content_column": "vector"}, "data.content_column=vector needs config.data.items_path"),
        ({"data.category_column": "genre"}, "data.category_column=genre needs config.data.items_path"),
        (
            {"data.items_path": "x", "model.content": "trainable"},
            "needs config.data.items_path and config.data.content",
        ),
        ({"data.items_path": "x", "data.items_join": False}, "gives nothing with config.data.items_join=False"),
    ],
)
def test_contradictions_are_refused(fields, match):
    config = Config()
    config.split.test_start = 1
    for name, value in fields.items():
        section, field = name.split(".")
        setattr(getattr(config, section), field, value)
    with pytest.raises(ConfigError, match=match.replace(".", r"\.")):
        validate(config)

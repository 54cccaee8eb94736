"""Evaluation end to end against ranking every item in numpy, over a small stand-in for the loader."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from recml_sasrec.config import Config, ConfigError
from recml_sasrec.data.batch import QueryBatch
from recml_sasrec.ranking import evaluation, item_knn
from recml_sasrec.ranking.baselines import decay_pop, most_pop
from recml_sasrec.ranking.metrics import RankingMetrics

USERS, ITEMS, BATCH = 23, 40, 8


class FakeData:
    """Leave-last 1/2 of random histories; the loader's contract."""

    def __init__(self, has_time=True):
        rng = np.random.default_rng(0)
        offsets = np.cumsum([0, *rng.integers(1, 100, USERS)])
        # Items 30 and up are never trained on: they come in last events only.
        items = rng.integers(0, 30, offsets[-1]).astype(np.int32)
        items[offsets[1:] - 1] = rng.integers(0, ITEMS, USERS)
        self.store = SimpleNamespace(
            items=items,
            timestamps=np.arange(len(items)) * 500,
            offsets=offsets,
            num_users=USERS,
            num_items=ITEMS,
            has_time=has_time,
        )
        start, end = offsets[:-1], offsets[1:]
        train_end = np.where(end - start > 3, end - 3, end)
        self.split = SimpleNamespace(
            train_start=start,
            train_end=train_end,
            validation_start=train_end,
            validation_end=np.minimum(train_end + 1, end),
            validation_history_end=train_end,
            test_start=np.minimum(train_end + 1, end),
            test_end=end,
            test_history_end=np.minimum(train_end + 1, end),
            description="leave-last 1/2",
        )

    def users(self, which):
        return np.flatnonzero(getattr(self.split, f"{which}_end") > getattr(self.split, f"{which}_start"))

    def query_batches(self, config, which):
        for i in range(0, len(self.users(which)), BATCH):
            users = np.full(BATCH, -1)
            some = self.users(which)[i : i + BATCH]
            users[: len(some)] = some
            users = np.roll(users, 1)  # padding need not come last
            empty = np.zeros((BATCH, 4), np.int32)
            yield QueryBatch(empty, empty, empty, np.arange(BATCH, dtype=np.int32), np.zeros(BATCH, np.int32), users)

    def _csr(self, lists):
        return np.concatenate([[], *lists]).astype(np.int32), np.cumsum([0, *map(len, lists)])

    def targets(self, which, users):
        start, end = getattr(self.split, f"{which}_start"), getattr(self.split, f"{which}_end")
        return self._csr([self.store.items[start[u] : end[u]] for u in users])

    def seen(self, which, users):
        end = getattr(self.split, f"{which}_history_end")
        return self._csr([np.unique(self.store.items[self.split.train_start[u] : end[u]]) for u in users])


def make_config(**fields):
    config = Config()
    config.evaluation.ks = (3, 10)
    config.evaluation.batch_users = 7
    for name, value in fields.items():
        setattr(config.evaluation, name, value)
    return config


def brute_force(config, data, which, scores):
    """Metrics of sorting scores [U, V] user by user."""
    trained = most_pop(data.store, data.split) > 0
    only_trained = config.evaluation.candidates == "train"
    metrics = RankingMetrics(
        config.evaluation.ks, ITEMS, trained.sum() if only_trained else ITEMS, config.evaluation.metric_version
    )
    for u in data.users(which):
        seen, _ = data.seen(which, [u])
        left_out = set(seen) if config.evaluation.filter_seen else set()
        items = [i for i in range(ITEMS) if i not in left_out and (trained[i] or not only_trained)]
        items.sort(key=lambda i: (-scores[u, i], i))
        metrics.add(np.array([[*items, *[-1] * ITEMS][:10]]), *data.targets(which, [u]))
    return metrics.result()


@pytest.mark.parametrize("which", ["validation", "test"])
@pytest.mark.parametrize("filter_seen", [False, True])
@pytest.mark.parametrize(("candidates", "version"), [("all", "standard"), ("train", "v1")])
def test_model_and_baselines_equal_sorting_every_item(which, filter_seen, candidates, version):
    config = make_config(filter_seen=filter_seen, candidates=candidates, metric_version=version)
    data = FakeData()
    rng = np.random.default_rng(1)
    hidden = rng.integers(-2, 3, (USERS, 3)).astype(np.float32)  # integers: ties
    table, bias = rng.integers(-2, 3, (ITEMS, 3)).astype(np.float32), rng.integers(0, 3, ITEMS).astype(np.float32)

    def encode(batch):
        return jnp.asarray(np.where(batch.users[:, None] >= 0, hidden[batch.users], np.nan))

    result = evaluation.evaluate(config, data, encode, jnp.asarray(table), jnp.asarray(bias), which)
    assert result == pytest.approx(brute_force(config, data, which, hidden @ table.T + bias), abs=1e-12)
    assert 0 < result["recall@10"] < 1

    rows = evaluation.evaluate_baselines(config, data, which)
    decayed = decay_pop(data.store, data.split, 24)
    for name, scores in (("most_pop", most_pop(data.store, data.split)), ("decay_pop", decayed)):
        expected = brute_force(config, data, which, np.broadcast_to(scores, (USERS, ITEMS)))
        assert rows[name] == pytest.approx(expected, abs=1e-12)


def test_ranking_is_compiled_once():
    data, before = FakeData(), evaluation.top_k_jit._cache_size()
    config, table = make_config(ks=(7,)), jnp.ones((ITEMS, 3))
    for _ in range(2):
        evaluation.evaluate(config, data, lambda batch: jnp.ones((BATCH, 3)), table, None, "test")
    assert evaluation.top_k_jit._cache_size() == before + 1


def test_a_stop_request_ends_evaluation_between_batches():
    encoded = []

    def encode(batch):
        encoded.append(batch)
        return jnp.ones((BATCH, 3))

    with pytest.raises(evaluation.Stopped):
        evaluation.evaluate(
            make_config(), FakeData(), encode, jnp.ones((ITEMS, 3)), None, "test", lambda: len(encoded) == 1
        )
    assert len(encoded) == 1


def test_a_table_of_another_catalogue_is_refused():
    with pytest.raises(ValueError, match="7 rows and the data 40 items"):
        evaluation.evaluate(make_config(), FakeData(), None, jnp.ones((7, 3)), None, "test")


@pytest.mark.parametrize("filter_seen", [False, True])
@pytest.mark.parametrize("candidates", ["all", "train"])
def test_item_knn_equals_cosines_of_a_dense_matrix(filter_seen, candidates, monkeypatch):
    monkeypatch.setattr(item_knn, "SCORES", 3 * ITEMS)  # three users at a time
    monkeypatch.setattr(item_knn, "BLOCK", 100)
    monkeypatch.setattr(item_knn, "TILE", 7)
    data = FakeData()
    config = make_config(filter_seen=filter_seen, candidates=candidates, baselines=("item_knn",), knn_hours=(5.0,))
    counts = np.zeros((USERS, ITEMS))
    weights = np.zeros((USERS, ITEMS))
    for u in range(USERS):
        for e in range(data.split.train_start[u], data.split.train_end[u]):
            counts[u, data.store.items[e]] += 1
        end = data.split.test_history_end[u]
        for e in range(data.split.train_start[u], end):
            age = (data.store.timestamps[end - 1] - data.store.timestamps[e]) / 3600
            weights[u, data.store.items[e]] += 0.9 ** (age / 5)
    profiles = weights @ counts.T
    scores = profiles @ counts / np.maximum(np.linalg.norm(counts, axis=0), 1)
    expected = brute_force(config, data, "test", scores.astype(np.float32))
    assert evaluation.evaluate_baselines(config, data, "test")["item_knn"] == pytest.approx(expected, abs=1e-9)


def test_item_knn_without_times_weighs_events_alike():
    data, config = FakeData(has_time=False), make_config(baselines=("item_knn",), candidates="train")
    counts = np.zeros((USERS, ITEMS))
    for u in range(USERS):
        np.add.at(counts[u], data.store.items[data.split.train_start[u] : data.split.train_end[u]], 1)
    scores = counts @ counts.T @ counts / np.maximum(np.linalg.norm(counts, axis=0), 1)
    expected = brute_force(config, data, "validation", scores.astype(np.float32))
    assert evaluation.evaluate_baselines(config, data, "validation")["item_knn"] == pytest.approx(expected, abs=1e-9)


def test_the_random_baseline_hits_as_often_as_chance():
    data, config = FakeData(), make_config(baselines=("random",), ks=(10,))
    rows = []
    for seed in range(200):
        config.train.seed = seed
        rows.append(evaluation.evaluate_baselines(config, data, "test")["random"]["recall@10"])
    assert np.mean(rows) == pytest.approx(10 / ITEMS, abs=4 * np.std(rows) / 200**0.5)
    assert evaluation.evaluate_baselines(config, data, "test")["random"]["recall@10"] == rows[-1]


def test_hours_to_choose_from_need_a_validation_split():
    data, config = FakeData(), make_config(decay_hours=(1.0, 2.0))
    data.split.validation_end = data.split.validation_start
    with pytest.raises(ConfigError, match=r"hours of decay_pop can't be chosen from \(1.0, 2.0\) without a validation"):
        evaluation.evaluate_baselines(config, data, "test")


def test_a_stop_request_ends_the_baselines_too():
    polls = []
    with pytest.raises(evaluation.Stopped):
        evaluation.evaluate_baselines(make_config(), FakeData(), "test", lambda: polls.append(0) or len(polls) == 5)
    assert len(polls) == 5  # in the second baseline: 23 users are four batches of the first


def test_without_times_there_is_no_decay_pop():
    assert set(evaluation.evaluate_baselines(make_config(), FakeData(has_time=False), "test")) == {"most_pop"}


def test_the_protocol_says_what_was_done():
    data = FakeData()
    lines = evaluation.protocol(make_config(filter_seen=True, candidates="train"), data, "test")
    assert lines["split"] == "leave-last 1/2"
    assert lines["users"] == len(data.users("test"))
    assert lines["target rows"] == len(data.targets("test", data.users("test"))[0])
    assert (lines["items"], lines["candidates"]) == (ITEMS, int((most_pop(data.store, data.split) > 0).sum()))
    assert lines["seen items"] == "removed"
    assert lines["metric version"] == "standard"


def test_the_table_is_headed_by_its_protocol():
    both = {"hr@1": 0.25, "recall@1": 0.25}  # metrics that are the same in every model share a line
    rows = {"sasrec": {"ndcg@10": 0.1234567, "hr@10": 0.5, **both}, "most_pop": {"ndcg@10": 0.01, **both}}
    assert evaluation.format_table({"users": 12345, "split": "temporal"}, rows).splitlines() == [
        "users  12,345",
        "split  temporal",
        "",
        "                   sasrec  most_pop",
        "ndcg@10          0.123457  0.010000",
        "hr@10            0.500000         -",
        "hr@1 = recall@1  0.250000  0.250000",
    ]


def test_written_floats_are_exact_and_a_failed_write_leaves_the_old_file(tmp_path):
    path, value = tmp_path / "evaluation.json", 0.1 + 0.2
    evaluation.write_evaluation(path, {"users": 3}, {"sasrec": {"ndcg@10": value}})
    assert json.loads(path.read_text()) == {"protocol": {"users": 3}, "rows": {"sasrec": {"ndcg@10": value}}}
    with pytest.raises(TypeError):
        evaluation.write_evaluation(path, {"users": object()}, {})
    assert json.loads(path.read_text())["protocol"] == {"users": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation.json"]

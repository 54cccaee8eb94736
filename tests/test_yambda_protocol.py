"""Yambda's benchmark protocol on a file of its schema, against a reading of the file in plain Python.

The reading below uses nothing of the package: dicts, lists and loops over the rows as pyarrow gives them.
"""

import math

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recml_sasrec.config import Config
from recml_sasrec.data.loader import open_data
from recml_sasrec.ranking import evaluation
from recml_sasrec.ranking.baselines import decay_pop, most_pop, order_items, top_of_order
from recml_sasrec.ranking.item_knn import ItemKNN
from recml_sasrec.ranking.metrics import ranking_metrics

DAY, END = 86_400, 26_000_000
BOUNDARIES = (25_823_600, 25_825_400, 25_911_800, 25_913_600)
WITHOUT_LISTENS, ONLY_TEST, ONLY_GAP, BOUNDARY, TIES, GREEDY = 400, 500, 600, 700, 800, 900  # users
NEW_ITEM, FAR_ITEM = 9_390_623, 22
KS = (2, 10, 40)
GRID = (0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 12.0, 24.0)
KNN_HOURS = 6.0


def fixture_rows():
    """(uid, item_id, timestamp, played_ratio_pct), in the file's order: by uid and time."""
    rng = np.random.default_rng(5)
    rows = []
    for uid in range(1_000, 1_000 + 100 * 25, 100):
        times = (
            np.sort(np.r_[rng.integers(END - 9 * DAY, END - DAY, 50), rng.integers(END - 3 * DAY, END, 25)]) // 5 * 5
        )
        items = 100 + 7 * np.minimum(rng.geometric(0.03, 75), 120)
        ratios = rng.choice([0, 10, 49, 50, 80, 100, 100, 100, 159, None], 75)
        rows += [(uid, int(i), int(t), r) for i, t, r in zip(items, times, ratios, strict=True)]
    rows += [(WITHOUT_LISTENS, 107, 1_000, 49), (WITHOUT_LISTENS, 107, BOUNDARIES[3] + 5, None)]
    rows += [(ONLY_TEST, 114, t, 100) for t in (BOUNDARIES[3], BOUNDARIES[3] + 5, END)]
    rows += [(ONLY_GAP, 121, t, 100) for t in (BOUNDARIES[0], BOUNDARIES[1] - 5, BOUNDARIES[2], BOUNDARIES[3] - 5)]
    # 49 beside 50 at each boundary and five seconds before; the item names the place.
    for number, time in enumerate(t for b in BOUNDARIES for t in (b - 5, b)):
        rows += [(BOUNDARY, 5_000 + number, time, 49), (BOUNDARY, 6_000 + number, time, 50)]
    # One second, items in no order, a repeat among them; the last is found in no other place but the test.
    rows += [(TIES, i, 20_000_000, 100) for i in (128, 107, 999, FAR_ITEM, 107, 114)]
    rows += [(TIES, i, BOUNDARIES[3] + 100, 100) for i in (NEW_ITEM, 107, 107, 107)]
    # More targets than any k, most of them repeats.
    rows += [(GREEDY, 107 + 7 * (n % 9), END - 5 * DAY + 5 * n, 100) for n in range(30)]
    rows += [(GREEDY, 107 + 7 * (n % 50), BOUNDARIES[3] + 10 * n, 50) for n in range(130)]
    rows += [(GREEDY, 107 + 7 * (n % 5), BOUNDARIES[1] + 10 * n, 50) for n in range(60)]
    return sorted(rows, key=lambda row: (row[0], row[2]))  # stable


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    uid, item, time, ratio = zip(*fixture_rows(), strict=True)
    columns = {
        "uid": pa.array(uid, pa.uint32()),
        "timestamp": pa.array(time, pa.uint32()),
        "item_id": pa.array(item, pa.uint32()),
        "is_organic": pa.array([1] * len(uid), pa.uint8()),
        "played_ratio_pct": pa.array(ratio, pa.uint16()),
        "track_length_seconds": pa.array([180] * len(uid), pa.uint32()),
    }
    path = tmp_path_factory.mktemp("yambda") / "listens.parquet"
    pq.write_table(pa.table(columns), path, compression="lz4", row_group_size=700)  # users lie across row groups
    return path


def config_of(path, run):
    config = Config()
    config.data.source, config.data.path, config.data.cache = "yambda", str(path), str(path.parent)
    config.data.min_played_ratio = 50
    config.split.test_start, config.split.gap = BOUNDARIES[3], 1_800
    config.split.validation_length = DAY if run == "tuning" else 0
    config.evaluation.ks = KS
    config.evaluation.batch_users = 7
    config.evaluation.candidates = "train"
    config.evaluation.baselines = ("most_pop", "decay_pop", "item_knn")
    config.evaluation.decay_hours, config.evaluation.knn_hours = (1.0,), (KNN_HOURS,)
    return config


class Reading:
    """The protocol, read from the file by loops: histories, targets and lists by raw ids."""

    def __init__(self, path, run):
        self.events = {}  # user: [(time, item)]
        for row in pq.read_table(path).to_pylist():
            if row["played_ratio_pct"] is not None and row["played_ratio_pct"] >= 50:
                self.events.setdefault(row["uid"], []).append((row["timestamp"], row["item_id"]))
        train_end = BOUNDARIES[0] if run == "tuning" else BOUNDARIES[2]
        self.train, self.validation, self.test, self.before_test = {}, {}, {}, {}
        for user, events in self.events.items():
            train = [(t, i) for t, i in events if t < train_end]
            if train:
                self.train[user] = train
                self.before_test[user] = [(t, i) for t, i in events if t < BOUNDARIES[2]]
                validation = [i for t, i in events if BOUNDARIES[1] <= t < BOUNDARIES[2]]
                if validation and run == "tuning":
                    self.validation[user] = validation
                test = [i for t, i in events if t >= BOUNDARIES[3]]
                if test:
                    self.test[user] = test
        self.items = sorted({i for events in self.train.values() for _, i in events})

    def most_pop(self):
        scores = dict.fromkeys(self.items, 0)
        for events in self.train.values():
            for _, item in events:
                scores[item] += 1
        return self.first(scores)

    def decay_pop(self, hours):
        if hours == 0:
            return self.most_pop()
        now = max(t for events in self.train.values() for t, _ in events)
        terms = {item: [] for item in self.items}
        for events in self.train.values():
            for time, item in events:
                terms[item].append(0.9 ** ((now - time) / 3600 / hours))
        return self.first({item: math.fsum(values) for item, values in terms.items()})

    def item_knn(self, which, hours):
        """{user: list}: cosines of items' vectors of users' counts with the decayed sum of a history's vectors."""
        counts = {item: {} for item in self.items}
        for user, events in self.train.items():
            for _, item in events:
                counts[item][user] = counts[item].get(user, 0) + 1
        lists = {}
        for user in getattr(self, which):
            history = self.before_test[user] if which == "test" else self.train[user]
            weights, profile, last = {}, {}, history[-1][0]
            for time, item in history:
                weight = 0.9 ** ((last - time) / 3600 / hours) if hours else float(time == last)
                weights[item] = weights.get(item, 0) + weight
            for item, weight in weights.items():
                if weight <= 1e-9:  # as the benchmark does
                    continue
                for other, count in counts.get(item, {}).items():
                    profile[other] = profile.get(other, 0) + weight * count
            scores = {}
            for item, vector in counts.items():
                dot = math.fsum(count * profile.get(other, 0) for other, count in vector.items())
                scores[item] = dot / math.sqrt(sum(count * count for count in vector.values()))
            # Rounding must not decide between items whose vectors are parallel: those tie.
            lists[user] = self.first({item: np.float32(score) for item, score in scores.items()})
        return lists

    def first(self, scores):
        return sorted(scores, key=lambda item: (-scores[item], item))[: max(KS)]

    def metrics(self, lists, which, version):
        """Of {user: list}; every formula as the facts of the benchmark state it."""
        result = {}
        targets = getattr(self, which)
        for k in KS:
            recall, capped, hit, ratio, dcgs, idcgs, shown = [], [], [], [], [], [], set()
            for user, rows in targets.items():
                hits = [1 if item in set(rows) else 0 for item in lists[user][:k]]
                positives = len(rows)
                dcg = sum(h / math.log2(rank + 2) for rank, h in enumerate(hits))
                recall.append(sum(hits) / positives)
                capped.append(sum(hits) / min(positives, k))
                hit.append(max(hits))
                ratio.append(dcg / sum(1 / math.log2(rank + 2) for rank in range(min(positives, k))))
                dcgs.append(dcg)
                idcgs.append(sum(1 / math.log2(rank + 2) for rank in range(min(positives, k, 100))))
                shown.update(lists[user][:k])
            users = len(targets)
            mean = lambda values, users=users: math.fsum(values) / users  # noqa: E731
            result[f"recall@{k}"] = mean(capped if version == "v2" else recall)
            result[f"recall_capped@{k}"] = mean(capped)
            result[f"hit_rate@{k}"] = mean(hit)
            result[f"ndcg@{k}"] = {"v1": mean(dcgs) / mean(idcgs), "v2": mean(hit), "corrected": mean(ratio)}[version]
            result[f"coverage@{k}"] = len(shown) / len(self.items)
        return result


RUNS = [("tuning", "validation"), ("tuning", "test"), ("final", "test")]


@pytest.mark.parametrize("run", ["tuning", "final"])
def test_histories_and_targets_are_those_of_the_file(path, run):
    data, reading = open_data(config_of(path, run)), Reading(path, run)
    store, split = data.store, data.split
    items, users = store.item_ids.to_pylist(), store.user_ids.to_pylist()
    assert users == sorted(reading.events) and WITHOUT_LISTENS not in users
    raw = lambda start, end: [items[i] for i in store.items[start:end]]  # noqa: E731
    for u, user in enumerate(users):  # lists, not sets: ties stay in the file's order
        assert raw(store.offsets[u], store.offsets[u + 1]) == [i for _, i in reading.events[user]]
        assert raw(split.train_start[u], split.train_end[u]) == [i for _, i in reading.train.get(user, [])]
        history = reading.before_test.get(user, [])
        assert raw(split.train_start[u], split.test_history_end[u]) == [i for _, i in history]
        assert raw(split.validation_start[u], split.validation_end[u]) == reading.validation.get(user, [])
        assert raw(split.test_start[u], split.test_end[u]) == reading.test.get(user, [])
    for which in ("validation", "test"):
        assert [users[u] for u in evaluation.query_users(data, which)] == sorted(getattr(reading, which))


def test_the_reading_itself_meets_the_cases_it_is_for(path):
    """By hand, on the boundary user: a row at a boundary belongs to what begins there."""
    tuning, final = Reading(path, "tuning"), Reading(path, "final")
    assert [i for _, i in tuning.train[BOUNDARY]] == [6_000]
    assert tuning.validation[BOUNDARY] == [6_003, 6_004]
    assert [i for _, i in tuning.before_test[BOUNDARY]] == [6_000, 6_001, 6_002, 6_003, 6_004]
    assert [i for _, i in final.train[BOUNDARY]] == [6_000, 6_001, 6_002, 6_003, 6_004]
    assert tuning.test[BOUNDARY] == final.test[BOUNDARY] == [6_007]
    assert ONLY_TEST not in tuning.train and ONLY_TEST not in tuning.test
    assert ONLY_GAP not in tuning.train and ONLY_GAP in final.train and ONLY_GAP not in final.test
    assert NEW_ITEM in final.test[TIES] and NEW_ITEM not in final.items
    assert [i for _, i in final.train[TIES]] == [128, 107, 999, FAR_ITEM, 107, 114]
    assert len(final.test[GREEDY]) > max(KS)


@pytest.mark.parametrize(("run", "which"), RUNS)
def test_lists_equal_the_reading(path, run, which):
    config, reading = config_of(path, run), Reading(path, run)
    data = open_data(config)
    items, users = np.array(data.store.item_ids.to_pylist()), data.store.user_ids.to_pylist()
    mask = evaluation.candidate_mask(config, data)
    assert list(items[mask]) == reading.items
    for scores, expected in (
        (most_pop(data.store, data.split), reading.most_pop()),
        *((decay_pop(data.store, data.split, hours), reading.decay_pop(hours)) for hours in GRID),
    ):
        ids = top_of_order(order_items(scores, mask), max(KS), 1, len(items))[0]
        assert list(items[ids]) == expected
    queries = evaluation.query_users(data, which)
    history_end = getattr(data.split, f"{which}_history_end")
    for hours in (0.0, 0.5, KNN_HOURS):
        lists = ItemKNN(data.store, data.split).lists(queries, history_end, hours, max(KS), mask)
        expected = reading.item_knn(which, hours)
        assert {users[u]: list(items[row]) for u, row in zip(queries, lists, strict=True)} == expected


@pytest.mark.parametrize("version", ["v1", "v2", "corrected"])
@pytest.mark.parametrize(("run", "which"), RUNS)
def test_metrics_equal_the_reading(path, run, which, version):
    config, reading = config_of(path, run), Reading(path, run)
    config.evaluation.metric_version = version
    rows = evaluation.evaluate_baselines(config, open_data(config), which)
    targets = getattr(reading, which)
    lists = {
        "most_pop": dict.fromkeys(targets, reading.most_pop()),
        "decay_pop": dict.fromkeys(targets, reading.decay_pop(1.0)),
        "item_knn": reading.item_knn(which, KNN_HOURS),
    }
    for name, expected in lists.items():
        expected = reading.metrics(expected, which, version)
        found = {key.replace("hr@", "hit_rate@"): value for key, value in rows[name].items()}
        assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-9), name
        assert 0 < expected["recall@40"] < 1
        padded = [[*lists[name][user], *[-1] * max(KS)][: max(KS)] for user in targets]
        direct = ranking_metrics(np.array(padded), list(targets.values()), KS, version, len(reading.items))
        assert {key: direct[key] for key in expected} == pytest.approx(expected, abs=1e-9), name


def test_a_model_is_scored_for_the_same_users_and_targets(path):
    config, reading = config_of(path, "final"), Reading(path, "final")
    config.evaluation.metric_version, config.evaluation.candidates = "v1", "all"
    data, rng = open_data(config), np.random.default_rng(0)
    items, users = data.store.item_ids.to_pylist(), data.store.user_ids.to_pylist()
    hidden, table = (rng.integers(-4, 5, (n, 4)).astype(np.float32) for n in (len(users), len(items)))
    encode = lambda batch: jnp.asarray(hidden[batch.users])  # noqa: E731
    found = evaluation.evaluate(config, data, encode, jnp.asarray(table), None, "test")
    lists = {
        user: reading.first(dict(zip(items, table @ hidden[users.index(user)], strict=True))) for user in reading.test
    }
    reading.items = items  # the denominator of coverage: all are candidates
    expected = reading.metrics(lists, "test", "v1")
    found = {key.replace("hr@", "hit_rate@"): value for key, value in found.items()}
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("metric", ["ndcg@10", "recall@40"])
def test_hours_are_chosen_on_validation_and_the_protocol_says_so(path, metric):
    config, reading = config_of(path, "tuning"), Reading(path, "tuning")
    config.evaluation.metric_version, config.evaluation.best_metric = "v1", metric
    config.evaluation.decay_hours = GRID
    scores = {}
    for hours in GRID:
        lists = dict.fromkeys(reading.validation, reading.decay_pop(hours))
        scores[hours] = reading.metrics(lists, "validation", "v1")[metric]
    best = max(GRID, key=scores.get)
    assert len(set(scores.values())) > 3
    data = open_data(config)
    assert evaluation.chosen_hours(config, data, "decay_pop") == best
    assert f"/ {best:g})" in evaluation.protocol(config, data, "test")["decay_pop"]
    row = evaluation.evaluate_baselines(config, data, "test")["decay_pop"]
    expected = reading.metrics(dict.fromkeys(reading.test, reading.decay_pop(best)), "test", "v1")
    assert row[metric] == pytest.approx(expected[metric], abs=1e-9)


def test_repeated_targets_by_hand():
    """Four rows of two items, one of them found: a hit is one hit, and the denominators count rows."""
    recommended, targets = np.array([[7, 5]]), [np.array([7, 7, 7, 8])]
    v1, v2, corrected = (ranking_metrics(recommended, targets, (2,), v) for v in ("v1", "v2", "corrected"))
    assert v1["recall@2"] == corrected["recall@2"] == 1 / 4
    assert v2["recall@2"] == corrected["recall_capped@2"] == 1 / 2
    assert v1["ndcg@2"] == corrected["ndcg@2"] == pytest.approx(1 / (1 + 0.6309297535714575), abs=1e-12)
    assert v1["hit_rate@2"] == v2["hit_rate@2"] == v2["ndcg@2"] == 1
    assert ranking_metrics(recommended, targets, (2,), "standard")["recall@2"] == 1 / 2  # of two distinct items


def test_more_targets_than_places_by_hand():
    recommended, targets = np.array([[1, 2]]), [np.array([1, 2, 3, 4, 5])]
    v1, v2, corrected = (ranking_metrics(recommended, targets, (2,), v) for v in ("v1", "v2", "corrected"))
    assert v1["recall@2"] == corrected["recall@2"] == 2 / 5  # a perfect list of two finds two of five
    assert v2["recall@2"] == corrected["recall_capped@2"] == 1
    assert v1["ndcg@2"] == corrected["ndcg@2"] == 1


def test_ratio_of_means_against_mean_of_ratios_by_hand():
    """User 0 finds its one target at rank 2, user 1 one of two at rank 1; user 2 has no target and is not scored."""
    recommended = np.array([[4_000_000_000, 3], [9, -1], [1, 2]])
    targets = [np.array([3]), np.array([9, 11]), np.array([], np.int64)]
    v1, v2, corrected = (ranking_metrics(recommended, targets, (2,), v, 10) for v in ("v1", "v2", "corrected"))
    third = 0.6309297535714575  # 1 / log2(3)
    assert v1["ndcg@2"] == pytest.approx((third + 1) / (1 + 1 + third), abs=1e-12)
    assert corrected["ndcg@2"] == pytest.approx((third + 1 / (1 + third)) / 2, abs=1e-12)
    assert v2["ndcg@2"] == v1["hit_rate@2"] == 1
    assert v1["coverage@2"] == 3 / 10  # lists of users who are not scored don't count, nor does -1
    assert "coverage@2" not in ranking_metrics(recommended, targets, (2,), "v1")


@pytest.mark.parametrize(
    ("recommended", "targets", "ks", "version", "message"),
    [
        (np.zeros((2, 3), int), [[1]], (3,), "v1", r"recommended is \(2, 3\) and there are 1 users' targets"),
        (np.zeros(3, int), [[1]] * 3, (3,), "v1", r"recommended is \(3,\)"),
        (np.zeros((1, 3), int), [[1]], (), "v1", "needs at least one list length"),
        (np.zeros((1, 3), int), [[1]], (3,), "v3", "'v3' is unknown; choose one of standard, v1, v2, corrected"),
    ],
)
def test_what_is_wrong_with_metrics_asked_for_is_one_sentence(recommended, targets, ks, version, message):
    with pytest.raises(ValueError, match=message):
        ranking_metrics(recommended, targets, ks, version)

"""The store where size or change matters: rows above 2^32, no room on disk, files that change, and its description."""

import collections
import logging
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from event_helpers import store_of
from test_store import reader, shuffled

from recml_sasrec.config import Config, DataConfig, SplitConfig
from recml_sasrec.data import describe as describe_module
from recml_sasrec.data import progress
from recml_sasrec.data import store as store_module
from recml_sasrec.data.describe import describe
from recml_sasrec.data.events import DataError, EventBatch
from recml_sasrec.data.loader import Data, open_store_of
from recml_sasrec.data.split import make_split
from recml_sasrec.data.store import Store, build_store
from recml_sasrec.data.vocabulary import Encoder
from recml_sasrec.ranking import evaluation

FAR = 2**32 + 12_345  # events of the user before ours: files with holes instead of data


@pytest.fixture
def far_store(tmp_path):
    """Three users: FAR events that are not there, then 3 and 40 real ones."""
    offsets = np.array([0, FAR, FAR + 3, FAR + 43])
    items = np.memmap(tmp_path / "items", np.int32, "w+", shape=(FAR + 43,))
    times = np.memmap(tmp_path / "times", np.int64, "w+", shape=(FAR + 43,))
    return Store(
        items=items, timestamps=times, offsets=offsets, num_users=3, num_items=100, has_time=True, fingerprint="",
        vocabulary="", user_ids=pa.array([0, 1, 2]), item_ids=pa.array(range(100)), directory="", first_time=0,
        last_time=39,
    )  # fmt: skip


def test_rows_above_2_to_the_32_are_written_sorted_split_and_batched(far_store, monkeypatch):
    store = far_store
    rng = np.random.default_rng(0)
    order = rng.permutation(43)
    user = np.r_[np.full(3, 1), np.full(40, 2)][order]
    time = np.r_[np.arange(3), np.arange(40)][order]
    item = np.r_[np.arange(3), 10 + np.arange(40)][order]

    def read():
        yield EventBatch(pa.array(user[:20]), pa.array(item[:20]), pa.array(time[:20]))
        yield EventBatch(pa.array(user[20:]), pa.array(item[20:]), pa.array(time[20:]))

    # the first user's events are taken for written, the two others' are
    monkeypatch.setattr(store_module, "_SORT_EVENTS", 4)
    encode = Encoder(store.user_ids), Encoder(store.item_ids)
    offsets = np.array([FAR, FAR, FAR + 3, FAR + 43])
    store_module._scatter(read, *encode, offsets, store.items, store.timestamps, "far")
    assert store_module._sort_users(offsets[1:], store.items, store.timestamps, True) == (0, 39, 0, 0)
    assert store.items[FAR:].tolist() == [0, 1, 2, *range(10, 50)]
    assert store.timestamps[FAR:].tolist() == [*range(3), *range(40)]

    rest = {"num_users": 2, "offsets": offsets[1:], "user_ids": pa.array([1, 2])}
    near = Store(**{name: rest.get(name, getattr(store, name)) for name in Store.__dataclass_fields__})
    split = make_split(near, SplitConfig("temporal", test_start=38, validation_length=2))
    assert split.train_end.tolist() == [FAR + 3, FAR + 39] and split.test_start.tolist()[1] == FAR + 41
    config = Config(data=DataConfig(length=8, targets=2, pack=False))
    config.train.batch_size = 4
    batch = Data(near, split).train_source(config)[0]
    for row in range(4):
        real = batch.segment_ids[row] > 0
        inputs, targets = batch.items[row][real], batch.targets[row][real]
        assert np.all(targets[:, 0] == inputs + 1)  # items follow each other in every history
        assert inputs.min() >= 0 and inputs.max() < 50


@pytest.mark.parametrize("filter_seen", [False, True])
def test_users_above_2_to_the_32_are_evaluated_on_their_own_events(far_store, filter_seen):
    rng = np.random.default_rng(0)
    items, times = rng.integers(0, 100, 43), np.r_[30, 37, 39, np.arange(40)]
    far_store.items[FAR:], far_store.timestamps[FAR:] = items, times
    rest = {"num_users": 2, "offsets": far_store.offsets[1:], "user_ids": pa.array([1, 2])}
    near = Store(**{name: rest.get(name, getattr(far_store, name)) for name in Store.__dataclass_fields__})
    data = Data(near, make_split(near, SplitConfig("temporal", test_start=38)))
    config = Config(data=DataConfig(length=8))
    config.evaluation.ks, config.evaluation.filter_seen = (10, 100), filter_seen
    config.evaluation.baselines = ("most_pop",)
    table = rng.normal(size=(100, 100)).astype(np.float32)  # an item's scores after the history's last item

    def encode(batch):
        return np.eye(100, dtype=np.float32)[batch.items[batch.rows, batch.columns]]

    users = [(items[:3], times[:3]), (items[3:], times[3:])]
    trained = np.concatenate([own[at < 38] for own, at in users])
    popularity = np.bincount(trained, minlength=100)
    expected = {"sasrec": [], "most_pop": []}
    for own, at in users:
        history, targets = own[at < 38], set(own[at >= 38])
        for name, scores in (("sasrec", table[:, history[-1]]), ("most_pop", popularity)):
            ranked = sorted(range(100), key=lambda item, scores=scores: (-scores[item], item))
            ranked = [item for item in ranked if not filter_seen or item not in history]
            gains = [1 / np.log2(place + 2) for place, item in enumerate(ranked) if item in targets]
            expected[name].append(sum(gains) / sum(1 / np.log2(place + 2) for place in range(len(targets))))
    got = evaluation.evaluate(config, data, encode, jnp.asarray(table), None, "test")
    assert got["ndcg@100"] == pytest.approx(np.mean(expected["sasrec"]), rel=1e-6) and got["ndcg@100"] > 0
    got = evaluation.evaluate_baselines(config, data, "test")["most_pop"]
    assert got["ndcg@100"] == pytest.approx(np.mean(expected["most_pop"]), rel=1e-6)


def test_no_room_is_said_before_writing_with_the_bytes_needed(tmp_path, monkeypatch):
    users, items, times = shuffled()
    written = []
    monkeypatch.setattr(store_module, "write_ids", lambda *_: written.append(1))
    free = collections.namedtuple("free", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free(10**6, 10**6 - 9_999, 9_999))
    with pytest.raises(
        DataError, match=r"'log' needs (2[0-9],[0-9]{3}) bytes but .* has 9,999 free; free disk"
    ) as told:
        build_store(reader(users, items, times), str(tmp_path / "s"), "f", source="log")
    assert not written and os.listdir(tmp_path) == []
    monkeypatch.undo()
    build_store(reader(users, items, times), str(tmp_path / "s"), "f")
    size = sum(os.path.getsize(tmp_path / "s" / name) for name in os.listdir(tmp_path / "s"))
    needed = int(str(told.value).split(" needs ")[1].split(" bytes")[0].replace(",", ""))
    assert size <= needed <= size + (1 << 14)


def listens(path, count):
    columns = {"uid": [1] * count, "item_id": list(range(count)), "timestamp": list(range(count))}
    pq.write_table(pa.table(columns), path)


def test_a_file_that_changes_under_a_finished_store_is_read_again_with_a_word(tmp_path, caplog):
    path = str(tmp_path / "listens.parquet")
    config = Config()
    config.data.source, config.data.path, config.data.cache = "yambda", path, str(tmp_path / "cache")
    listens(path, 20)
    with caplog.at_level(logging.INFO, "recml_sasrec"):
        first = open_store_of(config)
        assert "read 20 events" in caplog.text and "changed" not in caplog.text
        caplog.clear()
        assert open_store_of(config).num_events == 20 and not caplog.text
        listens(path, 30)
        again = open_store_of(config)
    assert f"{path!r} has changed since its store was made: reading it again" in caplog.text
    assert (again.num_events, again.directory) == (30, first.directory)
    assert first.items.tolist() == list(range(20))  # who has the old one open keeps it
    assert os.listdir(tmp_path / "cache" / "stores") == [os.path.basename(first.directory)]
    with caplog.at_level(logging.INFO, "recml_sasrec"):
        caplog.clear()
        os.remove(os.path.join(again.directory, "meta.json"))
        assert open_store_of(config).num_events == 30
    assert f"the store of {path!r} is damaged or of another version: reading it again" in caplog.text


def test_every_filter_is_part_of_the_store(tmp_path):
    path = str(tmp_path / "multi.parquet")
    table = {
        "uid": [1] * 6,
        "item_id": [1, 2, 3, 4, 5, 5],
        "timestamp": range(6),
        "is_organic": [1, 1, 1, 0, 1, 1],
        "event_type": ["listen", "listen", "like", "like", "like", "unlike"],
        "played_ratio_pct": [49, 50, None, None, None, None],
    }
    pq.write_table(pa.table(table), path)
    config = Config()
    config.data.source, config.data.path, config.data.cache = "yambda", path, str(tmp_path / "cache")
    stores = {}
    for change in (
        {},
        {"min_played_ratio": 50},
        {"organic_only": True},
        {"event_types": ("like",)},
        {"drop_undone": True},
    ):
        for name, value in change.items():
            setattr(config.data, name, value)
        store = open_store_of(config)
        stores[store.fingerprint] = (store.num_events, store.directory)
    assert [events for events, _ in stores.values()] == [6, 5, 4, 2, 1]  # each on top of those before
    assert len({directory for _, directory in stores.values()}) == 5


def test_the_description_counts_repeats_and_quantiles(monkeypatch):
    monkeypatch.setattr(describe_module, "_SCAN_EVENTS", 3)
    histories = [[(1, 0), (1, 5), (2, 9)], [(1, 0)], [(0, 86_400), (0, 86_400), (0, 86_400), (1, 86_405)]]
    text = describe(store_of(histories))
    assert "3 users, 3 items, 8 events" in text
    assert "repeats: 37.5%" in text  # (user 0, item 1) once, (user 2, item 0) twice: 3 of 8
    assert "mean 2.7; least 1, 10% 1, 25% 1, 50% 3, 75% 4, 90% 4, 99% 4, most 4" in text
    assert "time: second 0 to 86,405 (1.0 days)" in text
    assert "time: none" in describe(store_of(histories, has_time=False))


def test_progress_is_told_every_few_seconds_and_counts_every_event(monkeypatch, caplog):
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    batch = EventBatch(pa.array([1] * 1_000), pa.array([1] * 1_000), None)
    with caplog.at_level(logging.INFO, "recml_sasrec"):
        passed = list(progress.watched((batch._replace(share=(i + 1) / 8) for i in range(8)), "reading"))
    assert len(passed) == 8
    assert [record.getMessage() for record in caplog.records] == [
        "reading: 3,000 events (38%), 500 events/s",
        "reading: 6,000 events (75%), 500 events/s",
    ]

"""The store against a plain Python stable sort, and what happens when its building is interrupted."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from recml_sasrec.data import store as store_module
from recml_sasrec.data.events import DataError, EventBatch
from recml_sasrec.data.folders import temporary_name
from recml_sasrec.data.store import build_store, open_store
from recml_sasrec.data.vocabulary import Collector, Encoder


def reader(users, items, times, batch=7):
    """A function that streams the rows in batches, as the readers do."""

    def read():
        for start in range(0, len(users), batch):
            part = slice(start, start + batch)
            time = None if times is None else pa.array(times[part], pa.int64())
            yield EventBatch(pa.array(users[part]), pa.array(items[part]), time)

    return read


def shuffled(count=500, seed=0, kind=int):
    rng = np.random.default_rng(seed)
    users = [kind(u) for u in rng.integers(0, 30, count) * 10**15]
    items = [kind(i) for i in rng.integers(0, 90, count) ** 8]
    times = rng.integers(0, 40, count).tolist()  # many ties
    return users, items, times


@pytest.mark.parametrize("kind", [int, str])
@pytest.mark.parametrize("timed", [True, False])
def test_store_equals_a_stable_sort_of_the_rows(tmp_path, kind, timed, monkeypatch):
    monkeypatch.setattr(store_module, "_SORT_EVENTS", 64)  # several chunks of users
    users, items, times = shuffled(kind=kind)
    store = build_store(reader(users, items, times if timed else None), str(tmp_path / "s"), "f")
    user_ids, item_ids = sorted(set(users)), sorted(set(items))
    assert store.user_ids.to_pylist() == user_ids and store.item_ids.to_pylist() == item_ids
    assert (store.num_users, store.num_items, store.num_events) == (len(user_ids), len(item_ids), len(users))
    assert store.items.dtype == np.int32 and store.timestamps.dtype == store.offsets.dtype == np.int64
    assert store.has_time is timed
    for u, user in enumerate(user_ids):
        rows = [i for i in range(len(users)) if users[i] == user]
        if timed:
            rows.sort(key=lambda i: times[i])
        part = slice(store.offsets[u], store.offsets[u + 1])
        assert [item_ids[i] for i in store.items[part]] == [items[i] for i in rows]
        assert store.timestamps[part].tolist() == ([times[i] for i in rows] if timed else list(range(len(rows))))


def test_a_store_is_reused_only_for_its_fingerprint(tmp_path):
    users, items, times = shuffled()
    build_store(reader(users, items, times), str(tmp_path / "s"), "first")

    def never():
        raise AssertionError("the store was there")

    assert build_store(never, str(tmp_path / "s"), "first").fingerprint == "first"
    again = build_store(reader(users[:50], items[:50], times[:50]), str(tmp_path / "s"), "second")
    assert again.num_events == 50 and open_store(str(tmp_path / "s")).fingerprint == "second"
    assert os.listdir(tmp_path) == ["s"]


def test_the_vocabulary_is_that_of_the_ids_not_of_the_file(tmp_path):
    users, items, times = shuffled()
    a = build_store(reader(users, items, times), str(tmp_path / "a"), "a")
    b = build_store(reader(users[::-1], items[::-1], times), str(tmp_path / "b"), "b")
    c = build_store(reader(users, [*items[:-1], 7], times), str(tmp_path / "c"), "c")
    as_text = build_store(reader(users, [str(i) for i in items], times), str(tmp_path / "d"), "d")
    assert a.vocabulary == b.vocabulary
    assert len({a.vocabulary, c.vocabulary, as_text.vocabulary}) == 3


def test_wide_ids_are_counted_over_many_merges():
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 2**62, 300_000)
    batches = [pool[rng.integers(0, size, 500_000)] for size in (1_000, 200_000, 300_000, 300_000, 300_000, 300_000)]
    collector = Collector("item")
    for batch in batches:
        collector.add(pa.array(batch))
    ids, counts = collector.finish()
    unique, expected = np.unique(np.concatenate(batches), return_counts=True)
    np.testing.assert_array_equal(ids.to_numpy(), unique)
    np.testing.assert_array_equal(counts, expected)
    np.testing.assert_array_equal(Encoder(ids)(pa.array(batches[1])), np.searchsorted(unique, batches[1]))


@pytest.mark.parametrize("fail_at", [1, 2])
def test_an_error_while_building_leaves_nothing(tmp_path, fail_at):
    calls = []

    def read():
        calls.append(1)
        yield from reader(*shuffled(20))()
        if len(calls) == fail_at:
            raise DataError("the disk was pulled out")

    with pytest.raises(DataError, match="pulled out"):
        build_store(read, str(tmp_path / "s"), "f")
    assert os.listdir(tmp_path) == []


def test_a_source_that_changes_between_the_passes_is_refused(tmp_path):
    counts = iter([40, 50])
    with pytest.raises(DataError, match="changed while it was read"):
        build_store(lambda: reader(*shuffled(next(counts)))(), str(tmp_path / "s"), "f", source="log.csv")
    assert os.listdir(tmp_path) == []


def test_what_killed_builders_left_is_removed_and_living_ones_are_let_be(tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    living = temporary_name("s")
    stale = living.replace(f"-{os.getpid()}-", f"-{dead.stdout.strip()}-")
    for name in (living, stale):
        (tmp_path / name).mkdir()
        (tmp_path / name / "items.npy").write_bytes(b"half")
    build_store(reader(*shuffled()), str(tmp_path / "s"), "f")
    assert sorted(os.listdir(tmp_path)) == sorted([living, "s"])


def test_of_two_builders_at_once_one_wins_and_both_get_the_store(tmp_path):
    users, items, times = shuffled()
    plain = reader(users, items, times)
    inner = []

    def read():  # another builder finishes while this one is reading
        if not inner:
            inner.append(build_store(plain, str(tmp_path / "s"), "f"))
        yield from plain()

    outer = build_store(read, str(tmp_path / "s"), "f")
    np.testing.assert_array_equal(outer.items, inner[0].items)
    assert os.listdir(tmp_path) == ["s"]


def test_a_damaged_or_older_store_is_built_again(tmp_path):
    path = tmp_path / "s"
    read = reader(*shuffled())
    build_store(read, str(path), "f")
    os.truncate(path / "items.npy", 200)
    with pytest.raises(DataError, match="damaged"):
        open_store(str(path))
    assert build_store(read, str(path), "f").num_events == 500
    meta = (path / "meta.json").read_text().replace(f'"version": {store_module.VERSION}', '"version": 0')
    (path / "meta.json").write_text(meta)
    with pytest.raises(DataError, match="version 0"):
        open_store(str(path))
    with pytest.raises(DataError, match="no complete store"):
        open_store(str(tmp_path / "nowhere"))


def test_no_events_and_mixed_ids_are_refused(tmp_path):
    with pytest.raises(DataError, match="no events"):
        build_store(reader([], [], []), str(tmp_path / "s"), "f")

    def mixed():
        yield EventBatch(pa.array([1]), pa.array([1]), pa.array([0]))
        yield EventBatch(pa.array([1]), pa.array(["a"]), pa.array([0]))

    with pytest.raises(DataError, match="item ids are int64 in one place"):
        build_store(mixed, str(tmp_path / "s"), "f")
    assert os.listdir(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"can't be written .* choose another config.data.cache"):
        build_store(reader(*shuffled()), str(tmp_path / "file" / "s"), "f")


@pytest.mark.parametrize("ids", [[3, 5, 9], [3, 2**40, 2**62], ["a", "b", "ä"]])
def test_the_encoder_knows_ranks_and_unknown_ids(ids):
    encode = Encoder(pa.array(ids, pa.large_string() if isinstance(ids[0], str) else pa.int64()))
    asked = [ids[2], ids[0], ids[1]] + (["c"] if isinstance(ids[0], str) else [4, 0, 2**63 - 1])
    kind = pa.large_string() if isinstance(ids[0], str) else pa.int64()
    assert encode(pa.array(asked, kind)).tolist() == [2, 0, 1] + [-1] * (len(asked) - 3)

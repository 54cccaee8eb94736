"""From a configuration to batches and queries."""

import os
import pathlib

import numpy as np
import pytest
from event_helpers import store_of

from recml_sasrec.config import Config, SplitConfig
from recml_sasrec.data import loader, synthetic
from recml_sasrec.data.events import DataError
from recml_sasrec.data.loader import Data, open_data
from recml_sasrec.data.split import split_leave_last

LEAVE_ONE_OUT = SplitConfig(kind="leave_last")


def synthetic_config(tmp_path) -> Config:
    config = Config()
    config.data.cache = str(tmp_path)
    config.data.synthetic.users, config.data.synthetic.items, config.data.synthetic.events_per_user = 200, 300, 20
    config.data.length = 16
    config.split.test_start, config.split.validation_length, config.split.gap = 23_000_000, 2_000_000, 1_800
    config.train.batch_size = 8
    return config


def shared_file(*parts: str) -> str:
    """A file that does not ship with the code: below $RECML_SASREC_SHARED, or ``shared`` beside the repository."""
    default = pathlib.Path(__file__).resolve().parents[2].parent / "shared"
    path = pathlib.Path(os.environ.get("RECML_SASREC_SHARED", default)).joinpath("data", *parts)
    if not path.exists():
        pytest.skip(f"{path} is not there; set RECML_SASREC_SHARED to the folder that holds data/{'/'.join(parts)}")
    return str(path)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("order", ["oldest_first", "newest_first"])
@pytest.mark.parametrize("batch_users", [3, 1000])
def test_queries_hold_the_end_of_every_evaluated_history(pack, order, batch_users):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 30, 70)
    store = store_of([[(int(i), t) for t, i in enumerate(rng.integers(0, 40, size))] for size in sizes])
    data, config = Data(store, split_leave_last(store, LEAVE_ONE_OUT)), Config()
    config.data.length, config.data.pack, config.data.position_order = 12, pack, order
    config.evaluation.batch_users = batch_users
    for which, held_out in (("validation", 2), ("test", 1)):
        batches = list(data.query_batches(config, which))
        assert len({tuple(a.shape for a in batch) for batch in batches}) == 1, "one compilation"
        users = []
        for batch in batches:
            for row, column, user in zip(batch.rows, batch.columns, batch.users, strict=True):
                if user < 0:
                    continue
                users.append(int(user))
                history = store.items[store.offsets[user] : store.offsets[user + 1] - held_out][-12:]
                inside = batch.segment_ids[row] == batch.segment_ids[row, column]
                assert batch.segment_ids[row, column] > 0 and np.flatnonzero(inside)[-1] == column
                assert batch.items[row][inside].tolist() == history.tolist()
                positions = list(range(len(history)))
                assert batch.positions[row][inside].tolist() == (
                    positions if order == "oldest_first" else positions[::-1]
                )
        assert sorted(users) == np.flatnonzero(sizes >= 3).tolist()
        assert data.num_queries(which) == len(users)
    if pack:
        rows = sum(int((batch.segment_ids > 0).any(1).sum()) for batch in batches)
        assert rows < len(users), "short histories share rows"


def test_targets_and_seen_items_of_users_in_any_order():
    store = store_of([[(i, t) for t, i in enumerate(items)] for items in ([3, 1, 3, 1, 2, 2], [5], [4, 4, 0, 4, 4])])
    data = Data(store, split_leave_last(store, SplitConfig(kind="leave_last", test_last=2, validation_last=1)))
    users = np.array([2, 0])
    assert [a.tolist() for a in data.targets("test", users)] == [[4, 4, 2, 2], [0, 2, 4]]
    assert [a.tolist() for a in data.seen("test", users)] == [[0, 4, 1, 3], [0, 2, 4]]
    assert [a.tolist() for a in data.targets("validation", users)] == [[0, 1], [0, 1, 2]]
    assert [a.tolist() for a in data.seen("validation", users)] == [[4, 1, 3], [0, 1, 3]]
    assert [a.tolist() for a in data.targets("test", np.zeros(0, np.int64))] == [[], [0]]
    assert [a.tolist() for a in data.seen("test", np.zeros(0, np.int64))] == [[], [0]]


def test_no_query_sees_its_targets(tmp_path):
    """Times of the histories end before the gap, times of the targets begin after it."""
    config = synthetic_config(tmp_path)
    data = open_data(config)
    split, time = data.split, data.store.timestamps
    for which, start in (("validation", 23_000_000 - 1_800 - 2_000_000), ("test", 23_000_000)):
        first, end = getattr(split, f"{which}_start"), getattr(split, f"{which}_end")
        history_end = getattr(split, f"{which}_history_end")
        for user in np.flatnonzero(end > first):
            assert time[first[user]] >= start
            assert time[history_end[user] - 1] < start - 1_800
    batch = data.train_source(config)[0]
    trained = {int(i) for a, b in zip(split.train_start, split.train_end, strict=True) for i in data.store.items[a:b]}
    assert set(batch.targets[batch.targets >= 0].tolist()) <= trained


def test_the_second_opening_generates_and_builds_nothing(tmp_path, monkeypatch):
    config = synthetic_config(tmp_path)
    first = open_data(config)
    monkeypatch.setattr(synthetic, "write", None)
    monkeypatch.setattr(loader.yambda, "read_yambda", None)
    second = open_data(config)
    np.testing.assert_array_equal(first.store.items, second.store.items)
    assert isinstance(second.store.items.base, np.memmap)
    monkeypatch.undo()
    os.remove(synthetic.cached_file(config.data.synthetic, str(tmp_path)))  # generated again, the content is the same
    assert open_data(config).store.fingerprint == first.store.fingerprint
    config.data.min_played_ratio = 50
    assert open_data(config).store.num_events < first.store.num_events
    assert len(os.listdir(tmp_path / "stores")) == 2


def test_the_cache_is_found_by_its_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("RECML_SASREC_CACHE", str(tmp_path / "here"))
    config = synthetic_config(tmp_path)
    config.data.cache = ""
    assert open_data(config).store.directory.startswith(str(tmp_path / "here"))


def test_bad_configurations_of_data_are_one_sentence(tmp_path):
    config = synthetic_config(tmp_path)
    config.data.source = "table"
    with pytest.raises(DataError, match=r"data.source='table' needs config.data.path"):
        open_data(config)
    config.data.path = str(tmp_path / "absent.csv")
    with pytest.raises(DataError, match=r"absent.csv' does not exist"):
        open_data(config)
    one_item = tmp_path / "one.csv"
    one_item.write_text("user_id,item_id,timestamp\n1,1,1\n1,1,2\n1,1,3\n")
    config.data.path, config.split.kind = str(one_item), "leave_last"
    with pytest.raises(DataError, match="has 1 item but ranking needs at least 2 items"):
        open_data(config)
    short = tmp_path / "short.csv"
    short.write_text("user_id,item_id,timestamp\n1,1,1\n2,2,2\n3,1,1\n3,2,2\n3,3,3\n3,1,4\n")
    config.data.path = str(short)
    config.train.batch_size = 2
    data = open_data(config)  # users with one event are no error
    with pytest.raises(DataError, match="batch_size 2 is larger than the data"):
        data.train_batches(config)
    assert not [name for name in os.listdir(tmp_path / "stores") if name.startswith(".")]


def test_closing_the_iterator_ends_it(tmp_path):
    config = synthetic_config(tmp_path)
    batches = open_data(config).train_batches(config, 5)
    next(batches)
    batches.close()
    with pytest.raises(ValueError, match="closed"):
        next(batches)


def real(source, path, cache):
    config = Config()
    config.data.source, config.data.path, config.data.cache = source, path, str(cache)
    config.split = LEAVE_ONE_OUT
    return open_data(config), config


@pytest.mark.parametrize(
    ("source", "parts", "users", "items", "rows"),
    [
        ("table", ("ml-100k", "ml-100k.inter"), 943, 1_682, 100_000),
        ("lines", ("s3rec-beauty", "Beauty.txt"), 22_363, 12_101, 198_502),
    ],
)
def test_real_files_have_the_published_sizes(tmp_path, source, parts, users, items, rows):
    data, config = real(source, shared_file(*parts), tmp_path)
    assert (data.store.num_users, data.store.num_items, data.store.num_events) == (users, items, rows)
    assert data.num_queries("validation") == data.num_queries("test") == users, "nobody is lost"
    assert data.fill(config) > 0.95


def test_popularity_on_beauty_equals_the_published_number(tmp_path):
    """Counts without each user's last two events, ties by id: HR@10 .011447 over all items (facts of the data set)."""
    data, _ = real("lines", shared_file("s3rec-beauty", "Beauty.txt"), tmp_path)
    store, split = data.store, data.split
    trained = np.concatenate([store.items[a:b] for a, b in zip(split.train_start, split.train_end, strict=True)])
    counts = np.bincount(trained, minlength=store.num_items)
    top = np.lexsort((np.arange(store.num_items), -counts))[:10]
    values, _ = data.targets("test", np.arange(store.num_users))
    assert np.mean(np.isin(values, top)) == pytest.approx(0.011447, abs=5e-7)

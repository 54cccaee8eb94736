"""Items that join a store, and what a table says of the items, against plain Python."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from recml_sasrec.config import Config
from recml_sasrec.data import catalogue
from recml_sasrec.data.catalogue import categories_of, content_of, store_with
from recml_sasrec.data.events import DataError
from recml_sasrec.data.loader import open_data
from recml_sasrec.data.vocabulary import fingerprint

USERS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
ITEMS = [50, 7, 50, 7, 9, 3, 9, 3, 50, 7]
TIMES = list(range(10))


def config_of(tmp_path, kind=int, **data):
    """A config of the ten events above, item ids as integers or as text."""
    path = tmp_path / f"log-{kind.__name__}.parquet"
    if not path.exists():
        columns = {"user_id": USERS, "item_id": [kind(i) for i in ITEMS], "timestamp": TIMES}
        pq.write_table(pa.table(columns), path)
    config = Config()
    config.data.source, config.data.path, config.data.cache = "table", str(path), str(tmp_path / "cache")
    config.split.kind = "leave_last"
    for name, value in data.items():
        setattr(config.data, name, value)
    return config


def written(path, ids, **columns):
    """The items' table."""
    pq.write_table(pa.table({"item_id": ids, **columns}), path)
    return str(path)


def events(store):
    """[(raw user, raw item, time)] in the store's order."""
    users = np.repeat(store.user_ids.to_pylist(), np.diff(store.offsets))
    return list(zip(users.tolist(), store.item_ids.take(pa.array(store.items)).to_pylist(), store.timestamps.tolist(),
                    strict=True))  # fmt: skip


@pytest.mark.parametrize("kind", [int, str])
def test_a_store_with_more_items_has_the_same_events_and_the_union_in_order(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(catalogue, "_BLOCK", 4)  # several blocks
    store = open_data(config_of(tmp_path, kind)).store
    new = [kind(i) for i in (8, 50, 1, 8, 2**40)]
    grown = store_with(store, pa.array(new, store.item_ids.type), str(tmp_path / "grown"))
    assert grown.item_ids.to_pylist() == sorted({*(kind(i) for i in ITEMS), *new})
    assert grown.num_items == 7 == len(grown.item_ids) and grown.items.dtype == np.int32
    assert events(grown) == events(store)
    assert grown.vocabulary == fingerprint(grown.item_ids) != store.vocabulary
    assert grown.fingerprint != store.fingerprint
    for name in ("num_users", "num_events", "has_time", "first_time", "last_time"):
        assert getattr(grown, name) == getattr(store, name)
    assert os.path.samefile(f"{grown.directory}/timestamps.npy", f"{store.directory}/timestamps.npy")
    made = os.stat(f"{grown.directory}/items.npy").st_ino
    again = store_with(store, pa.array(new[::-1], store.item_ids.type), str(tmp_path / "grown"))
    assert os.stat(f"{again.directory}/items.npy").st_ino == made  # opened, not built


def test_a_store_that_has_the_items_is_given_back_and_other_ids_replace_a_store(tmp_path):
    store = open_data(config_of(tmp_path)).store
    assert store_with(store, pa.array([9, 3]), str(tmp_path / "grown")) is store
    assert not (tmp_path / "grown").exists()
    store_with(store, pa.array([4]), str(tmp_path / "grown"))
    grown = store_with(store, pa.array([4, 5]), str(tmp_path / "grown"))
    assert grown.item_ids.to_pylist() == [3, 4, 5, 7, 9, 50]
    with pytest.raises(DataError, match="large_string"):
        store_with(store, pa.array(["4"], pa.large_string()), str(tmp_path / "other"))
    assert sorted(os.listdir(tmp_path)) == ["cache", "grown", "log-int.parquet"]


def test_without_links_the_files_are_copied_and_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    store = open_data(config_of(tmp_path)).store

    def no_links(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    assert events(store_with(store, pa.array([4]), str(tmp_path / "copied"))) == events(store)
    monkeypatch.setattr(catalogue, "_link", lambda *_: no_links())
    with pytest.raises(DataError, match="can't be written"):
        store_with(store, pa.array([4]), str(tmp_path / "failed"))
    assert not [name for name in os.listdir(tmp_path) if "failed" in name]


@pytest.mark.parametrize("kind", [int, str])
def test_items_of_the_table_join_the_catalogue_unless_told_otherwise(tmp_path, kind):
    path = written(tmp_path / "items.parquet", [kind(i) for i in (9, 4, 3)])
    joined = open_data(config_of(tmp_path, kind, items_path=path)).store
    assert joined.item_ids.to_pylist() == sorted(kind(i) for i in (3, 4, 7, 9, 50))
    plain = open_data(config_of(tmp_path, kind, items_path=path, items_join=False)).store
    assert plain.num_items == 4 and events(plain) == events(joined)


VECTORS = {4: [1.0, 2.0], 50: [3.0, 4.0], 3: [0.5, -6.0]}
KINDS = [pa.list_(pa.float64()), pa.list_(pa.float32()), pa.list_(pa.float32(), 2), pa.large_list(pa.float16())]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("join", [True, False])
def test_content_is_in_the_order_of_the_items_with_zeros_where_there_is_none(tmp_path, kind, join, monkeypatch, caplog):
    monkeypatch.setattr(catalogue, "_BATCH_ROWS", 2)  # several batches
    rows = [np.array(row, np.float16) for row in VECTORS.values()] if "half" in str(kind) else [*VECTORS.values()]
    path = written(tmp_path / "items.parquet", [*VECTORS], vector=pa.array(rows, kind))
    config = config_of(tmp_path, items_path=path, items_join=join, content_column="vector")
    store = open_data(config).store
    with caplog.at_level("INFO"):
        content = content_of(store, config.data)
    expected = [VECTORS.get(item, [0.0, 0.0]) for item in store.item_ids.to_pylist()]
    assert content.dtype == np.float32 and content.tolist() == expected
    assert isinstance(content.base, np.memmap)
    assert f"2 of {store.num_items} items have no row" in caplog.text
    assert content_of(store, Config().data) is None


def test_content_is_read_once_and_again_when_the_file_has_changed(tmp_path, monkeypatch):
    path = written(tmp_path / "items.parquet", [3, 50], vector=[[1.0], [2.0]])
    config = config_of(tmp_path, items_path=path, items_join=False, content_column="vector")
    store = open_data(config).store
    assert content_of(store, config.data).tolist() == [[1], [0], [0], [2]]
    with monkeypatch.context() as patch:
        patch.setattr(catalogue, "_write_content", None)  # would raise if called
        assert content_of(store, config.data).tolist() == [[1], [0], [0], [2]]
    (kept,) = (name for name in os.listdir(store.directory) if "content" in name)
    os.truncate(os.path.join(store.directory, kept), 130)  # damaged: read again
    assert content_of(store, config.data).tolist() == [[1], [0], [0], [2]]
    written(path, [3, 50, 9], vector=[[5.0, 1], [2.0, 1], [7, 1]])
    assert content_of(store, config.data).tolist() == [[5, 1], [0, 0], [7, 1], [2, 1]]
    assert len([name for name in os.listdir(store.directory) if "content" in name]) == 1


@pytest.mark.parametrize(
    "column, match",
    [
        ([[1.0, 2.0], None], "item 9 has no value in column 'vector'"),
        ([[1.0, 2.0], [1.0, None]], "item 9 has a number missing"),
        ([[1.0, 2.0], [1.0]], "item 9 has 1 numbers, others 2"),
        (pa.array([[], []], pa.list_(pa.float32())), "item 3 has an empty list"),
        ([[1.0, 2.0], [1.0, float("nan")]], "item 9 has a number that is not finite"),
        ([[1e39, 2.0], [1.0, 0.0]], "item 3 has a number that is not finite"),
        (["1 2", "3 4"], "holds string values but content must be lists of numbers"),
        ([["a"], ["b"]], "must be lists of numbers"),
    ],
)
@pytest.mark.parametrize("batch", [1, 10])
def test_bad_vectors_are_refused_by_the_item_and_leave_nothing(tmp_path, column, match, batch, monkeypatch):
    monkeypatch.setattr(catalogue, "_BATCH_ROWS", batch)
    path = written(tmp_path / "items.parquet", [3, 9], vector=column)
    config = config_of(tmp_path, items_path=path, content_column="vector")
    store = open_data(config).store
    with pytest.raises(DataError, match=match):
        content_of(store, config.data)
    assert not [name for name in os.listdir(store.directory) if "content" in name]


@pytest.mark.parametrize("column_type", [pa.string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str)
@pytest.mark.parametrize("kind", [int, str])
def test_categories_are_numbered_in_the_order_of_their_text(tmp_path, kind, column_type):
    values = pa.array(["rock", "jazz", None, "rock"]).cast(column_type)
    path = written(tmp_path / "items.parquet", [kind(i) for i in (50, 4, 3, 9)], genre=values)
    config = config_of(tmp_path, kind, items_path=path, category_column="genre")
    store = open_data(config).store
    genre = dict(zip((kind(i) for i in (50, 4, 3, 9)), values.to_pylist(), strict=True))
    numbers = {None: -1, "jazz": 0, "rock": 1}
    categories = categories_of(store, config.data)
    assert categories.dtype == np.int32
    assert categories.tolist() == [numbers[genre.get(item)] for item in store.item_ids.to_pylist()]
    assert categories_of(store, Config().data) is None


def test_a_column_of_nothing_but_nulls_has_no_category(tmp_path):
    path = written(tmp_path / "items.parquet", [50, 4, 3], genre=pa.nulls(3, pa.string()))
    config = config_of(tmp_path, items_path=path, category_column="genre")
    store = open_data(config).store
    assert categories_of(store, config.data).tolist() == [-1] * store.num_items


def test_a_csv_has_categories_and_ids_of_the_events_type(tmp_path):
    table = pa.table({"item_id": [50, 4, 3], "genre": [7, 7, 5]})
    pacsv.write_csv(table, tmp_path / "items.csv")
    for kind in (int, str):  # in a CSV "50" may be either
        config = config_of(tmp_path, kind, items_path=str(tmp_path / "items.csv"), category_column="genre")
        store = open_data(config).store
        assert store.num_items == 5
        expected = {"50": 1, "4": 1, "3": 0}
        assert categories_of(store, config.data).tolist() == [
            expected.get(str(i), -1) for i in store.item_ids.to_pylist()
        ]


@pytest.mark.parametrize("batch", [1, 10])
def test_other_faults_of_the_table_are_refused_in_a_sentence(tmp_path, batch, monkeypatch):
    monkeypatch.setattr(catalogue, "_BATCH_ROWS", batch)
    path = written(tmp_path / "items.parquet", [3, 9, 3], genre=["a", "b", "c"], vector=[[1.0], [2.0], [3.0]])
    with pytest.raises(DataError, match="item 3 has more than one row"):
        open_data(config_of(tmp_path, items_path=path))
    config = config_of(tmp_path, items_path=path, items_join=False, content_column="vector", category_column="genre")
    for read in (content_of, categories_of):
        with pytest.raises(DataError, match="item 3 has more than one row"):
            read(open_data(config).store, config.data)
    with pytest.raises(DataError, match="are integers but those of the events are text; convert one"):
        open_data(config_of(tmp_path, str, items_path=path))
    config.data.items_path = written(tmp_path / "others.parquet", [1, 2], genre=["a", "b"], vector=[[1.0], [2.0]])
    for read in (content_of, categories_of):
        with pytest.raises(DataError, match="has no row for any of the 4 items"):
            read(open_data(config).store, config.data)
    with pytest.raises(DataError, match=r"does not exist; check config\.data\.items_path"):
        open_data(config_of(tmp_path, items_path=str(tmp_path / "none.parquet")))
    with pytest.raises(DataError, match="has no column 'gender'; the nearest of its 3 columns is 'genre'"):
        categories_of(open_data(config).store, config_of(tmp_path, items_path=path, category_column="gender").data)
    with pytest.raises(DataError, match="categories must be text or integers"):
        config = config_of(tmp_path, items_path=path, items_join=False, category_column="vector")
        categories_of(open_data(config).store, config.data)

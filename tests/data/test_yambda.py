"""The Yambda reader: flat and sequential files hold the same events, whatever the lists are called."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from event_helpers import collect

from recml_sasrec.config import SyntheticConfig
from recml_sasrec.data import synthetic
from recml_sasrec.data.events import DataError
from recml_sasrec.data.yambda import read_yambda


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    path = tmp_path_factory.mktemp("yambda") / "flat.parquet"
    synthetic.write(SyntheticConfig(users=150, items=300, events_per_user=20, seed=3), str(path))
    return path


def sequential_of(flat, path, plural, kind):
    """The sequential form: a row for each uid, every other column a list."""
    table = pq.read_table(flat)
    uid = table["uid"].to_numpy()
    starts = np.flatnonzero(np.r_[True, uid[1:] != uid[:-1]])
    offsets = pa.array(np.r_[starts, len(uid)], pa.int64() if kind is pa.LargeListArray else pa.int32())
    columns = {"uid": pa.array(uid[starts])}
    for name in table.column_names[1:]:
        columns[name + ("s" if plural else "")] = kind.from_arrays(offsets, table[name].combine_chunks())
    pq.write_table(pa.table(columns), path, compression="lz4")


@pytest.mark.parametrize("plural", [False, True])
@pytest.mark.parametrize("kind", [pa.ListArray, pa.LargeListArray])
@pytest.mark.parametrize("ratio", [0, 50])
def test_sequential_and_flat_files_hold_the_same_events(flat, tmp_path, plural, kind, ratio):
    sequential_of(flat, tmp_path / "s.parquet", plural, kind)
    found = collect(read_yambda(str(tmp_path / "s.parquet"), ratio))
    assert found == collect(read_yambda(str(flat), ratio))
    assert len(found[0]) == len(set(found[0])) or len(found[0]) > 1_000


def test_listen_plus_keeps_half_played_and_drops_unknown(tmp_path):
    table = {
        "item_id": pa.array([1, 2, 3, 4, 5], pa.uint32()),
        "played_ratio_pct": pa.array([49, 50, None, 100, 159], pa.uint16()),
        "timestamp": pa.array([0, 5, 5, 10, 15], pa.uint32()),
        "uid": pa.array([100] * 5, pa.uint32()),
    }
    pq.write_table(pa.table(table), tmp_path / "f.parquet")
    assert collect(read_yambda(str(tmp_path / "f.parquet"), 50))[1] == [2, 4, 5]
    assert collect(read_yambda(str(tmp_path / "f.parquet"), 49))[1] == [1, 2, 4, 5]
    assert collect(read_yambda(str(tmp_path / "f.parquet"), 0))[1] == [1, 2, 3, 4, 5]


def test_multi_event_files_with_an_enum_and_users_without_events_are_read(tmp_path):
    table = {
        "uid": pa.array([100, 200, 300], pa.uint32()),
        "timestamp": pa.array([[0, 5], [], [5]], pa.list_(pa.uint32())),
        "item_id": pa.array([[7, 7], [], [9]], pa.list_(pa.uint32())),
        "event_type": pa.array([["listen", "like"], [], ["listen"]]),
    }
    pq.write_table(pa.table(table), tmp_path / "s.parquet")
    assert collect(read_yambda(str(tmp_path / "s.parquet"))) == ([100, 100, 300], [7, 7, 9], [0, 5, 5])
    flat = {
        "uid": [100, 100],
        "timestamp": [0, 5],
        "item_id": [7, 7],
        "event_type": pa.array(["listen", "like"]).dictionary_encode(),
    }
    pq.write_table(pa.table(flat), tmp_path / "f.parquet")
    assert collect(read_yambda(str(tmp_path / "f.parquet"))) == ([100, 100], [7, 7], [0, 5])


def test_what_is_wrong_with_a_file_is_one_sentence(flat, tmp_path):
    likes = pq.read_table(flat).drop_columns(["played_ratio_pct", "track_length_seconds"])
    pq.write_table(likes, tmp_path / "likes.parquet")
    with pytest.raises(DataError, match="no column 'played_ratio_pct'"):
        collect(read_yambda(str(tmp_path / "likes.parquet"), 50))
    uneven = {"uid": [1], "timestamp": [[1, 2]], "item_id": [[1, 2, 3]]}
    pq.write_table(pa.table(uneven), tmp_path / "uneven.parquet")
    with pytest.raises(DataError, match="a row with 3 items but 2 values of 'timestamp'"):
        collect(read_yambda(str(tmp_path / "uneven.parquet")))
    mixed = {"uid": [1], "timestamp": [1], "item_id": [[1, 2, 3]]}
    pq.write_table(pa.table(mixed), tmp_path / "mixed.parquet")
    with pytest.raises(DataError, match="a list in every column but uid"):
        collect(read_yambda(str(tmp_path / "mixed.parquet")))

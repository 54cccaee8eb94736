"""Readers: every format gives the same events, and every bad input is one sentence."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from event_helpers import collect

from recml_sasrec.data import events
from recml_sasrec.data.events import DataError, read_lines, read_table

ROWS = {"user_id": [3, 1, 3, 2], "item_id": [10, 11, 10, 12], "timestamp": [5, 9, 5, 0]}


def read(path, user="user_id", item="item_id", time="timestamp"):
    return collect(read_table(str(path), user, item, time))


def text(path, content):
    path.write_bytes(content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "delimiter", "header"),
    [
        ("log.csv", ",", "rating,user_id,item_id,timestamp"),
        ("log.tsv", "\t", "rating\tuser_id\titem_id\ttimestamp"),
        ("log.inter", "\t", "rating:float\tuser_id:token\titem_id:token\ttimestamp:float"),
        ("log.txt", ";", "rating;user_id;item_id;timestamp"),
        ("log.csv.gz", ",", "rating,user_id,item_id,timestamp"),
    ],
)
def test_text_tables(tmp_path, name, delimiter, header):
    lines = [header] + [delimiter.join(map(str, (0.5, *row))) for row in zip(*ROWS.values(), strict=True)]
    content = ("\n".join(lines) + "\n").encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert read(tmp_path / name) == tuple(ROWS.values())
    assert read(tmp_path / name, time="") == (ROWS["user_id"], ROWS["item_id"], [])
    if "inter" in name:
        assert read(tmp_path / name, "user_id:token", "item_id:token", "timestamp:float") == tuple(ROWS.values())


def test_parquet_with_more_columns_and_other_types(tmp_path):
    table = pa.table(
        {
            "extra": [1.5] * 4,
            "timestamp": pa.array([5e6, 9e6, 5e6, 0], pa.timestamp("us")),
            "item_id": pa.array(["10", "11", "10", "12"]).dictionary_encode(),
            "user_id": pa.array(ROWS["user_id"], pa.uint16()),
        }
    )
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=2)
    assert read(tmp_path / "log.parquet") == (ROWS["user_id"], ["10", "11", "10", "12"], ROWS["timestamp"])


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        (pa.array([1.0, 2.9, 0.0]), [1, 2, 0]),
        (pa.array([1500, 999, 0], pa.timestamp("ms")), [1, 0, 0]),
        (pa.array([10**9, 1, 0], pa.timestamp("ns", "UTC")), [1, 0, 0]),
        (pa.array([1, 2, 0], pa.date32()), [86_400, 172_800, 0]),
        (pa.array(["1", "2.5", "0"]), [1, 2, 0]),
        (pa.array(["1970-01-02 00:00:01", "1970-01-01T00:01:00", "1970-01-01"]), [86_401, 60, 0]),
        (pa.array([2**63 - 1, 1, 0], pa.uint64()), [2**63 - 1, 1, 0]),
    ],
)
def test_times_become_whole_seconds(tmp_path, times, seconds):
    pq.write_table(pa.table({"user_id": [1, 1, 2], "item_id": [1, 2, 3], "timestamp": times}), tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet")[2] == seconds


def test_ids_that_turn_into_text_late_are_text_from_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "_BLOCK_BYTES", 4096)  # the odd one is blocks away
    rows = [f"{i},{i % 7},{i}" for i in range(5_000)] + ["anna,3,1"]
    users, items, _ = read(text(tmp_path / "t.csv", "user_id,item_id,timestamp\n" + "\n".join(rows)))
    assert users == [str(i) for i in range(5_000)] + ["anna"]
    assert items[:3] == [0, 1, 2]
    lines = "\n".join(f"{i} {i % 7}" for i in range(5_000)) + "\n1 x7\n"
    users, items, _ = collect(read_lines(str(text(tmp_path / "t.txt", lines))))
    assert users[-1] == 1 and items[:3] == ["0", "1", "2"] and items[-1] == "x7"


def test_leading_zeros_make_different_ids(tmp_path):
    assert read(text(tmp_path / "t.csv", "user_id,item_id\n007,1\n7,2\n"), time="")[0] == ["007", "7"]


def test_ids_over_int64_in_text_stay_text(tmp_path):
    path = text(tmp_path / "t.csv", f"user_id,item_id\n{2**63 - 1},{2**63}\n")
    assert read(path, time="")[:2] == ([2**63 - 1], [str(2**63)])


@pytest.mark.parametrize("zipped", [False, True])
def test_lines(tmp_path, zipped, monkeypatch):
    monkeypatch.setattr(events, "_BLOCK_BYTES", 64)
    content = "".join(f"{u} {' '.join(str(10 * u + i) for i in range(u))}\n" for u in range(20)) + "\n"
    path = tmp_path / ("t.txt.gz" if zipped else "t.txt")
    path.write_bytes(gzip.compress(content.encode()) if zipped else content.encode())
    users, items, times = collect(read_lines(str(path)))
    assert users == [u for u in range(20) for _ in range(u)]
    assert items == [10 * u + i for u in range(20) for i in range(u)]
    assert times == []


def table_of(tmp_path, **columns):
    base = {"user_id": pa.array([1, 2]), "item_id": pa.array([1, 2]), "timestamp": pa.array([1, 2])}
    pq.write_table(pa.table({**base, **columns}), tmp_path / "bad.parquet")
    return tmp_path / "bad.parquet"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user_id": pa.array([1, None])}, "'user_id' .* has no value in row 2"),
        ({"item_id": pa.array(["a", None])}, "'item_id' .* has no value in row 2"),
        ({"timestamp": pa.array([None, 3])}, "'timestamp' .* has no value in row 1"),
        ({"user_id": pa.array([1, -7])}, "negative id -7"),
        ({"item_id": pa.array([1, 2**63], pa.uint64())}, f"the id {2**63}, over the limit {2**63 - 1}"),
        ({"item_id": pa.array([1.0, 2.0])}, "holds double values but ids must be integers or strings"),
        ({"timestamp": pa.array([1, -2])}, "negative time -2"),
        ({"timestamp": pa.array([1, 2**63], pa.uint64())}, f"the time {2**63}, outside"),
        ({"timestamp": pa.array([1, 1e30])}, "the time 1e.30, outside"),
        ({"timestamp": pa.array([1, np.nan])}, "the time nan, outside"),
        ({"timestamp": pa.array([1, np.inf])}, "the time inf, outside"),
        ({"timestamp": pa.array(["1", str(2**63)])}, "outside"),
        ({"timestamp": pa.array(["1", "soon"])}, "holds 'soon', which is neither a number nor a datetime"),
        ({"timestamp": pa.array(["1", "1970-01-01"])}, "neither a number nor a datetime|mixes"),
        ({"timestamp": pa.array([True, False])}, "holds bool values but times must be"),
    ],
)
def test_bad_values_are_one_sentence(tmp_path, columns, message):
    with pytest.raises(DataError, match=message) as caught:
        read(table_of(tmp_path, **columns))
    assert "\n" not in str(caught.value)


def test_bad_files_are_one_sentence(tmp_path):
    whole = table_of(tmp_path)
    big = tmp_path / "big.parquet"
    pq.write_table(pa.table({k: np.arange(200_000) for k in ROWS}), big, compression="none")
    damaged = bytearray(big.read_bytes())
    damaged[4:2_000] = b"\xff" * 1_996
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-20])
    (tmp_path / "head.parquet").write_bytes(whole.read_bytes()[:2])
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"user_id,item_id,timestamp\n" + b"1,2,3\n" * 9_999)[:-50])
    for name, content in {
        "empty.csv": "",
        "ragged.csv": "user_id,item_id,timestamp\n1,2,3\n1,2\n",
        "null.csv": "user_id,item_id,timestamp\n1,2,3\n,2,3\n",
        "negative.csv": "user_id,item_id,timestamp\n1,2,3\n-1,2,3\n",
        "blank.csv": "\n\n",
    }.items():
        text(tmp_path / name, content)
    (tmp_path / "latin.csv").write_bytes(b"user_id,item_id,timestamp\n1,caf\xe9,3\n")
    (tmp_path / "folder").mkdir()
    for name, message in {
        "absent.parquet": "does not exist",
        "folder": "is not a file",
        "empty.csv": "is empty",
        "blank.csv": "empty first line",
        "ragged.csv": "Expected 3 columns, got 2",
        "null.csv": "'user_id' .* has no value in row 2",
        "negative.csv": "negative id -1",
        "latin.csv": "can't be read",
        "cut.parquet": "is not a complete parquet file",
        "head.parquet": "is not a complete parquet file",
        "damaged.parquet": "can't be read to its end",
        "cut.csv.gz": "can't be read",
    }.items():
        with pytest.raises(DataError, match=message) as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value), name


def test_a_missing_column_is_answered_with_the_nearest(tmp_path):
    path = table_of(tmp_path)
    with pytest.raises(DataError, match=r"no column 'item'; the nearest of its 3 columns is 'item_id'"):
        read(path, item="item")
    path = text(tmp_path / "t.csv", "userId,movieId,rating\n1,2,3\n")
    with pytest.raises(DataError, match=r"no column 'user_id'; the nearest of its 3 columns is 'userId'"):
        read(path)


def test_a_table_without_rows_has_no_events(tmp_path):
    assert read(text(tmp_path / "t.csv", "user_id,item_id,timestamp\n")) == ([], [], [])


def test_quoted_text_with_delimiters(tmp_path):
    table = pa.table({"user_id": ["a, b", "c"], "item_id": ['say "x"', "y"], "timestamp": [1, 2]})
    pacsv.write_csv(table, tmp_path / "t.csv")
    assert read(tmp_path / "t.csv") == (["a, b", "c"], ['say "x"', "y"], [1, 2])

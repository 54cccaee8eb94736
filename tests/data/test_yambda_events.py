"""Every kind of Yambda's files under every filter, against a plain Python reading of the same rows."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from event_helpers import collect

from recml_sasrec.data import yambda
from recml_sasrec.data.events import DataError
from recml_sasrec.data.yambda import read_yambda

TYPES = {
    "uid": pa.uint32(),
    "timestamp": pa.uint32(),
    "item_id": pa.uint32(),
    "is_organic": pa.uint8(),
    "event_type": pa.dictionary(pa.uint8(), pa.string()),
    "played_ratio_pct": pa.uint16(),
    "track_length_seconds": pa.uint32(),
}


def multi_event(users=12, seed=0):
    """Rows sorted by (uid, timestamp) with many ties, undone likes and dislikes, and listens without a ratio."""
    draw = random.Random(seed)
    rows = []
    for user in range(users):
        times = sorted(5 * draw.randrange(12) for _ in range(draw.randrange(60)))
        for time in times:
            kind = draw.choice(yambda.EVENT_TYPES)
            listen = kind == "listen"
            rows.append(
                {
                    "uid": 100 * user + 100,
                    "timestamp": time,
                    "item_id": draw.choice([22, 23, 24, 9_390_623]),
                    "is_organic": draw.randrange(2),
                    "event_type": kind,
                    "played_ratio_pct": draw.choice([0, 49, 50, 100, 159, None]) if listen else None,
                    "track_length_seconds": 200 if listen else None,
                }
            )
    return rows


def plain(rows, min_played_ratio=0, organic_only=False, event_types=(), drop_undone=False):
    """The filters as their docstring words them, row by row."""
    kept = []
    for index, row in enumerate(rows):
        kind, ratio = row.get("event_type", "listen"), row.get("played_ratio_pct")
        undone = {"like": "unlike", "dislike": "undislike"}.get(kind) if drop_undone else None
        if undone and any(
            other["event_type"] == undone
            and (other["uid"], other["item_id"]) == (row["uid"], row["item_id"])
            and (other["timestamp"], position) > (row["timestamp"], index)
            for position, other in enumerate(rows)
        ):
            continue
        if min_played_ratio and kind == "listen" and (ratio is None or ratio < min_played_ratio):
            continue
        if (organic_only and not row["is_organic"]) or (event_types and kind not in event_types):
            continue
        kept.append(row)
    return tuple([row[name] for row in kept] for name in ("uid", "item_id", "timestamp"))


def write(rows, path, sequential=False, plural=False, large=False, types=TYPES):
    """The rows as a flat file, or with the events of each user as lists."""
    names = [name for name in TYPES if name in rows[0]]
    if not sequential:
        columns = {name: pa.array([row[name] for row in rows]).cast(types[name]) for name in names}
    else:
        users = list(dict.fromkeys(row["uid"] for row in rows))
        starts = [next(i for i, row in enumerate(rows) if row["uid"] == user) for user in users] + [len(rows)]
        kind = pa.LargeListArray if large else pa.ListArray
        offsets = pa.array(starts, pa.int64() if large else pa.int32())
        columns = {"uid": pa.array(users, pa.uint32())}
        for name in names[1:]:
            values = pa.array([row[name] for row in rows]).cast(types[name])
            columns[name + "s" * plural] = kind.from_arrays(offsets, values)
    pq.write_table(
        pa.table(columns), path, compression="lz4", row_group_size=5 if sequential else 100, data_page_size=64,
        write_batch_size=8,
    )  # fmt: skip


FILTERS = [
    {},
    {"min_played_ratio": 50},
    {"min_played_ratio": 49, "organic_only": True},
    {"event_types": ("listen",), "min_played_ratio": 50},
    {"event_types": ("like", "dislike")},
    {"event_types": ("like",), "drop_undone": True},
    {"drop_undone": True},
    {"drop_undone": True, "organic_only": True, "min_played_ratio": 50, "event_types": ("listen", "like")},
]


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({}, pa.dictionary(pa.uint8(), pa.string())),
        ({}, pa.dictionary(pa.int32(), pa.large_string())),
        ({}, pa.string()),
        ({}, pa.large_string()),
        ({"sequential": True}, pa.dictionary(pa.uint8(), pa.string())),
        ({"sequential": True, "plural": True}, pa.string()),
        ({"sequential": True, "large": True}, pa.dictionary(pa.uint8(), pa.string())),
        ({"sequential": True, "large": True, "plural": True}, pa.large_string()),
    ],
)
def test_multi_event_files_under_every_filter(tmp_path, monkeypatch, form, texts):
    monkeypatch.setattr(yambda, "_FLAT_ROWS", 7)  # users go over several batches
    monkeypatch.setattr(yambda, "_SEQUENTIAL_ROWS", 2)
    rows = multi_event()
    write(rows, tmp_path / "f.parquet", **form, types=TYPES | {"event_type": texts})
    sizes = set()
    for filters in FILTERS:
        found = collect(read_yambda(str(tmp_path / "f.parquet"), **filters))
        assert found == plain(rows, **filters), filters
        sizes.add(len(found[0]))
    assert len(sizes) == len(FILTERS) and 0 not in sizes  # each filter drops something of its own


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("event", ["listens", "likes", "dislikes", "unlikes", "undislikes"])
def test_files_of_one_type_have_only_its_columns(tmp_path, event, sequential):
    rows = [row for row in multi_event() if row["event_type"] == event[:-1]]
    dropped = ["event_type"] + ([] if event == "listens" else ["played_ratio_pct", "track_length_seconds"])
    rows = [{name: value for name, value in row.items() if name not in dropped} for row in rows]
    write(rows, tmp_path / "f.parquet", sequential=sequential)
    for filters in ({}, {"organic_only": True}, *([{"min_played_ratio": 50}] if event == "listens" else [])):
        assert collect(read_yambda(str(tmp_path / "f.parquet"), **filters)) == plain(rows, **filters)
    with pytest.raises(
        DataError, match=r"no column 'event_type', which config.data.event_types reads; only multi_event"
    ):
        collect(read_yambda(str(tmp_path / "f.parquet"), event_types=("like",)))


def test_undone_by_hand():
    """Ties in file order, other items and users untouched, a like after the unlike kept."""
    rows = [
        (100, 0, 7, "like"),  # undone in the tie
        (100, 0, 7, "unlike"),
        (100, 5, 7, "like"),  # stays: liked again
        (100, 5, 8, "unlike"),
        (100, 5, 8, "like"),  # stays: the unlike is before it in the file
        (100, 9, 9, "like"),  # stays: an undislike undoes no like
        (100, 9, 9, "undislike"),
        (200, 0, 7, "like"),  # stays: another user
        (200, 0, 8, "dislike"),  # undone
        (200, 9, 8, "undislike"),
    ]
    user, time, item, kinds = zip(*rows, strict=True)
    batch = pa.record_batch(
        [pa.array(user), pa.array(item), pa.array(time), pa.array(map(yambda.EVENT_TYPES.index, kinds), pa.int8())],
        ["uid", "item_id", "timestamp", "event_type"],
    )
    kept = yambda._kept(batch, 0, False, (), True).to_pylist()
    assert [i for i, keep in enumerate(kept) if not keep] == [0, 8]


def test_the_share_read_so_far_ends_at_one(tmp_path, monkeypatch):
    monkeypatch.setattr(yambda, "_FLAT_ROWS", 100)
    write(multi_event(), tmp_path / "f.parquet")
    shares = [batch.share for batch in read_yambda(str(tmp_path / "f.parquet"))]
    assert shares == sorted(shares) and len(shares) > 2 and 0 < shares[0] < 0.5 and shares[-1] == 1


def test_what_is_wrong_with_events_is_one_sentence(tmp_path):
    path = str(tmp_path / "f.parquet")
    rows = multi_event()
    write([*rows, rows[0]], path)
    assert len(collect(read_yambda(path))[0]) == len(rows) + 1
    with pytest.raises(DataError, match=r"events of user 100 in two places .* sort the file by uid"):
        collect(read_yambda(path, drop_undone=True))
    write([row | {"event_type": "Like"} for row in rows], path)
    with pytest.raises(DataError, match=r"holds 'Like'; the types of Yambda's events are listen, dislike, like"):
        collect(read_yambda(path, event_types=("like",)))
    pq.write_table(pa.table({"user": [1], "item_id": [2], "timestamp": [3]}), path)
    with pytest.raises(
        DataError, match="no column 'uid', which every file of Yambda has; it has user, item_id, timest"
    ):
        collect(read_yambda(path))
    write([{name: value for name, value in row.items() if name != "is_organic"} for row in rows], path)
    with pytest.raises(DataError, match=r"no column 'is_organic', which config.data.organic_only reads"):
        collect(read_yambda(path, organic_only=True))
    whole = (tmp_path / "f.parquet").read_bytes()
    for size in (len(whole) // 2, 100, 3):
        (tmp_path / "f.parquet").write_bytes(whole[:size])
        with pytest.raises(DataError, match="is not a complete parquet file"):
            collect(read_yambda(path))

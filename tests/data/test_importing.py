"""prepare --input: what it recognises, reports and writes, against plain Python; and what it refuses, in a sentence."""

import collections
import datetime
import gzip
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from recml_sasrec import prepare
from recml_sasrec.data import events, suggest
from recml_sasrec.data.events import DataError
from recml_sasrec.data.folders import restore
from recml_sasrec.data.importing import Asked, import_log
from recml_sasrec.data.store import open_store, read_store

ARRAYS = ("items", "timestamps", "offsets")
BEGIN = 1_546_473_600  # 2019-01-03


def log_rows(count=600, seed=0):
    """(user, item, milliseconds) in no order, with ties, duplicates, blanks, many alphabets and 64-bit ids."""
    rng = np.random.default_rng(seed)
    users = [f"Zoë {u} ž" if u % 2 else f"用户 {u}" for u in rng.integers(0, 25, count)]
    items = [int(i) for i in rng.integers(0, 40, count) * 2**57 + 3]
    times = [BEGIN * 1000 + int(t) * 250 for t in rng.integers(0, 400, count)]
    return list(zip(users, items, times, strict=True)) + list(zip(users, items, times, strict=True))[:7]


def write_parquet(path, rows, times=None):
    users, items, milliseconds = zip(*rows, strict=True)
    pq.write_table(pa.table({"user_id": users, "item_id": items, "ts": milliseconds if times is None else times}), path)
    return str(path)


def write_csv(path, rows, header="user_id,item_id,ts"):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(path)


def histories(store):
    """user -> [(item, second)] with raw ids."""
    users, items = store.user_ids.to_pylist(), store.item_ids.to_pylist()
    return {
        users[u]: [(items[store.items[e]], int(store.timestamps[e])) for e in range(begin, end)]
        for u, (begin, end) in enumerate(zip(store.offsets[:-1], store.offsets[1:], strict=True))
    }


def expected(rows, ticks):
    """The same by a stable sort in Python, with times in ticks of a second."""
    result = collections.defaultdict(list)
    for user, item, time in sorted(rows, key=lambda row: row[2]):
        result[user].append((item, time // ticks))
    return result


def test_a_log_becomes_its_store_and_a_true_report(tmp_path):
    rows = log_rows()
    report = import_log(write_parquet(tmp_path / "log.parquet", rows), str(tmp_path / "shop"))
    store = open_store(str(tmp_path / "shop"))
    assert histories(store) == expected(rows, 1000)  # milliseconds order the events inside a second
    assert histories(store) != expected([(user, item, time // 1000) for user, item, time in rows], 1)
    sharing = collections.Counter((user, time) for user, _, time in rows)
    ties = sum(count for count in sharing.values() if count > 1)
    duplicates = len(rows) - len(set(rows))
    assert duplicates >= 7
    assert f"ties: {ties} events share their user's time" in report
    assert f"{duplicates} repeat an earlier one's user, item and time" in report
    repeats = 1 - len({(user, item) for user, item, _ in rows}) / len(rows)
    assert f"repeats: {repeats:.1%} of" in report
    assert f"{len({r[0] for r in rows})} users, {len({r[1] for r in rows})} items, {len(rows)} events" in report
    assert "time: 2019-01-03 .. 2019-01-03 UTC, milliseconds" in report
    assert "user ids are text" in report and "item ids are integers" in report
    assert f"--config configs/custom.py --workdir runs/shop --config.data.path={tmp_path / 'shop'}" in report
    fields = json.loads((tmp_path / "shop/suggestion.json").read_text())["fields"]
    assert all(field["reason"] and f"{name} " in report for name, field in fields.items())
    assert sorted(os.listdir(tmp_path)) == ["log.parquet", "shop"]


ISO = [
    datetime.datetime.fromtimestamp(BEGIN, datetime.UTC) + datetime.timedelta(seconds=s) for s in (0.75, 86_400, 0.5)
]


@pytest.mark.parametrize(
    ("times", "unit"),
    [
        ([BEGIN + 1, BEGIN + 86_400, BEGIN], "seconds"),
        ([BEGIN * 1000 + 750, (BEGIN + 86_400) * 1000, BEGIN * 1000 + 500], "milliseconds"),
        ([BEGIN * 10**6 + 750_000, (BEGIN + 86_400) * 10**6, BEGIN * 10**6 + 749_999], "microseconds"),
        ([BEGIN * 10**9 + 9, (BEGIN + 86_400) * 10**9, BEGIN * 10**9 + 8], "nanoseconds"),
        ([BEGIN + 0.75, BEGIN + 86_400, BEGIN + 0.5], "seconds"),
        ([BEGIN * 1e3 + 0.75, (BEGIN + 86_400) * 1e3, BEGIN * 1e3 + 0.5], "milliseconds"),
        (pa.array(ISO, pa.timestamp("us", "UTC")), "dates or datetimes"),
        (pa.array([time.replace(tzinfo=None) for time in ISO], pa.timestamp("ns")), "dates or datetimes"),
        ([time.isoformat() for time in ISO], "dates or datetimes"),
        ([str(BEGIN + 1), f"{BEGIN + 86_400}.5", str(BEGIN)], "seconds"),
        (pa.array([17899, 17900, 17899], pa.int32()).cast(pa.date32()), "dates or datetimes"),
    ],
)
@pytest.mark.parametrize("text", [False, True])
def test_the_unit_of_the_times_is_recognised_and_orders_events_inside_a_second(tmp_path, times, unit, text):
    table = pa.table({"user_id": [7] * 4, "item_id": [1, 2, 3, 4], "ts": pa.concat_arrays([pa.array(times)] * 2)[:4]})
    path = str(tmp_path / ("log.csv" if text else "log.parquet"))
    if text:
        pacsv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    report = import_log(path, str(tmp_path / "shop"))
    store = open_store(str(tmp_path / "shop"))
    assert f"time: 2019-01-03 .. 2019-01-04 UTC, {unit}" in report
    is_date = isinstance(times, pa.Array) and pa.types.is_date(times.type)
    order = [1, 3, 4, 2] if is_date else [3, 1, 4, 2]  # rows 1 and 4 have the same time
    assert (store.items + 1).tolist() == order
    seconds = store.timestamps - BEGIN
    assert seconds.tolist() == [0, 0 if is_date else seconds[1], seconds[1], 86_400] and seconds[1] in (0, 1)


def test_times_that_are_no_dates_are_seconds_with_a_word(tmp_path):
    rows = [("a", i, t) for i, t in enumerate([5, 3, 9, 0])]
    report = import_log(write_csv(tmp_path / "log.csv", rows), str(tmp_path / "shop"))
    assert "time: 0 .. 9, no dates: taken as seconds (--time-unit names another unit)" in report
    store = open_store(str(tmp_path / "shop"))
    assert store.has_time and store.items.tolist() == [3, 1, 0, 2]


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("log.csv", "event,VisitorId,ItemID,Timestamp\nview,1,{i},1546473600\n", "user 'VisitorId', item 'ItemID'"),
        ("log.inter", "user_id:token\tmovieId:token\ttime:float\n1\t{i}\t1546473600\n", "item 'movieId:token'"),
        ("log.txt", "customer_id;asin;created_at\n1;{i};2019-01-03T00:00:00Z\n", "time 'created_at'"),
        ("log.csv.gz", "uid,track id,event-time\n1,{i},1546473600\n", "item 'track id', time 'event-time'"),
    ],
)
def test_columns_are_recognised_by_their_names(tmp_path, name, content, columns):
    header, line = content.splitlines()
    text = "\n".join([header, *(line.format(i=i) for i in range(5))]) + "\n"
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert columns in import_log(str(tmp_path / name), str(tmp_path / "shop"))
    assert open_store(str(tmp_path / "shop")).item_ids.to_pylist() == list(range(5))


@pytest.mark.parametrize("text", ["u1 b a c b\n\nu0 a b c d\n", "u1\tb\ta\tc\tb\nu0\ta\tb\tc\td\te\n"])
def test_lines_are_recognised_by_their_content(tmp_path, text):
    (tmp_path / "log.txt").write_text(text)
    report = import_log(str(tmp_path / "log.txt"), str(tmp_path / "shop"))
    assert "user item item ... lines" in report and "time: none" in report
    found = histories(open_store(str(tmp_path / "shop")))
    assert [item for item, _ in found["u1"]] == ["b", "a", "c", "b"]


def test_stray_ids_and_empty_values_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "_BLOCK_BYTES", 2_048)
    rows = [(i % 9, i % 50, BEGIN + i) for i in range(1_000)]
    rows[6] = (7, "abc", BEGIN)
    rows[700] = (7, "", BEGIN)
    rows[800] = ("", 8, "")
    path = write_csv(tmp_path / "log.csv", rows)
    with pytest.raises(DataError, match=r"2 of 1,000 rows with an empty value \(user_id 1, item_id 1, ts 1\); --drop"):
        import_log(path, str(tmp_path / "shop"))
    report = import_log(path, str(tmp_path / "shop"), Asked(drop_nulls=True))
    assert "item ids are text: 1 of 1,000 is not a plain number: 'abc' in row 7" in report
    assert "user ids are integers" in report and "empty values: 2 rows, left out" in report
    kept = [(u, str(i), t) for u, i, t in rows if u != "" and i != ""]
    assert histories(open_store(str(tmp_path / "shop"))) == expected(kept, 1)


HEADER = "user_id,item_id,ts\n"


@pytest.mark.parametrize(
    ("content", "asked", "sentence"),
    [
        ("user_id,sku,ts\n", {"item": "item"}, "no column 'item'"),
        ("who,sku,ts\n1,2,3\n", {}, "no column known as the user; say --user NAME: who, sku, ts"),
        ("user,item,item_id,ts\n1,2,2,3\n", {}, "2 columns that may be the item (item, item_id); say --item NAME"),
        ("user,item,size\n1,2,3\n", {}, "no column known as the time; say --time NAME, or --time none if the rows are"),
        ("user,item,ts,ts\n1,2,3,3\n", {}, "has 2 columns 'ts'; rename all but one"),
        ("user,user,item,ts\n1,1,2,3\n", {}, "has 2 columns 'user'; rename all but one"),
        ("user,item,ts\n1,2,3\n", {"user": "item"}, "must name different columns"),
        (
            "196\t242\t3\t881250949\n186\t302\t3\t891717742\n",
            {},
            "holds values (196, 242, 3, 881250949), not the names",
        ),
        ("user_id item_id ts\n1 2 3\n", {}, "separated by blanks; separate them by tabs or commas"),
        ("1 2 3\n", {"time": "ts"}, "has no columns but `user item item ...` lines; leave out --time ts"),
        (HEADER, {}, "has no events"),
        (HEADER + "1,,3\n", {"drop_nulls": True}, "no row with a value in each of"),
        (HEADER + f"1,2,{BEGIN}\n1,3,2019-01-03\n", {}, "mixes numbers (1546473600) and datetimes (2019-01-03)"),
        (HEADER + f"1,2,{BEGIN}\n" * 999 + "1,3,2019-01-03\n", {}, "mixes numbers (1546473600) and datetimes (2019"),
        (HEADER + "1,2,2019-01-03\n1,2,soon\n", {}, "'soon', which is neither a number nor a datetime"),
        (HEADER + f"1,2,{BEGIN}\n1,3,{BEGIN}000\n", {}, "dates in no one unit (as seconds the years 2019 to 50975,"),
        (HEADER + f"1,2,0\n1,3,{BEGIN}\n", {}, "give --time-unit s, ms, us or ns"),
        (HEADER + "1,2,20190103\n1,3,20200228\n", {}, "look like days written YYYYMMDD"),
        (
            HEADER + "1,2,2019-01-03\n" * 4,
            {"time_unit": "s"},
            "has datetimes, which have a unit; leave out --time-unit s",
        ),
        ("user,item\n" + "1,2\n" * 4, {"time": "none", "time_unit": "s"}, "has no times; leave out --time-unit s"),
        (HEADER + "1,2,inf\n" * 4, {}, "the time inf, outside"),
        (HEADER + "1,2,-3\n" * 4, {"time_unit": "s"}, "the negative time -3"),
        (HEADER + "-1,2,3\n" * 4, {}, "negative id -1"),
        (HEADER + "1,2,3\n1,4,5\n", {}, "the longest history is of 2"),
        (HEADER + "1,2,3\n" * 5, {}, "1 item"),
    ],
)
def test_what_is_wrong_or_ambiguous_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, content, asked, sentence):
    monkeypatch.setattr(events, "_BLOCK_BYTES", 4_096)  # what is wrong is blocks away
    (tmp_path / "log.txt").write_text(content)
    with pytest.raises(DataError) as error:
        import_log(str(tmp_path / "log.txt"), str(tmp_path / "shop"), Asked(**asked))
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["log.txt"]


def test_a_named_unit_settles_it(tmp_path):
    path = write_csv(tmp_path / "log.csv", [(1, i, BEGIN * i) for i in range(1, 6)])
    import_log(path, str(tmp_path / "shop"), Asked(time_unit="s"))
    assert open_store(str(tmp_path / "shop")).timestamps.tolist() == [BEGIN * i for i in range(1, 6)]


@pytest.mark.parametrize("text", [False, True])
def test_appending_gives_the_store_of_the_whole_file(tmp_path, text):
    rows = log_rows(900)
    write = write_csv if text else write_parquet
    suffix = "csv" if text else "parquet"
    old, new = rows[:500], rows[500:]  # overlapping in time, in the same seconds
    whole = write(tmp_path / f"whole.{suffix}", rows)
    import_log(whole, str(tmp_path / "whole"))
    import_log(write(tmp_path / f"old.{suffix}", old), str(tmp_path / "shop"))
    for part, count in ((new[:150], 650), (new[150:], len(rows))):
        report = import_log(write(tmp_path / f"new{count}.{suffix}", part), str(tmp_path / "shop"), append=True)
    before = rows[:650]
    users, items = ({row[i] for row in rows} - {row[i] for row in before} for i in (0, 1))
    assert f"added to 650 events: {len(rows) - 650} events, {len(users)} new users, {len(items)} new items" in report
    a, b = (open_store(str(tmp_path / name)) for name in ("whole", "shop"))
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert a.user_ids.equals(b.user_ids) and a.item_ids.equals(b.item_ids) and a.vocabulary == b.vocabulary
    metas = [json.loads((tmp_path / name / "meta.json").read_text()) for name in ("whole", "shop")]
    for name in ("ties", "duplicates", "first_time", "last_time"):
        assert metas[0][name] == metas[1][name]
    with pytest.raises(DataError, match=r"already holds the events of .*new650.* there is nothing to do"):
        import_log(str(tmp_path / f"new650.{suffix}"), str(tmp_path / "shop"), append=True)


def test_added_events_leave_the_model_and_the_kind_of_split_and_say_what_else_changes(tmp_path):
    rows = [(f"u{u}", f"i{(u * 7 + n) % 50}", 1_600_000_000 + 86_400 * n) for u in range(150) for n in range(8)]
    import_log(write_csv(tmp_path / "old.csv", rows), str(tmp_path / "shop"))
    old = suggest.read(str(tmp_path / "shop"))
    more = [(f"u{u}", f"i{n % 60}", 1_600_700_000 + 3_600 * n) for u in range(150) for n in range(60)]
    path = write_csv(tmp_path / "day.csv", more)
    report = import_log(path, str(tmp_path / "shop"), append=True)
    new, alone = (
        suggest.read(str(tmp_path / "shop")),
        suggest.suggest(suggest.facts_of(open_store(str(tmp_path / "shop")))),
    )
    assert alone["data.length"].value > old["data.length"] == new["data.length"]
    assert new["split.kind"] == old["split.kind"] and new["model.dropout"] == old["model.dropout"] == 0.5
    assert alone["model.dropout"].value == 0.3
    assert f"changed: train.steps {old['train.steps']} to {new['train.steps']}" in report
    with pytest.raises(DataError, match=r"holds another store, of 'old\.csv', 'day\.csv'; use another folder"):
        import_log(path, str(tmp_path / "shop"))


def test_a_store_read_back_is_what_was_written(tmp_path):
    rows = log_rows()
    import_log(write_parquet(tmp_path / "log.parquet", rows), str(tmp_path / "shop"))
    batches = list(read_store(open_store(str(tmp_path / "shop"))))
    columns = [[value for batch in batches for value in batch[i].to_pylist()] for i in range(3)]
    assert {batch.ticks for batch in batches} == {1000}
    assert list(zip(*columns, strict=True)) == sorted(rows, key=lambda row: (row[0].encode(), row[2]))


def test_seconds_and_milliseconds_may_follow_each_other(tmp_path):
    seconds = [("a", i, BEGIN + i) for i in range(6)]
    milliseconds = [("a", i, (BEGIN + 2) * 1000 + 100 * i) for i in range(5)]
    import_log(write_csv(tmp_path / "s.csv", seconds), str(tmp_path / "shop"))
    import_log(write_csv(tmp_path / "ms.csv", milliseconds), str(tmp_path / "shop"), append=True)
    rows = [(u, i, t * 1000) for u, i, t in seconds] + milliseconds
    assert histories(open_store(str(tmp_path / "shop"))) == expected(rows, 1000)


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        ("1,{i},{t}", "1,x{i},{t}", "item ids of .* are integers but .* has 'x0' in row 1"),
        ("1,{i},{t}", "1,{i}", "has times but .* has none"),
        ("1,{i}", "1,{i},{t}", "has times but .* has none"),
    ],
)
def test_events_of_another_kind_are_not_appended(tmp_path, first, second, sentence):
    for name, line in (("a", first), ("b", second)):
        header = "user_id,item_id,ts".rsplit(",", 2 - line.count(","))[0]
        rows = [line.format(i=i, t=BEGIN + i) for i in range(6)]
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *rows]) + "\n")
    time = Asked(time="none")
    import_log(str(tmp_path / "a.csv"), str(tmp_path / "shop"), Asked() if "{t}" in first else time)
    before = (tmp_path / "shop/meta.json").read_text()
    with pytest.raises(DataError, match=sentence) as error:
        import_log(str(tmp_path / "b.csv"), str(tmp_path / "shop"), Asked(time="ts") if "{t}" in second else time, True)
    assert "\n" not in str(error.value) and (tmp_path / "shop/meta.json").read_text() == before


def test_text_of_digits_joins_ids_of_text_but_typed_integers_do_not(tmp_path):
    import_log(write_csv(tmp_path / "a.csv", [("anna", i, BEGIN + i) for i in range(5)]), str(tmp_path / "shop"))
    import_log(
        write_csv(tmp_path / "b.csv", [(7, i, BEGIN + i) for i in range(5)]), str(tmp_path / "shop"), append=True
    )
    assert open_store(str(tmp_path / "shop")).user_ids.to_pylist() == ["7", "anna"]
    path = write_parquet(tmp_path / "c.parquet", [(7, i, BEGIN * 1000) for i in range(5)])
    with pytest.raises(DataError, match=r"user ids of .* are text but those of .* integers; convert the file's"):
        import_log(path, str(tmp_path / "shop"), append=True)


def test_what_is_at_the_output_is_opened_kept_or_replaced(tmp_path, monkeypatch):
    shop = str(tmp_path / "shop")
    path = write_csv(tmp_path / "a.csv", [(1, i, BEGIN + i) for i in range(5)])
    other = write_csv(tmp_path / "b.csv", [(1, i, BEGIN + i) for i in range(9)])
    with pytest.raises(DataError, match="--append needs a store at --output"):
        import_log(path, shop, append=True)
    report = import_log(path, shop)
    stamp = os.stat(os.path.join(shop, "items.npy")).st_mtime_ns
    assert import_log(path, shop) == report and os.stat(os.path.join(shop, "items.npy")).st_mtime_ns == stamp
    with pytest.raises(DataError, match=r"holds another store, of 'a\.csv'; use another folder, --replace"):
        import_log(other, shop)
    import_log(other, shop, replace=True)
    assert open_store(shop).num_events == 9 and sorted(os.listdir(tmp_path)) == ["a.csv", "b.csv", "shop"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(DataError, match="is there and holds no store; choose another folder"):
        import_log(path, str(tmp_path / "mine"), replace=True)
    assert os.listdir(tmp_path / "mine") == ["letter.txt"]


@pytest.mark.parametrize("nth", range(1, 4))
def test_a_kill_while_the_new_store_takes_its_place_loses_none(tmp_path, monkeypatch, nth):
    """The renames: over the old store (which fails), the old one away, the new one in its place."""
    shop = str(tmp_path / "shop")
    import_log(write_csv(tmp_path / "a.csv", [(1, i, BEGIN + i) for i in range(5)]), shop)
    path = write_csv(tmp_path / "b.csv", [(2, i, BEGIN + i) for i in range(5)])
    rename, calls = os.rename, []

    def killed(*names):
        calls.append(names)
        if len(calls) == nth:
            raise KeyboardInterrupt  # no handler of ours sees it, as a kill
        rename(*names)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", killed)
        import_log(path, shop, append=True)
    restore(shop)
    assert open_store(shop).num_events == 5
    import_log(path, shop, append=True)
    assert open_store(shop).num_events == 10
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "b.csv", "shop"]


def test_the_command_prints_the_report(tmp_path, capsys):
    rows = [(f"u {i % 3}", i % 4, BEGIN + i) for i in range(30)]
    words = ["--input", write_csv(tmp_path / "a.csv", rows, "who,what,when"), "--output", str(tmp_path / "shop")]
    words += ["--user", "who", "--item", "what", "--time", "when", "--time-unit", "s"]
    assert prepare.main(words) == 0
    told = capsys.readouterr().out
    assert "3 users, 4 items, 30 events" in told and "--config.data.path=" in told
    more = write_csv(tmp_path / "b.csv", [("u 9", 9, BEGIN)], "who,what,when")
    assert prepare.main(["--input", more, "--output", str(tmp_path / "shop"), "--append"]) == 0  # columns as before
    told = capsys.readouterr().out
    assert "added to 30 events: 1 events, 1 new users, 1 new items" in told and "config.init.from_run=RUN" in told


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--input x --config y --output z", "give one of them"),
        ("--input x --output z --config.train.steps=3", "give one of them"),
        ("--input x", "--input needs --output FOLDER"),
        ("--user u --config y", "--user goes with --input FILE"),
        ("--time-unit ms --config y", "--time-unit goes with --input FILE"),
        ("", "give --input FILE --output FOLDER"),
        ("--input x --output z --append --replace", "give one of them"),
        ("--input x --output z --time-unit hours", "invalid choice: 'hours'"),
        ("--input nowhere.csv --output z", "'nowhere.csv' does not exist; check --input"),
    ],
)
def test_flags_that_do_not_go_together_are_one_sentence(words, sentence, capsys):
    assert prepare.main(words.split()) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1 and "Traceback" not in told

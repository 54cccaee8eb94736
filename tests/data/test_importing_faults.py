"""Imports that meet others' files, other processes, changing logs and damage: a sentence, and nothing is lost."""

import fcntl
import json
import os
import pathlib
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recml_sasrec.config import Config, ConfigError
from recml_sasrec.data import folders, importing, loader, suggest
from recml_sasrec.data.errors import DataError
from recml_sasrec.data.importing import Asked, import_log
from recml_sasrec.data.store import open_store, read_store

BEGIN = 1_546_473_600  # 2019-01-03


def write(path, times, user=1):
    path.write_text("user,item,time\n" + "".join(f"{user},{i},{time}\n" for i, time in enumerate(times)))
    return str(path)


@pytest.fixture
def log(tmp_path):
    return write(tmp_path / "a.csv", range(BEGIN, BEGIN + 5))


@pytest.fixture
def other(tmp_path):
    return write(tmp_path / "b.csv", range(BEGIN, BEGIN + 7))


@pytest.fixture
def shop(tmp_path, log):
    import_log(log, str(tmp_path / "shop"))
    return str(tmp_path / "shop")


@pytest.mark.parametrize(
    "files",
    [{"meta.json": '{"title": "thesis"}', "thesis.txt": "dear"}, {"meta.json": '{"title": 1}', "items.npy": "mine"}],
)
@pytest.mark.parametrize("flags", [{}, {"append": True}, {"replace": True}])
def test_a_folder_of_another_program_is_left_alone(tmp_path, log, files, flags):
    (tmp_path / "mine").mkdir()
    for name, text in files.items():
        (tmp_path / "mine" / name).write_text(text)
    with pytest.raises(DataError, match="is there and holds no store; choose another folder"):
        import_log(log, str(tmp_path / "mine"), **flags)
    assert {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()} == files


@pytest.mark.parametrize("flags", [{"append": True}, {"replace": True}])
def test_what_a_user_put_into_a_store_is_not_removed_with_it(shop, other, flags):
    shutil.copy(other, os.path.join(shop, "new.csv"))
    with pytest.raises(DataError, match=r"also holds 'new\.csv', which is not the store's and would be removed; move"):
        import_log(os.path.join(shop, "new.csv"), shop, **flags)
    assert os.path.exists(os.path.join(shop, "new.csv")) and open_store(shop).num_events == 5
    os.rename(os.path.join(shop, "new.csv"), os.path.join(shop, "content-0123-4567.npy"))  # a catalogue's: made anew
    import_log(other, shop, **flags)
    assert open_store(shop).num_events in (7, 12)


@pytest.mark.parametrize("flags", [{"append": True}, {"replace": True}])
def test_of_two_that_write_to_a_store_the_second_is_told(shop, other, flags):
    with open(os.path.join(shop, "meta.json"), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process writes to the store"):
            import_log(other, shop, **flags)
    import_log(other, shop, **flags)


def test_a_store_made_meanwhile_is_not_written_over(tmp_path, log, other, monkeypatch):
    shop, look, inner = str(tmp_path / "shop"), importing.look, []

    def slow(*arguments):
        if not inner:
            inner.append(1)
            import_log(other, shop)
        return look(*arguments)

    monkeypatch.setattr(importing, "look", slow)
    with pytest.raises(DataError, match=r"another process has just written .*shop"):
        import_log(log, shop)
    assert open_store(shop).num_events == 7 and sorted(os.listdir(tmp_path)) == ["a.csv", "b.csv", "shop"]


CHANGES = {"more rows": "1,3,1546473600\n" * 3, "text": "abc,3,1546473600\n", "half a row": "1,", "other times": ""}


def change_log(path, more):
    if more:
        path.write_text(path.read_text() + more)
    else:
        write(path, range(BEGIN + 1, BEGIN + 6))


@pytest.mark.parametrize("more", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("after", ["_digest", "look"])
def test_a_log_that_changes_while_it_is_read_is_refused(tmp_path, log, monkeypatch, more, after):
    function, done = getattr(importing, after), []

    def then_change(*arguments):
        result = function(*arguments)
        if not done:
            done.append(change_log(tmp_path / "a.csv", more))
        return result

    monkeypatch.setattr(importing, after, then_change)
    with pytest.raises(DataError, match=r"a\.csv' changed while it was read; wait until it is complete"):
        import_log(log, str(tmp_path / "shop"))
    assert os.listdir(tmp_path) == ["a.csv"]


def test_times_that_are_dates_and_times_that_are_not_do_not_share_a_store(tmp_path, log, shop):
    relative = write(tmp_path / "relative.csv", range(9))
    with pytest.raises(DataError, match=r"times of .*shop' are dates but those of .*relative.csv' are none, up to sec"):
        import_log(relative, shop, append=True)
    import_log(relative, str(tmp_path / "other"))
    for unit in ("", "s"):
        with pytest.raises(DataError, match=r"times of .*a.csv' are dates but those of .*other' are none, up to sec"):
            import_log(log, str(tmp_path / "other"), Asked(time_unit=unit), append=True)


def test_a_unit_named_before_is_for_numbers_that_do_not_tell_theirs(tmp_path, log):
    shop = str(tmp_path / "shop")
    import_log(log, shop, Asked(time_unit="s"))
    milliseconds = write(tmp_path / "ms.csv", [1000 * (BEGIN + i) for i in range(5)])
    with pytest.raises(DataError, match=r"holds milliseconds .* but --time-unit s was given .* say --time-unit ms or"):
        import_log(milliseconds, shop, append=True)
    import_log(milliseconds, shop, Asked(time_unit="ms"), append=True)
    import_log(write(tmp_path / "days.csv", [f"2019-01-0{i}" for i in range(3, 8)]), shop, append=True)
    import_log(write(tmp_path / "far.csv", [BEGIN * i for i in range(1, 6)]), shop, append=True)  # in no one unit
    seconds = [BEGIN + i for i in range(5)]
    expected = [*seconds, *seconds, *[BEGIN + 86_400 * i for i in range(5)], *[BEGIN * i for i in range(1, 6)]]
    assert open_store(shop).timestamps.tolist() == sorted(expected)


def pickled(path):
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)


def zeros(kind, length):
    return lambda path: np.save(path, np.zeros(length, kind))


def text(content):
    return lambda path: pathlib.Path(path).write_text(content)


META = [text(t) for t in ("[1]", "null", "3", "{", '{"version": 2}', '{"version": "x"}')]


@pytest.mark.parametrize(
    ("name", "damage"),
    [("meta.json", damage) for damage in META]
    + [(f"{name}.npy", d) for name in ("items", "timestamps", "offsets") for d in (pickled, zeros(int, 3), text(""))]
    + [("offsets.npy", zeros(np.int64, 2)), ("items.npy", zeros(np.float32, 5)), ("user_ids.arrow", text("x"))]
    + [("items.npy", os.remove)],
)
def test_a_damaged_store_is_a_sentence_and_can_be_replaced(shop, other, name, damage):
    damage(os.path.join(shop, name))
    for flags in ({}, {"append": True}):
        with pytest.raises(DataError, match=r"is damaged; delete it|holds no complete store; delete it"):
            import_log(other, shop, **flags)
    import_log(other, shop, replace=True)
    assert open_store(shop).num_events == 7


@pytest.mark.parametrize("damage", [os.remove, pickled, zeros(np.int32, 3), text("")])
def test_fractions_that_are_damaged_or_gone_are_not_dropped(tmp_path, log, damage):
    shop = str(tmp_path / "shop")
    import_log(write(tmp_path / "ms.csv", [BEGIN * 1000 + i for i in range(5)]), shop)
    damage(os.path.join(shop, "fractions.npy"))
    with pytest.raises(DataError, match="shop' is damaged"):
        import_log(log, shop, append=True)


ENTRY = {"name": "a", "digest": "x", "asked": {}}


@pytest.mark.parametrize(
    "tree",
    [
        {"inputs": [{}], "report": "r"},
        {"inputs": [ENTRY | {"asked": {"zzz": 1}}], "report": "r"},
        {"inputs": [ENTRY | {"asked": {"user": 1}}], "report": "r"},
        {"inputs": [ENTRY | {"asked": []}], "report": "r"},
        {"inputs": [3], "report": "r"},
        {"inputs": [ENTRY], "report": 1},
        {"inputs": 3, "report": "r"},
        [],
    ],
)
def test_a_damaged_list_of_files_is_a_sentence(shop, other, tree):
    with open(os.path.join(shop, "import.json"), "w") as file:
        json.dump(tree, file)
    with pytest.raises(DataError, match=r"import\.json is missing or damaged"):
        import_log(other, shop, append=True)


@pytest.mark.parametrize("name", ["suggestion.json", "import.json"])
@pytest.mark.parametrize("replace", [False, True])
def test_a_file_that_is_gone_is_written_again(shop, log, name, replace):
    path = os.path.join(shop, name)
    with open(path) as file:
        before = file.read()
    os.remove(path)
    import_log(log, shop, replace=replace)
    with open(path) as file:
        assert file.read() == before


@pytest.mark.parametrize("content", ['{"fields": []}', '{"fields": {"data.length": 3}}', "[]", "{"])
def test_a_damaged_suggestion_is_a_sentence(tmp_path, content):
    (tmp_path / "suggestion.json").write_text(content)
    with pytest.raises(ConfigError, match=r"has no suggestion\.json; write it with"):
        suggest.read(str(tmp_path))


@pytest.mark.parametrize("target", ["store", "empty", "nothing"])
def test_a_link_is_followed(tmp_path, log, other, target):
    (tmp_path / "disk").mkdir()
    os.symlink("disk/real", tmp_path / "link")
    if target == "store":
        import_log(log, str(tmp_path / "disk/real"))
    elif target == "empty":
        (tmp_path / "disk/real").mkdir()
    import_log(other, str(tmp_path / "link") + "/", replace=True)
    import_log(log, str(tmp_path / "link"), append=True)
    assert os.path.islink(tmp_path / "link") and os.listdir(tmp_path / "disk") == ["real"]
    assert open_store(str(tmp_path / "disk/real")).num_events == 12


def test_a_store_that_was_half_removed_is_not_put_back(tmp_path, shop, other, monkeypatch):
    def killed(folder, **_):
        os.remove(os.path.join(folder, "items.npy"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(folders.shutil, "rmtree", killed)
        import_log(other, shop, append=True)
    assert open_store(shop).num_events == 12
    os.rename(shop, str(tmp_path / "elsewhere"))
    folders.restore(shop)
    assert not os.path.exists(shop)


def test_times_of_16_bits_are_read(tmp_path):
    times = pa.array(np.array([3.5, 1, 2, np.nan, 7], np.float16))
    pq.write_table(pa.table({"user": [1] * 5, "item": [0, 1, 2, 3, 4], "time": times}), tmp_path / "log.parquet")
    import_log(str(tmp_path / "log.parquet"), str(tmp_path / "shop"), Asked(drop_nulls=True))
    batch = next(read_store(open_store(str(tmp_path / "shop"))))
    assert (batch.timestamp.to_numpy() / batch.ticks).tolist() == [1, 2, 3.5, 7]


def test_minus_zero_is_no_zero_and_blanks_are_no_id(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(
        "user,item,time\n" + "".join(f"{u},{i},1546473600\n" for u, i in zip("00001", "12345", strict=True))
    )
    with open(path, "a") as file:
        file.write("-0,5,1546473600\n1,  ,1546473600\n")
    with pytest.raises(DataError, match=r"1 of 7 rows with an empty value \(item 1\)"):
        import_log(str(path), str(tmp_path / "shop"))
    import_log(str(path), str(tmp_path / "shop"), Asked(drop_nulls=True))
    store = open_store(str(tmp_path / "shop"))
    assert store.user_ids.to_pylist() == ["-0", "0", "1"] and store.item_ids.to_pylist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            '"us\ner","item","time"\n1,2,3\n',
            "the first line .* ends inside a quoted name .* write each name on one line",
        ),
        ("x" * 200_000 + "\n", "can't be read"),
        ("user,item,time\n1,2,1969-07-20\n", "holds the date 1969-07-20; times must be 0 or more"),
    ],
)
def test_headers_and_dates_that_can_not_be_are_named(tmp_path, content, sentence):
    (tmp_path / "log.csv").write_text(content)
    with pytest.raises(DataError, match=sentence):
        import_log(str(tmp_path / "log.csv"), str(tmp_path / "shop"))


def test_an_inch_in_a_header_is_no_quote(tmp_path):
    (tmp_path / "log.csv").write_text('user,item,time,5" wide\n' + "".join(f"1,{i},{BEGIN},3\n" for i in range(5)))
    import_log(str(tmp_path / "log.csv"), str(tmp_path / "shop"))
    assert open_store(str(tmp_path / "shop")).num_events == 5


def test_a_source_that_changes_while_its_store_is_built_is_refused(tmp_path, log, monkeypatch):
    config = Config()
    config.data.source, config.data.path, config.data.cache = "table", log, str(tmp_path / "cache")
    config.data.user_column, config.data.item_column, config.data.time_column = "user", "item", "time"
    plain = loader.read_table

    def read(*arguments):
        yield from plain(*arguments)
        write(tmp_path / "a.csv", range(BEGIN, BEGIN + 6))

    with monkeypatch.context() as patch, pytest.raises(DataError, match=r"a\.csv' changed while it was read"):
        patch.setattr(loader, "read_table", read)
        loader.open_store_of(config)
    assert loader.open_store_of(config).num_events == 6

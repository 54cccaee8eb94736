"""The reproduction scripts, rehearsed: complete tables after a kill in the middle; rows that are done are kept."""

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from recml_sasrec import memory
from recml_sasrec.config import ConfigError
from recml_sasrec.ranking import evaluation

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
reproduction, yambda, cutbce = map(importlib.import_module, ("reproduction", "reproduce_yambda", "reproduce_cutbce"))


@contextlib.contextmanager
def script(name, work, *words):
    """A script started with --rehearse in a process group of its own; its console goes to a file beside ``work``."""
    # what the killed process has compiled, the next one finds
    compiled = {"JAX_COMPILATION_CACHE_DIR": f"{work}-compiled", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **compiled}
    command = [sys.executable, str(ROOT / "scripts" / name), "--rehearse", "--workdir", str(work), *words]
    with work.with_name("console").open("w") as console:
        yield subprocess.Popen(command, env=environment, stdout=console, stderr=console, start_new_session=True)


def kill_when_there(path, name, work):
    """Starts a script and kills it, and the processes it has started, as soon as ``path`` exists."""
    with script(name, work) as process:
        while process.poll() is None and not path.exists():
            time.sleep(0.02)
        assert process.poll() is None, console_of(work)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, console_of(work)


def finish(name, work, *words):
    """Runs a script to its end."""
    with script(name, work, *words) as process:
        assert process.wait() == 0, console_of(work)


def console_of(work):
    return work.with_name("console").read_text()


def rows_of(workdir):
    return {path.stem: (path.stat().st_mtime_ns, path.read_text()) for path in (workdir / "rows").glob("*.json")}


def test_yambdas_rehearsal_is_complete_after_a_kill_and_keeps_what_was_done(tmp_path):
    work, document = tmp_path / "run", tmp_path / "reproduction.md"
    kill_when_there(work / "runs/multi_label_tuning/checkpoints/8", "reproduce_yambda.py", work)
    done = rows_of(work)
    assert "SASRec" in done and yambda.OURS not in done and not (work / "table.json").exists()
    document.write_text("# Reproduction\n\nBefore.\n")
    finish("reproduce_yambda.py", work, "--write", str(document))
    assert done.items() <= rows_of(work).items()
    assert "resuming from step" in console_of(work) and "SASRec: done before" in console_of(work)
    table = json.loads((work / "table.json").read_text())
    assert table["rehearsal"] and "A rehearsal on generated events" in (work / "table.md").read_text()
    made = {row["model"]: row for row in table["rows"] if row["ours"]}
    assert set(made) == {"Random", "MostPop", "DecayPop", "ItemKNN", "SASRec", yambda.OURS}
    assert {row["model"] for row in table["rows"]} - set(made) == {"iALS", "BPR", "SANSA"}
    for row in made.values():
        for metric in yambda.METRICS:
            assert 0 <= row["ours"][metric] <= 1
            if row["published"]:
                assert row["difference"][metric] == pytest.approx(row["ours"][metric] - row["published"][metric])
    # the numbers of the runs are those of their own evaluations
    evaluation = json.loads((work / "runs/multi_label/evaluation.json").read_text())
    assert evaluation["rows"]["sasrec"].items() >= made[yambda.OURS]["ours"].items()
    assert "25911800" in evaluation["protocol"]["split"] and "validation" not in evaluation["protocol"]["split"]
    assert document.read_text().startswith("# Reproduction\n\nBefore.\n")
    assert document.read_text().count((work / "table.md").read_text().strip()) == 1
    with pytest.raises(ConfigError, match="holds rows made with size=50m, but this call has 5b"):
        reproduction.adopt(work, json.loads((work / "settings.json").read_text()) | {"size": "5b"})
    with pytest.raises(ConfigError, match=r"table\.md can't be written: .*missing is not a folder"):
        reproduction.adopt(tmp_path / "new", {}, tmp_path / "missing/table.md")
    assert not (tmp_path / "new").exists()


def test_cutbces_rehearsal_is_complete_after_a_kill_and_keeps_what_was_done(tmp_path, monkeypatch, capsys):
    work = tmp_path / "run"
    kill_when_there(work / "runs/dense_bce-64x256/checkpoints/2", "reproduce_cutbce.py", work)
    done = rows_of(work)
    assert set(done) == {"dense_bce-64x256-speed"} and not (work / "table.json").exists()
    # each row is a process that compiles: a trained and a timed one, dense and cut, stand for all of them
    monkeypatch.setattr(cutbce, "CASES", (cutbce.CASES[0], cutbce.CASES[-1]))
    assert cutbce.main(["--rehearse", "--workdir", str(work)]) == 0
    console = capsys.readouterr().out
    assert "resuming from step" in console and "dense_bce-64x256-speed: done before" in console
    assert done.items() <= rows_of(work).items()
    trained, timed = json.loads((work / "table.json").read_text())["rows"]
    assert (trained["name"], timed["name"]) == ("dense_bce-64x256", "cut_bce-128x512")
    for row in (trained, timed):
        assert row["ours"]["steps_per_s"] > 0 and row["ours"]["peak_bytes"] > 2**26
    evaluation = json.loads((work / "runs/dense_bce-64x256/evaluation.json").read_text())
    assert trained["ours"]["hit@8"] == evaluation["rows"]["sasrec"]["hr@8"]
    assert "the last 8" in evaluation["protocol"]["split"] and "hit@8" not in timed["ours"]
    text = (work / "table.md").read_text()
    assert "A rehearsal" in text and f"6.14 / {trained['ours']['steps_per_s']:.2f} | 0.186 / " in text


def test_a_row_without_enough_memory_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "device_limit", lambda device: 100_000)
    monkeypatch.setattr(reproduction, "leave_with_parent", lambda: None)
    assert cutbce.main(["--rehearse", "--workdir", str(tmp_path), "--child", "dense_bce-128x256"]) == 0
    row = json.loads(capsys.readouterr().out.rpartition("ROW ")[2])
    assert row["error"].startswith("out of memory: a training step needs")
    row = {**cutbce.CASES[2]._asdict(), "ours": row}
    text = cutbce.markdown({"rehearsal": False, "items": 3, "split": "s", "rows": [row]})
    assert "| dense_bce | 128 | 256 | out of memory / out of memory: a training step needs" in text


@pytest.mark.parametrize(("interaction", "last"), [("listens", 2.0), ("likes", 6.0)])
def test_item_knns_hours_are_chosen_from_the_benchmarks_own_grid(tmp_path, monkeypatch, interaction, last):
    def chosen_hours(config, data, name):
        raise StopIteration(config.evaluation.knn_hours)

    monkeypatch.setattr(evaluation, "chosen_hours", chosen_hours)
    flags = argparse.Namespace(size="50m", interaction=interaction, rehearse=True, data=None, workdir=tmp_path)
    with pytest.raises(StopIteration) as asked:
        yambda.Reproduction(flags, []).baseline("item_knn")
    grid = asked.value.args[0]
    # the benchmark tries single seconds: 0.001 hours are 3.6
    assert grid[:2] == (0.0, 0.001) and grid[-1] == last and len(grid) in (13, 9)


def test_markers_are_replaced_and_the_rest_of_a_document_is_left_alone(tmp_path):
    document = tmp_path / "d.md"
    document.write_text("a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n")
    reproduction.put_between_markers(document, "x", "new\n")
    reproduction.put_between_markers(document, "y", "other")
    first = "a\n<!-- x: begin -->\nnew\n<!-- x: end -->\nb\n"
    assert document.read_text() == first + "\n<!-- y: begin -->\nother\n<!-- y: end -->\n"

"""The sweep: killed and gone on with, its table against numpy on the runs' files, its draws, and what it refuses."""

import contextlib
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
sweep = importlib.import_module("sweep")

CONFIG = """
from tests.tiny import tiny_config

def get_config():
    config = tiny_config({cache!r})
    config.train.steps, config.train.log_every, config.checkpoint.every = 600, 200, 200
    config.evaluation.every = 200
    return config
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(cache=str(tmp_path / "cache")))
    return path


@contextlib.contextmanager
def started(words, console):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with console.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts/sweep.py"), *words], env=environment, stdout=file, stderr=file
        )
        yield process


def wait_for(path, process, console):
    while not path.exists():
        assert process.poll() is None, console.read_text()
        time.sleep(0.01)


def best_line(run):
    """The line of metrics.jsonl with the highest validation metric."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = [line.get("validation/ndcg@10", -1) for line in lines]
    return lines[int(np.argmax(values))]


def test_a_killed_sweep_goes_on_and_its_table_is_that_of_the_runs(config_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    work, console = tmp_path / "sweep", tmp_path / "console"
    words = ["--config", str(config_file), "--workdir", str(work), "--grid", "optimizer.learning_rate=1e-2,1e30"]
    first, log = work / "runs/000-seed0", work / "logs/000-seed0.log"
    with started(words, console) as process:
        wait_for(first / "checkpoints/200", process, console)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 75, console.read_text()
    assert "SIGTERM: 0 of 2 runs are done; the same command goes on" in console.read_text()
    assert log.read_text().splitlines()[-1].startswith("SIGTERM: ") and not list((work / "rows").iterdir())

    with started(words, console) as process:
        wait_for(work / "rows/000-seed0.json", process, console)
        process.kill()
        process.wait()
    finished = {path: path.stat().st_mtime_ns for path in (first / "metrics.jsonl", first / "evaluation.json")}
    assert best_line(first)["step"] % 200 == 0

    document = tmp_path / "document.md"
    assert sweep.main([*words, "--seeds", "2", "--write", str(document)]) == 0
    out, err = capsys.readouterr()
    assert "000-seed0: done before" in out, err
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    runs = [work / f"runs/000-seed{seed}" for seed in (0, 1)]
    good, bad = json.loads((work / "results.json").read_text())["points"]
    assert good["fields"] == {"optimizer.learning_rate": 0.01} and good["n"] == 2
    scores = [best_line(run)["validation/ndcg@10"] for run in runs]
    assert good["validation"] == pytest.approx({"mean": np.mean(scores), "sd": np.std(scores, ddof=1)})
    assert good["steps"] == [best_line(run)["step"] for run in runs]
    evaluations = [json.loads((run / "evaluation.json").read_text()) for run in runs]
    assert [evaluation["protocol"]["checkpoint"] for evaluation in evaluations] == [f"step {n}" for n in good["steps"]]
    for name, values in good["test"].items():
        tests = [evaluation["rows"]["sasrec"][name] for evaluation in evaluations]
        assert values == pytest.approx({"mean": np.mean(tests), "sd": np.std(tests, ddof=1)})
    assert bad["n"] == 0 and "test" not in bad and bad["validation"] == {"mean": None, "sd": None}
    text = (work / "results.md").read_text()
    assert f"| 000 | 0.01 | {np.mean(scores):.4f} | {np.std(scores, ddof=1):.4f} | 2 |" in text
    assert "| 001 | 1e+30 | - | - | 0 | - | seed 0, 1 failed: the loss or its gradient is not finite" in text
    assert document.read_text().count(text.strip()) == 1
    saved = json.loads((runs[1] / "config.json").read_text())
    assert (saved["train"]["seed"], saved["optimizer"]["learning_rate"]) == (1, 0.01)

    # nothing is left to train
    monkeypatch.setattr(sweep.Runs, "_child", None)
    assert sweep.main([*words, "--test"]) == 0
    test = evaluations[0]["rows"]["sasrec"]["ndcg@10"]
    assert f"| 000 | 0.01 | {scores[0]:.4f} | - | 1 | {good['steps'][0]} | {test:.4f} | - |" in capsys.readouterr().out
    for other, name in (
        (["--grid", "optimizer.learning_rate=1e-2,1e-3"], "--grid optimizer.learning_rate=[0.01, 1e+30]"),
        ([*words[-2:], "--config.model.dropout=0.5"], "config.model.dropout=0.2, but this call has 0.5"),
    ):
        assert sweep.main([*words[:-2], *other]) == 2
        err = capsys.readouterr().err
        assert f"holds rows made with {name}" in err and err.count("\n") == 1


def test_draws_depend_on_seed_and_index_alone_and_cover_their_ranges():
    ranges = {"b": ["log", 1e-4, 1e-2], "a": ["linear", 1, 3], "c": ["one of", "x", "y"], "d": ["log", 4, 64]}
    points = sweep.make_points(seeded(7), {}, ranges, 300)
    assert sweep.make_points(seeded(7), {}, dict(reversed(ranges.items())), 20) == points[:20]
    assert points[:5] != sweep.make_points(seeded(8), {}, ranges, 5)
    columns = {name: [point[name] for point in points] for name in ranges}
    assert set(columns["a"]) == {1, 2, 3} and set(columns["c"]) == {"x", "y"}
    assert min(columns["a"].count(value) for value in (1, 2, 3)) > 70
    assert min(columns["b"]) >= 1e-4 and max(columns["b"]) <= 1e-2
    assert np.median(columns["b"]) == pytest.approx(1e-3, rel=0.3) and np.median(columns["d"]) == pytest.approx(
        16, rel=0.3
    )
    assert all(type(value) is int and 4 <= value <= 64 for value in columns["d"])
    crossed = sweep.make_points(seeded(7), {"e": [1, 2]}, ranges, 2)
    assert crossed == [{"e": e} | point for point in points[:2] for e in (1, 2)]


def seeded(seed):
    from recml_sasrec.config import Config

    config = Config()
    config.train.seed = seed
    return config


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--config.evaluation.every=0"], "config.evaluation.every=0 leaves nothing to rank points by"),
        (["--grid", "optimizer.lerning_rate=1"], "did you mean config.optimizer.learning_rate?"),
        (["--grid", "model.width=8,x"], "config.model.width=x is not a whole number"),
        (["--grid", "model.width="], "--grid model.width= has no values"),
        (["--grid", "model.width=8,8"], "has a value twice"),
        (["--grid", "model.width=8", "--grid", "model.width=16"], "config.model.width is given twice"),
        (["--grid", "model.width=8,9"], "the point model.width=9 can't be run: config.model.width=9 is not a multiple"),
        (["--grid", "train.seed=1,2"], "use --seeds"),
        (["--grid", "split.gap=1,2"], "config.split.gap can't be searched over"),
        (["--grid", "data.path=a,b"], "config.data.path can't be searched over"),
        (["--random", "3"], "--random 3 with 0 --range"),
        (["--range", "model.dropout=0:0.5"], "--random 0 with 1 --range"),
        (["--random", "3", "--range", "model.dropout=0.5:0"], "must have LOW below HIGH"),
        (["--random", "3", "--range", "model.dropout=log:0:0.5"], "both above 0"),
        (["--random", "3", "--range", "model.dropout=0:1:2"], "is not LOW:HIGH or log:LOW:HIGH"),
        (["--random", "3", "--range", "model.item_bias=0:1"], "needs a field of numbers"),
        (["--seeds", "0"], "--seeds 0 must be at least 1"),
        (["--jobs", "0"], "--jobs 0 must be at least 1"),
        (["--random", "-1"], "--random -1 must be at least 0"),
        (
            ["--config.train.seed=4294967295", "--seeds", "2"],
            "--seeds 2 ends at the seed 4294967296, but seeds must be",
        ),
        (["--write", "no/where.md"], "is not a folder"),
    ],
)
def test_what_cannot_be_swept_gets_one_sentence_before_anything_is_trained(
    config_file, tmp_path, capsys, monkeypatch, words, sentence
):
    monkeypatch.setattr(sweep.Runs, "_child", None)
    assert sweep.main(["--config", str(config_file), "--workdir", str(tmp_path / "work"), *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and sentence in err, err
    assert not (tmp_path / "work").exists()

"""The command lines: exit codes, one sentence, nothing else."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent
QUICKSTART = ("--config", str(ROOT / "configs/quickstart.py"))


def command(name, *words):
    return subprocess.run(
        [sys.executable, "-m", f"recml_sasrec.{name}", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--confg", "x"), "unknown flag --confg; did you mean --config?"),
        (("--config", "configs/quickstrat.py", "--workdir", "x"), "did you mean 'configs/quickstart.py'?"),
        ((*QUICKSTART,), "--workdir; see --help"),
        ((*QUICKSTART, "--workdir", "x", "--config.train.steps"), "has no value"),
        ((*QUICKSTART, "--workdir", "x", "--config.train.stepz=3"), "did you mean config.train.steps?"),
        ((*QUICKSTART, "--workdir", "x", "astray"), "astray"),
        ((*QUICKSTART, "--workdir", "x", "--config.data.source=table", "--config.data.path=no.csv"), "no.csv"),
    ],
)
def test_a_wrong_command_line_gets_one_sentence_and_exit_code_2(words, sentence):
    done = command("train", *words)
    assert done.returncode == 2
    assert sentence in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
    assert not (ROOT / "x").exists()


def test_prepare_then_evaluate_a_run_on_other_terms(tmp_path):
    small = [
        f"--config.{name}"
        for name in (
            f"data.cache={tmp_path}",
            "data.synthetic.users=80",
            "data.synthetic.items=120",
            "data.length=16",
            "model.width=8",
            "model.blocks=1",
            "train.batch_size=4",
            "train.steps=4",
        )
    ]
    prepared = command("prepare", *QUICKSTART, *small)
    assert prepared.returncode == 0 and " validation and " in prepared.stdout, prepared.stderr
    lines = prepared.stdout.splitlines()
    assert lines[0].startswith("read ") and lines[0].endswith("/s") and lines[1].startswith("store: ")
    assert " items, " in lines[2] and [line.split(":")[0] for line in lines[3:6]] == [
        "repeats",
        "events a user",
        "time",
    ]
    workdir = tmp_path / "run"
    trained = command("train", *QUICKSTART, "--workdir", str(workdir), *small)
    assert trained.returncode == 0, trained.stderr
    assert "Traceback" not in trained.stdout + trained.stderr and trained.stdout.count("compiled in") == 1
    own = (workdir / "evaluation.json").read_text()
    again = command("evaluate", "--workdir", str(workdir))
    assert again.returncode == 0 and (workdir / "evaluation.json").read_text() == own
    other = command(
        "evaluate", "--workdir", str(workdir), "--config.evaluation.filter_seen=true", "--output", str(tmp_path / "o")
    )
    assert other.returncode == 0, other.stderr
    assert json.loads((tmp_path / "o").read_text())["protocol"]["seen items"] == "removed"
    assert (workdir / "evaluation.json").read_text() == own
    refused = command("evaluate", "--workdir", str(workdir), "--config.model.width=16")
    assert refused.returncode == 2 and "can't change after training" in refused.stderr
    missing = command("evaluate", "--workdir", str(workdir), "--checkpoint=999")
    assert missing.returncode == 2 and "has no checkpoint '999'; it has 4" in missing.stderr


def test_ctrl_c_before_the_first_step_leaves_at_once(tmp_path):
    words = [sys.executable, "-m", "recml_sasrec.train", *QUICKSTART, "--workdir", str(tmp_path / "run")]
    words += [f"--config.data.cache={tmp_path}", "--config.data.synthetic.users=200", "--config.train.steps=100000"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("model:"):  # the step is being compiled
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75 and errors.startswith("SIGINT: stopped") and errors.count("\n") == 1

"""A run that is killed, stopped, starved or diverging: what it leaves behind and how it goes on."""

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from recml_sasrec import memory, run_folder, trainer
from recml_sasrec.checkpoint import CheckpointError, Checkpoints
from recml_sasrec.config import ConfigError
from recml_sasrec.data.events import DataError
from recml_sasrec.data.loader import open_data
from recml_sasrec.meter import Diverged
from recml_sasrec.preemption import Interrupted
from recml_sasrec.run import Run
from tests.tiny import params_hash, tiny_config

ROOT = pathlib.Path(__file__).parent.parent
LAST = 24


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def losses(workdir):
    return {row["step"]: row["loss"] for row in rows(workdir) if "loss" in row}


def child(cache, workdir, *points):
    # compiled as users' runs are, not as this suite's: bit for bit is a claim about them
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "tests.tiny", str(cache), str(workdir), *points],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run, made in a child too: the thread pools of this process must not matter."""
    folder = tmp_path_factory.mktemp("straight")
    done = child(folder / "cache", folder / "run")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    "point", ["kill_at_step=3", "kill_at_step=13", "kill_in_save=12", "kill_in_validation=2", "kill_in_save=24"]
)
def test_a_killed_run_ends_bit_for_bit_like_an_uninterrupted_one(straight, tmp_path, point):
    killed = child(straight / "cache", tmp_path / "run", point)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = child(straight / "cache", tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    assert params_hash(tmp_path / "run", LAST) == params_hash(straight / "run", LAST)
    assert losses(tmp_path / "run") == losses(straight / "run")
    saved = [(folder / "run/evaluation.json").read_text() for folder in (straight, tmp_path)]
    assert json.loads(saved[0])["rows"] == json.loads(saved[1])["rows"]


@pytest.mark.parametrize("point", ["stop_at_step=10", "stop_in_validation=1", "stop_in_validation=4"])
def test_sigterm_saves_exits_75_and_the_same_command_goes_on(straight, tmp_path, point):
    stopped = child(straight / "cache", tmp_path / "run", point)
    assert stopped.returncode == 75, stopped.stderr
    assert "SIGTERM" in stopped.stderr and "Traceback" not in stopped.stderr
    resumed = child(straight / "cache", tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    assert params_hash(tmp_path / "run", LAST) == params_hash(straight / "run", LAST)
    validations = [row["step"] for row in rows(tmp_path / "run") if "validation/ndcg@10" in row]
    assert validations == [8, 16, 24]
    assert losses(tmp_path / "run") == losses(straight / "run")


def test_a_run_folder_holds_what_it_promises(straight):
    workdir = straight / "run"
    evaluation = json.loads((workdir / "evaluation.json").read_text())
    assert set(evaluation["rows"]) == {"sasrec", "most_pop", "decay_pop"}
    assert evaluation["protocol"]["users"] > 0 and "ties" in evaluation["protocol"]
    logged = [row for row in rows(workdir) if "loss" in row]
    assert [row["step"] for row in logged] == [5, 10, 15, 20, 24]
    assert {"loss", "precision", "recall", "tokens_per_s", "data_wait", "grad_norm"} <= set(logged[0])
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert list(workdir.glob("events.out.tfevents.*"))
    saved, _ = run_folder.read(workdir)
    assert saved == tiny_config(straight / "cache")


def test_the_best_checkpoint_of_validation_is_kept_and_evaluated(straight):
    scores = {row["step"]: row["validation/ndcg@10"] for row in rows(straight / "run") if "validation/ndcg@10" in row}
    best = min(step for step, score in scores.items() if score == max(scores.values()))
    with Checkpoints(straight / "run", keep=2, best_metric="ndcg@10") as checkpoints:
        assert checkpoints.best == best
        assert set(checkpoints.steps) == {best, 18, LAST}
    protocol = json.loads((straight / "run/evaluation.json").read_text())["protocol"]
    assert protocol["checkpoint"] == f"step {best}"


def test_the_step_is_compiled_once_and_dense_and_cut_report_the_same_losses(tmp_path, caplog):
    jax.config.update("jax_log_compiles", True)
    found = {}
    try:
        for name in ("cut_bce", "dense_bce"):
            config = tiny_config(tmp_path / "cache")
            config.head.name = name
            caplog.clear()
            trainer.train(config, tmp_path / name)
            compiles = [r for r in caplog.records if "Finished XLA compilation of jit(train_step)" in r.getMessage()]
            assert len(compiles) == 1
            found[name] = losses(tmp_path / name)
    finally:
        jax.config.update("jax_log_compiles", False)
    np.testing.assert_allclose(list(found["cut_bce"].values()), list(found["dense_bce"].values()), rtol=1e-5)


def test_early_stopping_waits_for_patience_and_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    config = tiny_config(tmp_path / "cache")
    config.optimizer.learning_rate = 1e-12  # nothing gets better after the first validation
    config.evaluation.every, config.evaluation.patience, config.train.steps = 4, 2, 100
    trainer.train(config, tmp_path / "run")
    validations = [row["step"] for row in rows(tmp_path / "run") if "validation/ndcg@10" in row]
    assert validations == [4, 8, 12]
    monkeypatch.setattr(Run, "compile_step", lambda self: pytest.fail("trained again"))
    again = trainer.train(config, tmp_path / "run")
    assert again == json.loads((tmp_path / "run/evaluation.json").read_text())["rows"]


def test_a_loss_that_is_not_finite_stops_with_its_step_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    config = tiny_config(tmp_path / "cache")
    batches = Run.batches

    def poisoned(self, start_step):
        for step, batch in enumerate(batches(self, start_step), start=start_step + 1):
            yield batch._replace(weights=batch.weights * np.float32("nan")) if step == 14 else batch

    monkeypatch.setattr(Run, "batches", poisoned)
    with pytest.raises(Diverged, match=r"at step 14 \(between steps 11 and 15\); the checkpoint of step 12 is good"):
        trainer.train(config, tmp_path / "run")
    with Checkpoints(tmp_path / "run", 2, "ndcg@10") as checkpoints:
        assert checkpoints.latest == 12
    monkeypatch.setattr(Run, "batches", batches)
    assert trainer.train(config, tmp_path / "run")["sasrec"]["ndcg@10"] > 0


def test_a_full_disk_while_checkpointing_keeps_the_last_good_checkpoint(tmp_path, caplog):
    caplog.set_level("INFO", "recml_sasrec")
    config = tiny_config(tmp_path / "cache")
    config.train.steps = 6
    trainer.train(config, tmp_path / "run")
    config.train.steps = 24
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write beyond so many bytes of a file fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(CheckpointError, match="the checkpoint of step 6 is intact") as error:
            trainer.train(config, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "\n" not in str(error.value)
    assert "going on with config.train.steps=24, so far 6" in caplog.text
    assert trainer.train(config, tmp_path / "run")["sasrec"]["ndcg@10"] > 0


def test_a_step_that_cannot_fit_is_refused_before_training_with_the_numbers(tmp_path, monkeypatch):
    config = tiny_config(tmp_path / "cache")
    config.head.name = "dense_bce"
    monkeypatch.setattr(memory, "device_limit", lambda device: 100_000)
    with pytest.raises(memory.MemoryLimitError, match=r"needs .* MiB .*has 0.1 MiB; set config.head.name=cut_bce"):
        trainer.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    config.head.name = "cut_bce"  # the remedy works in the same folder
    monkeypatch.undo()
    assert trainer.train(config, tmp_path / "run")["sasrec"]["ndcg@10"] > 0


def test_damage_in_a_run_folder_is_named_or_mended(straight, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(straight / "run", workdir)
    config = tiny_config(straight / "cache")
    config.train.steps = 12
    with pytest.raises(ConfigError, match="24 steps, more than"):
        trainer.train(config, workdir)
    config.train.steps = LAST + 2
    (workdir / "metrics.jsonl").open("ab").write(b'12\n{"a": 1}\n\xff\xfe\n{"step": 3, "lo')
    trainer.train(config, workdir)
    assert max(losses(workdir)) == LAST + 2
    (workdir / "checkpoints" / str(LAST + 2) / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainer.train(config, workdir)
    for text in ("[]", '{"vocabulary": "x", "events": "y", "data": 3}', "{"):
        (workdir / "config.json").write_text(text)
        with pytest.raises(ConfigError):
            trainer.train(config, workdir)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: setattr(c.model, "width", 16), "config.model.width=8, but this one has 16"),
        (lambda c: setattr(c.data, "targets", 2), "config.data.targets=4, but this one has 2"),
        (lambda c: setattr(c.train, "seed", 1), "config.train.seed=0, but this one has 1"),
    ],
)
def test_a_workdir_of_another_config_is_refused(straight, change, sentence):
    config = tiny_config(straight / "cache")
    change(config)
    with pytest.raises(ConfigError) as error:
        trainer.train(config, straight / "run")
    assert sentence in str(error.value)


def test_a_workdir_of_other_items_or_events_is_refused_but_a_moved_file_is_not(tmp_path):
    def write(path, items):
        path.write_text("".join(f"{u} {' '.join(map(str, items))}\n" for u in range(40)))

    config = tiny_config(tmp_path / "cache")
    config.data.source, config.data.path = "lines", str(tmp_path / "events.txt")
    config.split.kind, config.train.batch_size, config.train.steps = "leave_last", 2, 4
    write(tmp_path / "events.txt", [1, 2, 3, 4, 5])
    trainer.train(config, tmp_path / "run")
    write(tmp_path / "events.txt", [1, 2, 3, 4, 6])
    with pytest.raises(ConfigError, match="other items"):
        trainer.train(config, tmp_path / "run")
    # the checkpoints say so too, where somebody moved them into another run's folder
    other = tmp_path / "other"
    other.mkdir()
    shutil.copytree(tmp_path / "run" / "checkpoints", other / "checkpoints")
    data = open_data(config)
    run_folder.adopt(other, config, data.store)
    with pytest.raises(ConfigError, match=r"checkpoint of step 4 .* is of other items than this data's 5"):
        trainer.train(config, other)
    write(tmp_path / "events.txt", [1, 2, 3, 5, 4])
    with pytest.raises(ConfigError, match="other events"):
        trainer.train(config, tmp_path / "run")
    write(tmp_path / "moved.txt", [1, 2, 3, 4, 5])
    config.data.path = str(tmp_path / "moved.txt")
    before = (tmp_path / "run/config.json").read_text()
    trainer.train(config, tmp_path / "run")
    assert (tmp_path / "run/config.json").read_text() == before
    (tmp_path / "run/config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        trainer.train(config, tmp_path / "run")


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    config = tiny_config(tmp_path / "cache")
    config.train.batch_size = 10_000
    with pytest.raises(DataError, match=r"10000|10,000"):
        trainer.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_trainers_do_not_share_a_folder(tmp_path):
    with run_folder.claimed(tmp_path), pytest.raises(ConfigError, match="another process trains"):
        trainer.train(tiny_config(tmp_path / "cache"), tmp_path)


def test_ctrl_c_from_python_raises_interrupted(tmp_path, monkeypatch):
    config = tiny_config(tmp_path / "cache")
    batches = Run.batches

    def stopping(self, start_step):
        for step, batch in enumerate(batches(self, start_step), start=start_step + 1):
            if step == 7:
                signal.raise_signal(signal.SIGINT)
            yield batch

    monkeypatch.setattr(Run, "batches", stopping)
    with pytest.raises(Interrupted, match="SIGINT: saved step 7"):
        trainer.train(config, tmp_path / "run")

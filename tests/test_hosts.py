"""Several processes as one run, on this machine: what they compute, how they stop, and what they say of each other."""

import json
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from recml_sasrec import hosts
from recml_sasrec.config import ConfigError

ROOT = pathlib.Path(__file__).parent.parent
CLUSTER = ("JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JOB_COMPLETION_INDEX", "SLURM_", "OMPI_")
ACROSS = ("config.mesh.data=1", "config.mesh.items=2")  # the table lies half in each process


def environment(**more: object) -> dict[str, str]:
    """This process's, with one device and of no cluster."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(CLUSTER)}
    return own | {"JAX_NUM_CPU_DEVICES": "1", **{name: str(value) for name, value in more.items()}}


def finish(started):
    """(exit code, stdout, stderr) of each; none outlives the test."""
    processes = list(started)
    try:
        texts = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


def start(words, env):
    return subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def tiny(workdir, *words):
    """A run of tests.tiny in as many processes as there are lists of words."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    joined = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": len(words)}
    cache = workdir.parent / "cache"
    return finish(
        start(["-m", "tests.tiny", str(cache), str(workdir), *own], environment(**joined, JAX_PROCESS_ID=process))
        for process, own in enumerate(words)
    )


def rows(workdir, name):
    logged = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in logged if name in row}


def evaluated(workdir):
    return json.loads((workdir / "evaluation.json").read_text())["rows"]


def assert_same_run(workdir, reference):
    for name in ("loss", "recall", "hit@10", "validation/ndcg@10"):
        ours, theirs = rows(workdir, name), rows(reference, name)
        assert list(ours) == list(theirs)
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5, atol=1e-7)
    for model, metrics in evaluated(reference).items():
        assert evaluated(workdir)[model] == pytest.approx(metrics, rel=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process with one device."""
    workdir = tmp_path_factory.mktemp("hosts") / "alone"
    ((code, _, errors),) = tiny(workdir, ["config.evaluation.candidates=train"])
    assert code == 0, errors
    return workdir


def test_two_processes_train_and_evaluate_like_one_and_the_first_writes(alone):
    workdir = alone.parent / "two"
    first, second = tiny(workdir, *[[*ACROSS, "config.evaluation.candidates=train"]] * 2)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert_same_run(workdir, alone)
    assert "step 24/24" in first[1] and "ndcg@10" in first[1]
    assert "step 24/24" not in second[1] and "ndcg@10" not in second[1]
    assert len(list(workdir.glob("events.out.tfevents.*"))) == 1


def test_a_signal_to_one_stops_all_a_lost_one_ends_all_and_one_process_goes_on(alone):
    workdir, candidates = alone.parent / "stopped", "config.evaluation.candidates=train"
    stopped = tiny(workdir, [*ACROSS, candidates], [*ACROSS, candidates, "stop_at_step=3"])
    for code, _, errors in stopped:
        assert code == 75, errors
    said = {errors.splitlines()[-1] for _, _, errors in stopped}
    assert len(said) == 1 and "SIGTERM: saved step" in said.pop()
    (saved,) = (int(path.name) for path in (workdir / "checkpoints").iterdir())
    assert 3 <= saved <= 7  # the processes ask each other after 1, 2 and 4 polls at most
    # on another mesh, where each has the whole table
    split = ["config.mesh.data=2", "config.mesh.items=1", candidates]
    survivor, killed = tiny(workdir, split, [*split, "kill_at_step=17"])
    assert killed[0] == -signal.SIGKILL
    assert survivor[0] == 4, survivor[2]
    assert "process 1 of this run was lost" in survivor[2] and "Traceback" not in survivor[2]
    ((code, _, errors),) = tiny(workdir, [candidates])
    assert code == 0, errors
    assert_same_run(workdir, alone)


AGREEING = """
import sys
from recml_sasrec import command, hosts, run_folder, sharding
from recml_sasrec.config import ConfigError
from tests.tiny import tiny_config

def main():
    hosts.initialise()
    import jax
    me, config = jax.process_index(), tiny_config(sys.argv[1])
    assert hosts.count() == 2 and hosts.is_first() == (me == 0)
    assert hosts.largest(me, 5 - me) == (1, 5)
    order = hosts.together(lambda: me, waiting_for="nothing")
    assert order == me
    for turns in ("", "it fails"):
        try:
            hosts.together(lambda: int("x" if me else "1"), waiting_for=turns)
        except ValueError as error:
            assert "invalid literal" in str(error) and ("process 1: " in str(error)) == (me == 0), error
        else:
            raise AssertionError("an error of the other process was not told")
    config.mesh.data, config.mesh.items = 2, 1
    rows = sharding.make_layout(config, 120).rows
    assert sharding.block_of_process(rows, 4) == (me, 2)
    assert sharding.block_of_process(jax.NamedSharding(rows.mesh, jax.P()), 4) == (0, 1)
    config.data.source, config.split.kind = "lines", "leave_last"
    config.data.path = f"{sys.argv[1]}/{me}.txt"
    open(config.data.path, "w").write("1 7 8 9 7\\n2 9 8 7 %d\\n" % (8 + me))
    try:
        run_folder.open_together(config)
    except ConfigError as error:
        assert str(error).startswith("the log of events is "), error
    else:
        raise AssertionError("other events were not noticed")
    config.optimizer.learning_rate = 1e-3 * (1 + me)
    run_folder.open_together(config)

sys.exit(command.run(main))
"""


def test_processes_of_a_slurm_step_agree_on_errors_data_and_config(tmp_path):
    step = {"SLURM_JOB_ID": secrets.randbelow(2**12), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": 2}
    done = finish(
        start(["-c", AGREEING, str(tmp_path)], environment(**step, SLURM_PROCID=process, SLURM_LOCALID=process))
        for process in range(2)
    )
    for code, _, errors in done:
        assert code == 2, errors
        assert errors.splitlines()[-1].startswith(
            "error: config.optimizer.learning_rate is 0.001 in process 0 but 0.002 in process 1; start all"
        )


def test_processes_that_do_not_come_are_named_in_one_sentence():
    code = "from recml_sasrec import hosts; hosts._JOIN = 2.0; hosts.initialise('localhost:9', 2, 1)"
    ((code, _, errors),) = finish([start(["-c", code], environment())])
    assert code == 2 and errors.startswith("error: process 1 of 2 could not join the others at localhost:9 within 2 s")
    assert errors.count("\n") == 1


@pytest.fixture
def no_cluster(monkeypatch):
    for name in list(os.environ):
        if name.startswith(CLUSTER):
            monkeypatch.delenv(name)


def test_a_single_machine_initialises_nothing(no_cluster, monkeypatch):
    hosts.initialise()
    hosts.initialise(processes=1)
    for name, value in {"SLURM_STEP_NODELIST": "node1", "SLURM_NTASKS": "1", "JOB_COMPLETION_INDEX": "3"}.items():
        monkeypatch.setenv(name, value)
    hosts.initialise()
    assert not jax.distributed.is_initialized()
    assert hosts.count() == 1 and hosts.is_first() and hosts.largest(3, 1) == (3, 1)


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (("node1", 2, 0), {}, "--coordinator 'node1' is not host:port"),
        (("", 2, 0), {}, "--coordinator '' is not host:port"),
        (("node1:1234", 0, -1), {}, "--processes (none) and --process (none)"),
        (("node1:1234", 2, 2), {}, "--processes 2 and --process 2 don't name"),
        (("node1:1234", 2, -1), {"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID='one' is not a number"),
    ],
)
def test_incomplete_or_wrong_arguments_get_one_sentence(no_cluster, monkeypatch, arguments, variables, sentence):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        hosts.initialise(*arguments)
    assert sentence in str(error.value) and "\n" not in str(error.value)

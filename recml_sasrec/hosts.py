"""Several processes, each with its own devices, as one run: joining, agreeing, and ending when one of them is lost.

All processes run the same program on the same config; whatever one of them decides alone would leave the others
waiting in a collective. So what may differ between them (a signal, an error, data) is decided here, together.
With one process nothing is initialised, and every function answers at once.
"""

import contextlib
import importlib.util
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import jax
import numpy as np

from recml_sasrec import lifeline
from recml_sasrec.config import ConfigError

log = logging.getLogger("recml_sasrec")
T = TypeVar("T")

_JOIN = 300.0  # seconds in which all processes must have started
_GOODBYE = 10.0  # seconds that a failed process waits for the others to have failed too
_LAST_WORDS = 2.0  # seconds in which the lifeline, which knows what process it was, ends this one instead
# how the runtimes say that a peer does not answer
_LOST = ("gloo", "nccl", "coordination", "barrier", "deadline_exceeded", "unavailable", "heartbeat", "connection")


class HostLost(RuntimeError):
    """Another process of the run died or can't be reached; the message is one sentence for the user."""


def initialise(coordinator: str = "", processes: int = 0, process: int = -1) -> None:
    """Joins the run's other processes, where the arguments or the environment tell of any. Call it before devices.

    Arguments left out are taken from ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES``, and ``JAX_PROCESS_ID`` or
    Kubernetes' ``JOB_COMPLETION_INDEX``. Without any, TPU slices, Slurm steps and Open MPI are known by JAX itself.

    Args:
        coordinator: ``host:port`` where process 0 can be reached; ``auto``: whatever JAX detects, Kubernetes included.
        processes: how many there are; 1: this one is alone, whatever the environment says.
        process: this one's number, from 0.

    Raises:
        ConfigError: incomplete or wrong arguments, or the processes did not come together.
    """
    environment = os.environ
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS", "")
    processes = processes or _number("JAX_NUM_PROCESSES", 0)
    if process < 0:
        process = _number("JAX_PROCESS_ID", _number("JOB_COMPLETION_INDEX", -1) if coordinator else -1)
    if processes == 1:
        return
    explicit = coordinator != "auto" and bool(coordinator or processes)
    if not explicit and coordinator != "auto" and not _in_cluster():
        return
    arguments: dict = {}
    if explicit:
        _check(coordinator, processes, process)
        # JAX's detection would add a restriction to one local device, or complain of missing packages
        arguments = {"cluster_detection_method": "deactivate", "coordinator_address": coordinator}
        arguments |= {"num_processes": processes, "process_id": process}
    # its handler of SIGTERM would take the place of ours; see preemption.py for what is agreed instead
    jax.config.update("jax_enable_preemption_service", False)
    who = f"process {process} of {processes} could not join the others at {coordinator}"
    who = who if explicit else "this process could not join the others of its cluster"
    remedy = "see that all were started and can reach process 0, or give --processes 1 to run this one alone"
    late = threading.Timer(_JOIN, _give_up, (f"error: {who} within {_JOIN:.0f} seconds; {remedy}",))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(**arguments, initialization_timeout=int(_JOIN) + 10)
        index, count = jax.process_index(), jax.process_count()
    except Exception as error:
        raise ConfigError(f"{who} ({_reason(error)}); {remedy}") from error
    finally:
        late.cancel()
    if index:
        log.setLevel(logging.WARNING)
    host = coordinator.rpartition(":")[0].strip("[]") or socket.gethostname()
    invitation = _gather_texts(lifeline.offer(host) if not index else "")[0]
    if index:
        lifeline.take(invitation, index)
    log.info("hosts: process %d of %d; %d of %d devices", index, count, jax.local_device_count(), jax.device_count())


def _give_up(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
    os._exit(2)  # before JAX, which raises nothing then but aborts the process


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(f"the environment variable {name}={text!r} is not a number of processes; unset or mend it")
    return int(text) if text else default


def _check(coordinator: str, processes: int, process: int) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--coordinator {coordinator!r} is not host:port; give the address of process 0 and a port")
    if processes < 1 or not 0 <= process < processes:
        given = f"--processes {processes or '(none)'} and --process {process if process >= 0 else '(none)'}"
        raise ConfigError(f"{given} don't name one of several processes; give their number, and this one's from 0")


def _in_cluster() -> bool:
    """Whether the environment tells of several processes, or of a TPU host whose metadata may."""
    environment = os.environ
    if environment.get("SLURM_STEP_NODELIST") and _number("SLURM_NTASKS", 1) > 1:
        return True
    if environment.get("OMPI_MCA_orte_hnp_uri") and _number("OMPI_COMM_WORLD_SIZE", 1) > 1:
        return True
    # JAX sets the variable where it finds no chips
    chips = "TPU_SKIP_MDS_QUERY" not in environment and importlib.util.find_spec("libtpu") is not None
    return chips and "tpu" in (environment.get("JAX_PLATFORMS") or "tpu")


def count() -> int:
    """The number of processes."""
    return jax.process_count() if jax.distributed.is_initialized() else 1  # or asking would take the devices


def is_first() -> bool:
    """Whether this process writes what a run leaves once: logs, config, tables."""
    return count() == 1 or jax.process_index() == 0


def largest(*numbers: int) -> tuple[int, ...]:
    """The largest of all processes' numbers (int32), place by place; all must ask."""
    if count() == 1:
        return numbers
    return tuple(int(x) for x in _gather(np.asarray(numbers, np.int32)).max(0))


def together(work: Callable[[], T], waiting_for: str = "") -> T:
    """Does some work in all processes; an error of any of them ends them all with its sentence.

    Args:
        work: may raise ConfigError, DataError, CheckpointError or OSError.
        waiting_for: what process 0 does before the others, who may find its result in a shared cache, say; "": all at
            once.
    """
    if count() == 1:
        return work()
    if not waiting_for:
        return _one_of_all(work, True)
    if not is_first():
        log.warning("process %d waits for process 0: %s", jax.process_index(), waiting_for)
    first = _one_of_all(work, is_first())
    others = _one_of_all(work, not is_first())
    return first if is_first() else others


def _one_of_all(work: Callable, mine: bool):
    result, error = None, None
    try:
        result = work() if mine else None
    except (ValueError, OSError) as failed:  # with a sentence for the user
        error = failed
    texts = _gather_texts(str(error) or type(error).__name__ if error else "")
    if error is not None:
        raise error
    for process, text in enumerate(texts):
        if text:
            raise ConfigError(f"process {process}: {text}")
    return result


def check_same(values: Mapping[str, object]) -> None:
    """Raises:
    ConfigError: one of the named values is another in another process.
    """
    if count() == 1:
        return
    text = json.dumps(dict(values), default=str)
    trees = [json.loads(other) for other in _gather_texts(text)]
    for process, tree in enumerate(trees):
        for name in (*trees[0], *tree):
            if trees[0].get(name) != tree.get(name):
                raise ConfigError(
                    f"{name} is {trees[0].get(name)!r} in process 0 but {tree.get(name)!r} in process {process}; "
                    "start all processes with the same command and the same data"
                )


def _gather_texts(text: str) -> list[str]:
    """The texts of all processes, in their order; waits for the slowest, however long it takes."""
    from orbax.checkpoint import multihost

    data = np.frombuffer(text.encode(), np.uint8)
    with watched():
        # a barrier first: unlike it, some collectives give up on those who come minutes later
        multihost.sync_global_processes("recml_sasrec:texts", timeout=24 * 3600)
    (size,) = largest(len(data))
    rows = _gather(np.pad(data, (0, max(size, 1) - len(data))))
    return [bytes(row).rstrip(b"\0").decode() for row in rows]


def _gather(array: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    with watched():
        return np.asarray(multihost_utils.process_allgather(array))


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raises:
    HostLost: what is done inside failed because another process can't be reached.
    """
    try:
        yield
    except Exception as error:
        reason = _lost(error)
        if reason is None:
            raise
        time.sleep(_LAST_WORDS)
        raise HostLost(
            f"another process of the run was lost ({reason}); its own output says why, and the same command, also with "
            "another number of processes, goes on from the last checkpoint"
        ) from error


def _lost(error: BaseException | None) -> str | None:
    """What a runtime says of a lost process, in an exception or in what caused it; None where it's nothing such."""
    while error is not None and count() > 1:
        # status codes become several types of exceptions, JAX's own and ValueError itself among them
        if isinstance(error, jax.errors.JaxRuntimeError) or type(error) is ValueError or "Barrier" in str(error):
            text = _reason(error)
            if any(word in text.lower() for word in _LOST):
                return text
        error = error.__cause__ or error.__context__
    return None


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def leave(code: int, wait: bool) -> int:
    """Returns the exit code; of several processes, one that failed ends here with it.

    Python's end would wait for others that may be waiting for this one. ``wait``: they may have failed for the same
    reason and get a few seconds to say so, for the end of process 0 is the end of all.
    """
    if code and count() > 1:
        if wait:
            lifeline.expect_ends()
            goodbye = threading.Thread(target=_shut_down, daemon=True)
            goodbye.start()
            goodbye.join(_GOODBYE)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _shut_down() -> None:
    with contextlib.suppress(Exception):
        jax.distributed.shutdown()

"""The CutBCE paper's table (arXiv 2610.05559), dense against cut: Hit@8, peak memory and steps a second.

    python scripts/reproduce_cutbce.py --workdir runs/cutbce

Each row is a process of its own, so that its peak memory is its own: it times some steps, then trains and evaluates
configs/yambda50m_cutbce.py where the paper has a Hit@8. A row that runs out of memory says so. Peak memory is a
device's, on a CPU the process's. Writes table.md and table.json into the folder. Killed and run again with the same
--workdir, it goes on: rows that are done are kept, training resumes at its checkpoint. --rehearse runs all of it on a
generated miniature in about a minute.
"""

import argparse
import functools
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import reproduction  # beside this script

from recml_sasrec import command
from recml_sasrec.config import Config
from recml_sasrec.config_file import load_config


class Case(NamedTuple):
    """A row: the head, the global batch, N, and what the paper has of it on 8 TPU v6e chips (memory a chip)."""

    head: str
    batch: int
    length: int
    memory: str = "-"
    steps_per_s: float | None = None
    hit: float | None = None

    @property
    def name(self) -> str:
        return f"{self.head}-{self.batch}x{self.length}"


CASES = (
    Case("dense_bce", 64, 256, "22.37 GiB", 6.14, 0.186),
    Case("cut_bce", 64, 256, "7.67 GiB", 20.01, 0.183),
    Case("dense_bce", 128, 256, "out of memory"),
    Case("dense_bce", 64, 512, "out of memory"),
    Case("cut_bce", 128, 512),
)
WARM, TIMED = 5, 50  # steps
REHEARSAL = [
    "data.source=synthetic",
    "data.synthetic.users=300",
    "data.synthetic.items=400",
    "model.width=16",
    "model.blocks=1",
    "model.dtype=float32",
    "train.steps=4",
    "train.log_every=2",
    "optimizer.warmup_steps=0",
    "checkpoint.every=2",
    "evaluation.batch_users=128",
]
SHRINK = 8  # of batch and N in a rehearsal


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder of the rows, runs and tables")
    parser.add_argument("--data", help="local file, or folder of the hub's layout; empty: from the hub")
    parser.add_argument("--rehearse", action="store_true", help="on a generated miniature")
    parser.add_argument("--write", type=pathlib.Path, metavar="FILE", help="put the table into this document")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.epilog = "Fields such as --config.train.steps=1000 hold for every row."
    words = list(sys.argv[1:] if argv is None else argv)

    def reproduce() -> None:
        flags, overrides = command.parse(parser, words)
        if flags.child:
            make_row(next(case for case in CASES if case.name == flags.child), flags, overrides)
        else:
            reproduce_all(flags, overrides, words)

    return command.run(reproduce)


def config_of(case: Case, flags: argparse.Namespace, overrides: Sequence[str]) -> Config:
    batch, length = case.batch, case.length
    changes = [f"head.name={case.head}", f"data.path={flags.data or ''}"]
    if flags.rehearse:
        changes += [*REHEARSAL, f"data.cache={flags.workdir / 'cache'}"]
        batch, length = batch // SHRINK, length // SHRINK
    changes += [f"train.batch_size={batch}", f"data.length={length}", *overrides]
    return load_config(str(reproduction.CONFIGS / "yambda50m_cutbce.py"), changes)


def reproduce_all(flags: argparse.Namespace, overrides: Sequence[str], words: Sequence[str]) -> None:
    from recml_sasrec import run_folder
    from recml_sasrec.data.loader import open_data

    data = open_data(config_of(CASES[0], flags, overrides))  # once, ahead of the processes, which find its store
    settings = {"rehearse": flags.rehearse, "overrides": list(overrides), **run_folder.data_marks(data.store)}
    reproduction.adopt(flags.workdir, settings, flags.write)
    rows = []
    for case in CASES:
        make = functools.partial(in_child, case, flags.workdir, words)
        rows.append((case, reproduction.kept_row(flags.workdir, case.name, make)))
    result = {
        "rehearsal": flags.rehearse,
        "split": data.split.description,
        "items": data.store.num_items,
        "rows": [case._asdict() | {"name": case.name, "ours": row} for case, row in rows],
    }
    text = markdown(result)
    reproduction.write_table(flags.workdir, text, result)
    if flags.write:
        reproduction.put_between_markers(flags.write, "reproduce_cutbce", text)


def in_child(case: Case, workdir: pathlib.Path, words: Sequence[str]) -> dict[str, Any]:
    """What ``make_row`` prints last in a process of its own, the rest goes to the console.

    The child reads from a pipe of ours, and so learns when this process ends, however that comes about.
    """
    # what was compiled for the timing, or for another row, is there for the training
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(workdir / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    child = subprocess.Popen(
        [sys.executable, __file__, *words, "--child", case.name],
        env={**compiled, **os.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    row: dict[str, Any] | None = None
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("ROW "):
            row = json.loads(line.removeprefix("ROW "))
        else:
            print(line, end="", flush=True)
    code = child.wait()
    if code == -signal.SIGKILL:  # as Linux does it to whom the memory's last page went
        return {"error": "out of memory: the system ended it (SIGKILL)"}
    if code or row is None:
        sys.exit(code or 1)  # it has said why
    return row


def make_row(case: Case, flags: argparse.Namespace, overrides: Sequence[str]) -> None:
    """The child: prints ``ROW {...}``."""
    threading.Thread(target=reproduction.leave_with_parent, daemon=True).start()
    import jax

    from recml_sasrec import trainer
    from recml_sasrec.memory import MemoryLimitError

    config = config_of(case, flags, overrides)
    row: dict[str, Any] = {}
    try:
        row |= reproduction.kept_row(flags.workdir, f"{case.name}-speed", lambda: measure(config, flags.rehearse))
        if case.hit is not None:
            row["hit@8"] = trainer.train(config, flags.workdir / "runs" / case.name)["sasrec"]["hr@8"]
    except MemoryLimitError as error:
        row["error"] = f"out of memory: {error}"
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        row["error"] = f"out of memory: {str(error).splitlines()[0][:200]}"
    print("ROW " + json.dumps(row), flush=True)


def measure(config: Config, rehearse: bool) -> dict[str, Any]:
    """Steps a second, data included, and the peak memory in bytes, of a device or of this process on a CPU."""
    import jax

    from recml_sasrec.data.loader import open_data
    from recml_sasrec.run import Run

    run = Run(config, open_data(config))
    step, state, batches = run.compile_step(), run.init(), run.batches(0)
    warm, timed = (1, 2) if rehearse else (WARM, TIMED)
    for _ in range(warm):
        state = step(state, next(batches))
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(timed):
        state = step(state, next(batches))
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    batches.close()
    device = run.layout.mesh.devices.flat[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    if peak is None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "peak_bytes": peak,
        "steps_per_s": timed / seconds,
        "devices": f"{run.layout.mesh.size} x {device.device_kind}",
    }


def markdown(result: dict[str, Any]) -> str:
    """The document's section."""
    lines = "## CutBCE's table, Yambda-50m, all listens: published / ours\n\n"
    if result["rehearsal"]:
        lines += (
            "**A rehearsal on generated events, an eighth of the batch and of N: ours says nothing of the paper.**\n\n"
        )
    devices = dict.fromkeys(row["ours"]["devices"] for row in result["rows"] if "devices" in row["ours"])
    lines += f"Published: 8 x TPU v6e, V 876,939. Ours: {', '.join(devices) or 'no row ran'}; V {result['items']:,}; "
    lines += (
        f"{result['split']}. Hit@8: any of the 8 in the first 8 of the full ranking. Memory: the peak a device.\n\n"
    )
    lines += reproduction.markdown_row("loss", "batch", "N", "peak memory", "steps/s", "Hit@8")
    lines += reproduction.markdown_row(*["---"] * 6)
    for row in result["rows"]:
        ours = row["ours"]
        memory = ours["error"] if "error" in ours else f"{ours['peak_bytes'] / 2**30:.2f} GiB"
        rate = f"{number(row['steps_per_s'], 2)} / {number(ours.get('steps_per_s'), 2)}"
        hit = f"{number(row['hit'], 3)} / {number(ours.get('hit@8'), 3)}"
        cells = (row["head"], row["batch"], row["length"], f"{row['memory']} / {memory}", rate, hit)
        lines += reproduction.markdown_row(*cells)
    return lines


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())

"""A grid or random search over fields of a config, and the spread over seeds of one config.

    python scripts/sweep.py --config configs/quickstart.py --workdir runs/sweep --seeds 3 \\
        --grid optimizer.learning_rate=1e-3,3e-3 --grid model.dropout=0.1,0.3
    python scripts/sweep.py --config configs/quickstart.py --workdir runs/random --random 20 \\
        --range optimizer.learning_rate=log:1e-4:1e-2 --range model.dropout=0:0.5 --range model.heads=1,2,4
    python scripts/sweep.py --config configs/beauty.py --workdir runs/seeds --seeds 3 --config.data.path=Beauty.txt

Each point and seed is an ordinary run in WORKDIR/runs, trained by recml_sasrec.train in a process of its own whose
console is in WORKDIR/logs. Points are ranked by evaluation.best_metric of the best checkpoint on the validation split,
mean and sample standard deviation over the seeds; test metrics are shown of the chosen point alone, unless --test asks
for all. Writes results.json and results.md into WORKDIR. Killed and run again, it goes on: what is done is kept, and
so are diverged runs; training resumes at its checkpoint. Random points depend on (train.seed, index) alone: a larger
--random, or --seeds, adds to those that are there.
"""

import argparse
import copy
import functools
import itertools
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import reproduction  # beside this script
from sweep_table import Point, best_of, markdown, run_name, summary

from recml_sasrec import command
from recml_sasrec.config import Config, ConfigError, field_names, get_field
from recml_sasrec.config_checks import validate
from recml_sasrec.config_file import load_config, set_field

# the other fields of data, and these, make the numbers that points are compared by
SWEPT_DATA = [f"data.{n}" for n in "length targets horizon windows stride pack position_order content_column".split()]
COMPARED_BY = ("split.", "evaluation.", "train.seed")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--child"]:
        threading.Thread(target=reproduction.leave_with_parent, daemon=True).start()
        from recml_sasrec import train

        return train.main(words[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_config_flag(parser)
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder of the runs and the results")
    parser.add_argument(
        "--grid", action="append", default=[], metavar="FIELD=A,B", help="each value, with each other's"
    )
    parser.add_argument(
        "--range", action="append", default=[], metavar="FIELD=[log:]LOW:HIGH or A,B", help="to draw from"
    )
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="draws from all --range, crossed with --grid"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="runs of a point: train.seed, train.seed + 1, .."
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    parser.add_argument("--test", action="store_true", help="show the test metric of all points, not of the chosen one")
    parser.add_argument("--write", type=pathlib.Path, metavar="FILE", help="put the tables into this document")
    parser.epilog = "Fields such as --config.train.steps=300 hold for every run."

    def run() -> None:
        flags, overrides = command.parse(parser, words)
        sweep(flags, overrides)

    return command.run(run)


def sweep(flags: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Everything that can be wrong is said before the first run starts."""
    for name, least in (("seeds", 1), ("jobs", 1), ("random", 0)):
        if getattr(flags, name) < least:
            raise ConfigError(f"--{name} {getattr(flags, name)} must be at least {least}")
    base = load_config(flags.config, overrides)
    if not base.evaluation.every:
        raise ConfigError(
            "config.evaluation.every=0 leaves nothing to rank points by; set it to the steps between two validations"
        )
    grid = dict(read_grid(base, word) for word in flags.grid)
    ranges = dict(read_range(base, word) for word in flags.range)
    names = [word.removeprefix("config.").partition("=")[0] for word in (*flags.grid, *flags.range)]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"config.{twice[0]} is given twice; name all its values in one --grid or --range")
    if bool(ranges) != (flags.random > 0):
        raise ConfigError(f"--random {flags.random} with {len(ranges)} --range; give how many to draw, and from what")
    last = base.train.seed + flags.seeds - 1
    if last >= 2**32:
        raise ConfigError(
            f"--seeds {flags.seeds} ends at the seed {last}, but seeds must be below 2**32; lower "
            f"config.train.seed={base.train.seed}"
        )
    points = make_points(base, grid, ranges, flags.random)
    for point in points:
        check(base, point)

    from recml_sasrec import run_folder
    from recml_sasrec.data.loader import open_data

    data = open_data(base)  # once, ahead of the runs, which find its store
    settings = {
        f"config.{name}": get_field(base, name) for name in field_names(base) if name not in ("data.cache", "data.path")
    }
    settings |= {f"--grid {name}": values for name, values in grid.items()}
    settings |= {f"--range {name}": words for name, words in ranges.items()}
    settings |= {f"data: {name}": mark for name, mark in run_folder.data_marks(data.store).items()}
    reproduction.adopt(flags.workdir, settings, flags.write)
    seeds = [base.train.seed + i for i in range(flags.seeds)]
    rows = Runs(flags, overrides, base).all(points, seeds)
    result = summary(flags, base, points, seeds, rows)
    reproduction.write_table(flags.workdir, markdown(result), result, "results")
    if flags.write:
        reproduction.put_between_markers(flags.write, f"sweep {flags.workdir.name}", markdown(result))
    if not any(point["n"] for point in result["points"]):
        raise ConfigError(f"none of the {len(rows)} runs has a result; the table says why")


def read_grid(base: Config, word: str) -> tuple[str, list[Any]]:
    """The field and values of ``FIELD=A,B``; commas inside brackets belong to a value."""
    name, _, text = word.removeprefix("config.").partition("=")
    values = [typed(base, name, value) for value in re.split(r",(?![^(\[]*[)\]])", text) if value]
    if not values:
        raise ConfigError(f"--grid {word} has no values; write --grid {name or 'FIELD'}=A,B")
    if len({repr(value) for value in values}) < len(values):
        raise ConfigError(f"--grid {word} has a value twice; leave one out")
    return name, values


def read_range(base: Config, word: str) -> tuple[str, list[Any]]:
    """The field of ``FIELD=[log:]LOW:HIGH``, and ["log" or "linear", low, high]; or ["one of", A, B, ...]."""
    name, _, text = word.removeprefix("config.").partition("=")
    if ":" not in text:
        return name, ["one of", *read_grid(base, word)[1]]
    scale, *ends = text.split(":") if text.startswith("log:") else ("linear", *text.split(":"))
    if len(ends) != 2:
        raise ConfigError(f"--range {word} is not LOW:HIGH or log:LOW:HIGH")
    low, high = (typed(base, name, end) for end in ends)
    if isinstance(low, bool) or not isinstance(low, int | float):
        raise ConfigError(f"--range {word} needs a field of numbers; name its values, as {name}=A,B")
    if not (low < high and math.isfinite(high - low)) or (scale == "log" and low <= 0):
        raise ConfigError(f"--range {word} must have LOW below HIGH{', both above 0' if scale == 'log' else ''}")
    return name, [scale, low, high]


def typed(base: Config, name: str, text: str) -> Any:
    """The value of a field that a text stands for."""
    config = copy.deepcopy(base)
    set_field(config, name, text)
    if name.startswith(COMPARED_BY) or (name.startswith("data.") and name not in SWEPT_DATA):
        raise ConfigError(
            f"config.{name} can't be searched over, for it decides on what points are compared"
            + ("; use --seeds" if name == "train.seed" else f"; set it for all, as --config.{name}={text}")
        )
    return get_field(config, name)


def make_points(base: Config, grid: dict[str, list], ranges: dict[str, list], count: int) -> list[Point]:
    """The points in their order; a larger ``count`` of draws adds to the end."""
    cells: list[Point] = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    drawn: list[Point] = [draw(base.train.seed, index, ranges) for index in range(count)] if ranges else [{}]
    return [cell | point for point in drawn for cell in cells]


def draw(seed: int, index: int, ranges: dict[str, list]) -> Point:
    """A random point, of (seed, index) and the ranges alone."""
    rng, point = np.random.default_rng((seed, index)), {}
    for name, (scale, *values) in sorted(ranges.items()):
        u = rng.random()
        if scale == "one of":
            point[name] = values[int(u * len(values))]
            continue
        low, high = values
        whole = isinstance(low, int)
        high += whole and scale == "linear"  # each whole number as likely
        value = low * (high / low) ** u if scale == "log" else low + u * (high - low)
        point[name] = (round(value) if scale == "log" else int(value)) if whole else float(f"{value:.4g}")
    return point


def check(base: Config, point: Point) -> None:
    config = copy.deepcopy(base)
    for name, value in point.items():
        set_field(config, name, str(value))
    try:
        validate(config)
    except ConfigError as error:
        raise ConfigError(f"the point {words_of(point)} can't be run: {error}") from None


def words_of(point: Point) -> str:
    return " ".join(f"{name}={value}" for name, value in point.items()) or "as configured"


class Failed(Exception):
    """A run ended without a result, for a reason that may pass: it is tried again next time."""


class Runs:
    """Trains points with seeds, each run in a process that ends with this one."""

    def __init__(self, flags: argparse.Namespace, overrides: Sequence[str], base: Config):
        self.flags, self.overrides, self.metric = flags, overrides, base.evaluation.best_metric
        self.stopped = ""
        self.children: set[subprocess.Popen] = set()

    def all(self, points: list[Point], seeds: list[int]) -> dict[tuple[int, int], dict[str, Any]]:
        """By (index of the point, seed) what ``one`` made, or ``{"error": sentence}``.

        Raises:
            Interrupted: SIGTERM or Ctrl-C came and every child has saved its state.
        """
        from recml_sasrec.preemption import Interrupted

        for folder in ("runs", "logs", "rows"):
            (self.flags.workdir / folder).mkdir(exist_ok=True)
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        cells = list(itertools.product(range(len(points)), seeds))
        # the first seed of all points before the second of any
        cells.sort(key=lambda cell: cell[1])
        with ThreadPoolExecutor(self.flags.jobs) as pool:
            rows = list(pool.map(lambda cell: self._kept(*cell, points[cell[0]]), cells))
        for number, handler in previous.items():
            signal.signal(number, handler)
        if self.stopped:
            done = sum(row is not None for row in rows)
            raise Interrupted(f"{self.stopped}: {done} of {len(cells)} runs are done; the same command goes on")
        return {cell: row for cell, row in zip(cells, rows, strict=True) if row is not None}

    def _stop(self, number: int, frame: Any) -> None:
        self.stopped = signal.Signals(number).name
        for child in tuple(self.children):
            child.stdin.close()  # type: ignore[union-attr]  # it then stops as at a SIGTERM

    def _kept(self, index: int, seed: int, point: Point) -> dict[str, Any] | None:
        if self.stopped:
            return None
        name = run_name(index, seed)
        try:
            row = reproduction.kept_row(self.flags.workdir, name, functools.partial(self._one, name, seed, point))
        except Failed as failure:
            row = {"error": str(failure)}
        except InterruptedError:
            return None
        said = (
            row.get("error") or f"validation {self.metric} {row['validation'][self.metric]:.4f} at step {row['step']}"
        )
        print(f"{name} ({words_of(point)}): {said}", flush=True)
        return row

    def _one(self, name: str, seed: int, point: Point) -> dict[str, Any]:
        """Trains a run to its end: its best step and validation metrics, or why it diverged."""
        folder, log = self.flags.workdir / "runs" / name, self.flags.workdir / "logs" / f"{name}.log"
        words = [*self.overrides, *(f"{field}={value}" for field, value in point.items()), f"train.seed={seed}"]
        code = self._child(
            ["--config", self.flags.config, "--workdir", str(folder), *(f"--config.{w}" for w in words)], log
        )
        if self.stopped and code:
            raise InterruptedError
        if code == 0:
            return best_of(folder, self.metric)
        sentence = last_words(log) or f"the run ended with exit code {code}"
        if code == command.EXIT_DIVERGED:
            return {"error": sentence}
        raise Failed(f"{sentence} (exit code {code}, {log})")

    def _child(self, words: list[str], log: pathlib.Path) -> int:
        # what one run has compiled another finds, where no number of its point is in it
        compiled = {
            "JAX_COMPILATION_CACHE_DIR": str(self.flags.workdir.absolute() / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with log.open("w") as console:
            child = subprocess.Popen(
                [sys.executable, __file__, "--child", *words],
                env={**compiled, **os.environ},
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=console,
            )
            self.children.add(child)
            if self.stopped:  # between the last look and the start
                self._stop(signal.Signals[self.stopped], None)
            code = child.wait()
            self.children.discard(child)
        return code


def last_words(log: pathlib.Path) -> str:
    """The sentence that a run ended with."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


if __name__ == "__main__":
    sys.exit(main())

"""Measures the input side: the store's building from shuffled events, and training batches per second.

    python scripts/bench_input.py                      # 5 million shuffled events; N 200, L 8
    python scripts/bench_input.py --events 500000      # a quick look

Prints a markdown table. The store is built in a process of its own, so that the peak memory is its own; batches are
built on one thread, and the loader's figure includes Grain and its read-ahead thread.
"""

import argparse
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recml_sasrec.config import Config
from recml_sasrec.data.loader import open_data

MIN_WINDOWS_PER_S, MAX_STORE_S, MAX_STORE_GB = 100_000, 20.0, 1.0


def write_shuffled(path: str, events: int, users: int, items: int) -> None:
    """Events in random order: Zipf-like items, sparse 64-bit ids, times with ties."""
    rng = np.random.default_rng(0)
    with pq.ParquetWriter(path, pa.schema([(n, pa.int64()) for n in ("user_id", "item_id", "timestamp")])) as writer:
        for start in range(0, events, 1 << 20):
            count = min(1 << 20, events - start)
            item = (items ** rng.random(count)).astype(np.int64)
            columns = [rng.integers(0, users, count) * 1_000_003, item * 997, rng.integers(0, 5_200_000, count) * 5]
            writer.write_table(pa.table(columns, schema=writer.schema))


def configuration(path: str, cache: str, length: int, targets: int, batch_size: int) -> Config:
    config = Config()
    config.data.source, config.data.path, config.data.cache = "table", path, cache
    config.data.length, config.data.targets = length, targets
    config.split.kind = "leave_last"
    config.train.batch_size = batch_size
    return config


def build(path: str, cache: str) -> None:
    """Runs in a process of its own; prints seconds and the peak of its resident memory in GB."""
    start = time.perf_counter()
    open_data(configuration(path, cache, 200, 8, 1))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(seconds, peak / 1e9)


def windows_per_s(step, rows: int, seconds: float) -> tuple[float, float]:
    """Windows per second (of CPU time of all threads, by the clock): the best of five, as others share the machine.

    A window is a full row of N positions.
    """
    best = [0.0, 0.0]
    for _ in range(5):
        start, cpu, steps = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - start < seconds / 5:
            step()
            steps += 1
        spent = time.process_time() - cpu, time.perf_counter() - start
        best = [max(old, steps * rows / new) for old, new in zip(best, spent, strict=True)]
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--users", type=int, default=5_000)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--length", type=int, default=200, help="N")
    parser.add_argument("--targets", type=int, default=8, help="L")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement of the loader")
    parser.add_argument("--build", nargs=2, metavar=("FILE", "CACHE"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.build:
        build(*flags.build)
        return
    with tempfile.TemporaryDirectory() as folder:
        path, cache = os.path.join(folder, "events.parquet"), os.path.join(folder, "cache")
        write_shuffled(path, flags.events, flags.users, flags.items)
        output = subprocess.run(
            [sys.executable, __file__, "--build", path, cache], check=True, capture_output=True, text=True
        ).stdout
        store_s, store_gb = map(float, output.split()[-2:])
        config = configuration(path, cache, flags.length, flags.targets, flags.batch_size)
        data = open_data(config)
        source, numbers = data.train_source(config), itertools.count()
        direct = windows_per_s(lambda: source[next(numbers)], flags.batch_size, flags.seconds)
        with data.train_batches(config) as batches:
            through = windows_per_s(lambda: next(batches), flags.batch_size, flags.seconds)
        fill = data.fill(config)
    shape = f"N {flags.length}, L {flags.targets}, {flags.batch_size} rows a batch, {fill:.1%} real positions"
    print("| what | measured | bound |\n|---|---|---|")
    print(f"| store of {flags.events:,} shuffled events | {store_s:.1f} s | {MAX_STORE_S:.0f} s |")
    print(f"| its peak resident memory, Python and pyarrow included | {store_gb:.2f} GB | {MAX_STORE_GB:.0f} GB |")
    print(f"| batches built, {shape}, a second of CPU time | {direct[0]:,.0f} windows | {MIN_WINDOWS_PER_S:,} |")
    print(f"| the same, a second by the clock | {direct[1]:,.0f} windows | |")
    print(f"| through Grain, a second of CPU time of all threads | {through[0]:,.0f} windows | {MIN_WINDOWS_PER_S:,} |")
    print(f"| the same, a second by the clock | {through[1]:,.0f} windows | |")


if __name__ == "__main__":
    main()

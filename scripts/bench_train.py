"""Measures training on S3 Beauty: real tokens per second, peak memory, and the host's share of a step.

    python scripts/bench_train.py --data ../shared/data/s3rec-beauty/Beauty.txt

SASRec of width 64, 2 blocks, 2 heads, N 50, next item, full-catalogue cut_bce, float32. Each row of the table is a
process of its own, bound to one core unless --cores says otherwise; its peak memory is its own. A real token is an
input position that is not padding. The host time is that of the same loop around a compiled function that does
nothing. CPU time a step is what other load on the machine disturbs least.

    python scripts/bench_train.py --items 100000 --content 128

adds items without events to the catalogue, and rows with random content vectors of so many numbers.
"""

import argparse
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time

TOKENS = 2_050  # positions of a batch
CONTENT = ("fixed", "trainable")


def measure(data: str, cache: str, case: str, items_path: str, steps: int, repeats: int) -> dict[str, float]:
    """Runs in a process of its own, after its cores are set."""
    import jax
    import numpy as np

    from recml_sasrec.config import Config
    from recml_sasrec.data.loader import open_data
    from recml_sasrec.run import Run

    config = Config()
    config.data.source, config.data.path, config.data.cache = "lines", data, cache
    pack = case != "unpacked"
    config.data.length, config.data.targets, config.data.pack = 50, 1, pack
    if items_path:
        config.data.items_path, config.data.item_column, config.data.content_column = items_path, "item", "content"
        config.model.content = case if case in CONTENT else "none"
    config.split.kind = "leave_last"
    config.model.norm, config.model.dropout = "post", 0.5
    config.train.batch_size = TOKENS // config.data.length if pack else 128
    run = Run(config, open_data(config))
    state = run.init()
    train_step = run.compile_step()
    batches = run.batches(0)

    def seconds(step, state, count):
        state = step(state, next(batches))
        tokens = int(jax.block_until_ready(state).metrics.tokens)
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            state = step(state, next(batches))
        real = int(state.metrics.tokens) - tokens  # waits for the last step
        cpus.append((time.process_time() - cpu) / count)
        return time.perf_counter() - start, real, state

    rates, hosts, cpus = [], [], []
    for _ in range(repeats):
        elapsed, real, state = seconds(train_step, state, steps)
        rates.append(real / elapsed)
    cpu_ms = 1e3 * statistics.median(cpus)
    nothing = jax.jit(lambda state, batch: state, donate_argnums=0).lower(state, next(batches)).compile()
    for _ in range(repeats):
        elapsed, _, state = seconds(nothing, state, 200)
        hosts.append(elapsed / 200)
    batches.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    per_epoch = run.data.tokens(config) / statistics.median(rates)
    return {
        "tokens_per_s": statistics.median(rates),
        "slowest": float(np.min(rates)),
        "fastest": float(np.max(rates)),
        "epoch_s": per_epoch,
        "host_ms": 1e3 * statistics.median(hosts),
        "fill": run.data.fill(config),
        "peak_gb": peak / 1e9,
        "cpu_ms": cpu_ms,
    }


def write_items(path: str, items: int, width: int) -> None:
    """A table of items 0, 1, ... with random vectors of norm 1."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    vectors = np.random.default_rng(0).normal(size=(items, width)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    content = pa.FixedSizeListArray.from_arrays(vectors.ravel(), width)
    pq.write_table(pa.table({"item": np.arange(items), "content": content}), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = pathlib.Path(__file__).resolve().parents[2] / "shared/data/s3rec-beauty/Beauty.txt"
    parser.add_argument("--data", default=str(beside), help="Beauty.txt as S3-Rec prepared it")
    parser.add_argument("--steps", type=int, default=20, help="of a repetition")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--items", type=int, default=100_000, help="of the catalogue, with --content")
    parser.add_argument("--content", type=int, default=0, help="numbers of an item's content vector; 0: no such rows")
    parser.add_argument("--child", choices=("packed", "unpacked", *CONTENT), help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--items-path", default="", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-flags.cores :])
        arguments = flags.data, flags.cache, flags.child, flags.items_path, flags.steps, flags.repeats
        print(json.dumps(measure(*arguments)))
        return
    print(f"{platform.machine()}, {flags.cores} core(s); median of {flags.repeats} x {flags.steps} steps\n")
    columns = "batches | real tokens/s (slowest to fastest) | s/epoch | real positions | peak memory | host ms/step"
    print(f"| {columns} | CPU ms/step |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as cache:
        items_path = os.path.join(cache, "items.parquet") if flags.content else ""
        if flags.content:
            write_items(items_path, flags.items, flags.content)
        for name in ("packed", *CONTENT) if flags.content else ("packed", "unpacked"):
            command = [sys.executable, __file__, "--child", name, "--cache", cache, "--data", flags.data]
            command += ["--items-path", items_path, "--steps", str(flags.steps)]
            command += ["--repeats", str(flags.repeats), "--cores", str(flags.cores)]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            row = json.loads(out.splitlines()[-1])
            label = f"packed, content {name}" if name in CONTENT else name
            print(
                f"| {label} | {row['tokens_per_s']:,.0f} ({row['slowest']:,.0f} to {row['fastest']:,.0f}) "
                f"| {row['epoch_s']:.1f} | {row['fill']:.1%} | {row['peak_gb']:.2f} GB | {row['host_ms']:.2f} "
                f"| {row['cpu_ms']:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Recommendations by raw ids: time beside the matrix product of the same scores, peak memory, one history's latency.

    python scripts/bench_recommend.py                    10,000 histories, 1,000,000 items, D 64, k 100

The run is made here, of random parameters: SASRec's defaults, N 50, item bias. Histories hold 1 to 100 items; they come
as lists of Python integers, lists of (id, score) go back, and all of that is in the times. "the scores alone" is the
matrix product of as many hidden states with the item table in tiles, float32, nothing kept. Calls take turns in one
process, which has compiled before, and the table shows medians. Peak memory is VmHWM of a fresh process that loads the
run and recommends once: Python, JAX, its compiler, parameters, histories and lists included. Last, one at a time.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from bench_ranking import scores_alone  # beside this script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one-items", type=int, default=100_000, help="catalogue of the single histories")
    parser.add_argument("--one-repeats", type=int, default=50)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--workdir", type=pathlib.Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        {"make": make_run, "times": times, "peak": peak, "filtered": peak, "one": one}[flags.child](flags)
        return
    print(f"{flags.histories:,} histories, k {flags.k}, V {flags.items:,}, D {flags.width}\n")
    with tempfile.TemporaryDirectory() as folder:
        for child in ("make", "times", "peak", "filtered"):
            start([*sys.argv[1:], "--workdir", f"{folder}/many", "--child", child])
        words = [*sys.argv[1:], "--items", str(flags.one_items), "--workdir", f"{folder}/one"]
        for child in ("make", "one"):
            start([*words, "--child", child])


def start(words: list[str]) -> None:
    subprocess.run([sys.executable, __file__, *words], check=True)


def make_run(flags: argparse.Namespace) -> None:
    """A run's folder as training leaves it, but for its optimizer's state."""
    import jax
    import jax.numpy as jnp
    import pyarrow as pa
    from flax import nnx

    from recml_sasrec import run_folder
    from recml_sasrec.checkpoint import Checkpoints
    from recml_sasrec.config import Config
    from recml_sasrec.data.store import EventBatch, build_store
    from recml_sasrec.step import Metrics, TrainState, make_model

    config = Config()
    config.split.test_start, config.model.width = 1, flags.width
    items = pa.array(raw_ids(flags.items))
    batch = EventBatch(pa.array(np.zeros(flags.items, np.int64)), items, pa.array(np.arange(flags.items)))
    store = build_store(lambda: iter([batch]), str(flags.workdir / "store"), "bench")
    run_folder.adopt(flags.workdir, config, store)
    _, init = make_model(config, flags.items, 1.0)
    params = nnx.to_pure_dict(nnx.state(init(), nnx.Param))
    params["item_bias"] += jax.random.normal(jax.random.key(1), params["item_bias"].shape) / 100
    state = TrainState(jnp.zeros((), jnp.int32), params, {"none": jnp.zeros(())}, Metrics.zeros())
    with Checkpoints(flags.workdir, 1, config.evaluation.best_metric) as checkpoints:
        checkpoints.save(0, state, {"vocabulary": store.vocabulary})


def raw_ids(items: int) -> np.ndarray:
    """Sparse 64-bit ids."""
    return np.arange(items, dtype=np.int64) * 7_919 + 2**40


def histories_of(flags: argparse.Namespace, count: int) -> list[list[int]]:
    rng, raw = np.random.default_rng(0), raw_ids(flags.items)
    return [raw[rng.integers(0, flags.items, n)].tolist() for n in rng.integers(1, 101, count)]


def times(flags: argparse.Namespace) -> None:
    import jax

    from recml_sasrec import Recommender

    recommender, histories = Recommender.load(flags.workdir), histories_of(flags, flags.histories)
    product, table = jax.jit(scores_alone), recommender._table
    hidden = jax.random.normal(jax.random.key(0), (512, flags.width))
    batches = -(-flags.histories // 512)
    calls = {
        "the scores alone": lambda: [product(hidden, table).block_until_ready() for _ in range(batches)],
        "recommend()": lambda: recommender.recommend(histories, k=flags.k),
        "recommend(), seen items removed": lambda: recommender.recommend(histories, k=flags.k, filter_seen=True),
    }
    for filtered in (False, True):  # compiles the sizes of batch that the histories come in
        recommender.recommend(histories[: 256 + flags.histories % 256], k=flags.k, filter_seen=filtered)
    product(hidden, table).block_until_ready()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(flags.repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print("| what | s | x the scores alone |\n|---|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value:.1f} | {value / medians['the scores alone']:.2f} |", flush=True)


def peak(flags: argparse.Namespace) -> None:
    from recml_sasrec import Recommender

    filtered = flags.child == "filtered"
    lists = Recommender.load(flags.workdir).recommend(
        histories_of(flags, flags.histories), k=flags.k, filter_seen=filtered
    )
    assert all(len(items) == flags.k for items in lists)
    status = pathlib.Path("/proc/self/status").read_text()
    kilobytes = int(status.partition("VmHWM:")[2].split()[0])
    print(f"peak memory{', seen items removed' if filtered else ''}: {kilobytes * 1024 / 1e9:.2f} GB", flush=True)


def one(flags: argparse.Namespace) -> None:
    from recml_sasrec import Recommender

    recommender, histories = Recommender.load(flags.workdir), histories_of(flags, flags.one_repeats + 3)
    milliseconds = []
    for history in histories:
        begin = time.perf_counter()
        recommender.recommend([history], k=flags.k, filter_seen=True)
        milliseconds.append((time.perf_counter() - begin) * 1e3)
    rest = milliseconds[3:]
    print(
        f"one history, seen items removed, V {flags.items:,}: median {statistics.median(rest):.1f} ms, "
        f"slowest {max(rest):.1f} ms of {len(rest)}; the first, with its compilation, {milliseconds[0] / 1e3:.1f} s"
    )


if __name__ == "__main__":
    main()

"""Full ranking at the size of Yambda-50M: time and peak memory of evaluation, and of the baselines.

    python scripts/bench_ranking.py                       4,600 users, k 100, V 877,168, D 64, 46,467,212 events
    python scripts/bench_ranking.py --events 2000000 --users 500 --items 50000

The events are random: half of the users have no test targets, histories have one length, a third of one are new items,
popularity is about as skewed as the data set's, and a day of test is at the end. Each variant is prepared in a
subprocess of its own; they take turns, one call each, so that a busy machine disturbs all alike, and the table shows
medians; the CPU seconds are the least of the calls. "the scores alone" is the matrix product of the same hidden states
and item table in tiles, without bias and selection. Peak memory is the process's peak resident set: Python, JAX, its
compiler, the table and the memory-mapped events that were touched included. Runs on whatever device JAX finds.
"""

import argparse
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

VARIANTS = {
    "product": "the scores alone",
    "top_k": "top_k",
    "evaluate": "evaluate(), metrics included",
    "filtered": "evaluate(), seen items removed",
    "encoded": "evaluate(), SASRec's encoder included",
    "most_pop": "MostPop",
    "decay_pop": "DecayPop",
    "item_knn": "ItemKNN",
}
BASELINES = ("most_pop", "decay_pop", "item_knn")
TEST_START, GAP, DAY = 25_913_600, 1_800, 86_400  # Yambda's clock


def main() -> None:
    flags = parse_flags()
    if flags.variant:
        work(flags)
        return
    with tempfile.TemporaryDirectory() as folder:
        flags.folder = flags.folder or folder
        write_events(flags)
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", flags.folder]
        variants = flags.variants.split(",")
        workers = {name: start([*command, "--variant", name]) for name in variants}
        times: dict[str, list[list[float]]] = {name: [] for name in variants}  # [wall, CPU] seconds of each call
        for turn in range(flags.repeats):
            for name in variants:
                if turn == 0 or name not in BASELINES:  # a second call would find what the first remembered
                    times[name].append(ask(workers[name], "run"))
        peaks = {name: ask(worker, "peak")[0] for name, worker in workers.items()}
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()
    report(flags, times, peaks)


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=4_600)
    parser.add_argument("--items", type=int, default=877_168)
    parser.add_argument("--events", type=int, default=46_467_212)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, comma-separated")
    parser.add_argument("--folder", default="", help="where the events are written, or were before")
    parser.add_argument("--variant", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def start(command: list[str]) -> subprocess.Popen:
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    if not worker.stdout.readline():  # a line comes once all is prepared and compiled
        sys.exit(f"{command[-1]} failed")
    return worker


def ask(worker: subprocess.Popen, what: str) -> list[float]:
    worker.stdin.write(f"{what}\n")
    worker.stdin.flush()
    return [float(word) for word in worker.stdout.readline().split()]


def write_events(flags: argparse.Namespace) -> None:
    """Items and times of users with histories of one length, as the store's arrays."""
    import numpy as np

    folder = pathlib.Path(flags.folder)
    if (folder / "items.npy").exists():
        return
    rng = np.random.default_rng(0)
    length = flags.events // (2 * flags.users)
    size = (2 * flags.users * length,)
    items = np.lib.format.open_memmap(folder / "items.npy", mode="w+", dtype=np.int32, shape=size)
    times = np.lib.format.open_memmap(folder / "timestamps.npy", mode="w+", dtype=np.int64, shape=size)
    shuffled = rng.permutation(flags.items).astype(np.int32)  # popularity does not follow the ids
    for user in range(2 * flags.users):
        part = slice(user * length, (user + 1) * length)
        # A third is new, the rest repeats, as in the data set; x**4 gives the first percent of items a third of all.
        new = shuffled[(rng.random(length // 3 + 1) ** 4 * flags.items).astype(np.int64)]
        items[part] = new[rng.integers(0, len(new), length)]
        times[part] = np.sort(rng.integers(0, TEST_START + (DAY if user % 2 else -GAP), length))


def open_events(flags: argparse.Namespace):
    import numpy as np
    import pyarrow as pa

    from recml_sasrec.data.loader import Data
    from recml_sasrec.data.split import make_split
    from recml_sasrec.data.store import Store

    items, times = (np.load(f"{flags.folder}/{name}.npy", mmap_mode="r") for name in ("items", "timestamps"))
    store = Store(
        items=items.view(np.ndarray),
        timestamps=times.view(np.ndarray),
        offsets=np.arange(2 * flags.users + 1, dtype=np.int64) * (flags.events // (2 * flags.users)),
        num_users=2 * flags.users,
        num_items=flags.items,
        has_time=True,
        fingerprint="",
        vocabulary="",
        user_ids=pa.array([]),
        item_ids=pa.array([]),
        directory="",
        first_time=0,
        last_time=TEST_START + DAY,
    )
    return Data(store, make_split(store, make_config(flags).split))


def make_config(flags: argparse.Namespace):
    from recml_sasrec.config import Config

    config = Config()
    config.data.length = 200
    config.split.test_start, config.split.gap = TEST_START, GAP
    config.model.width, config.model.item_bias = flags.width, False
    config.evaluation.ks = tuple(sorted({min(10, flags.k), flags.k}))
    config.evaluation.metric_version = "v1"
    return config


def work(flags: argparse.Namespace) -> None:
    """A subprocess: prepares its variant, then runs it once whenever asked to."""
    call = prepare(flags)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "run":
            begin, busy = time.perf_counter(), time.process_time()
            call()
            print(time.perf_counter() - begin, time.process_time() - busy, flush=True)
        else:
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, flush=True)


def prepare(flags: argparse.Namespace):
    """The variant as a function without arguments; compiled and run once where it runs several times."""
    from recml_sasrec.ranking import evaluation

    config, data = make_config(flags), open_events(flags)
    if flags.variant in BASELINES:
        config.evaluation.baselines = (flags.variant,)
        return lambda: evaluation.evaluate_baselines(config, data, "test")
    call = ranking_call(flags, config, data)
    call()
    return call


def ranking_call(flags: argparse.Namespace, config, data):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from recml_sasrec.ranking import evaluation
    from recml_sasrec.ranking.topk import top_k_jit
    from recml_sasrec.step import make_encoder, make_model

    keys = jax.random.split(jax.random.key(0), 2)
    table = jax.random.normal(keys[0], (flags.items, flags.width))
    hidden = jax.random.normal(keys[1], (flags.users, flags.width))
    batches = [
        hidden[i : i + config.evaluation.batch_users] for i in range(0, flags.users, config.evaluation.batch_users)
    ]
    batches[-1] = jnp.pad(batches[-1], ((0, len(batches[0]) - len(batches[-1])), (0, 0)))  # one shape to compile
    if flags.variant == "product":
        product = jax.jit(scores_alone)
        return lambda: jax.block_until_ready([product(batch, table) for batch in batches])
    if flags.variant == "top_k":
        return lambda: jax.block_until_ready([top_k_jit(batch, table, flags.k) for batch in batches])
    if flags.variant == "encoded":
        graphdef, init = make_model(config, flags.items, 1.0)
        params = nnx.to_pure_dict(nnx.state(init(), nnx.Param)) | {"item_table": table}
        model = jax.jit(make_encoder(graphdef))
        return lambda: evaluation.evaluate(config, data, lambda batch: model(params, batch), table, None, "test")
    config.evaluation.filter_seen = flags.variant == "filtered"
    config.data.length = 1  # the encoder's input is not used
    return lambda: evaluation.evaluate(config, data, lambda batch: hidden[batch.users // 2], table, None, "test")


def scores_alone(hidden_QD, table_VD, tile: int = 16_384):
    """Every tile's scores, each overwriting the one before."""
    import jax
    import jax.numpy as jnp

    tile = min(tile, table_VD.shape[0])

    def step(_, begin):
        return jnp.einsum("qd,vd->qv", hidden_QD, jax.lax.dynamic_slice_in_dim(table_VD, begin, tile)), None

    begins = jnp.arange(-(-table_VD.shape[0] // tile)) * tile
    return jax.lax.scan(step, jnp.zeros((len(hidden_QD), tile)), begins)[0]


def report(flags: argparse.Namespace, times: dict[str, list[list[float]]], peaks: dict[str, float]) -> None:
    print(f"{flags.users:,} users, k {flags.k}, V {flags.items:,}, D {flags.width}, {flags.events:,} events; float32,")
    print(f"{os.cpu_count()} threads, median of {flags.repeats} interleaved calls (baselines: one call)")
    if hasattr(os, "getloadavg"):
        print("load average {:.1f}, {:.1f}, {:.1f} (1, 5, 15 minutes)".format(*os.getloadavg()))
    print("\n| what | s | x the scores alone | CPU s | x the scores alone | peak GiB |")
    print("|---|---|---|---|---|---|")
    wall = {name: statistics.median(w for w, _ in calls) for name, calls in times.items()}
    busy = {name: min(b for _, b in calls) for name, calls in times.items()}
    for name in times:
        cells = []
        for seconds in (wall, busy):
            ratio = seconds[name] / seconds["product"] if "product" in seconds and name not in BASELINES else None
            cells += [f"{seconds[name]:.1f}", f"{ratio:.2f}" if ratio else "-"]
        print(f"| {VARIANTS[name]} | {' | '.join(cells)} | {peaks[name]:.2f} |")


if __name__ == "__main__":
    main()

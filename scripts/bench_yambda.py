"""Measures the data side at Yambda-50M's full size: the store, its opening, the first batch, popularity, memory.

    python scripts/bench_yambda.py --workdir /tmp/yambda                 # 46,467,212 listens; 2 GB of disk
    python scripts/bench_yambda.py --workdir /tmp/yambda --scale 0.05    # a quick look
    python scripts/bench_yambda.py --workdir /tmp/yambda --rows 4.6e6 46e6 200e6    # and memory against rows; 5 GB more

Generates the files it lacks in the folder and keeps them. Each figure is of a process of its own; seconds are by the
clock. The parent reads its child's resident memory from /proc every 10 ms (Linux), anonymous pages apart from mapped
files, which the system takes back when it needs them.
"""

import argparse
import filecmp
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

from measure import peaks_of  # beside this script

from recml_sasrec.data import synthetic_sizes
from recml_sasrec.data.synthetic_sizes import Size

ROOT = pathlib.Path(__file__).resolve().parents[1]
ARRAYS = ("items.npy", "timestamps.npy", "offsets.npy", "user_ids.arrow", "item_ids.arrow")


def child(what: str, path: str, cache: str) -> dict[str, Any]:
    """Runs in a process of its own."""
    from recml_sasrec.config_file import load_config
    from recml_sasrec.data.loader import open_data, open_store_of

    every_listen = ["data.min_played_ratio=0", f"data.path={path}", f"data.cache={cache}"]
    config = load_config(str(ROOT / "configs/yambda50m.py"), every_listen)
    begin = time.perf_counter()
    if what == "store":
        store = open_store_of(config)
        return {"seconds": time.perf_counter() - begin, "directory": store.directory, "events": store.num_events}
    if what == "batch":
        import jax  # noqa: F401  the trainer has it

        data = open_data(config)
        data.mean_positives(config)  # the trainer asks for it first
        with data.train_batches(config) as batches:
            next(batches)
        return {"done": time.time()}
    from recml_sasrec.ranking.baselines import decay_pop, most_pop

    data = open_data(config)
    begin = time.perf_counter()
    counts = most_pop(data.store, data.split)
    middle = time.perf_counter()
    decay_pop(data.store, data.split, 1.0)
    return {"most": middle - begin, "decay": time.perf_counter() - middle, "events": int(counts.sum())}


def run_child(what: str, path: pathlib.Path, cache: pathlib.Path) -> dict[str, Any]:
    """What the child found, and its seconds since the start and its peaks of memory in GB."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    begin = time.time()
    words = [sys.executable, __file__, "--child", what, str(path), str(cache)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    peaks = peaks_of(process)
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(process.returncode)
    return json.loads(output.splitlines()[-1]) | peaks | {"begin": begin}


def generated(goal: Size, path: pathlib.Path, sequential: bool = False) -> pathlib.Path:
    if not path.exists():
        print(f"generating {path}", file=sys.stderr)
        synthetic_sizes.write(goal, str(path), sequential, density=synthetic_sizes.density("50m"))
    return path


def row(what: str, measured: str, bar: str) -> None:
    print(f"| {what} | {measured} | {bar} |", flush=True)


def full_size(folder: pathlib.Path, goal: Size) -> None:
    flat = generated(goal, folder / f"flat-{goal.listens}.parquet")
    lists = generated(goal, folder / f"sequential-{goal.listens}.parquet", sequential=True)
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    built, again = (run_child("store", flat, cache) for _ in range(2))
    other = run_child("store", lists, cache)
    same = all(
        filecmp.cmp(f"{built['directory']}/{name}", f"{other['directory']}/{name}", shallow=False) for name in ARRAYS
    )
    batch, popularity = run_child("batch", flat, cache), run_child("popularity", flat, cache)
    shutil.rmtree(cache)
    row(f"store of {built['events']:,} listens from the flat file", f"{built['seconds']:.1f} s", "90 s")
    row("its peak resident memory, mapped files included", f"{built['VmHWM']:.2f} GB", "2 GB")
    row("opening it again", f"{again['seconds'] * 1e3:.0f} ms", "50 ms")
    row("store from the sequential file", f"{other['seconds']:.1f} s, {other['VmHWM']:.2f} GB", "90 s, 2 GB")
    row("its arrays and ids", "identical" if same else "DIFFERENT", "identical")
    row("first training batch, from the start of the process", f"{batch['done'] - batch['begin']:.1f} s", "5 s")
    row(f"MostPop, {popularity['events']:,} training events", f"{popularity['most']:.1f} s", "30 s")
    row("DecayPop", f"{popularity['decay']:.1f} s", "30 s")


def memory_of_rows(folder: pathlib.Path, goal: Size, rows: list[float]) -> None:
    """Peak memory of the build where users and items stay and only the rows grow."""
    first = 0.0
    for count in map(int, rows):
        path = generated(goal._replace(listens=count), folder / f"rows-{count}.parquet")
        built = run_child("store", path, folder / "cache")
        shutil.rmtree(folder / "cache")
        first = first or built["RssAnon"]
        growth = f"{built['RssAnon'] / first - 1:+.0%}"
        what = f"{built['RssAnon']:.3f} GB ({growth}); {built['VmHWM']:.2f} GB with mapped files"
        row(f"memory of the build of {count:,} rows, {built['seconds']:.0f} s", what, "within 15%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, help="folder of the files")
    parser.add_argument("--scale", type=float, default=1.0, help="share of 50m's users, items and listens")
    parser.add_argument(
        "--rows", type=float, nargs="*", default=[], help="also the memory of builds of so many listens"
    )
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "FILE", "CACHE"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        print(json.dumps(child(*flags.child)))
        return
    if flags.workdir is None:
        parser.error("--workdir is needed")
    flags.workdir.mkdir(parents=True, exist_ok=True)
    goal = synthetic_sizes.scaled("50m", flags.scale)
    print("| what | measured | bar |\n|---|---|---|", flush=True)
    full_size(flags.workdir, goal)
    memory_of_rows(flags.workdir, goal, flags.rows)


if __name__ == "__main__":
    main()

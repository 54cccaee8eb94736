"""Time and memory of prepare --input for logs larger than memory: generated parquet, a process of its own for each.

    python scripts/bench_import.py --workdir /tmp/import --rows 1e8 --text-rows 1e7

The rows are in the order of time, milliseconds, with 50 events a user and 100 an item; ids are spread over 63 bits, or
text with blanks and letters outside ASCII. Peak memory is the process's, Python, JAX and mapped files included; RssAnon
is the part that is not a file's. Nothing is left behind but with --keep.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from measure import peaks_of  # beside this script

ROOT = pathlib.Path(__file__).parent.parent
ROWS = 1 << 20  # of a row group
FIRST = 1_546_473_600_000  # 2019-01-03, milliseconds


def generate(path: pathlib.Path, rows: int, text: bool) -> None:
    """Writes a log in the memory of a row group; popularity of the items falls with their number."""
    users, items = max(rows // 50, 1), max(rows // 100, 1)
    rng = np.random.default_rng(0)
    writer = None
    for begin in range(0, rows, ROWS):
        count = min(ROWS, rows - begin)
        columns = {
            "user_id": _ids(rng.integers(0, users, count), "Zoë Müller", text),
            "item_id": _ids((items * rng.random(count) ** 3).astype(np.int64), "blå jeans, str.", text),
            "ts": pa.array(
                FIRST + (begin + np.arange(count)) * (31_536_000_000 // rows) + rng.integers(0, 5_000, count)
            ),
        }
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def _ids(numbers: np.ndarray, words: str, text: bool) -> pa.Array:
    if text:
        return pc.binary_join_element_wise(words, pa.array(numbers).cast(pa.string()), " ")
    return pa.array((numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(1)).astype(np.int64))


def measure(arguments: list[str]) -> dict[str, float]:
    """Seconds and peaks of memory in GB of prepare in a child."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    begin = time.perf_counter()
    words = [sys.executable, "-m", "recml_sasrec.prepare", *arguments]
    process = subprocess.Popen(words, env=environment, stdout=sys.stderr)
    peaks = peaks_of(process)
    if process.wait():
        sys.exit(process.returncode)
    return peaks | {"seconds": time.perf_counter() - begin}


def bench(folder: pathlib.Path, rows: int, text: bool, keep: bool) -> None:
    log, store = folder / f"log-{rows}{'-text' * text}.parquet", folder / "store"
    if not log.exists():
        generate(log, rows, text)
    shutil.rmtree(store, ignore_errors=True)
    found = measure(["--input", str(log), "--output", str(store)])
    what = "text with blanks and Unicode" if text else "64-bit integers"
    print(
        f"| {rows:,} rows, ids {what}, {log.stat().st_size / 1e9:.2f} GB | {found['seconds']:.0f} s | "
        f"{found['VmHWM']:.2f} GB | {found['RssAnon']:.2f} GB |",
        flush=True,
    )
    shutil.rmtree(store)
    if not keep:
        log.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder of the files")
    parser.add_argument("--rows", type=float, nargs="*", default=[1e8], help="rows with integer ids")
    parser.add_argument("--text-rows", type=float, nargs="*", default=[1e7], help="rows with ids of text")
    parser.add_argument("--keep", action="store_true", help="keep the generated logs")
    flags = parser.parse_args()
    flags.workdir.mkdir(parents=True, exist_ok=True)
    print("| log | prepare --input | peak memory (bar 3 GB) | of it anonymous |\n|---|---|---|---|", flush=True)
    for rows, text in [(int(r), False) for r in flags.rows] + [(int(r), True) for r in flags.text_rows]:
        bench(flags.workdir, rows, text, flags.keep)


if __name__ == "__main__":
    main()

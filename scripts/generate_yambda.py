"""Writes listens of Yambda's shape and size as one parquet file, for measurements.

    python scripts/generate_yambda.py --size 50m --output listens.parquet             # 46,467,212 listens
    python scripts/generate_yambda.py --size 5b --scale 0.01 --format sequential --output listens.parquet

Numbers of users, items and listens are exact, proportions are the published ones (recml_sasrec.data.synthetic_sizes).
The full 50m takes about a minute on one core, in 0.4 GB of memory.
"""

import argparse
import os
import sys
import time

from recml_sasrec.data import synthetic_sizes
from recml_sasrec.data.events import DataError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(synthetic_sizes.SIZES), default="50m")
    parser.add_argument("--scale", type=float, default=1.0, help="share of users, items and listens")
    parser.add_argument("--format", choices=("flat", "sequential"), default="flat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", required=True, help="the parquet file to write")
    flags = parser.parse_args()
    start = time.perf_counter()
    try:
        holds = synthetic_sizes.scaled(flags.size, flags.scale)
        density = synthetic_sizes.SIZES[flags.size].items / synthetic_sizes.SIZES["5b"].items
        synthetic_sizes.write(holds, flags.output, flags.format == "sequential", flags.seed, density)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - start
    print(
        f"{flags.output}: {holds.users:,} users, {holds.items:,} items, {holds.listens:,} listens, "
        f"{os.path.getsize(flags.output):,} bytes in {seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

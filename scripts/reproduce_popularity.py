"""MostPop on ml-100k and S3 Beauty beside the published values, as a markdown table.

    python scripts/reproduce_popularity.py --shared ../shared

Leave-last-one-out (the event before is the validation), counts over training events only, full ranking, ties by the
smaller item id. Nothing is random: the values must agree to six decimals, and the exit status is 1 where they don't.
"""

import argparse
import os
import pathlib
import sys
import tempfile
from typing import NamedTuple

from recml_sasrec.config import Config
from recml_sasrec.data.loader import open_data
from recml_sasrec.ranking.evaluation import evaluate_baselines


class Published(NamedTuple):
    """R@10 and NDCG@10, with a user's earlier items removed from its ranking or not."""

    data: str
    path: str  # below the shared folder's data/
    source: str
    filter_seen: bool
    recall: float
    ndcg: float


PUBLISHED = (
    Published("ml-100k", "ml-100k/ml-100k.inter", "table", True, 0.085896, 0.044885),
    Published("ml-100k", "ml-100k/ml-100k.inter", "table", False, 0.049841, 0.022409),
    Published("S3 Beauty", "s3rec-beauty/Beauty.txt", "lines", True, 0.011537, 0.005456),
    Published("S3 Beauty", "s3rec-beauty/Beauty.txt", "lines", False, 0.011447, 0.005347),
)


def shared_folder() -> pathlib.Path:
    """$RECML_SASREC_SHARED, or ``shared`` beside the repository."""
    beside = pathlib.Path(__file__).resolve().parents[2] / "shared"
    return pathlib.Path(os.environ.get("RECML_SASREC_SHARED") or beside)


def reproduce(published: Published, shared: pathlib.Path, cache: str) -> tuple[float, float]:
    """Our R@10 and NDCG@10 of the same protocol; stores go to the folder ``cache``."""
    config = Config()
    config.data.source, config.data.path = published.source, str(shared / "data" / published.path)
    config.data.cache = cache
    config.split.kind = "leave_last"
    config.evaluation.ks = (10,)
    config.evaluation.filter_seen = published.filter_seen
    metrics = evaluate_baselines(config, open_data(config), "test")["most_pop"]
    return metrics["recall@10"], metrics["ndcg@10"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=pathlib.Path, default=shared_folder(), help="folder that holds data/")
    shared = parser.parse_args().shared
    missing = [p.path for p in PUBLISHED if not (shared / "data" / p.path).is_file()]
    if missing:
        print(
            f"{shared / 'data' / missing[0]} is missing; give the folder that holds data/ as --shared", file=sys.stderr
        )
        return 2
    agree = True
    print("| data | seen items | R@10, published | R@10, ours | NDCG@10, published | NDCG@10, ours |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as cache:
        for row in PUBLISHED:
            recall, ndcg = reproduce(row, shared, cache)
            agree &= (round(recall, 6), round(ndcg, 6)) == (row.recall, row.ndcg)
            seen = "removed" if row.filter_seen else "kept"
            print(f"| {row.data} | {seen} | {row.recall:.6f} | {recall:.6f} | {row.ndcg:.6f} | {ndcg:.6f} |")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())

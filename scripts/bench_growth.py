"""Measures what growing a catalogue keeps and what it gains: 20 % more items added to a trained model.

    python scripts/bench_growth.py --config configs/movielens100k.py --input ../shared/data/ml-100k/ml-100k.inter \
        --workdir /tmp/growth --config.train.steps=600

The base is trained on a random 5/6 of the items, all events of the others removed; then the same log with all items is
trained on twice for as many steps, from the base (``init.from_run``) and from scratch. Printed are the largest
difference of a score of an old item for the old histories before any step, whether all moments of kept rows are equal,
NDCG@10 on the test split over all items, and how many of the first 10 the new items take.
"""

import argparse
import copy
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recml_sasrec import Recommender, command, grow, trainer
from recml_sasrec.checkpoint import Checkpoints
from recml_sasrec.config import Config, ConfigError
from recml_sasrec.config_file import load_config
from recml_sasrec.data.loader import open_data
from recml_sasrec.optim import moment_of
from recml_sasrec.preemption import StopRequest
from recml_sasrec.run import Run
from recml_sasrec.serving import served
from recml_sasrec.sharding import BY_ITEM

COLUMNS = ("user_id", "item_id", "timestamp")


def write_logs(config: Config, folder: pathlib.Path, seed: int) -> tuple[Config, Config]:
    """The configs of the base, with 5/6 of the items, and of all items."""
    store = open_data(config).store
    old = np.random.default_rng(seed).permutation(store.num_items) < store.num_items * 5 // 6
    users = np.repeat(np.arange(store.num_users), np.diff(store.offsets))
    configs = []
    for name, kept in (("base", old[store.items]), ("all", np.ones(store.num_events, bool))):
        columns = (users[kept], store.item_ids.take(pa.array(store.items[kept])), store.timestamps[kept])
        path = folder / f"{name}-{seed}.parquet"
        pq.write_table(pa.table(dict(zip(COLUMNS, columns, strict=True))), path)
        one = copy.deepcopy(config)
        one.data.source, one.data.path, one.data.min_played_ratio, one.train.seed = "table", str(path), 0, seed
        one.data.user_column, one.data.item_column, one.data.time_column = COLUMNS
        one.evaluation.ks, one.evaluation.best_metric = (10,), "ndcg@10"
        configs.append(one)
    return configs[0], configs[1]


def moments_equal(run: Run, state: Any, growth: grow.Growth) -> bool:
    """Whether each moment of a kept row, and of the backbone, is the base's."""
    base = Run(growth.base.config, open_data(growth.base.config))
    with Checkpoints(growth.base.folder, 1, "ndcg@10", reading=True) as checkpoints:
        old = checkpoints.restore(growth.base.step, base.abstract_state)
    before = {moment_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(old.opt_state)}
    here = np.flatnonzero(growth.source >= 0)
    for path, after in jax.tree_util.tree_leaves_with_path(state.opt_state):
        moment, parameter = moment_of(path)
        if not parameter:
            continue
        kept, now = np.asarray(before[moment, parameter]), np.asarray(after)
        if parameter[0] in BY_ITEM:
            kept, now = kept[growth.source[here]], now[here]
        if not np.array_equal(kept, now):
            return False
    return True


def before_any_step(config: Config, folder: pathlib.Path, users: int) -> dict[str, Any]:
    opened = grow.open_base(config, folder)
    assert opened is not None
    run = Run(config, open_data(config))
    growth = grow.plan(opened, run.data, config)
    state = grow.grown_state(run, growth)
    base, store = Recommender.load(opened.folder), run.data.store
    grown = Recommender(served(config, store.item_ids, run.layout, run.graphdef, state.params))
    old, largest, taken = set(opened.item_ids.to_pylist()), [0.0, 0.0], 0
    events = open_data(opened.config).store
    histories = [
        events.item_ids.take(pa.array(events.items[events.offsets[u] : events.offsets[u + 1]])).to_pylist()
        for u in range(min(users, events.num_users))
    ]
    for start in range(0, len(histories), 64):
        some = histories[start : start + 64]
        pairs = zip(base.recommend(some, k=store.num_items), grown.recommend(some, k=store.num_items), strict=True)
        for before, after in pairs:
            scores = dict(after)
            apart = [(abs(scores[item] - score), abs(score)) for item, score in before]
            largest[0] = max(largest[0], *(x for x, _ in apart))
            largest[1] = max(largest[1], *(x / max(score, 1.0) for x, score in apart))
            taken += sum(item not in old for item, _ in after[:10])
    return {
        "largest difference of a score": largest[0],
        "the same, over the score where that is above 1": largest[1],
        "moments equal": moments_equal(run, state, growth),
        "new items": 1 - len(old) / store.num_items,
        "new items in the first 10": taken / (10 * len(histories)),
        "no step": run.evaluate(state.params, "test", StopRequest())["ndcg@10"],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_config_flag(parser)
    parser.add_argument("--input", help="file of events, config.data.path of the config")
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder for the runs")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--users", type=int, default=500, help="whose scores are compared")

    def measure() -> None:
        flags, overrides = command.parse(parser, argv)
        for name in ("seeds", "users"):
            if getattr(flags, name) < 1:
                raise ConfigError(f"--{name} {getattr(flags, name)} must be at least 1")
        config = load_config(flags.config, [*overrides, *([f"data.path={flags.input}"] if flags.input else [])])
        flags.workdir.mkdir(parents=True, exist_ok=True)
        rows = []
        for seed in range(flags.seeds):
            base, scratch = write_logs(config, flags.workdir, seed)
            grown, folder = copy.deepcopy(scratch), flags.workdir / f"base-{seed}"
            grown.init.from_run = str(folder)
            trainer.train(base, folder)
            row = before_any_step(grown, flags.workdir / "none", flags.users)
            for name, one in (("grown", grown), ("scratch", scratch)):
                result = trainer.train(one, flags.workdir / f"{name}-{seed}")
                row |= {name: result["sasrec"]["ndcg@10"]}
            rows.append(row)
            print(json.dumps(row), flush=True)
        print("\n| | " + " | ".join(f"seed {seed}" for seed in range(flags.seeds)) + " |\n|---|" + "---|" * len(rows))
        for name in rows[0]:
            cells = (row[name] if isinstance(row[name], bool) else f"{row[name]:.4g}" for row in rows)
            print(f"| {name} | " + " | ".join(map(str, cells)) + " |")

    return command.run(measure)


if __name__ == "__main__":
    sys.exit(main())

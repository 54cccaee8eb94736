"""Reads the event log into its store: python -m recml_sasrec.prepare --config configs/yambda50m.py"""

import argparse
import sys
from collections.abc import Sequence

from recml_sasrec import command
from recml_sasrec.config_file import load_config


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recml_sasrec.prepare", description=__doc__)
    command.add_config_flag(parser)

    def prepare() -> None:
        flags, overrides = command.parse(parser, argv)
        config = load_config(flags.config, overrides)
        from recml_sasrec.data.loader import open_data

        data = open_data(config)
        store = data.store
        print(f"store: {store.directory}")
        print(f"{store.num_users:,} users, {store.num_items:,} items, {len(store.items):,} events")
        print(data.split.description)
        print(
            f"{data.steps_per_epoch(config):.1f} steps an epoch of {config.train.batch_size} x {config.data.length}; "
            f"{data.num_queries('validation'):,} validation and {data.num_queries('test'):,} test users"
        )

    return command.run(prepare)


if __name__ == "__main__":
    sys.exit(main())

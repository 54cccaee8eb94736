"""Reads the event log into its store and describes it: python -m recml_sasrec.prepare --config configs/yambda50m.py"""

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
        from recml_sasrec.data.describe import describe
        from recml_sasrec.data.loader import open_data

        data = open_data(config)
        print(f"store: {data.store.directory}")
        print(describe(data.store))
        print(data.split.description)
        print(
            f"{data.steps_per_epoch(config):.1f} steps an epoch of {config.train.batch_size} x {config.data.length}; "
            f"{data.num_queries('validation'):,} validation and {data.num_queries('test'):,} test users"
        )

    return command.run(prepare)


if __name__ == "__main__":
    sys.exit(main())

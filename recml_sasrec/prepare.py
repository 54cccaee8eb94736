"""Reads an event log into its store and describes it.

Your own log, with what it suggests for training: python -m recml_sasrec.prepare --input log.parquet --output data/shop
The data of a config, ahead of training: python -m recml_sasrec.prepare --config configs/yambda50m.py
"""

import argparse
import sys
from collections.abc import Sequence

from recml_sasrec import command
from recml_sasrec.config import ConfigError
from recml_sasrec.config_file import load_config


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recml_sasrec.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_config_flag(parser, required=False)
    group = parser.add_argument_group("your own log", "columns and units that are not named are recognised")
    group.add_argument("--input", metavar="FILE", help="parquet, CSV, TSV, .inter, gzip, or `user item item ...` lines")
    group.add_argument("--output", metavar="FOLDER", help="the store to write")
    group.add_argument("--user", default="", metavar="NAME", help="column of the users")
    group.add_argument("--item", default="", metavar="NAME", help="column of the items")
    group.add_argument("--time", default="", metavar="NAME", help="column of the times; none: the rows are in order")
    group.add_argument("--time-unit", default="", choices=["s", "ms", "us", "ns"], help="of times that are numbers")
    group.add_argument("--drop-nulls", action="store_true", help="leave out rows with an empty value")
    group.add_argument("--append", action="store_true", help="add the file's events to the store at --output")
    group.add_argument("--replace", action="store_true", help="write over another store at --output")

    def prepare() -> None:
        flags, overrides = command.parse(parser, argv)
        _check(flags, overrides)
        if flags.input:
            from recml_sasrec.data.importing import Asked, import_log

            asked = Asked(flags.user, flags.item, flags.time, flags.time_unit, flags.drop_nulls)
            print(import_log(flags.input, flags.output, asked, flags.append, flags.replace))
            return
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


def _check(flags: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Refuses flags that do not go together."""
    own = ("output", "user", "item", "time", "time_unit", "drop_nulls", "append", "replace")
    given = [f"--{name.replace('_', '-')}" for name in own if getattr(flags, name)]
    if flags.input and (flags.config or overrides):
        raise ConfigError("--input is for your own log and --config for the data of a config; give one of them")
    if flags.input and not flags.output:
        raise ConfigError("--input needs --output FOLDER, where the store is written")
    if not flags.input and given:
        raise ConfigError(f"{given[0]} goes with --input FILE, the log to read")
    if not flags.input and not flags.config:
        raise ConfigError("give --input FILE --output FOLDER for your own log, or --config FILE; see --help")
    if flags.append and flags.replace:
        raise ConfigError("--append adds to a store and --replace writes over it; give one of them")


if __name__ == "__main__":
    sys.exit(main())

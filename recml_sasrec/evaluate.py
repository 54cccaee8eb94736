"""Evaluates a trained run by exact full ranking: python -m recml_sasrec.evaluate --workdir runs/quickstart"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Literal

from recml_sasrec import command
from recml_sasrec.config import ConfigError, validate
from recml_sasrec.config_file import set_field


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recml_sasrec.evaluate", description=__doc__)
    parser.add_argument("--workdir", required=True, help="folder of the run")
    parser.add_argument("--split", choices=("test", "validation"), default="test")
    parser.add_argument("--checkpoint", default="best", help="best, latest or a step")
    parser.epilog = (
        "Fields such as --config.evaluation.filter_seen=true or --config.data.path=FILE replace those of the run."
    )

    def evaluate() -> None:
        flags, overrides = command.parse(parser, argv)
        evaluate_run(pathlib.Path(flags.workdir), flags.split, flags.checkpoint, overrides)

    return command.run(evaluate)


def evaluate_run(
    workdir: pathlib.Path, which: Literal["validation", "test"], checkpoint: str, overrides: Sequence[str]
) -> None:
    from recml_sasrec import run_folder
    from recml_sasrec.checkpoint import Checkpoints
    from recml_sasrec.data.loader import open_data
    from recml_sasrec.preemption import StopRequest
    from recml_sasrec.run import Run

    config, vocabulary = run_folder.read(workdir)
    for override in overrides:
        name, _, value = override.partition("=")
        if not name.startswith(("evaluation.", "data.path", "data.cache")):
            raise ConfigError(
                f"config.{name} can't change after training; only evaluation.*, data.path and data.cache can"
            )
        set_field(config, name, value)
    validate(config)
    data = open_data(config)
    if data.store.vocabulary != vocabulary:
        raise ConfigError(
            f"{workdir} was trained on other items (vocabulary {vocabulary}) than the data has now "
            f"({data.store.vocabulary}); name the file it was trained on with --config.data.path=FILE"
        )
    run = Run(config, data)
    with (
        StopRequest() as stop,
        Checkpoints(workdir, config.checkpoint.keep, config.evaluation.best_metric) as checkpoints,
    ):
        step = checkpoints.find(checkpoint)
        run.final_evaluation(workdir, checkpoints, stop, which, step)


if __name__ == "__main__":
    sys.exit(main())

"""Evaluates a trained run by exact full ranking: python -m recml_sasrec.evaluate --workdir runs/quickstart"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Literal

from recml_sasrec import command
from recml_sasrec.config import ConfigError, MeshConfig
from recml_sasrec.config_checks import validate
from recml_sasrec.config_file import set_field


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recml_sasrec.evaluate", description=__doc__)
    parser.add_argument("--workdir", required=True, help="folder of the run")
    parser.add_argument("--split", choices=("test", "validation"), default="test")
    parser.add_argument("--checkpoint", default="best", help="best, latest or a step")
    parser.add_argument(
        "--output", help="JSON file to write; by default the run's own, unless other terms were asked for"
    )
    command.add_host_flags(parser)
    parser.epilog = (
        "Fields such as --config.evaluation.filter_seen=true or --config.data.path=FILE replace those of the run."
    )

    def evaluate() -> None:
        flags, overrides = command.parse(parser, argv)
        from recml_sasrec import hosts

        hosts.initialise(flags.coordinator, flags.processes, flags.process)
        workdir = pathlib.Path(flags.workdir)
        output = pathlib.Path(flags.output) if flags.output else None
        if output is None and not overrides and flags.checkpoint == "best":
            output = workdir / ("evaluation.json" if flags.split == "test" else "evaluation_validation.json")
        evaluate_run(workdir, flags.split, flags.checkpoint, overrides, output)
        if hosts.is_first():
            print(f"\nwritten to {output}" if output else "\nnot written: name a file with --output")

    return command.run(evaluate)


def evaluate_run(
    workdir: pathlib.Path,
    which: Literal["validation", "test"],
    checkpoint: str,
    overrides: Sequence[str],
    output: pathlib.Path | None,
) -> None:
    from recml_sasrec import hosts, run_folder
    from recml_sasrec.checkpoint import Checkpoints
    from recml_sasrec.preemption import StopRequest
    from recml_sasrec.run import Run

    config, marks = run_folder.read(workdir)
    config.mesh = MeshConfig()  # the devices here need not be those it was trained on
    for override in overrides:
        name, _, value = override.partition("=")
        if not name.startswith(("evaluation.", "mesh.", "data.path", "data.cache")):
            raise ConfigError(
                f"config.{name} can't change after training; only evaluation.*, mesh.*, data.path and data.cache can"
            )
        set_field(config, name, value)
    validate(config)
    data = run_folder.open_together(config, run_folder.kept_ids(workdir, config))
    difference = run_folder.data_difference(marks, data.store)
    if difference and difference.startswith("items"):
        raise ConfigError(
            f"{workdir} was trained on other {difference}; name the file it was trained on with --config.data.path=FILE"
        )
    if difference and hosts.is_first():
        print(f"note: {workdir} was trained on other {difference}")
    run = Run(config, data)
    with (
        StopRequest() as stop,
        Checkpoints(workdir, config.checkpoint.keep, config.evaluation.best_metric, reading=True) as checkpoints,
        hosts.watched(),
    ):
        step = checkpoints.find(checkpoint)
        run.final_evaluation(output, checkpoints, stop, which, step)


if __name__ == "__main__":
    sys.exit(main())

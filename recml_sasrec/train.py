"""Trains a SASRec: python -m recml_sasrec.train --config configs/quickstart.py --workdir runs/quickstart"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from recml_sasrec import command
from recml_sasrec.config_file import load_config


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recml_sasrec.train", description=__doc__)
    command.add_config_flag(parser)
    command.add_host_flags(parser)
    parser.add_argument(
        "--workdir", required=True, help="folder of the run; one that holds a run of this config resumes it"
    )

    def train() -> None:
        flags, overrides = command.parse(parser, argv)
        config = load_config(flags.config, overrides)
        from recml_sasrec import hosts, trainer

        hosts.initialise(flags.coordinator, flags.processes, flags.process)
        trainer.train(config, flags.workdir)
        if hosts.is_first():
            folder = shlex.quote(flags.workdir)
            print(
                f'\nrecommend: python -m recml_sasrec.recommend --workdir {folder} --history "ID ID ID"\n'
                f"export: python -m recml_sasrec.export --workdir {folder} --output FOLDER"
            )

    return command.run(train)


if __name__ == "__main__":
    sys.exit(main())

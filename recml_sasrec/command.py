"""What the command lines share: flags, overrides, logging and exit codes.

Exit codes: 0 done · 2 bad input, config or environment, said in one sentence · 3 the loss stopped being finite ·
75 interrupted by SIGTERM or Ctrl-C with the state saved: the same command goes on.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from recml_sasrec.config import Config, ConfigError
from recml_sasrec.config_file import load_config

EXIT_USER_ERROR, EXIT_DIVERGED = 2, 3
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Flags, and the overrides ``--config.section.field=value`` as ``section.field=value``.

    Raises:
        ConfigError: an argument is neither.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    prefix = "--config."
    overrides, rest, words = [], [], iter(argv)
    for word in words:
        if not word.startswith(prefix):
            rest.append(word)
        elif "=" in word:
            overrides.append(word.removeprefix(prefix))
        else:
            overrides.append(f"{word.removeprefix(prefix)}={next(words, '')}")
    return parser.parse_args(rest), overrides


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="Python file with get_config(), such as configs/quickstart.py")
    parser.epilog = "Any field of the config is a flag too: --config.optimizer.learning_rate=3e-4"


def config_of(flags: argparse.Namespace, overrides: Sequence[str]) -> Config:
    return load_config(flags.config, overrides)


def run(main: Callable[[], None]) -> int:
    """Calls ``main`` and turns what it raises into a sentence on stderr and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("recml_sasrec").setLevel(logging.INFO)
    # imported here so that a mistyped flag is answered before JAX is loaded
    from recml_sasrec.checkpoint import CheckpointError
    from recml_sasrec.data.events import DataError
    from recml_sasrec.memory import MemoryLimitError
    from recml_sasrec.meter import Diverged
    from recml_sasrec.preemption import Interrupted

    try:
        main()
    except Interrupted as stop:
        return _say(str(stop), EXIT_INTERRUPTED)
    except Diverged as error:
        return _say(f"error: {error}", EXIT_DIVERGED)
    except (ConfigError, DataError, MemoryLimitError, CheckpointError) as error:
        return _say(f"error: {error}", EXIT_USER_ERROR)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _say(f"error: {error.strerror or error}{where}; what was complete on disk is intact", EXIT_USER_ERROR)
    return 0


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code

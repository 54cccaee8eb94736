"""What the command lines share: flags, overrides, logging and exit codes.

Exit codes: 0 done · 2 bad input, config or environment, said in one sentence · 3 the loss stopped being finite ·
4 another process of the run was lost: the same command goes on ·
75 interrupted by SIGTERM or Ctrl-C with the state saved: the same command goes on.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from recml_sasrec import files
from recml_sasrec.config import ConfigError
from recml_sasrec.config_checks import nearest
from recml_sasrec.lifeline import EXIT_LOST

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
        elif (value := next(words, None)) is None:
            raise ConfigError(f"{word} has no value; write {word}=VALUE")
        else:
            overrides.append(f"{word.removeprefix(prefix)}={value}")
    known = [flag for action in parser._actions for flag in action.option_strings]
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in known:
            near = nearest(flag, known)
            raise ConfigError(f"unknown flag {flag}; " + (f"did you mean {near}?" if near else "see --help"))
    parser.error = _raise  # type: ignore[method-assign]
    return parser.parse_args(rest), overrides


def _raise(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see --help")


def add_config_flag(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument(
        "--config", required=required, help="Python file with get_config(), such as configs/quickstart.py"
    )
    parser.epilog = "Any field of the config is a flag too: --config.optimizer.learning_rate=3e-4"


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes", "TPU slices and Slurm steps need none of these")
    group.add_argument("--coordinator", default="", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--processes", type=int, default=0, help="how many there are")
    group.add_argument("--process", type=int, default=-1, help="the number of this one, from 0")


def run(main: Callable[[], None]) -> int:
    """Calls ``main`` and turns what it raises into a sentence on stderr and an exit code."""
    signal.signal(signal.SIGINT, _quit)
    signal.signal(signal.SIGTERM, _quit)
    # a thread that fails is told by whoever waits for it; alone it deserves a line, not a traceback
    threading.excepthook = lambda thread: print(f"warning: {thread.exc_value}", file=sys.stderr)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("recml_sasrec").setLevel(logging.INFO)
    # imported here so that a mistyped flag is answered before JAX is loaded
    from recml_sasrec import hosts
    from recml_sasrec.checkpoint import CheckpointError
    from recml_sasrec.data.events import DataError
    from recml_sasrec.memory import MemoryLimitError
    from recml_sasrec.meter import Diverged
    from recml_sasrec.preemption import Interrupted

    code = 0
    try:
        main()
    except Interrupted as stop:
        code = _say(str(stop), EXIT_INTERRUPTED)
    except Diverged as error:
        code = _say(f"error: {error}", EXIT_DIVERGED)
    except hosts.HostLost as error:
        code = _say(f"error: {error}", EXIT_LOST)
    except (ConfigError, DataError, MemoryLimitError, CheckpointError) as error:
        code = _say(f"error: {error}", EXIT_USER_ERROR)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        code = _say(f"error: {error.strerror or error}{where}; what was complete on disk is intact", EXIT_USER_ERROR)
    except Exception:
        if hosts.count() == 1:
            raise
        traceback.print_exc()
        code = 1
    return hosts.leave(code, wait=code not in (1, EXIT_LOST))


def _quit(number: int, frame: FrameType | None) -> None:
    """Leaves at once: outside the training loop and evaluation, which poll, there is nothing to save."""
    del frame
    name = signal.Signals(number).name
    print(f"{name}: stopped; what was complete on disk is intact and the same command goes on", file=sys.stderr)
    sys.stdout.flush()
    files.remove_unfinished()
    os._exit(EXIT_INTERRUPTED)  # an exception could land in, and be lost to, any callback of a library


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    sys.unraisablehook = lambda _: None  # writers that could not write say so again when the process ends
    return code

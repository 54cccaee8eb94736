"""What the reproduction scripts share: rows kept in a folder, so that a killed script goes on, and where tables go."""

import argparse
import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

from recml_sasrec.config import ConfigError
from recml_sasrec.config_checks import nearest
from recml_sasrec.files import write_atomically

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"


def adopt(workdir: pathlib.Path, settings: dict[str, Any], document: pathlib.Path | None = None) -> None:
    """Makes the folder, or checks that the rows it holds were made with the same settings.

    Raises:
        ConfigError: they were not, or the table's ``document`` has no folder to lie in.
    """
    if document is not None and not document.absolute().parent.is_dir():
        raise ConfigError(f"--write {document} can't be written: {document.absolute().parent} is not a folder")
    path = workdir / "settings.json"
    wanted = json.loads(json.dumps(settings))
    if not path.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(wanted, indent=2) + "\n")
        return
    try:
        saved = dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ConfigError(f"{path} is damaged; use another --workdir") from None
    for name in wanted | saved:
        if saved.get(name) != wanted.get(name):
            raise ConfigError(
                f"{workdir} holds rows made with {name}={saved.get(name)}, but this call has {wanted.get(name)}; "
                "use another --workdir or the same value"
            )


def one_of(*names: str) -> Callable[[str], str]:
    """A type for argparse: one of the names; another word gets the nearest."""

    def check(word: str) -> str:
        if word in names:
            return word
        near = nearest(word, names)
        raise argparse.ArgumentTypeError(
            f"{word!r} is none of {', '.join(names)}" + (f"; did you mean {near}?" if near else "")
        )

    return check


def row_path(workdir: pathlib.Path, name: str) -> pathlib.Path:
    return workdir / "rows" / f"{name}.json"


def kept_row(workdir: pathlib.Path, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``make()`` returns; what an earlier call made where it is there, for it is written only when complete."""
    path = row_path(workdir, name)
    if path.exists():
        try:
            row = dict(json.loads(path.read_text()))
        except (ValueError, TypeError):
            print(f"{name}: {path} is damaged, again ...", flush=True)
        else:
            print(f"{name}: done before", flush=True)
            return row
    print(f"{name} ...", flush=True)
    row = make()
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(row, indent=2) + "\n")
    return row


def leave_with_parent() -> None:
    """Asks this process to stop, as Ctrl-C would, when its parent has ended or closed the pipe that stdin is."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def write_table(workdir: pathlib.Path, text: str, result: dict[str, Any], name: str = "table") -> None:
    """NAME.md and NAME.json, and the table on the console."""
    write_atomically(workdir / f"{name}.json", json.dumps(result, indent=2) + "\n")
    write_atomically(workdir / f"{name}.md", text)
    print(f"\n{text}\nwritten to {workdir / name}.md and {name}.json", flush=True)


def put_between_markers(path: pathlib.Path, name: str, text: str) -> None:
    """Replaces what is between the document's markers of that name; appends it with markers where there are none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = path.read_text() if path.exists() else "# Reproduction\n"
    if begin not in old or end not in old.partition(begin)[2]:
        old = f"{old.rstrip()}\n\n{begin}\n{end}\n"
    before, _, rest = old.partition(begin)
    write_atomically(path, f"{before}{begin}\n{text.strip()}\n{end}{rest.partition(end)[2]}")


def markdown_row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"

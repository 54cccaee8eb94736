"""Recommends items by raw ids: python -m recml_sasrec.recommend --workdir runs/quickstart --history "12 7 345"

One history prints one JSON object, {"history": [...], "unknown": 0, "items": [{"item": ..., "score": ...}, ...]}.
A file (--input) or users of the run's data (--users) give one a line with "user" in place of "history", on stdout or in
--output. A .parquet output has columns user, unknown, items and scores (lists). Lists "allow" and "block" of a user in
the file hold for that user, --allow and --block for all.
"""

import argparse
import contextlib
import json
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from recml_sasrec import command
from recml_sasrec.config import ConfigError

if TYPE_CHECKING:
    from recml_sasrec.data.histories import Chunk
    from recml_sasrec.recommender import Recommender

log = logging.getLogger("recml_sasrec")
SUFFIXES = (".parquet", ".jsonl")
Write = Callable[[list, Iterable[int], list], None]  # users, unknown ids of each, lists of each


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recml_sasrec.recommend",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--workdir", required=True, help="folder of the run, an exported folder, or hf://user/name[@revision]"
    )
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--history", help='raw item ids, oldest first: "id id id", or a JSON list where ids have spaces')
    who.add_argument(
        "--input",
        help='.parquet with columns user and history, or .jsonl of {"user":.., "history":[..]}; allow and block too',
    )
    who.add_argument(
        "--users", help="of the run's data: test, validation (with the histories of that evaluation), all, or ids"
    )
    parser.add_argument("--output", help=".parquet or .jsonl file to write; by default JSON lines are printed")
    parser.add_argument("--k", type=int, default=10, help="items of a list (default 10)")
    parser.add_argument("--checkpoint", default="best", help="best, latest or a step")
    parser.add_argument("--filter-seen", action="store_true", help="never recommend an item of the history")
    parser.add_argument("--allow", metavar="FILE", help="recommend only these items: one id a line")
    parser.add_argument("--block", metavar="FILE", help="never recommend these items: one id a line")
    parser.add_argument(
        "--all-items", action="store_true", help="items without a training event too, where the run ranks only others"
    )
    parser.epilog = "With --users, --config.data.path=FILE and --config.data.cache=FOLDER replace those of the run."
    # stdout is for the recommendations
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)

    def recommend() -> None:
        flags, overrides = command.parse(parser, argv)
        _check(flags, overrides)
        options: dict[str, Any] = {"k": flags.k, "filter_seen": flags.filter_seen}
        allow, block = _read_ids(flags.allow, "--allow"), _read_ids(flags.block, "--block")
        history = [] if flags.history is None else _parse_ids(flags.history, "--history")
        from recml_sasrec.recommender import Recommender

        chunks = _chunks(flags, overrides) if flags.history is None else None
        recommender = Recommender.load(flags.workdir, flags.checkpoint)
        if flags.all_items:
            recommender.candidates = None
        recommender.restrict(allow, block)
        if chunks is None:
            items = recommender.recommend([history], **options)[0]
            print(_json({"history": history, "unknown": int(recommender.unknown[0]), "items": _named(items)}))
        else:
            _recommend_all(recommender, chunks, flags.output, options)

    return command.run(recommend)


def _check(flags: argparse.Namespace, overrides: Sequence[str]) -> None:
    """What can be known to be wrong before anything is loaded."""
    if flags.history is not None and flags.output:
        raise ConfigError("--history prints its one list; give --output only with --input or --users")
    for flag, path in (("--input", flags.input), ("--output", flags.output)):
        if path and pathlib.Path(path).suffix not in SUFFIXES:
            raise ConfigError(f"{flag} {path} must end in {' or '.join(SUFFIXES)}; name the file accordingly")
    if flags.output and not pathlib.Path(flags.output).absolute().parent.is_dir():
        raise ConfigError(f"the folder of --output {flags.output} does not exist; make it first")
    if flags.output and pathlib.Path(flags.output).is_dir():
        raise ConfigError(f"--output {flags.output} is a folder; name a file")
    if flags.input and flags.output and pathlib.Path(flags.input).resolve() == pathlib.Path(flags.output).resolve():
        raise ConfigError(f"--output {flags.output} is the --input too and would replace it; name another file")
    for override in overrides:
        if not flags.users or not override.startswith(("data.path=", "data.cache=")):
            name = override.partition("=")[0]
            raise ConfigError(f"config.{name} can't be given here; only data.path and data.cache can, with --users")


def _parse_ids(text: str, flag: str) -> list:
    """Ids separated by blanks, or a JSON list of them."""
    if not text.lstrip().startswith("["):
        return text.split()
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} starts with [ but is no JSON list ({error}); quote ids of text inside it") from None


def _read_ids(path: str | None, flag: str) -> list[str] | None:
    """One id a line."""
    if path is None:
        return None
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8-sig").split("\n")  # ids may hold Unicode's other breaks
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path} is not UTF-8 text; write one id a line as UTF-8") from None
    return [line for line in lines if line.strip()]


def _chunks(flags: argparse.Namespace, overrides: Sequence[str]) -> "Iterator[Chunk]":
    from recml_sasrec import run_folder
    from recml_sasrec.config_file import set_field
    from recml_sasrec.data import histories
    from recml_sasrec.data.loader import open_data

    if flags.input:
        return histories.read_histories(pathlib.Path(flags.input))
    workdir = pathlib.Path(flags.workdir)
    config, marks = run_folder.read(workdir)
    for override in overrides:
        name, _, value = override.partition("=")
        set_field(config, name, value)
    data = open_data(config, run_folder.kept_ids(workdir, config))
    difference = run_folder.data_difference(marks, data.store)
    if difference:
        log.warning("note: %s was trained on other %s", workdir, difference)
    named = flags.users in ("test", "validation", "all")
    return histories.store_histories(data, flags.users if named else _parse_ids(flags.users, "--users"))


def _recommend_all(
    recommender: "Recommender", chunks: "Iterator[Chunk]", output: str | None, options: dict[str, Any]
) -> None:
    logging.getLogger("recml_sasrec.recommender").setLevel(logging.ERROR)  # one line at the end instead
    start, users, skipped, without, unlisted = time.perf_counter(), 0, 0, 0, 0
    path = pathlib.Path(output) if output else None
    with _writer(path, recommender) as write:
        for names, histories, allow, block in chunks:
            lists = recommender.recommend(histories, allow=allow, block=block, **options)
            write(names, recommender.unknown.tolist(), lists)
            users += len(names)
            unlisted += recommender.unknown_listed
            skipped += int(recommender.unknown.sum())
            without += recommender.without_history
    log.info(
        "%d lists in %.1f s; skipped %d unknown ids%s; %d histories have no known item and get an empty list",
        users, time.perf_counter() - start, skipped,
        f" and {unlisted} of the users' allow and block lists" if unlisted else "", without,
    )  # fmt: skip


@contextlib.contextmanager
def _writer(path: pathlib.Path | None, recommender: "Recommender") -> Iterator[Write]:
    """Writes to a temporary file that becomes ``path`` when all is written; to stdout without a path."""
    from recml_sasrec.files import replaced

    def lines_to(file) -> Write:
        def write(users, unknown, lists):
            for user, count, items in zip(users, unknown, lists, strict=True):
                file.write(_json({"user": user, "unknown": count, "items": _named(items)}) + "\n")

        return write

    if path is None:
        yield lines_to(sys.stdout)
        return
    with replaced(path) as temporary:
        if path.suffix == ".jsonl":
            with temporary.open("w", encoding="utf-8") as file:
                yield lines_to(file)
        else:
            with _parquet_writer(temporary, recommender) as write:
                yield write


@contextlib.contextmanager
def _parquet_writer(path: pathlib.Path, recommender: "Recommender") -> Iterator[Write]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from recml_sasrec.data.events import DataError

    columns = {"unknown": pa.int64(), "items": pa.list_(recommender.item_ids.type), "scores": pa.list_(pa.float32())}

    def table(users: list, unknown: Iterable[int], lists: list) -> pa.Table:
        pairs = [list(zip(*items, strict=True)) or [(), ()] for items in lists]
        try:
            user = pa.array(users, kind)
        except (pa.ArrowException, OverflowError):
            raise DataError(
                "the users are not all integers (int64) or all text, which a column of .parquet must be; write "
                "a .jsonl file"
            ) from None
        arrays = [pa.array([pair[i] for pair in pairs], columns[name]) for i, name in enumerate(("items", "scores"))]
        return pa.table([user, pa.array(unknown, pa.int64()), *arrays], schema=pa.schema({"user": kind, **columns}))

    kind, writer = None, None
    with contextlib.ExitStack() as stack:

        def write(users, unknown, lists) -> None:
            nonlocal kind, writer
            if writer is None:
                kind = pa.int64() if users and isinstance(users[0], int) else pa.large_string()
                schema = pa.schema({"user": kind, **columns})
                writer = stack.enter_context(pq.ParquetWriter(path, schema))
            writer.write_table(table(users, unknown, lists))

        yield write
        if writer is None:
            write([], [], [])


def _named(items: list) -> list[dict[str, Any]]:
    return [{"item": item, "score": score} for item, score in items]


def _json(value: dict) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main())

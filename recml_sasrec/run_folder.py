"""A run's folder: who may write to it, and whether it belongs to this config and these items.

config.json  metrics.jsonl  evaluation.json  item_ids.arrow  grown.json  trained_items.npy  checkpoints/
TensorBoard events
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from recml_sasrec import config as configs
from recml_sasrec import config_file, hosts
from recml_sasrec.config import Config, ConfigError
from recml_sasrec.data.arrays import read_ids
from recml_sasrec.data.catalogue import content_mark
from recml_sasrec.data.loader import Data, open_data
from recml_sasrec.data.store import Store
from recml_sasrec.data.vocabulary import fingerprint
from recml_sasrec.files import replaced, write_atomically

log = logging.getLogger("recml_sasrec")

# what may differ between the run that made a folder and one that goes on in it: nothing that the parameters depend on
CHANGEABLE = (
    "train.steps",
    "train.log_every",
    "checkpoint.",
    "evaluation.",
    "mesh.",
    "data.cache",
    "data.path",  # the events and items themselves are compared
    "data.items_path",
)


def open_together(config: Config, kept_ids: pa.Array | None = None) -> Data:
    """The data of a configuration in all processes of a run, after checking that they have the same of both.

    Args:
        kept_ids: raw ids of items that join the catalogue, see ``kept_ids``.

    Raises:
        ConfigError, DataError: they don't, or whatever is wrong with the source or the split.
    """
    names = [
        name
        for name in configs.field_names(config)
        if not name.startswith(("data.path", "data.items_path", "data.cache"))
    ]
    hosts.check_same({f"config.{name}": configs.get_field(config, name) for name in names})
    data = hosts.together(lambda: open_data(config, kept_ids), waiting_for="it reads the data")
    if hosts.count() > 1:
        marks = data_marks(data.store)
        same = {"the catalogue of items": marks["vocabulary"], "the log of events": marks["events"]}
        if data.content is not None:
            same["config.data.items_path's content"] = content_mark(data.content)
        hosts.check_same(same)
    return data


@contextlib.contextmanager
def claimed(workdir: pathlib.Path) -> Iterator[None]:
    """Holds the folder, made where it lacks, against a second trainer; one that stays empty is removed again.

    Of several processes of a run the first one holds it for all.

    Raises:
        ConfigError: it is not a folder, another run trains in it, or not all processes see it.
    """
    with contextlib.ExitStack() as stack:
        hosts.together(lambda: stack.enter_context(_locked(workdir)) if hosts.is_first() else None)
        hosts.together(lambda: _check_shared(workdir))
        yield


def _check_shared(workdir: pathlib.Path) -> None:
    if not (workdir / ".lock").exists():
        raise ConfigError(
            f"--workdir {workdir} is not the folder that process 0 has by that name; name one on a file system that "
            "all hosts share"
        )


@contextlib.contextmanager
def _locked(workdir: pathlib.Path) -> Iterator[None]:
    new = not workdir.exists()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with (workdir / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process trains in {workdir}; wait for it or use another --workdir"
                ) from None
            yield
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"--workdir {workdir} is a file; name a folder") from None
    finally:
        if new and not (workdir / "config.json").exists():
            (workdir / ".lock").unlink(missing_ok=True)
            for folder in (workdir / "checkpoints", workdir):
                with contextlib.suppress(OSError):  # not empty, so not ours to remove
                    folder.rmdir()


def check(workdir: pathlib.Path, config: Config, store: Store) -> None:
    """Checks that a folder is free, or holds a run of the same config, items and events.

    Raises:
        ConfigError: it holds another run.
    """
    # before its first checkpoint a run has nothing that another config could spoil
    if not has_checkpoint(workdir):
        return
    saved, marks = read(workdir)
    name = configs.first_difference(saved, config, but=CHANGEABLE)
    if name:
        raise ConfigError(
            f"{workdir} holds a run with config.{name}={configs.get_field(saved, name)}, but this one has "
            f"{configs.get_field(config, name)}; use another --workdir or the same value"
        )
    for name in configs.field_names(config):
        before, now = configs.get_field(saved, name), configs.get_field(config, name)
        if before != now and not name.startswith(("data.", "mesh.")):
            log.info("going on with config.%s=%s, so far %s", name, now, before)
    difference = data_difference(marks, store)
    if difference:
        raise ConfigError(f"{workdir} holds a run on other {difference}; use another --workdir or the same data")


def has_checkpoint(workdir: pathlib.Path) -> bool:
    """Whether a folder holds a complete checkpoint."""
    folder = workdir / "checkpoints"
    return folder.is_dir() and any(path.name.isdecimal() for path in folder.iterdir())


def kept_ids(workdir: pathlib.Path, config: Config) -> pa.Array | None:
    """Raw ids of the items of a run that its data may lack; None where it has none (``config.init.vanished``)."""
    if not config.init.from_run or config.init.vanished != "keep":
        return None
    return read_item_ids(workdir, read(workdir)[1])


def adopt(workdir: pathlib.Path, config: Config, store: Store) -> None:
    """Saves the config, what the data was, and the item ids."""
    temporary = workdir / ".item_ids.arrow.tmp"
    shutil.copyfile(pathlib.Path(store.directory, "item_ids.arrow"), temporary)
    temporary.replace(workdir / "item_ids.arrow")
    tree = {**data_marks(store), **json.loads(config_file.to_json(config))}
    write_atomically(workdir / "config.json", json.dumps(tree, indent=2) + "\n")


def data_marks(store: Store) -> dict[str, str]:
    """Fingerprints of the item ids and of the events: all offsets, and up to 2^20 events evenly spaced."""
    step = -(-store.num_events // 2**20)
    digest = hashlib.blake2b(digest_size=16)
    for array in (store.offsets, store.items[::step], store.timestamps[::step]):
        digest.update(np.ascontiguousarray(array).data)
    return {"vocabulary": store.vocabulary, "events": digest.hexdigest()}


def data_difference(marks: dict[str, str], store: Store) -> str | None:
    """In what the data differs from that with these marks: ``items``, ``events`` or nothing."""
    if marks["vocabulary"] != store.vocabulary:
        return f"items than this data has ({store.num_items})"
    return None if marks == data_marks(store) else f"events than this data has ({store.num_events})"


def read(workdir: pathlib.Path) -> tuple[Config, dict[str, str]]:
    """The config of a run and the marks of its data.

    Raises:
        ConfigError: the folder holds no run.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{workdir} holds no run (no config.json); train one there or name another --workdir")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if "encoder_sha256" in tree:
            raise ConfigError(f"{workdir} is an exported model, not a run; name the folder of the run")
        marks = {name: str(tree.pop(name)) for name in ("vocabulary", "events")}
    except ConfigError:
        raise
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ConfigError(f"{path} is damaged; restore it from a checkpoint's metadata or train again") from None
    return config_file.from_json(json.dumps(tree)), marks


def read_item_ids(workdir: pathlib.Path, marks: dict[str, str]) -> pa.Array:
    """The raw item ids by table row, int64 or large_string, checked against the marks of the run's data.

    Raises:
        ConfigError: they are missing, damaged or those of another run.
    """
    path = workdir / "item_ids.arrow"
    remedy = "copy it from the run's own folder, or start the run's training command again, which writes it"
    try:
        ids = read_ids(str(path))
        ids.validate(full=True)  # offsets of text may lead outside the file
    except (OSError, KeyError, pa.ArrowException, MemoryError):
        raise ConfigError(f"{path}, the raw ids of the run's items, is missing or damaged; {remedy}") from None
    if fingerprint(ids) != marks["vocabulary"]:
        raise ConfigError(f"{path} holds other item ids than the run was trained on; {remedy}")
    return ids


def save_trained_items(workdir: pathlib.Path, trained: np.ndarray | None) -> None:
    """Notes which items may be recommended, bool [V], where they are not all: it takes the events to know."""
    if trained is not None:
        with replaced(workdir / "trained_items.npy") as temporary, temporary.open("wb") as file:
            np.save(file, trained)


def read_trained_items(workdir: pathlib.Path, config: Config, num_items: int) -> np.ndarray | None:
    """bool [V], the items that a run with ``evaluation.candidates=train`` ranks; None where it ranks all.

    Raises:
        ConfigError: what the run noted is damaged.
    """
    if config.evaluation.candidates != "train":
        return None
    path = workdir / "trained_items.npy"
    remedy = "start the run's training command again, which writes it"
    if not path.exists():
        log.warning(
            "%s has no trained_items.npy: items without a training event are recommended too, though the run ranks "
            "only the others; %s", workdir, remedy,
        )  # fmt: skip
        return None
    try:
        with path.open("rb") as file:  # np.load would take an archive for arrays too
            trained = np.lib.format.read_array(file, allow_pickle=False)
        if trained.shape == (num_items,) and trained.dtype == bool:
            return trained
    except OSError:
        raise
    except Exception:  # NumPy raises whatever a broken header leads to
        pass
    raise ConfigError(f"{path}, which items the run was trained on, is damaged or another run's; {remedy}")

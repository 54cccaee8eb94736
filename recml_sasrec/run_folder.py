"""A run's folder: who may write to it, and whether it belongs to this config and these items.

config.json  metrics.jsonl  evaluation.json  item_ids.arrow  checkpoints/  TensorBoard events
"""

import contextlib
import fcntl
import json
import pathlib
import shutil
from collections.abc import Iterator

from recml_sasrec import config as configs
from recml_sasrec import config_file
from recml_sasrec.config import Config, ConfigError
from recml_sasrec.data.store import Store
from recml_sasrec.files import write_atomically

# what may differ between the run that made a folder and one that goes on in it: nothing that the parameters depend on
CHANGEABLE = (
    "train.steps",
    "train.log_every",
    "checkpoint.",
    "evaluation.",
    "data.cache",
)


@contextlib.contextmanager
def claimed(workdir: pathlib.Path) -> Iterator[None]:
    """Holds the folder, made where it lacks, against a second trainer.

    Raises:
        ConfigError: it is not a folder or another process trains in it.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"--workdir {workdir} is a file; name a folder") from None
    with (workdir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process trains in {workdir}; wait for it or use another --workdir") from None
        yield


def adopt(workdir: pathlib.Path, config: Config, store: Store) -> None:
    """Saves config and item ids in a new folder, or checks that an old one is of the same config and items.

    Raises:
        ConfigError: the folder holds another run.
    """
    # before its first checkpoint a run has nothing that another config could spoil
    if (workdir / "config.json").exists() and any((workdir / "checkpoints").glob("*[0-9]")):
        saved, vocabulary = read(workdir)
        name = configs.first_difference(saved, config, but=CHANGEABLE)
        if name:
            raise ConfigError(
                f"{workdir} holds a run with config.{name}={configs.get_field(saved, name)}, but this one has "
                f"{configs.get_field(config, name)}; use another --workdir or the same value"
            )
        if vocabulary != store.vocabulary:
            raise ConfigError(
                f"{workdir} holds a run on other items (vocabulary {vocabulary}) than this data has "
                f"({store.vocabulary}, {store.num_items} items); use another --workdir or the same data"
            )
    else:
        temporary = workdir / ".item_ids.arrow.tmp"
        shutil.copyfile(pathlib.Path(store.directory, "item_ids.arrow"), temporary)
        temporary.replace(workdir / "item_ids.arrow")
    tree = {"vocabulary": store.vocabulary, **json.loads(config_file.to_json(config))}
    write_atomically(workdir / "config.json", json.dumps(tree, indent=2) + "\n")


def read(workdir: pathlib.Path) -> tuple[Config, str]:
    """The config of a run and the fingerprint of its item ids.

    Raises:
        ConfigError: the folder holds no run.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{workdir} holds no run (no config.json); train one there or name another --workdir")
    try:
        tree = json.loads(path.read_text())
        vocabulary = tree.pop("vocabulary")
    except (ValueError, KeyError, AttributeError):
        raise ConfigError(f"{path} is damaged; restore it from a checkpoint's metadata or train again") from None
    return config_file.from_json(json.dumps(tree)), vocabulary

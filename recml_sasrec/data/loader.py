"""The loader: a configuration's events as training batches (through Grain) and as queries to rank for."""

import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from recml_sasrec.config import Config
from recml_sasrec.data import catalogue, hub, queries, synthetic, yambda
from recml_sasrec.data.batch import Batch, QueryBatch
from recml_sasrec.data.events import DataError, EventBatch, changed, check_file, read_lines, read_table
from recml_sasrec.data.folders import restore
from recml_sasrec.data.packing import Pattern, Placement, make_pattern, place
from recml_sasrec.data.split import Split, make_split
from recml_sasrec.data.store import Store, build_store, fingerprint_of, open_store, source_fingerprint
from recml_sasrec.data.vocabulary import check_same_type
from recml_sasrec.data.windows import Windows, build_batch, make_windows

Which = Literal["validation", "test"]
_SAMPLED_BATCHES = 16
_PREFETCH = 4  # batches ready ahead of the step


def cache_folder(config: Config) -> str:
    """Where stores and generated files go."""
    folder = config.data.cache or os.environ.get("RECML_SASREC_CACHE") or "~/.cache/recml_sasrec"
    return os.path.abspath(os.path.expanduser(folder))


def open_store_of(config: Config) -> Store:
    """Builds the store of the configuration's source in the cache, or opens it (source=store: the one at its path).

    Raises:
        DataError: whatever is wrong with the source.
    """
    data = config.data
    path = os.path.expanduser(data.path)
    if data.source == "store":
        restore(path)
        if not os.path.isdir(path):
            raise DataError(
                f"config.data.path={path!r} is not there; it must be the folder of a store, as written by "
                "python -m recml_sasrec.prepare --input FILE --output FOLDER"
            )
        return open_store(path)
    if data.source == "yambda":
        path = hub.locate(data)
    elif not path and data.source == "synthetic":
        path = synthetic.cached_file(data.synthetic, cache_folder(config))
    elif not path:
        raise DataError(f"config.data.source={data.source!r} needs config.data.path; give it the file of events")
    check_file(path)
    options: dict[str, Any] = {"source": data.source}
    if data.source == "table":
        options["columns"] = columns = (data.user_column, data.item_column, data.time_column)
        read = lambda: read_table(path, *columns)  # noqa: E731
    elif data.source == "lines":
        read = lambda: read_lines(path)  # noqa: E731
    else:
        names = ("min_played_ratio", "organic_only", "event_types", "drop_undone")
        filters = {name: getattr(data, name) for name in names}
        options = {"source": "yambda", **filters}
        read = lambda: yambda.read_yambda(path, **filters)  # noqa: E731
    if data.source == "synthetic" and not data.path:  # its name tells its content, whoever wrote it and when
        key = fingerprint = fingerprint_of(generated=os.path.basename(path), **options)
    else:  # one store of a path and its options: a file that has changed replaces the old one's
        key, fingerprint = fingerprint_of(path=os.path.abspath(path), **options), source_fingerprint(path, **options)
    name = os.path.basename(path).split(".")[0]
    directory = os.path.join(cache_folder(config), "stores", f"{name}-{key[:16]}")

    def read_whole() -> Iterator[EventBatch]:
        yield from read()
        if fingerprint not in (key, source_fingerprint(path, **options)):
            raise changed(path)

    return build_store(read_whole, directory, fingerprint, source=path)


def open_data(config: Config, kept_ids: pa.Array | None = None) -> "Data":
    """The data of a configuration: its store (built on first use), split and windows.

    Args:
        kept_ids: raw ids of items of ``config.init.from_run`` that join the catalogue.

    Raises:
        DataError: whatever is wrong with the source or the split.
    """
    store = catalogue.joined(open_store_of(config), config.data, os.path.join(cache_folder(config), "stores"))
    if kept_ids is not None:
        check_same_type(kept_ids, store.item_ids, config.init.from_run)
        key = fingerprint_of(store=os.path.abspath(store.directory), from_run=os.path.abspath(config.init.from_run))
        name = f"{os.path.basename(store.directory)}-{key[:16]}"
        store = catalogue.store_with(store, kept_ids, os.path.join(cache_folder(config), "stores", name))
    if store.num_items < 2:
        raise DataError(f"the data has {store.num_items} item but ranking needs at least 2 items; give more events")
    content = None if config.model.content == "none" else catalogue.content_of(store, config.data)
    return Data(store, make_split(store, config.split), content)


class TrainBatches:
    """Random access to training batches: element ``step`` is a pure function of (seed, step).

    Rows follow a fixed pattern of window lengths. Each epoch permutes the windows of equal length over the slots of the
    pattern, and the rows, so every window is used exactly once an epoch. Batch ``step`` holds the rows step*B ..
    (step+1)*B - 1 of the endless sequence of epochs; a process builds only its share of them.
    """

    def __init__(
        self, store: Store, windows: Windows, pattern: Pattern, config: Config, shard: tuple[int, int]
    ) -> None:
        index, count = shard
        if config.train.batch_size % count:
            raise DataError(
                f"config.train.batch_size {config.train.batch_size} can't be divided among {count} processes"
            )
        if config.train.batch_size > pattern.num_rows:
            raise DataError(
                f"config.train.batch_size {config.train.batch_size} is larger than the data: "
                f"{len(windows.starts)} windows "
                f"fill {pattern.num_rows} rows of {config.data.length}; lower it to at most {pattern.num_rows}"
            )
        self._store, self._windows, self._pattern, self._data = store, windows, pattern, config.data
        self._seed, self._batch_size = config.train.seed, config.train.batch_size
        self._rows = config.train.batch_size // count
        self._first = index * self._rows
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, step: int) -> Batch:
        epoch, row = np.divmod(step * self._batch_size + self._first + np.arange(self._rows), self._pattern.num_rows)
        parts = []
        for number in range(int(epoch[0]), int(epoch[-1]) + 1):
            windows, rows = self._permutations(number)
            part = place(self._pattern, rows[row[epoch == number]])
            parts.append((windows[part.rank], part.row + np.searchsorted(epoch, number), part.number))
        placement = Placement(*(np.concatenate(arrays).astype(np.int64) for arrays in zip(*parts, strict=True)))
        return build_batch(self._store, self._windows, placement, self._rows, self._data)

    def _permutations(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(slot rank -> window, row -> row of the pattern) of an epoch; the two newest asked for are kept."""
        with self._lock:
            if epoch not in self._epochs:
                rng = np.random.default_rng([self._seed, epoch])
                count = len(self._windows.starts)
                order = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
                bounds = np.searchsorted(self._windows.lengths, np.arange(1, self._data.length + 2))
                for first, last in itertools.pairwise(bounds):
                    rng.shuffle(order[first:last])
                while len(self._epochs) > 1:
                    del self._epochs[next(iter(self._epochs))]
                self._epochs[epoch] = (order, rng.permutation(self._pattern.num_rows))
            return self._epochs[epoch]


class Data:
    """An opened source: what the trainer and the evaluation read."""

    def __init__(self, store: Store, split: Split, content: np.ndarray | None = None) -> None:
        self.store = store
        self.split = split
        self.content = content  # float32 [V, C], mapped; None: the model has none
        self._windows: tuple[tuple, Windows, Pattern] | None = None

    def train_batches(self, config: Config, start_step: int = 0, shard: tuple[int, int] = (0, 1)) -> "TrainIterator":
        """Endless training batches from ``start_step`` on, prepared by a thread ahead of time; close it when done.

        Args:
            shard: (index of this process, number of processes); a process gets batch_size / processes rows.

        Raises:
            DataError: the batch is larger than the data.
        """
        return TrainIterator(self.train_source(config, shard), start_step)

    def train_source(self, config: Config, shard: tuple[int, int] = (0, 1)) -> TrainBatches:
        """The same batches by random access, without Grain and threads."""
        windows, pattern = self._windows_of(config)
        return TrainBatches(self.store, windows, pattern, config, shard)

    def steps_per_epoch(self, config: Config) -> float:
        """Steps in which every window is used once."""
        return self._windows_of(config)[1].num_rows / config.train.batch_size

    def tokens(self, config: Config) -> int:
        """Real positions of an epoch."""
        return int(self._windows_of(config)[0].lengths.sum(dtype=np.int64))

    def fill(self, config: Config) -> float:
        """Share of an epoch's positions that are real."""
        return self.tokens(config) / (self._windows_of(config)[1].num_rows * config.data.length)

    def mean_positives(self, config: Config) -> float:
        """Mean number of targets of a weighted training position, over a sample of batches.

        Raises:
            DataError: no sampled position has a target within the horizon.
        """
        source = self.train_source(config)
        last = int(np.ceil(self.steps_per_epoch(config)))
        steps = np.unique(np.linspace(0, last, min(_SAMPLED_BATCHES, last), endpoint=False).astype(int))
        positives = positions = 0.0
        for step in steps:
            batch = source[int(step)]
            positives += int(np.count_nonzero(batch.targets >= 0))
            positions += float(batch.weights.sum())
        if not positions:
            raise DataError(
                f"no training position has a target within config.data.horizon {config.data.horizon} seconds; raise it"
            )
        return positives / positions

    def query_batches(self, config: Config, which: Which) -> Iterator[QueryBatch]:
        """The histories of all evaluated users in batches of one static shape; see ``queries.query_batches``."""
        return queries.query_batches(self.store, self.split, which, config.data, config.evaluation.batch_users)

    def num_queries(self, which: Which) -> int:
        """Users with at least one target."""
        return len(queries.evaluated_users(self.split, which))

    def targets(self, which: Which, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """CSR (values int32, offsets int64): each user's target events with repeats, in time order."""
        return queries.targets_of(self.store, self.split, which, users)

    def seen(self, which: Which, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """CSR (values int32, offsets int64): the different items of each user's history, ascending."""
        return queries.seen_of(self.store, self.split, which, users)

    def _windows_of(self, config: Config) -> tuple[Windows, Pattern]:
        data = config.data
        key = (data.length, data.targets, data.horizon, data.windows, data.stride, data.pack)
        if self._windows is None or self._windows[0] != key:
            windows = make_windows(self.store, self.split, data)
            self._windows = (key, windows, make_pattern(windows.lengths, data.length, data.pack))
        return self._windows[1:]


class TrainIterator:
    """Batches in order through Grain: one record is one batch, read ahead by one thread."""

    def __init__(self, source: TrainBatches, start_step: int) -> None:
        import grain

        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH)
        self._iterator = iter(grain.MapDataset.source(source).to_iter_dataset(options))
        grain.experimental.set_next_index(self._iterator, start_step)

    def __iter__(self) -> "TrainIterator":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def close(self) -> None:
        """Ends the thread; the iterator can't be used any more."""
        self._iterator.close()

    def __enter__(self) -> "TrainIterator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

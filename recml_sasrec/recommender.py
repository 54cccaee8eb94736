"""Recommendations from a run's folder or an exported one: histories of raw ids in, raw ids with scores out."""

import bisect
import itertools
import logging
import operator
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from recml_sasrec.config import ConfigError
from recml_sasrec.data.batch import QueryBatch
from recml_sasrec.data.events import DataError
from recml_sasrec.data.packing import Placement
from recml_sasrec.data.vocabulary import Encoder
from recml_sasrec.data.windows import lay_out
from recml_sasrec.ranking.shards import top_k_over
from recml_sasrec.ranking.topk import top_k_listed_jit
from recml_sasrec.serving import Served, open_model

log = logging.getLogger("recml_sasrec.recommender")

RawId = int | str
BATCHES = (8, 64, 256)  # histories ranked at once; fixed, so that there are few shapes to compile for
_WIDEST = 1 << 22  # a batch's rows times its ranked or allowed items: top_k then scores at most 2^27 at once
_FEW = 256  # ids looked up one by one in a vocabulary of so many times their number of strings
_NO_ID = -1  # of integers: raw ids are not negative


class Recommender:
    """A checkpoint of a run with the raw ids of its items; ``Recommender.load`` makes one.

    Lists are exact over the whole catalogue, a higher score first and, between equal scores, the item that comes first
    among the run's ids. They are those that evaluation ranks for the same histories.

    Attributes:
        item_ids: pyarrow int64 or large_string [V], raw ids by table row.
        unknown: int64 [histories], how many ids of each history of the last ``recommend`` were skipped as unknown.
        without_history: how many of these histories had no known item, and so an empty list.
        unknown_listed: how many ids of its ``allow`` and ``block`` were skipped as unknown.
        candidates: bool [V], the items that may be recommended at all, None for every one: ``load`` sets those with a
            training event where the run ranks no others, ``restrict`` takes from them.
    """

    def __init__(self, served: Served):
        self.config, self.item_ids = served.config, served.item_ids
        self.unknown, self.without_history, self.unknown_listed = np.zeros(0, np.int64), 0, 0
        self.candidates = served.candidates
        self._find_many = Encoder(served.item_ids)
        self._params, self._encode = served.params, served.encode
        self._table, self._bias = served.table, served.bias
        self._top_k = top_k_over(served.layout)
        self._cosines = jax.jit(_cosines)

    @classmethod
    def load(cls, workdir: str | pathlib.Path, checkpoint: str = "best") -> "Recommender":
        """Opens a run on the devices here, which need not be those it was trained on, or an exported model on one.

        Args:
            workdir: folder of the run, an exported folder, or ``hf://user/name[@revision]`` on the Hugging Face Hub.
            checkpoint: ``best`` (by validation), ``latest`` or a step; an exported folder has the one it was made from.

        Raises:
            ConfigError: the folder holds no run or exported model, or its item ids are missing or others.
            CheckpointError: there is no such checkpoint, or it can't be read.
            DataError: the hub doesn't give the model.
        """
        return cls(open_model(workdir, checkpoint))

    def restrict(self, allow: Iterable[RawId] | None = None, block: Iterable[RawId] | None = None) -> None:
        """From now on recommends only items of ``allow``, where given, and none of ``block``, whatever a call allows.

        Raises:
            DataError: an id that is no integer or text, or of the wrong one of the two.
        """
        self.unknown_listed = 0
        dense = [
            None if ids is None else self._dense_listed([_entries(ids, what)], what)[0]
            for what, ids in (("allow", allow), ("block", block))
        ]
        self.candidates = self._mask(*dense)

    def recommend(
        self,
        histories: Sequence[Iterable[RawId]],
        k: int = 10,
        filter_seen: bool = False,
        allow: Iterable[Any] | None = None,
        block: Iterable[Any] | None = None,
    ) -> list[list[tuple[RawId, float]]]:
        """The ``k`` items with the highest scores after each history.

        Args:
            histories: of each user the raw item ids, oldest first. Unknown ones are skipped, of the rest the last N
                count. Where the run's ids are integers, text such as "42" is one too.
            k: length of a list; shorter where fewer items are allowed.
            filter_seen: never recommend an item of the history, however long ago.
            allow: raw ids that may be recommended, for all users; or for each history a collection of them or None.
            block: raw ids that may not be, likewise.

        Returns:
            For each history (raw item id, score) pairs; none for a history without a known item.

        Raises:
            DataError: an id that is no integer or text, or of the wrong one of the two; not one list for each history.
            ConfigError: k is not a whole number of at least 1.
        """
        k = min(_checked_k(k), len(self.item_ids))
        seen, self.unknown = self._dense_lists(_entries(histories, "histories"), "a history")
        able = np.array([index for index, items in enumerate(seen) if len(items)], np.int64)
        self.without_history = len(seen) - len(able)
        self._report()
        self.unknown_listed = 0
        allowed, allowed_lists = self._restriction("allow", allow, len(seen))
        blocked, blocked_lists = self._restriction("block", block, len(seen))
        mask = self._mask(allowed, blocked)
        candidates = None if mask is None else jnp.asarray(mask)
        lists: list[list[tuple[RawId, float]]] = [[] for _ in seen]
        pending: tuple[np.ndarray, jax.Array, jax.Array] | None = None
        # who has an allow list is scored by it alone
        has_list = np.array([allowed_lists is not None and allowed_lists[user] is not None for user in able], bool)
        longest = max((len(items) for items in allowed_lists or () if items is not None), default=0)
        batches = [(True, *batch) for batch in _batches(able[has_list], max(k, longest))]
        batches += [(False, *batch) for batch in _batches(able[~has_list], k)]
        for by_list, users, rows in batches:
            dropped = [_of_user(blocked_lists, user) for user in users]
            if filter_seen:
                dropped = [np.union1d(items, seen[user]) for items, user in zip(dropped, users, strict=True)]
            hidden = self._encode(self._params, self._queries([seen[user] for user in users], rows))
            if by_list:
                own = [_of_user(allowed_lists, user) for user in users]
                listed = [np.setdiff1d(items, drop) for items, drop in zip(own, dropped, strict=True)]
                listed = listed if mask is None else [items[mask[items]] for items in listed]
                padded = _padded(listed, rows)
                scores, ids = top_k_listed_jit(hidden, self._table, padded, min(k, padded.shape[1]), bias=self._bias)
            else:
                exclude = _padded(dropped, rows) if filter_seen or blocked_lists else None
                scores, ids = self._top_k(
                    hidden, self._table, k, bias=self._bias, exclude=exclude, candidates=candidates
                )
            # the device ranks this batch while the host names the items of the one before
            if pending is not None:
                self._name(lists, *pending)
            pending = users, scores, ids
        if pending is not None:
            self._name(lists, *pending)
        return lists

    def similar_items(self, item: RawId, k: int = 10) -> list[tuple[RawId, float]]:
        """The ``k`` other items whose vectors have the highest cosine with this item's.

        Raises:
            DataError: the run has no such item.
            ConfigError: k is not a whole number of at least 1.
        """
        k = min(_checked_k(k), len(self.item_ids))
        row = self._find([item])
        if row[0] < 0:
            raise DataError(f"item {item!r} is none of the {len(self.item_ids):,} items of the run; give one of those")
        # the cosines are a table of width 1, which the streamed search ranks by its product with 1
        cosines_V1 = self._cosines(self._table, row[0])
        candidates = None if self.candidates is None else jnp.asarray(self.candidates)
        scores, ids = self._top_k(jnp.ones((1, 1)), cosines_V1, k, exclude=row[None], candidates=candidates)
        lists: list[list[tuple[RawId, float]]] = [[]]
        self._name(lists, np.zeros(1, np.int64), scores, ids)
        return lists[0]

    def _queries(self, histories: list[np.ndarray], rows: int) -> QueryBatch:
        """A history to a row, as ``data.queries`` lays them out."""
        data, n = self.config.data, len(histories)
        last = [items[-data.length :] for items in histories]
        index = np.arange(n)
        layout = lay_out(
            np.array([len(items) for items in last]), Placement(index, index, np.zeros(n, np.int64)), rows, data
        )
        items_BN = np.zeros((rows, data.length), np.int32)
        items_BN[layout.segment_ids > 0] = np.concatenate(last)
        query_rows, columns = np.zeros((2, rows), np.int32)
        query_rows[:n], columns[:n] = np.divmod(layout.last, data.length)
        users = np.full(rows, -1, np.int64)
        users[:n] = index
        return QueryBatch(items_BN, layout.positions, layout.segment_ids, query_rows, columns, users)

    def _name(self, lists: list, users: np.ndarray, scores: jax.Array, ids: jax.Array) -> None:
        """Puts a batch's ranked rows, as raw ids, into the lists of their users."""
        ids_QK, scores_QK = (np.asarray(x)[: len(users)] for x in (ids, scores))
        raw = self.item_ids.take(pa.array(np.maximum(ids_QK, 0).ravel())).to_pylist()
        k = ids_QK.shape[1]
        for row, user in enumerate(users):
            n = int((ids_QK[row] >= 0).sum())  # what is missing is at the end
            lists[user] = list(zip(raw[row * k : row * k + n], scores_QK[row, :n].tolist(), strict=True))

    def _mask(self, allowed: np.ndarray | None, blocked: np.ndarray | None) -> np.ndarray | None:
        """bool [V], the candidates that are in ``allowed`` and not in ``blocked``, which hold dense ids; None: all."""
        if allowed is None and blocked is None:
            return self.candidates
        mask = np.full(len(self.item_ids), allowed is None)
        mask[[] if allowed is None else allowed] = True
        mask[[] if blocked is None else blocked] = False
        return mask if self.candidates is None else mask & self.candidates

    def _restriction(
        self, name: str, ids: Iterable[Any] | None, users: int
    ) -> tuple[np.ndarray | None, list[np.ndarray | None] | None]:
        """(dense ids for all users or None, those of each user or None)."""
        if ids is None:
            return None, None
        entries = _entries(ids, name)
        if not any(entry is None or (isinstance(entry, Iterable) and not isinstance(entry, str)) for entry in entries):
            return self._dense_listed([entries], name)[0], None
        if len(entries) != users:
            raise DataError(
                f"{name} has {len(entries)} lists for {users} histories; give one for each history, or one list of ids "
                "for all"
            )
        parts = self._dense_listed([[] if entry is None else entry for entry in entries], name)
        return None, [None if entry is None else part for entry, part in zip(entries, parts, strict=True)]

    def _dense_listed(self, lists: Sequence[Any], name: str) -> list[np.ndarray]:
        """The dense ids of each list, with the unknown ones counted and told."""
        parts, unknown = self._dense_lists(lists, name)
        if unknown.any():
            log.warning("%s: %d ids are none of the run's items", name, unknown.sum())
        self.unknown_listed += int(unknown.sum())
        return parts

    def _report(self) -> None:
        if self.unknown.any() or self.without_history:
            log.warning(
                "skipped %d unknown ids in %d of %d histories; %d have no known item and get no list",
                self.unknown.sum(), np.count_nonzero(self.unknown), len(self.unknown), self.without_history,
            )  # fmt: skip

    def _dense_lists(self, lists: Sequence[Any], what: str) -> tuple[list[np.ndarray], np.ndarray]:
        """Of each list of raw ids the dense ids (int32) of the known ones in order, and the number of the others."""
        entries = [_entries(ids, what) for ids in lists]
        dense = self._find(list(itertools.chain.from_iterable(entries)))
        ends = np.cumsum([len(ids) for ids in entries], dtype=np.int64)
        parts = [dense[end - len(ids) : end] for ids, end in zip(entries, ends, strict=True)]
        unknown = np.array([np.count_nonzero(part < 0) for part in parts], np.int64)
        return [part[part >= 0] for part in parts], unknown

    def _find(self, raw: list) -> np.ndarray:
        """int32 [n] table rows of raw ids, -1 for unknown ones."""
        if not raw:
            return _NONE
        integers = pa.types.is_integer(self.item_ids.type)
        try:
            column = pa.array(raw)
            plain = column.null_count == 0 and (
                pa.types.is_int64(column.type) if integers else pa.types.is_string(column.type)
            )
        except (pa.ArrowException, OverflowError, UnicodeError):  # of mixed types, over int64, or not Unicode
            plain = False
        if not plain:
            checked = [_as_integer(value) if integers else _as_text(value) for value in raw]
            column = pa.array(checked, self.item_ids.type)
        column = column.cast(self.item_ids.type)
        if integers or len(column) * _FEW > len(self.item_ids):
            return self._find_many(column)
        # Arrow would hash the whole vocabulary for them; the ids are in order of their code points, as Python's strings
        rows = [bisect.bisect_left(self.item_ids, value, key=lambda row: row.as_py()) for value in column.to_pylist()]
        found = self.item_ids.take(pa.array(np.minimum(rows, len(self.item_ids) - 1), pa.int64())).to_pylist()
        known = np.array([a == b for a, b in zip(found, column.to_pylist(), strict=True)], bool)
        return np.where(known, rows, -1).astype(np.int32)


_NONE = np.zeros(0, np.int32)


def _of_user(lists: list[np.ndarray | None] | None, user: int) -> np.ndarray:
    items = lists[user] if lists is not None else None
    return _NONE if items is None else items


def _cosines(table_VD: jax.Array, row: jax.Array) -> jax.Array:
    """float32 [V, 1] cosines of an item's row with all; NaN, which is never ranked, with a row of zeros."""
    products_V = jnp.matmul(table_VD, table_VD[row], precision=jax.lax.Precision.HIGHEST)
    norms_V = jnp.linalg.norm(table_VD, axis=1)
    return (products_V / (norms_V * norms_V[row]))[:, None]


def _batches(users: np.ndarray, width: int) -> Iterator[tuple[np.ndarray, int]]:
    """(users, rows of their batch): the smallest that holds those who are left, else the largest for this width."""
    sizes = [rows for rows in BATCHES if rows * width <= _WIDEST] or BATCHES[:1]
    for first in range(0, len(users), sizes[-1]):
        part = users[first : first + sizes[-1]]
        yield part, next(rows for rows in sizes if rows >= len(part))


def _padded(lists: list[np.ndarray], rows: int) -> np.ndarray:
    """int32 [rows, S], padded with -1. S is a power of two, so that there are few shapes to compile for."""
    width = 1 << max(6, (max(len(items) for items in lists) - 1).bit_length())
    padded = np.full((rows, width), -1, np.int32)
    for row, items in zip(padded, lists, strict=False):
        row[: len(items)] = items
    return padded


def _entries(ids: Any, what: str) -> list:
    """A collection as a list of Python objects."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable) or getattr(ids, "ndim", 1) == 0:
        raise DataError(f"{what} must be a list of item ids, not {ids!r}; put single ids into a list")
    if isinstance(ids, np.ndarray | pa.Array | pa.ChunkedArray):
        return ids.tolist()
    return list(ids)


def _as_integer(value: Any) -> int:
    """A raw id of an integer vocabulary; that of no item for text that is no integer, or one over int64."""
    if isinstance(value, str):
        _check_unicode(value)
        # "007" and "7" are two ids: a log that has the first one has ids of text
        value = int(value) if re.fullmatch("0|[1-9][0-9]{0,18}", value) else _NO_ID
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise DataError(f"item id {value!r} is a {type(value).__name__} but the run's ids are integers; give integers")
    return int(value) if 0 <= value < 2**63 else _NO_ID


def _as_text(value: Any) -> str:
    """A raw id of a vocabulary of strings."""
    if not isinstance(value, str):
        raise DataError(
            f"item id {value!r} is a {type(value).__name__} but the run's ids are text; give text, as {str(value)!r}"
        )
    _check_unicode(value)
    return value


def _check_unicode(value: str) -> None:
    try:
        value.encode()
    except UnicodeError:
        raise DataError(f"item id {value!r} is not valid Unicode, as all ids of a run are; correct it") from None


def _checked_k(k: Any) -> int:
    try:
        number = operator.index(k)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"k is {k!r} but must be a whole number of at least 1; ask for 10, say")
    return number

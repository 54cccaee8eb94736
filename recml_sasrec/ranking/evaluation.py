"""Full ranking of a split's users: the model, the popularity baselines, and the protocol printed with every table.

``data`` is what the loader offers: ``store``, ``split``, ``query_batches(config, which)``, and the CSR pairs
``targets(which, users)`` (raw rows) and ``seen(which, users)`` (distinct items of the histories).
"""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from recml_sasrec.config import Config
from recml_sasrec.data.batch import QueryBatch
from recml_sasrec.files import write_atomically
from recml_sasrec.ranking.baselines import decay_pop, most_pop, order_items, top_of_order
from recml_sasrec.ranking.metrics import RankingMetrics
from recml_sasrec.ranking.topk import top_k_jit

Which = Literal["validation", "test"]
Metrics = dict[str, float]
TopK = Callable[..., tuple[jax.Array, jax.Array]]
Rows = dict[str, Metrics]  # of a table: a model's name and its metrics


class Stopped(Exception):
    """Evaluation was given up because the process was asked to stop."""


def evaluate(
    config: Config,
    data,
    encode: Callable[[QueryBatch], jax.Array],
    table: jax.Array,
    bias: jax.Array | None,
    which: Which,
    should_stop: Callable[[], bool] | None = None,
    top_k: TopK = top_k_jit,
) -> Metrics:
    """Rank the whole catalogue for every user that has targets.

    Args:
        encode: from a batch to hidden states [Q, D], one row for each entry of ``users``; jitted by the caller.
        table: [V, D] item table, on the device.
        bias: [V] item bias or None.
        which: the split to rank for.
        should_stop: polled between batches; when true, evaluation is given up.
        top_k: ``topk.top_k``, or the same over the shards of a table that may have more than V rows.

    Returns:
        ``{"ndcg@10": ..., ...}``, see ``RankingMetrics``.

    Raises:
        Stopped: ``should_stop`` said so.
        ValueError: the table does not have a row for each item of the store.
    """
    if table.shape[0] != data.store.num_items and top_k is top_k_jit:
        raise ValueError(f"the item table has {table.shape[0]} rows and the data {data.store.num_items} items")
    mask = candidate_mask(config, data)
    metrics = _metrics(config, data, mask)
    candidates = None if mask is None else jnp.asarray(mask)
    k = max(config.evaluation.ks)
    pending: tuple[np.ndarray, jax.Array] | None = None
    for batch in data.query_batches(config, which):
        if should_stop is not None and should_stop():
            raise Stopped
        exclude = _exclusions(data, which, batch.users) if config.evaluation.filter_seen else None
        _, ids = top_k(encode(batch), table, k, bias=bias, exclude=exclude, candidates=candidates)
        # The device ranks this batch while the host scores the one before.
        if pending is not None:
            _score(metrics, data, which, *pending)
        pending = batch.users, ids
    if pending is not None:
        _score(metrics, data, which, *pending)
    return metrics.result()


def _score(metrics: RankingMetrics, data, which: Which, users: np.ndarray, ids: jax.Array) -> None:
    real = users >= 0
    metrics.add(np.asarray(ids)[real], *data.targets(which, users[real]))


def _exclusions(data, which: Which, users: np.ndarray) -> np.ndarray:
    """int32 [Q, S], -1 padded. S is a power of two, so that there are few shapes to compile for."""
    real = np.flatnonzero(users >= 0)
    values, offsets = data.seen(which, users[real])
    lengths = np.diff(offsets)
    width = 1 << max(6, int(lengths.max(initial=1) - 1).bit_length())
    exclude = np.full((len(users), width), -1, np.int32)
    column = np.arange(len(values)) - np.repeat(offsets[:-1], lengths)
    exclude[np.repeat(real, lengths), column] = values
    return exclude


def evaluate_baselines(config: Config, data, which: Which) -> Rows:
    """``{"most_pop": {...}, "decay_pop": {...}}``; no ``decay_pop`` where the store has no times."""
    mask = candidate_mask(config, data)
    scores = {"most_pop": train_counts(data)}
    if data.store.has_time:
        scores["decay_pop"] = decay_pop(data.store, data.split, config.evaluation.decay_hours)
    return {name: rank_scores(config, data, which, values, mask) for name, values in scores.items()}


def rank_scores(config: Config, data, which: Which, scores: np.ndarray, mask: np.ndarray | None = None) -> Metrics:
    """Metrics of one ranking for all users: items by ``scores`` [V] descending, then id, less what a user has seen."""
    metrics = _metrics(config, data, mask)
    order, k = order_items(scores, mask), max(config.evaluation.ks)
    users = query_users(data, which)
    for start in range(0, len(users), config.evaluation.batch_users):
        some = users[start : start + config.evaluation.batch_users]
        seen = data.seen(which, some) if config.evaluation.filter_seen else None
        metrics.add(top_of_order(order, k, len(some), data.store.num_items, seen), *data.targets(which, some))
    return metrics.result()


def query_users(data, which: Which) -> np.ndarray:
    """int64, ascending: the users that have targets in this split."""
    start, end = getattr(data.split, f"{which}_start"), getattr(data.split, f"{which}_end")
    return np.flatnonzero(end > start)


def candidate_mask(config: Config, data) -> np.ndarray | None:
    """bool [V], the items that may be recommended; None where all may."""
    return train_counts(data) > 0 if config.evaluation.candidates == "train" else None


_counted: list[tuple[Any, np.ndarray]] = []  # the last split and its counts: they are a pass over all training events


def train_counts(data) -> np.ndarray:
    """int64 [V], ``most_pop``, remembered for as long as the same split is asked for."""
    if not _counted or _counted[0][0] is not data.split:
        _counted[:] = [(data.split, most_pop(data.store, data.split))]
    return _counted[0][1]


def _metrics(config: Config, data, mask: np.ndarray | None) -> RankingMetrics:
    num_candidates = data.store.num_items if mask is None else int(mask.sum())
    return RankingMetrics(config.evaluation.ks, data.store.num_items, num_candidates, config.evaluation.metric_version)


def protocol(config: Config, data, which: Which) -> dict[str, Any]:
    """What a number means: printed above every table and saved beside every result."""
    evaluation, users = config.evaluation, query_users(data, which)
    rows = getattr(data.split, f"{which}_end")[users] - getattr(data.split, f"{which}_start")[users]
    mask = candidate_mask(config, data)
    lines = {
        "split": data.split.description,
        "ranked for": which,
        "users": len(users),
        "target rows": int(rows.sum()),
        "items": data.store.num_items,
        "candidates": data.store.num_items if mask is None else int(mask.sum()),
        "candidate rule": "all items" if mask is None else "items with a training event",
        "seen items": "removed" if evaluation.filter_seen else "kept",
        "ranking": "full catalogue, exact",
        "ties": "higher score first, then smaller item id",
        "metric version": evaluation.metric_version,
        "popularity": "counted on training events only",
    }
    if data.store.has_time:
        lines["decay_pop"] = f"0.9 ** (age in hours / {evaluation.decay_hours:g})"
    return lines


def format_table(protocol: dict[str, Any], rows: Rows) -> str:
    """A plain-text table: the protocol's lines, then a line for each metric and a column for each model."""
    width = max(map(len, protocol), default=0)
    lines = [f"{name:<{width}}  {value:,}" if isinstance(value, int) else f"{name:<{width}}  {value}"
             for name, value in protocol.items()]  # fmt: skip
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    left = max(map(len, names), default=0)
    columns = {model: max(len(model), 8) for model in rows}
    lines += ["", " " * left + "".join(f"  {model:>{columns[model]}}" for model in rows)]
    for name in names:
        cells = (f"{rows[model][name]:.6f}" if name in rows[model] else "-" for model in rows)
        lines.append(f"{name:<{left}}" + "".join(f"  {c:>{w}}" for c, w in zip(cells, columns.values(), strict=True)))
    return "\n".join(lines)


def write_evaluation(path: str | os.PathLike, protocol: dict[str, Any], rows: Rows) -> None:
    """Write ``{"protocol": ..., "rows": ...}`` as JSON, floats in full; the file is replaced whole or not at all."""
    write_atomically(pathlib.Path(path), json.dumps({"protocol": protocol, "rows": rows}, indent=2) + "\n")

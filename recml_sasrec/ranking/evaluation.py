"""Full ranking of a split's users: the model, the popularity baselines, and the protocol printed with every table.

``data`` is what the loader offers: ``store``, ``split``, ``query_batches(config, which)``, and the CSR pairs
``targets(which, users)`` (raw rows) and ``seen(which, users)`` (distinct items of the histories).
"""

import json
import os
import pathlib
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from recml_sasrec.config import Config, ConfigError
from recml_sasrec.data.batch import QueryBatch
from recml_sasrec.files import write_atomically
from recml_sasrec.ranking.baselines import decay_pop, most_pop, order_items, random_lists, top_of_order
from recml_sasrec.ranking.item_knn import ItemKNN
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


def evaluate_baselines(config: Config, data, which: Which, should_stop: Callable[[], bool] | None = None) -> Rows:
    """``{"most_pop": {...}, ...}``, the rows of ``evaluation.baselines``; no decay_pop where the store has no times.

    Raises:
        Stopped: ``should_stop``, polled between batches of users, said so.
    """
    names = [name for name in config.evaluation.baselines if name != "decay_pop" or data.store.has_time]
    return {
        name: _evaluate_baseline(config, data, which, name, chosen_hours(config, data, name, should_stop), should_stop)
        for name in names
    }


def chosen_hours(config: Config, data, name: str, should_stop: Callable[[], bool] | None = None) -> float:
    """The hours of decay_pop or item_knn: the configured ones or, of several, the best on validation.

    The best has the highest ``evaluation.best_metric``, the criterion for the model's checkpoints too; of equal ones
    the first. Other baselines have no hours: 0.

    Raises:
        ConfigError: there are several, and no validation split to choose on.
        Stopped: ``should_stop`` said so.
    """
    evaluation = config.evaluation
    grid = {"decay_pop": evaluation.decay_hours, "item_knn": evaluation.knn_hours}.get(name, (0.0,))
    if len(grid) == 1:
        return grid[0]
    if not len(query_users(data, "validation")):
        raise ConfigError(f"the hours of {name} can't be chosen from {grid} without a validation split; give one")

    def choose() -> float:
        rows = [_evaluate_baseline(config, data, "validation", name, hours, should_stop) for hours in grid]
        return grid[int(np.argmax([row[evaluation.best_metric] for row in rows]))]

    return _remembered(data, (name, repr(evaluation)), choose)


def _evaluate_baseline(
    config: Config, data, which: Which, name: str, hours: float, should_stop: Callable[[], bool] | None
) -> Metrics:
    mask, k, num_items = candidate_mask(config, data), max(config.evaluation.ks), data.store.num_items
    if name == "random":
        candidates = None if mask is None else np.flatnonzero(mask)
        lists = lambda users, seen: random_lists(config.train.seed, users, k, num_items, candidates, seen)  # noqa: E731
    elif name == "item_knn":
        knn = _remembered(data, "item_knn", lambda: ItemKNN(data.store, data.split))
        history_end = getattr(data.split, f"{which}_history_end")
        lists = lambda users, seen: knn.lists(users, history_end, hours, k, mask, seen)  # noqa: E731
    else:
        scores = train_counts(data) if name == "most_pop" else decay_pop(data.store, data.split, hours)
        order = order_items(scores, mask)
        lists = lambda users, seen: top_of_order(order, k, len(users), num_items, seen)  # noqa: E731
    metrics = _metrics(config, data, mask)
    users = query_users(data, which)
    for start in range(0, len(users), config.evaluation.batch_users):
        if should_stop is not None and should_stop():
            raise Stopped
        some = users[start : start + config.evaluation.batch_users]
        seen = data.seen(which, some) if config.evaluation.filter_seen else None
        metrics.add(lists(some, seen), *data.targets(which, some))
    return metrics.result()


def query_users(data, which: Which) -> np.ndarray:
    """int64, ascending: the users that have targets in this split."""
    start, end = getattr(data.split, f"{which}_start"), getattr(data.split, f"{which}_end")
    return np.flatnonzero(end > start)


def candidate_mask(config: Config, data) -> np.ndarray | None:
    """bool [V], the items that may be recommended; None where all may."""
    return train_counts(data) > 0 if config.evaluation.candidates == "train" else None


_memory: list[Any] = [None, {}]  # the last split, and what takes a pass over its training events


def _remembered(data, what: Hashable, compute: Callable[[], Any]) -> Any:
    """``compute()``, remembered for as long as the same split is asked for."""
    if _memory[0] is not data.split:
        _memory[:] = [data.split, {}]
    if what not in _memory[1]:
        _memory[1][what] = compute()
    return _memory[1][what]


def train_counts(data) -> np.ndarray:
    """int64 [V], ``most_pop``, remembered."""
    return _remembered(data, "most_pop", lambda: most_pop(data.store, data.split))


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
        "baselines": "counted on training events only",
    }
    if config.model.content != "none":
        cold = int((train_counts(data) == 0).sum())
        lines["cold items"] = f"{cold:,} without a training event, by their content; bias the mean of the others'"
    if "decay_pop" in evaluation.baselines and data.store.has_time:
        lines["decay_pop"] = _hours_line(config, data, "decay_pop", evaluation.decay_hours)
    if "item_knn" in evaluation.baselines and data.store.has_time:
        lines["item_knn"] = _hours_line(config, data, "item_knn", evaluation.knn_hours)
    return lines


def _hours_line(config: Config, data, name: str, grid: tuple[float, ...]) -> str:
    line = f"0.9 ** (age in hours / {chosen_hours(config, data, name):g})"
    return line + (f", of {', '.join(f'{h:g}' for h in grid)} the best on validation" if len(grid) > 1 else "")


def format_table(protocol: dict[str, Any], rows: Rows) -> str:
    """A plain-text table: the protocol's lines, then a line for each metric and a column for each model.

    Metrics that are the same in every model, as recall and hit rate are with one target, share a line.
    """
    width = max(map(len, protocol), default=0)
    lines = [f"{name:<{width}}  {value:,}" if isinstance(value, int) else f"{name:<{width}}  {value}"
             for name, value in protocol.items()]  # fmt: skip
    same: dict[tuple, list[str]] = {}
    for name in dict.fromkeys(name for row in rows.values() for name in row):
        same.setdefault(tuple(row.get(name) for row in rows.values()), []).append(name)
    left = max((len(" = ".join(names)) for names in same.values()), default=0)
    columns = {model: max(len(model), 8) for model in rows}
    lines += ["", " " * left + "".join(f"  {model:>{columns[model]}}" for model in rows)]
    for values, names in same.items():
        cells = ("-" if value is None else f"{value:.6f}" for value in values)
        lines.append(
            f"{' = '.join(names):<{left}}"
            + "".join(f"  {c:>{w}}" for c, w in zip(cells, columns.values(), strict=True))
        )
    return "\n".join(lines)


def write_evaluation(path: str | os.PathLike, protocol: dict[str, Any], rows: Rows) -> None:
    """Write ``{"protocol": ..., "rows": ...}`` as JSON, floats in full; the file is replaced whole or not at all."""
    write_atomically(pathlib.Path(path), json.dumps({"protocol": protocol, "rows": rows}, indent=2) + "\n")

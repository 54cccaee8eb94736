"""Starts a run from another one, whose items need not be the same (``config.init``); rows are matched by raw id.

What the two have in common is copied bit for bit, with its optimizer moments, so that before any step the scores of
kept items for histories of kept items are those of the other run. ``new_rows.py`` says where the other items start.
Only the first start of a run reads the other one: from its first checkpoint on it is a run like any.

Arrays stay on the devices, split as the new run's are: the other run's are restored there, rows are taken by one
compiled gather whose results have the new run's shardings. No process holds more of them than its devices do.
"""

import dataclasses
import functools
import json
import logging
import pathlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa

from recml_sasrec import config as configs
from recml_sasrec import hosts, new_rows, optim, run_folder
from recml_sasrec.checkpoint import CheckpointError, Checkpoints
from recml_sasrec.config import Config, ConfigError
from recml_sasrec.data.catalogue import categories_of, content_of
from recml_sasrec.data.loader import Data
from recml_sasrec.data.split import train_end
from recml_sasrec.data.store import Store
from recml_sasrec.data.vocabulary import Encoder, check_same_type
from recml_sasrec.files import write_atomically
from recml_sasrec.model import ranking_bias, split_given
from recml_sasrec.ranking import evaluation
from recml_sasrec.run import Run
from recml_sasrec.sharding import BY_ITEM
from recml_sasrec.step import Params, TrainState

log = logging.getLogger("recml_sasrec")

# what the parameters of the two runs must agree in, in shape or in meaning
SAME = (
    "model.width model.blocks model.heads model.mlp_width model.norm model.norm_eps model.activation model.item_bias "
    "data.position_order"
).split()


@dataclass(frozen=True)
class Base:
    """The run to start from."""

    folder: pathlib.Path
    config: Config
    item_ids: pa.Array
    step: int = 0  # of the checkpoint


@dataclass(frozen=True)
class Growth:
    """How a catalogue comes out of the base's."""

    base: Base
    source: np.ndarray  # int32 [V], the base's row of each item, -1: a new item
    categories: np.ndarray | None  # int32 [V], of which new items are drawn; -1: from all kept rows
    content: np.ndarray | None  # float32 [V, C], from which new items are fitted; zeros: from all kept rows
    report: dict[str, Any]


def open_base(config: Config, workdir: pathlib.Path) -> Base | None:
    """The run that ``config.init`` names; None where none is named, or ``workdir`` goes on from its own checkpoint.

    Raises:
        ConfigError, CheckpointError: there is no such run or checkpoint, or its model is another.
    """
    base = hosts.together(lambda: _read(config, workdir)) if config.init.from_run else None
    if base is None:
        return None
    with hosts.watched(), _checkpoints(base.folder, base.config) as checkpoints:
        return dataclasses.replace(base, step=checkpoints.find(config.init.checkpoint))


def _read(config: Config, workdir: pathlib.Path) -> Base | None:
    folder, field = pathlib.Path(config.init.from_run).expanduser(), f"config.init.from_run={config.init.from_run}"
    if folder.resolve() == workdir.resolve():
        raise ConfigError(f"{field} is --workdir itself; name the folder of another run, or another --workdir")
    if run_folder.has_checkpoint(workdir):
        return None
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{field} holds no run (no config.json); name the folder of a trained run")
    base, marks = run_folder.read(folder)
    _check_model(config, base)
    if not run_folder.has_checkpoint(folder):
        raise CheckpointError(f"{field} has no checkpoint yet; let its training go on to the first one")
    return Base(folder, base, run_folder.read_item_ids(folder, marks))


def _checkpoints(folder: pathlib.Path, config: Config) -> Checkpoints:
    return Checkpoints(folder, config.checkpoint.keep, config.evaluation.best_metric, reading=True)


def _check_model(config: Config, base: Config) -> None:
    def value(config: Config, name: str) -> Any:
        value = configs.get_field(config, name)
        return value or 4 * config.model.width if name == "model.mlp_width" else value

    # the base's content is a part of what its items are scored with; that of the new run may come on top
    names = SAME if base.model.content == "none" or config.model.content != "none" else [*SAME, "model.content"]
    for name in names:
        if value(config, name) != value(base, name):
            raise ConfigError(
                f"config.{name}={value(config, name)}, but {config.init.from_run} was trained with "
                f"{value(base, name)}; set config.{name}={value(base, name)} or train without config.init.from_run"
            )


def plan(base: Base, data: Data, config: Config) -> Growth:
    """Matches the items of the data with those of the base.

    Raises:
        DataError: ids of another type.
        ConfigError: no item in common.
    """
    store = data.store
    check_same_type(base.item_ids, store.item_ids, config.init.from_run)
    source = Encoder(base.item_ids)(store.item_ids)
    kept, rule = source >= 0, config.init.new_items
    if not kept.any():
        raise ConfigError(
            f"none of the data's {store.num_items:,} items is one of the {len(base.item_ids):,} of "
            f"config.init.from_run={config.init.from_run}; see that both have the same kind of ids, or train without it"
        )
    categories = categories_of(store, config.data) if rule == "category" else None
    if categories is not None:
        categories = new_rows.usable(categories, kept)
    by_rule = np.zeros(len(kept), bool) if categories is None else categories >= 0
    content = content_of(store, config.data) if rule == "content" else None
    if content is not None:
        by_rule = new_rows.described(content)
        if (by_rule & kept).sum() < 2:  # nothing to fit
            content, by_rule = None, by_rule & False
    vanished = len(base.item_ids) - int(kept.sum())
    if config.init.vanished == "keep":
        vanished = int((kept & ~_with_events(store)).sum())
    copied = min(config.data.length, base.config.data.length)
    table, before = config.optimizer.table, base.config.optimizer.table
    added = {rule: int((by_rule & ~kept).sum()), "table": int((~by_rule & ~kept).sum())}
    report = {
        "from_run": config.init.from_run,
        "checkpoint": base.step,
        "items": {
            "kept": int(kept.sum()),
            "added": added if rule != "table" else {"table": added["table"]},
            "added_without_training_event": int(np.count_nonzero(~kept & (evaluation.train_counts(data) == 0))),
            "vanished": {"kept" if config.init.vanished == "keep" else "dropped": vanished},
        },
        "positions": {"copied": copied, "fresh": config.data.length - copied},
        "moments": "kept"
        if table == before
        else f"kept, those of the item table fresh: config.optimizer.table={table}, was {before}",
    }
    report |= {} if (leak := _leak(config, base.config)) is None else {"warning": leak}
    return Growth(base, source, categories, content, report)


def _leak(config: Config, base: Config) -> str | None:
    """Why the base may have been trained on what this run is validated or tested on; None where it can't be seen."""
    split, before = config.split, base.split
    held_out = f"validation and test may hold events that {config.init.from_run} was trained on"
    if split.kind != before.kind:
        return f"config.split.kind={split.kind}, was {before.kind}: {held_out}"
    if split.kind == "temporal" and train_end(split) < train_end(before):
        return f"training ends at second {train_end(split):,}, was {train_end(before):,}: {held_out}"
    last, was = (s.test_last + s.validation_last for s in (split, before))
    if split.kind == "leave_last" and last > was:
        return f"the last {last} events of a user are held out, were {was}: {held_out}"
    return None


def _with_events(store: Store) -> np.ndarray:
    """bool [V]"""
    seen = np.zeros(store.num_items, bool)
    for start in range(0, store.num_events, 1 << 24):
        seen[store.items[start : start + (1 << 24)]] = True
    return seen


def sentence(report: dict[str, Any]) -> str:
    """The report for the console."""
    items, positions = report["items"], report["positions"]
    ((fate, vanished),) = items["vanished"].items()
    added = items["added"]
    rules = ", ".join(f"{count:,} by {name}" for name, count in added.items())
    untrained = items["added_without_training_event"]
    return (
        f"grown from {report['from_run']} (step {report['checkpoint']}): {items['kept']:,} items kept, "
        f"{sum(added.values()):,} new ({rules}; {untrained:,} without a training event), "
        f"{vanished:,} vanished ({fate}); "
        f"{positions['copied']} positions kept, {positions['fresh']} new; moments {report['moments']}"
    )


def grown_state(run: Run, growth: Growth) -> TrainState:
    """The state to start with: step 0 on the run's own layout.

    Raises:
        CheckpointError: the base's checkpoint can't be read.
        ConfigError: its content vectors have another length.
    """
    base, layout = growth.base, dataclasses.replace(run.layout, num_items=len(growth.base.item_ids))
    padded = lambda x: np.pad(x, (0, run.layout.table_rows - len(x)), constant_values=-1)  # noqa: E731
    source, categories = padded(growth.source), None if growth.categories is None else padded(growth.categories)
    fresh = run.init()
    like = _base_params(run.abstract_state.params, base, layout.table_rows)
    trained, _ = split_given(like, base.config.model.content)
    optimizer = optim.make_optimizer(base.config.optimizer, base.config.train.steps)
    placed = lambda tree: jax.tree.map(  # noqa: E731
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, layout.of(tree)
    )
    with _checkpoints(base.folder, base.config) as checkpoints:
        _check_content(checkpoints.info(base.step).get("content_width", 0), run.content_width, base)
        params = checkpoints.restore_params(base.step, placed(like))
        fitted = None
        if growth.content is not None:
            rows, sharding = run.layout.table_rows, run.shardings.params["item_table"]
            fitted = new_rows.fitted(growth.content, growth.source, params["item_table"], rows, sharding)
        count = 0 if categories is None else int(categories.max(initial=-1)) + 1
        grow = functools.partial(grown_params, num_categories=count)
        place = jax.jit(grow, out_shardings=run.shardings.params, donate_argnums=1)
        new_params = place(params, fresh.params, source, categories, fitted)
        del params
        opt_state = checkpoints.restore_opt_state(base.step, placed(jax.eval_shape(optimizer.init, trained)))
    fresh_table = run.config.optimizer.table != base.config.optimizer.table
    move = functools.partial(grown_moments, fresh_table=fresh_table)
    moved = jax.jit(move, out_shardings=run.shardings.opt_state, donate_argnums=1)
    return TrainState(fresh.step, new_params, moved(opt_state, fresh.opt_state, source), fresh.metrics)


def _base_params(params: Params, base: Base, rows: int) -> Params:
    """The shapes of the base's parameters, given those of the new run's."""

    def shape(name: str, x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        first = rows if name in BY_ITEM else base.config.data.length if name == "position_table" else x.shape[0]
        return (first, *x.shape[1:])

    content = base.config.model.content != "none"
    return {
        name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape(name, x), x.dtype), part)  # noqa: B023
        for name, part in params.items()
        if content or name not in ("item_content", "content_projection", "item_warm")
    }


def _check_content(has: int, wanted: int, base: Base) -> None:
    """A restore would cut vectors, or fill them with zeros, to the length that is asked for."""
    if has and has != wanted:
        raise ConfigError(
            f"config.data.content_column has vectors of {wanted} numbers, but {base.folder} was trained with {has}; "
            "give vectors of the same kind or train without config.init.from_run"
        )


def grown_params(
    base: Params,
    fresh: Params,
    source: jax.Array,
    categories: jax.Array | None = None,
    fitted: jax.Array | None = None,
    num_categories: int = 0,
) -> Params:
    """The base's parameters by name, rows by ``source``; what the base does not have is fresh or follows a rule.

    Args:
        base: [B, ...] rows in what has a row an item.
        fresh: [V', ...] rows; initialised at random, which is what new rows' noise is made of.
        source: int32 [V'], rows of the base, -1: none.
        categories: int32 [V'] below ``num_categories``, see ``new_rows.drawn``; None: the table's rule for all.
        fitted: float32 [V', D], rows by content; those that are all zeros follow the table's rule. None: likewise.
    """
    result = dict(fresh)
    if "item_bias" in base:  # of a cold item: what it is ranked with
        base = {**base, "item_bias": ranking_bias(base)}
    for name, part in base.items():
        if name in BY_ITEM:
            result[name] = rows_of(part, fresh[name], source)
        elif name == "position_table":
            result[name] = overlapping(part, fresh[name])
        else:
            result[name] = part
    table, bias = new_rows.drawn(
        result["item_table"], result.get("item_bias"), fresh["item_table"], source, categories, num_categories
    )
    if fitted is not None:
        table = jnp.where(((source < 0) & fitted.any(1))[:, None], fitted, table)
    result |= {"item_table": table} if bias is None else {"item_table": table, "item_bias": bias}
    return result if "item_warm" not in fresh else result | _content(base, fresh, table, source)


def _content(base: Params, fresh: Params, table: jax.Array, source: jax.Array) -> Params:
    """Of a model with content: which items are warm, and what follows from it."""
    was_warm = base.get("item_warm", jnp.ones(base["item_table"].shape[0]))
    warm = jnp.maximum(fresh["item_warm"], rows_of(was_warm, jnp.zeros_like(fresh["item_warm"]), source))
    # a new item without a training event is known by its content alone
    changed = {"item_warm": warm, "item_table": jnp.where(((source < 0) & (warm == 0))[:, None], 0, table)}
    if "content_projection" not in base:  # scores are those of the base until training finds what content is worth
        changed["content_projection"] = jnp.zeros_like(fresh["content_projection"])
    return changed


def grown_moments(base: optax.OptState, fresh: optax.OptState, source: jax.Array, fresh_table: bool) -> optax.OptState:
    """The base's moments by their name and their parameter's, rows by ``source``; the others, and new rows, are fresh.

    Adam's count goes with the moments of the parameters beside it; a schedule's starts anew.
    """
    have = {_key(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(base)}
    moments = {key[1:]: (leaf, key[0]) for key, leaf in have.items() if key[2]}
    leaves = jax.tree_util.tree_leaves_with_path(fresh)
    counts: dict[str, jax.Array] = {}  # by place in the new state: that of the base's moments which come there
    result = []
    for path, leaf in leaves:
        place, moment, parameter = _key(path)
        found = moments.get((moment, parameter))
        if moment == "old_rows":
            leaf = source >= 0
        elif parameter and found is not None and not (fresh_table and parameter[0] == "item_table"):
            old, old_place = found
            leaf = _moment_of(parameter[0], old, leaf, source)
            counts.setdefault(place, have.get((old_place, "count", ()), jnp.zeros((), jnp.int32)))
        result.append(leaf)
    for index, (path, _) in enumerate(leaves):
        place, moment, parameter = _key(path)
        if moment == "count" and not parameter and place in counts:
            result[index] = counts[place]
    return jax.tree.unflatten(jax.tree.structure(fresh), result)


def _key(path: tuple) -> tuple[str, str, tuple]:
    """(place of the optimizer's part, field, parameter) of a leaf."""
    moment, parameter = optim.moment_of(path)
    return jax.tree_util.keystr(path[: len(path) - len(parameter) - 1]), moment, parameter


def _moment_of(name: str, old: jax.Array, fresh: jax.Array, source: jax.Array) -> jax.Array:
    old = old.astype(fresh.dtype)
    if name == "position_table":
        return overlapping(old, fresh)
    if name in BY_ITEM and fresh.shape[:1] == source.shape and old.shape[1:] == fresh.shape[1:]:
        return rows_of(old, fresh, source)
    return old if old.shape == fresh.shape else fresh


def rows_of(old: jax.Array, fresh: jax.Array, source: jax.Array) -> jax.Array:
    """[V', ...] the old rows that ``source`` names, fresh ones where it is -1."""
    known = (source >= 0).reshape(-1, *[1] * (fresh.ndim - 1))
    return jnp.where(known, old[jnp.maximum(source, 0)], fresh)


def overlapping(old: jax.Array, fresh: jax.Array) -> jax.Array:
    """The fresh array with the old rows that it has room for."""
    count = min(old.shape[0], fresh.shape[0])
    return fresh.at[:count].set(old[:count])


def report(workdir: pathlib.Path, growth: Growth | None) -> None:
    """Says how the run has grown, and leaves it in its folder as ``grown.json``."""
    if growth is not None:
        log.info("%s", sentence(growth.report))
        if "warning" in growth.report:
            log.warning("warning: %s", growth.report["warning"])
        write_atomically(workdir / "grown.json", json.dumps(growth.report, indent=2) + "\n")

"""What a config must hold to: types, ranges, fields that contradict each other; and the nearest name to a wrong one."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from recml_sasrec.config import Config, ConfigError, DataConfig, get_field


def validate(config: Config) -> None:
    """Checks types, ranges and fields that contradict each other.

    Raises:
        ConfigError: with the first fault.
    """
    _check_types(config)
    _check_ranges(config)
    _check_filters(config.data)
    _check_items(config)
    _check_contradictions(config)
    _check_start(config)


def _check_types(node: Any, prefix: str = "") -> None:
    for name, hint in typing.get_type_hints(type(node)).items():
        value = getattr(node, name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(value, hint):
                raise ConfigError(f"config.{prefix}{name} must be a {hint.__name__}, not {value!r}")
            _check_types(value, f"{prefix}{name}.")
        else:
            setattr(node, name, checked(prefix + name, value, hint))


AT_LEAST_ONE = (
    "data.length data.targets data.synthetic.users data.synthetic.items data.synthetic.events_per_user "
    "model.width model.blocks model.heads head.negatives train.steps train.batch_size train.accumulate train.log_every "
    "checkpoint.every checkpoint.keep evaluation.batch_users"
).split()
AT_LEAST_ZERO = (
    "data.horizon data.stride data.min_played_ratio split.test_start split.test_length split.validation_length "
    "split.gap split.test_last split.validation_last model.mlp_width head.tile optimizer.warmup_steps "
    "optimizer.weight_decay optimizer.clip_norm train.seed mesh.data mesh.items evaluation.every evaluation.patience "
    "optimizer.backbone_rate optimizer.table_rate optimizer.old_rows_rate"
).split()
POSITIVE = "model.norm_eps optimizer.learning_rate optimizer.eps head.positive_weight".split()
UNIT_INTERVAL = "optimizer.final_fraction".split()
BELOW_ONE = "model.dropout optimizer.b1 optimizer.b2".split()
BEST_METRICS = ("ndcg", "hr", "recall", "recall_capped", "precision", "mrr", "map")


def _check_ranges(config: Config) -> None:
    rules: tuple[tuple[Sequence[str], Any, str], ...] = (
        (AT_LEAST_ONE, lambda v: v >= 1, "at least 1"),
        (AT_LEAST_ZERO, lambda v: v >= 0, "at least 0"),
        (POSITIVE, lambda v: 0 < v < float("inf"), "above 0 and finite"),
        (UNIT_INTERVAL, lambda v: 0 <= v <= 1, "between 0 and 1"),
        (BELOW_ONE, lambda v: 0 <= v < 1, "at least 0 and below 1"),
    )
    for names, holds, limit in rules:
        for name in names:
            if not holds(get_field(config, name)):
                raise ConfigError(f"config.{name}={get_field(config, name)} must be {limit}")
    if config.train.seed >= 2**32:
        raise ConfigError(f"config.train.seed={config.train.seed} must be below 2**32")
    if not config.evaluation.ks or min(config.evaluation.ks) < 1:
        raise ConfigError(f"config.evaluation.ks={config.evaluation.ks} must hold list lengths of at least 1")
    for name in ("decay_hours", "knn_hours"):
        hours = getattr(config.evaluation, name)
        if not hours or not all(0 <= h < float("inf") for h in hours):
            raise ConfigError(f"config.evaluation.{name}={hours} must hold numbers of hours, at least 0 and finite")


def _check_filters(data: DataConfig) -> None:
    """Refuses a filter that the chosen file has no column for."""
    event = "listens" if data.source == "synthetic" else data.yambda_event
    for name in ("min_played_ratio", "organic_only", "event_types", "drop_undone"):
        value = getattr(data, name)
        # min_played_ratio is let be there: the quickstart sets it, and takes any source by a flag
        if value and data.source in ("table", "lines", "store") and name != "min_played_ratio":
            raise ConfigError(
                f"config.data.{name}={value} needs config.data.source=yambda, not {data.source}; "
                "filter the events before, or leave it out"
            )
        if value and name in ("event_types", "drop_undone") and event != "multi_event":
            raise ConfigError(
                f"config.data.{name}={value} needs config.data.yambda_event=multi_event, not {event}: "
                "other files hold one type of events"
            )
    if data.source in ("table", "lines", "store"):
        return
    if data.min_played_ratio and event not in ("listens", "multi_event"):
        raise ConfigError(
            f"config.data.min_played_ratio={data.min_played_ratio} needs config.data.yambda_event=listens, "
            f"not {event}: other events have no played ratio"
        )
    if data.min_played_ratio and data.event_types and "listen" not in data.event_types:
        raise ConfigError(
            f"config.data.min_played_ratio={data.min_played_ratio} is about listens, which "
            f"config.data.event_types={data.event_types} leaves out; set it to 0"
        )
    if data.drop_undone and data.event_types and not {"like", "dislike"} & set(data.event_types):
        raise ConfigError(
            f"config.data.drop_undone=True is about likes and dislikes, which "
            f"config.data.event_types={data.event_types} leaves out; set it to false"
        )


def _check_items(config: Config) -> None:
    """Refuses columns of a table of items that is not given, and content that has no column."""
    data, content = config.data, config.model.content
    for name in ("content_column", "category_column"):
        if getattr(data, name) and not data.items_path:
            raise ConfigError(
                f"config.data.{name}={getattr(data, name)} needs config.data.items_path, the table of items it is in"
            )
    if content != "none" and not data.content_column:
        raise ConfigError(
            f"config.model.content={content} needs config.data.items_path and config.data.content_column, the items' "
            "vectors; name them, or set it to none"
        )
    if data.items_path and not (data.items_join or data.content_column or data.category_column):
        raise ConfigError(
            f"config.data.items_path={data.items_path} gives nothing with config.data.items_join=False and no column; "
            "set config.data.content_column or category_column, or let its items join"
        )


def _check_contradictions(config: Config) -> None:
    data, split, model, train, evaluation = (
        config.data,
        config.split,
        config.model,
        config.train,
        config.evaluation,
    )
    if model.width % model.heads:
        raise ConfigError(
            f"config.model.width={model.width} is not a multiple of config.model.heads={model.heads}; "
            f"the nearest width is {max(1, round(model.width / model.heads)) * model.heads}"
        )
    if train.batch_size % train.accumulate:
        raise ConfigError(
            f"config.train.batch_size={train.batch_size} is not a multiple of "
            f"config.train.accumulate={train.accumulate}; change one of them"
        )
    if data.stride > data.length:
        raise ConfigError(
            f"config.data.stride={data.stride} exceeds config.data.length={data.length}, which would skip events; "
            f"set it to at most {data.length}"
        )
    if data.source in ("table", "lines", "store") and not data.path:
        what = "the folder that prepare --output wrote" if data.source == "store" else "the file to read"
        raise ConfigError(f"config.data.source={data.source} needs config.data.path, {what}")
    columns = [data.user_column, data.item_column, *filter(None, [data.time_column])]
    if data.source == "table" and len(set(columns)) < len(columns):
        raise ConfigError(f"config.data.user_column, item_column and time_column must differ, not {columns}")
    # a store tells itself whether it has times, when it is split
    has_time = data.source in ("synthetic", "yambda", "store") or (data.source == "table" and data.time_column)
    if split.kind == "temporal" and not has_time:
        raise ConfigError(
            "config.split.kind=temporal needs times, which this source has not; set config.split.kind=leave_last"
        )
    if data.horizon and not has_time:
        raise ConfigError(f"config.data.horizon={data.horizon} needs times, which this source has not; set it to 0")
    if split.kind == "temporal" and split.test_start <= 0:
        raise ConfigError("config.split.kind=temporal needs config.split.test_start, a second of the source's clock")
    if split.kind == "leave_last" and split.test_last < 1:
        raise ConfigError("config.split.test_last=0 leaves nothing to test on; set it to at least 1")
    has_validation = split.validation_length if split.kind == "temporal" else split.validation_last
    if evaluation.every and not has_validation:
        wanted = "validation_length" if split.kind == "temporal" else "validation_last"
        raise ConfigError(
            f"config.evaluation.every={evaluation.every} validates during training, but config.split.{wanted}=0 "
            f"leaves no validation events; set one of them"
        )
    for baseline, name in (("decay_pop", "decay_hours"), ("item_knn", "knn_hours")):
        hours = getattr(evaluation, name)
        if baseline in evaluation.baselines and len(hours) > 1 and not has_validation:
            raise ConfigError(
                f"config.evaluation.{name}={hours} is chosen from on validation, but the split leaves no validation "
                f"events; give one number of hours"
            )
    if evaluation.patience and not evaluation.every:
        raise ConfigError(
            f"config.evaluation.patience={evaluation.patience} stops on validations, but "
            f"config.evaluation.every=0 makes none; set evaluation.every"
        )
    metric, _, k = evaluation.best_metric.partition("@")
    if metric not in BEST_METRICS or not k.isdecimal() or int(k) not in evaluation.ks:
        near = nearest(evaluation.best_metric, [f"{m}@{k}" for m in BEST_METRICS for k in evaluation.ks])
        raise ConfigError(
            f"config.evaluation.best_metric={evaluation.best_metric} is not computed; "
            f"did you mean {near or f'ndcg@{evaluation.ks[0]}'}?"
        )


def _check_start(config: Config) -> None:
    """What is said of another run's parameters, and of what is trained of them."""
    init, optimizer = config.init, config.optimizer
    if not init.from_run:
        given = [f"init.{name}" for name in ("checkpoint", "new_items", "vanished")]
        given = [
            name for name in (*given, "optimizer.old_rows_rate") if get_field(config, name) != get_field(Config(), name)
        ]
        if given:
            raise ConfigError(
                f"config.{given[0]}={get_field(config, given[0])} is about the items of another run; "
                "name its folder with config.init.from_run, or leave it out"
            )
    for name in ("category", "content"):
        if init.new_items == name and not getattr(config.data, f"{name}_column"):
            raise ConfigError(
                f"config.init.new_items={name} needs config.data.items_path, a table of items, and "
                f"config.data.{name}_column; give them or set config.init.new_items=table"
            )
    if optimizer.backbone_rate == optimizer.table_rate == 0:
        raise ConfigError(
            "config.optimizer.backbone_rate=0.0 and config.optimizer.table_rate=0.0 leave nothing to train; raise one"
        )


def checked(name: str, value: Any, hint: Any) -> Any:
    """The value, converted where nothing is lost, or a ConfigError."""
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value in choices:
            return value
        near = nearest(str(value), [str(c) for c in choices])
        hint_text = f"did you mean {near!r}?" if near else f"it must be one of {', '.join(map(repr, choices))}"
        raise ConfigError(f"config.{name}={value} is unknown; {hint_text}")
    if typing.get_origin(hint) is tuple:
        values = value if isinstance(value, tuple | list) else (value,)
        return tuple(checked(name, v, typing.get_args(hint)[0]) for v in values)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int and is_number and value == value and abs(value) != float("inf") and int(value) == value:
        return int(value)  # 1e3 is meant as 1000
    if hint is float and is_number:
        return float(value)
    if (hint is bool and isinstance(value, bool)) or (hint is str and isinstance(value, str)):
        return value
    raise ConfigError(f"config.{name}={value!r} is not {describe(hint)}")


def describe(hint: Any) -> str:
    if isinstance(hint, types.GenericAlias):
        return f"a tuple like ({describe(typing.get_args(hint)[0])}, ...)"
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[hint]


def nearest(word: str, words: Sequence[str]) -> str | None:
    found = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return found[0] if found else None

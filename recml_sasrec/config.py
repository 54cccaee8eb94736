"""The run's configuration: a typed dataclass tree, its defaults and what it must hold to."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


class ConfigError(ValueError):
    """A configuration that can't be run; the message is one sentence for the user."""


@dataclass(slots=True)
class SyntheticConfig:
    """The generator of Yambda-shaped events (``data.source = "synthetic"``)."""

    users: int = 2_000
    items: int = 4_000
    events_per_user: int = 60  # mean; histories are log-normal like Yambda's
    seed: int = 0


@dataclass(slots=True)
class DataConfig:
    """Where the events come from and how they become batches."""

    source: Literal["synthetic", "yambda", "table", "lines"] = "synthetic"
    path: str = ""  # local file; empty with source=yambda fetches it from the hub, with synthetic generates it;
    # with yambda also a directory laid out like the hub's (flat/50m/listens.parquet)
    revision: str = ""  # source=yambda: branch, tag or commit of the hub's repository; empty: its main branch
    cache: str = ""  # folder of stores and generated files; empty: $RECML_SASREC_CACHE or ~/.cache/recml_sasrec
    user_column: str = "user_id"  # source=table
    item_column: str = "item_id"  # source=table
    time_column: str = "timestamp"  # source=table; empty: rows are already in time order
    yambda_size: Literal["50m", "500m", "5b"] = "50m"
    yambda_format: Literal["flat", "sequential"] = "flat"
    yambda_event: Literal["listens", "likes", "dislikes", "unlikes", "undislikes", "multi_event"] = "listens"
    min_played_ratio: int = 0  # whole percent; 50 keeps Yambda's Listen+
    organic_only: bool = False  # yambda: only what the user found without a recommendation
    # multi_event: the types kept; empty: all
    event_types: tuple[Literal["listen", "dislike", "like", "undislike", "unlike"], ...] = ()
    drop_undone: bool = False  # multi_event: without the likes (dislikes) that an unlike (undislike) took back later
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    length: int = 50  # N, positions of a row
    targets: int = 8  # L, a position's targets are the set of the next L events; 1 is next-item
    horizon: int = 0  # seconds; > 0 keeps only those of the next L events at most this much later
    windows: Literal["all", "last"] = "all"  # every window of a history, or only the most recent one
    stride: int = 0  # events between the starts of two windows of a history; 0: N, no overlap
    pack: bool = True  # several short histories to a row
    position_order: Literal["oldest_first", "newest_first"] = "oldest_first"  # which end has position 0


@dataclass(slots=True)
class SplitConfig:
    """Who is trained on, validated on and tested on."""

    kind: Literal["temporal", "leave_last"] = "temporal"
    test_start: int = 0  # temporal: first second of the test interval
    test_length: int = 0  # temporal: seconds; 0: to the end
    validation_length: int = 0  # temporal: seconds before test_start - gap; 0: no validation, train on all of it
    gap: int = 0  # temporal: seconds left out before validation and before test
    test_last: int = 1  # leave_last: events of each user
    validation_last: int = 1  # leave_last: events of each user before those


@dataclass(slots=True)
class ModelConfig:
    """SASRec (arXiv 1808.09781) and its later variants."""

    width: int = 64  # D
    blocks: int = 2
    heads: int = 2
    mlp_width: int = 0  # 0: 4 * width
    norm: Literal["pre", "post"] = "pre"
    norm_eps: float = 1e-6  # added to a layer norm's variance
    activation: Literal["gelu", "gelu_exact", "relu"] = "gelu"  # gelu is its tanh approximation, gelu_exact has erf
    dropout: float = 0.2
    item_bias: bool = True  # initialised at the prior log-odds of a target
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; parameters are float32


@dataclass(slots=True)
class HeadConfig:
    """The loss over the catalogue."""

    name: Literal["cut_bce", "dense_bce", "sampled_bce"] = "cut_bce"
    reduction: Literal["token_mean", "mean"] = (
        "token_mean"  # sum over items a token, or also mean over V (RecML, Keras)
    )
    positive_weight: float = 1.0
    threshold: float = 0.0  # a logit above it counts as a predicted positive
    ranks: bool = True  # log Hit@k and MRR of each position's best target; sampled_bce has none
    tile: int = 0  # cut_bce: items of a tile; 0: chosen for the device
    negatives: int = 1  # sampled_bce: uniform negatives a position


@dataclass(slots=True)
class OptimizerConfig:
    """AdamW with linear warm-up and a cosine."""

    learning_rate: float = 1e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 0
    final_fraction: float = 0.1  # of the learning rate, at the cosine's end
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip_norm: float = 1.0  # global norm of the gradient; 0: no clipping


@dataclass(slots=True)
class TrainConfig:
    steps: int = 1_000
    batch_size: int = 64  # B, rows of N positions in a step, over all devices
    accumulate: int = 1  # micro-batches a step is split into
    seed: int = 0
    log_every: int = 50  # steps


@dataclass(slots=True)
class MeshConfig:
    """Devices: ``data`` x ``items`` of them; 0: what the other leaves, or both chosen by the bytes they'd move."""

    data: int = 0  # groups, each with a part of the batch
    items: int = 0  # shards of the item table, its gradient and its moments


@dataclass(slots=True)
class CheckpointConfig:
    every: int = 500  # steps
    keep: int = 2  # newest; the best one is kept besides


@dataclass(slots=True)
class EvaluationConfig:
    """Exact full ranking; nothing here is sampled."""

    every: int = 0  # steps between validations; 0: none during training
    patience: int = 0  # validations without a better best_metric before training stops; 0: never stops early
    best_metric: str = "ndcg@10"
    ks: tuple[int, ...] = (10, 100)
    filter_seen: bool = False  # remove a user's earlier items from its ranking
    candidates: Literal["all", "train"] = "all"  # rank every item, or those with a training event
    metric_version: Literal["standard", "v1", "v2", "corrected"] = "standard"  # see ranking/metrics.py
    baselines: tuple[Literal["most_pop", "decay_pop", "item_knn", "random"], ...] = ("most_pop", "decay_pop")
    # An event of this age in hours weighs 0.9; several: the best by best_metric on validation is taken.
    decay_hours: tuple[float, ...] = (24.0,)  # decay_pop; 0 is most_pop
    knn_hours: tuple[float, ...] = (24.0,)  # item_knn; 0: only the events of a user's last second
    batch_users: int = 512


@dataclass(slots=True)
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def validate(config: Config) -> None:
    """Checks types, ranges and fields that contradict each other.

    Raises:
        ConfigError: with the first fault.
    """
    _check_types(config)
    _check_ranges(config)
    _check_filters(config.data)
    _check_contradictions(config)


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
    "optimizer.weight_decay optimizer.clip_norm train.seed mesh.data mesh.items evaluation.every evaluation.patience"
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
        if value and data.source in ("table", "lines") and name != "min_played_ratio":
            raise ConfigError(
                f"config.data.{name}={value} needs config.data.source=yambda, not {data.source}; "
                "filter the events before, or leave it out"
            )
        if value and name in ("event_types", "drop_undone") and event != "multi_event":
            raise ConfigError(
                f"config.data.{name}={value} needs config.data.yambda_event=multi_event, not {event}: "
                "other files hold one type of events"
            )
    if data.source in ("table", "lines"):
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
    if data.source in ("table", "lines") and not data.path:
        raise ConfigError(f"config.data.source={data.source} needs config.data.path, the file to read")
    columns = [data.user_column, data.item_column, *filter(None, [data.time_column])]
    if data.source == "table" and len(set(columns)) < len(columns):
        raise ConfigError(f"config.data.user_column, item_column and time_column must differ, not {columns}")
    has_time = data.source in ("synthetic", "yambda") or (data.source == "table" and data.time_column)
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


def field_names(node: Any, prefix: str = "") -> typing.Iterator[str]:
    """Dotted names of all fields."""
    for entry in dataclasses.fields(node):
        value = getattr(node, entry.name)
        if dataclasses.is_dataclass(value):
            yield from field_names(value, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name


def get_field(config: Config, name: str) -> Any:
    """The value of the field with a dotted name."""
    node: Any = config
    for part in name.split("."):
        node = getattr(node, part)
    return node


def first_difference(saved: Config, wanted: Config, but: Sequence[str] = ()) -> str | None:
    """Dotted name of the first field in which two configs differ, leaving out names that start with one of ``but``."""
    for name in field_names(wanted):
        if not name.startswith(tuple(but)) and get_field(saved, name) != get_field(wanted, name):
            return name
    return None


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

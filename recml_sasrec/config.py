"""The run's configuration: a typed dataclass tree and its defaults; ``config_checks.py`` says what it must hold to."""

import dataclasses
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

    source: Literal["synthetic", "yambda", "table", "lines", "store"] = "synthetic"
    path: str = ""  # local file; empty with source=yambda fetches it from the hub, with synthetic generates it;
    # with yambda also a directory laid out like the hub's (flat/50m/listens.parquet); source=store: prepare's --output
    revision: str = ""  # source=yambda: branch, tag or commit of the hub's repository; empty: its main branch
    items_path: str = ""  # a table of items, parquet or CSV, with item_column
    items_join: bool = True  # its items join the catalogue, with or without events; false: only those with events count
    content_column: str = ""  # of items_path: a list of numbers for each item, all of one length
    category_column: str = ""  # of items_path: text or an integer for each item
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
    # what a learned projection of the items' content vectors adds to the item table: nothing, or the vectors as they
    # are (fixed) or as training changes them (trainable: 8 C bytes of moments an item, whatever optimizer.table is).
    # Items without a training event are then left out of the loss, and ranked by their content
    content: Literal["none", "fixed", "trainable"] = "none"
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
    # of the item table; bytes of moments an item, beside 4 D of the table itself (D = 128: 512):
    #   adam 8 D (1,024); adam_bf16, the first moment in bfloat16, 6 D (768); adagrad, one sum a row, 4;
    #   adafactor, squares factored into rows and columns, no first moment, 4
    table: Literal["adam", "adam_bf16", "adagrad", "adafactor"] = "adam"

    # of a group's learning rate; 0 freezes it
    backbone_rate: float = 1.0  # all but the item table and bias
    table_rate: float = 1.0  # the item table and bias
    old_rows_rate: float = 1.0  # of these the rows that init.from_run gave, times table_rate


@dataclass(slots=True)
class InitConfig:
    """Where the parameters start: at random, or from another run, whose items need not be the same."""

    from_run: str = ""  # folder of the run; items are matched by raw id
    checkpoint: str = "best"  # best, latest or a step
    # rows of items that the run does not have: drawn around the mean of its table, or of its items of the same
    # category, by their spread; or fitted from content vectors
    new_items: Literal["table", "category", "content"] = "table"
    vanished: Literal["drop", "keep"] = "drop"  # items of the run that the data does not have


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
    init: InitConfig = field(default_factory=InitConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


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

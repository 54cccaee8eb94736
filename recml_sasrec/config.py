"""The run's configuration: a typed dataclass tree, how it is loaded, overridden, checked and saved.

A config file is a Python file with ``get_config() -> Config``. Any field can be overridden from the command line:
``--config configs/quickstart.py --config.optimizer.learning_rate=3e-4``. Whatever is wrong with either is a
``ConfigError`` of one sentence that names the field, the value and the nearest right one.
"""

import ast
import dataclasses
import difflib
import importlib.util
import json
import pathlib
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
    path: str = ""  # local file; empty with source=yambda fetches it from the hub, with synthetic generates it
    cache: str = ""  # folder of stores and generated files; empty: $RECML_SASREC_CACHE or ~/.cache/recml_sasrec
    user_column: str = "user_id"  # source=table
    item_column: str = "item_id"  # source=table
    time_column: str = "timestamp"  # source=table; empty: rows are already in time order
    yambda_size: Literal["50m", "500m", "5b"] = "50m"
    yambda_format: Literal["flat", "sequential"] = "flat"
    yambda_event: Literal["listens", "likes", "dislikes"] = "listens"
    min_played_ratio: int = 0  # whole percent; 50 keeps Yambda's Listen+
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
    activation: Literal["gelu", "relu"] = "gelu"
    dropout: float = 0.2
    item_bias: bool = True  # initialised at the prior log-odds of a target
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; parameters are float32


@dataclass(slots=True)
class HeadConfig:
    """The loss over the catalogue."""

    name: Literal["cut_bce", "dense_bce", "sampled_bce"] = "cut_bce"
    reduction: Literal["token_mean", "mean"] = "token_mean"  # sum over items a token, or also mean over V (RecML, Keras)
    positive_weight: float = 1.0
    threshold: float = 0.0  # a logit above it counts as a predicted positive
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
    metric_version: Literal["standard", "yambda_v1", "yambda_v2"] = "standard"
    decay_hours: float = 24.0  # DecayPop: 0.9 ** (hours / decay_hours)
    batch_users: int = 512


@dataclass(slots=True)
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

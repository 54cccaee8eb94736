"""What the loader hands to the model."""

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """A training batch: a pure function of (seed, step)."""

    items: np.ndarray  # int32 [B, N], dense item ids, 0 where padded
    positions: np.ndarray  # int32 [B, N], restart in each segment
    segment_ids: np.ndarray  # int32 [B, N], 0 = padding, else 1, 2, ... within a row
    targets: np.ndarray  # int32 [B, N, L], a set, -1 = none
    weights: np.ndarray  # float32 [B, N], 0 where a position has no target


class QueryBatch(NamedTuple):
    """Histories to rank for: the hidden state of query q is hidden[rows[q], columns[q]]."""

    items: np.ndarray  # int32 [B, N]
    positions: np.ndarray  # int32 [B, N]
    segment_ids: np.ndarray  # int32 [B, N]
    rows: np.ndarray  # int32 [Q]
    columns: np.ndarray  # int32 [Q], position of the last event of the history
    users: np.ndarray  # int64 [Q], dense user ids, -1 = padding

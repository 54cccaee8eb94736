"""What a store's facts suggest for training on it: a value and a reason for each field, kept in the store's folder.

The rules were chosen on the validation splits of Amazon Beauty and MovieLens 100K; what they give for logs of 10^7
events and more follows Yambda's published settings and is not tuned.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from recml_sasrec.config import ConfigError, SplitConfig
from recml_sasrec.data.events import DataError
from recml_sasrec.data.split import Split, make_split
from recml_sasrec.data.store import Store

FILE = "suggestion.json"
_DAY = 86_400
_EPOCHS = 100  # times all training positions
_MOST_STEPS = 30_000
_MOST_LENGTH = 200


@dataclass(frozen=True)
class Facts:
    """What the suggestion is a function of."""

    users: int
    items: int
    events: int
    mean: float  # events a user; the three below are quantiles of them
    median: int
    ninety: int  # nine of ten users have at most so many
    longest: int
    has_time: bool
    first_time: int  # seconds
    last_time: int
    inputs: int  # training positions with leave_last
    late_users: int  # with events in the last test interval and training events before it
    late_inputs: int  # training positions with that split; 0: it is not possible


class Suggested(NamedTuple):
    value: Any
    reason: str


def facts_of(store: Store) -> Facts:
    """Counts what the rules ask for: a pass over the events where they have times.

    Raises:
        DataError: there is one item, or no user has enough events to be trained and tested on.
    """
    if store.num_items < 2:
        raise DataError("the log has 1 item but ranking needs at least 2 items; give more events")
    lengths = np.sort(np.diff(store.offsets))
    rank = lambda share: int(lengths[max(int(np.ceil(share * len(lengths))) - 1, 0)])  # noqa: E731
    late_users = late_inputs = 0
    if store.has_time:
        start, length = last_interval(store.first_time, store.last_time)
        try:
            split = make_split(store, SplitConfig("temporal", test_start=start, validation_length=length))
            late_inputs = _inputs(split)
            late_users = int(np.count_nonzero(split.test_end > split.test_start))
        except DataError:  # an interval without users
            pass
    inputs = _inputs(make_split(store, SplitConfig("leave_last")))
    if not inputs:
        raise DataError(
            f"the longest history has {rank(1)} events but training needs at least 4 of one user, of which 2 are "
            "held out; give more events"
        )
    return Facts(
        users=store.num_users,
        items=store.num_items,
        events=store.num_events,
        mean=round(store.num_events / store.num_users, 1),
        median=rank(0.5),
        ninety=rank(0.9),
        longest=rank(1),
        has_time=store.has_time,
        first_time=store.first_time,
        last_time=store.last_time,
        inputs=inputs,
        late_users=late_users,
        late_inputs=late_inputs,
    )


def _inputs(split: Split) -> int:
    return int(np.maximum(split.train_end - split.train_start - 1, 0).sum())


def last_interval(first: int, last: int) -> tuple[int, int]:
    """(first second, length) of the last thirtieth of a log, in whole days where that is at least two."""
    length = max((last - first) // 30, 1)
    if length >= 2 * _DAY:
        length -= length % _DAY
        return (last + 1 - length) // _DAY * _DAY, length
    return last + 1 - length, length


def suggest(facts: Facts, before: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Suggested]:
    """Fields of the config by dotted name; those left out keep their defaults.

    Args:
        before: values that were suggested for the store before events were added. Its model, inputs, targets and
            kind of split stay: a run that goes on from another one needs the same model, and another kind of split
            would validate on events that the other run was trained on.
    """
    large = facts.events >= 10_000_000
    long = facts.median >= _MOST_LENGTH
    length = next((n for n in (50, 100) if facts.ninety <= n), _MOST_LENGTH)
    length = before.get("data.length", 256 if long else length)
    overlap = facts.ninety > length and facts.events < 1_000_000
    sparse = facts.mean < 20
    fields = {
        "data.length": Suggested(
            length, f"half of the users have at most {facts.median:,} events, nine of ten at most {facts.ninety:,}"
        ),
        "data.stride": Suggested(
            length // 2 if overlap else 0,
            "long histories but few events: windows overlap by half" if overlap else "windows do not overlap",
        ),
        "data.targets": Suggested(
            8 if long else 1,
            f"histories are long: the next 8 events, from half of the users having {_MOST_LENGTH} events on"
            if long
            else "the next event; several from half of the users having 200 events on",
        ),
        "data.position_order": Suggested("newest_first", "positions counted from the newest event did better"),
    }
    temporal = facts.late_inputs > 0 and facts.late_users >= max(100, facts.users / 10)
    if "split.kind" in before:
        temporal = facts.late_inputs > 0 and before["split.kind"] == "temporal"
    fields |= _split(facts, temporal)
    fields |= {
        "model.width": Suggested(128 if large else 64, f"{facts.events:,} events; 128 from 10,000,000 on"),
        "model.blocks": Suggested(2, "as published; more seldom help"),
        "model.heads": Suggested(2, "as above"),
        "model.norm": Suggested("post", "did better on validation"),
        "model.dropout": Suggested(
            0.5 if sparse else 0.2 if long else 0.3,
            f"{facts.mean:,} events a user: .5 below 20, .3 from there, .2 where half of the users have {_MOST_LENGTH}",
        ),
    }
    fields |= _training(facts, length, facts.late_inputs if temporal else facts.inputs, large)
    kept = [name for name in fields if name in before and name.startswith(("model.", "data.", "split.kind"))]
    return fields | {name: Suggested(before[name], "as before events were added") for name in kept}


def _split(facts: Facts, temporal: bool) -> dict[str, Suggested]:
    if temporal:
        start, length = last_interval(facts.first_time, facts.last_time)
        reason = (
            f"one clock for all: {facts.late_users:,} users have events before and in the last thirtieth of the log"
        )
        return {
            "split.kind": Suggested("temporal", reason),
            "split.test_start": Suggested(start, "the last thirtieth of the log is the test"),
            "split.validation_length": Suggested(length, "as long, before it"),
        }
    if facts.has_time:
        reason = f"only {facts.late_users:,} users have events before and in the last thirtieth of the log"
    else:
        reason = "there are no times"
    return {"split.kind": Suggested("leave_last", reason)}


def _training(facts: Facts, length: int, inputs: int, large: bool) -> dict[str, Suggested]:
    tokens = 16_384 if large else 8_192 if facts.events >= 1_000_000 else 2_048
    # no more than the rows that the inputs certainly fill
    batch = max(1, min(round(tokens / length), inputs // length))
    per_epoch = max(1, round(inputs / (batch * length)))
    steps = min(_EPOCHS * per_epoch, _MOST_STEPS)
    # a validation ranks for every user
    every = steps // (20 if facts.users <= 100_000 else 5)
    return {
        "optimizer.learning_rate": Suggested(1e-3, "Adam's usual one"),
        "optimizer.final_fraction": Suggested(0.02, "a cosine down to nearly nothing did better than a constant rate"),
        "optimizer.warmup_steps": Suggested(
            1_000 if large else 0, "for the larger model and batch" if large else "none needed at this size"
        ),
        "train.batch_size": Suggested(batch, f"rows of {length} positions: about {batch * length:,} a step"),
        "train.steps": Suggested(
            steps,
            f"all training positions {steps / per_epoch:.3g} times, in {per_epoch:,} steps each"
            + (f", at most {_MOST_STEPS:,} steps" if steps == _MOST_STEPS else ""),
        ),
        "train.log_every": Suggested(steps // 100, "a hundred lines"),
        "checkpoint.every": Suggested(every, "with each validation"),
        "evaluation.every": Suggested(every, f"{steps // every} validations; the best checkpoint is kept"),
        "evaluation.patience": Suggested(
            0, "the falling learning rate brings the best late: stopping early would miss it"
        ),
        "evaluation.ks": Suggested((5, 10, 20), "the usual list lengths"),
        "evaluation.filter_seen": Suggested(False, "seen items stay in the ranking; true removes them"),
    }


def write(directory: str, facts: Facts, before: Mapping[str, Any]) -> dict[str, Suggested]:
    """Writes ``suggestion.json`` to a store's folder and returns what it suggests; see ``suggest``."""
    fields = suggest(facts, before)
    tree = {"facts": asdict(facts), "fields": {name: field._asdict() for name, field in fields.items()}}
    with open(os.path.join(directory, FILE), "w") as file:
        json.dump(tree, file, indent=1)
    return fields


def read(directory: str) -> dict[str, Any]:
    """The suggested value of each field, as ``prepare --output`` wrote it to the store's folder.

    Raises:
        ConfigError: the folder has no suggestion.
    """
    path = os.path.join(os.path.expanduser(directory), FILE)
    try:
        with open(path) as file:
            return {name: field["value"] for name, field in json.load(file)["fields"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{directory!r} has no {FILE}; write it with python -m recml_sasrec.prepare --input FILE "
            f"--output {directory}"
        ) from None

"""Splits: who is trained on, validated on and tested on, as ranges of the store's events. Nothing is copied."""

from dataclasses import dataclass

import numpy as np

from recml_sasrec.config import SplitConfig
from recml_sasrec.data.events import DataError
from recml_sasrec.data.store import Store, user_chunks

_SCAN_EVENTS = 1 << 22


@dataclass(frozen=True, eq=False)
class Split:
    """Half-open ranges of event indices, all int64 [U]; a history is [train_start, *_history_end)."""

    train_start: np.ndarray
    train_end: np.ndarray
    validation_start: np.ndarray
    validation_end: np.ndarray  # equal to validation_start: the user has no validation target
    test_start: np.ndarray
    test_end: np.ndarray
    validation_history_end: np.ndarray
    test_history_end: np.ndarray
    description: str  # one line for the protocol of a table


def make_split(store: Store, split: SplitConfig) -> Split:
    """The split that ``split.kind`` names."""
    return {"temporal": split_temporal, "leave_last": split_leave_last}[split.kind](store, split)


def train_end(split: SplitConfig) -> int:
    """The first second that a temporal split does not train on."""
    held_out = split.validation_length + split.gap if split.validation_length else 0
    return split.test_start - split.gap - held_out


def split_temporal(store: Store, split: SplitConfig) -> Split:
    """Global temporal split (Yambda, arXiv 2505.22238): one clock for all users, half-open intervals.

    test = [test_start, test_start + test_length); validation, if it has a length, the ``validation_length`` seconds
    that end ``gap`` before test_start; train = everything until ``gap`` before the first of these. The test history
    ends ``gap`` before test_start too: it holds the validation's events. A user without training events is not
    evaluated.

    Raises:
        DataError: the source has no times, or train, validation or test have no events.
    """
    if not store.has_time:
        raise DataError(
            "config.split.kind='temporal' needs times but the source has none; "
            "name its column of times or set config.split.kind='leave_last'"
        )
    last = np.iinfo(np.int64).max
    history_time = split.test_start - split.gap
    test_end_time = split.test_start + split.test_length if split.test_length > 0 else last
    validation_time = history_time - split.validation_length
    train_time = train_end(split)
    times = (train_time, validation_time, history_time, split.test_start, test_end_time)
    trained_end, validation_start, history_end, test_start, test_end = _first_at_or_after(store, times)
    train_start = np.array(store.offsets[:-1])
    trained = trained_end > train_start
    if split.validation_length == 0:
        validation_start = history_end
    result = Split(
        train_start=train_start,
        train_end=trained_end,
        validation_start=np.where(trained, validation_start, trained_end),
        validation_end=np.where(trained, history_end, trained_end),
        test_start=np.where(trained, test_start, trained_end),
        test_end=np.where(trained, test_end, trained_end),
        validation_history_end=trained_end,
        test_history_end=np.where(trained, history_end, trained_end),
        description=(
            f"global temporal, train t < {train_time}"
            + (f", validation [{validation_time}, {history_time})" if split.validation_length > 0 else "")
            + f", test [{split.test_start}, {'end' if test_end_time == last else test_end_time})"
        ),
    )
    span = f"the events span [{store.first_time}, {store.last_time}]"
    if not trained.any():
        raise DataError(
            f"no event lies before the end of training {train_time}, which is config.split.test_start "
            f"{split.test_start} less the gaps of {split.gap} and a validation of {split.validation_length} seconds "
            f"({span}); raise config.split.test_start or lower config.split.gap"
        )
    if not np.any(result.test_end > result.test_start):
        raise DataError(
            "no user with training events has an event in the test interval "
            f"of config.split.test_start {split.test_start} "
            f"({span}); choose a config.split.test_start before the last event"
        )
    if split.validation_length > 0 and not np.any(result.validation_end > result.validation_start):
        raise DataError(
            f"no user with training events has an event in the validation interval [{validation_time}, {history_time}) "
            f"({span}); raise config.split.validation_length or set it to 0"
        )
    return result


def split_leave_last(store: Store, split: SplitConfig) -> Split:
    """Leave-last-n: a user's last ``test_last`` events are the test, the ``validation_last`` before them validation.

    A history too short to leave one event for training (fewer than test_last + validation_last + 1) is trained on
    whole and not evaluated. The test history is everything before the test, the validation's targets included.

    Raises:
        DataError: nobody has a history long enough to be evaluated.
    """
    start, end = np.array(store.offsets[:-1]), np.array(store.offsets[1:])
    held_out = split.test_last + split.validation_last
    enough = end - start > held_out
    if held_out and not enough.any():
        raise DataError(
            f"the longest history is of {int((end - start).max())} but leaving out {split.test_last} for test "
            f"and {split.validation_last} for validation needs {held_out + 1} events; "
            "give longer histories or lower config.split.validation_last"
        )
    test_start = np.where(enough, end - split.test_last, end)
    train_end = np.where(enough, end - held_out, end)
    return Split(
        train_start=start,
        train_end=train_end,
        validation_start=train_end,
        validation_end=test_start,
        test_start=test_start,
        test_end=end,
        validation_history_end=train_end,
        test_history_end=test_start,
        description=f"leave-last, test the last {split.test_last}, validation the {split.validation_last} before",
    )


def _first_at_or_after(store: Store, times: tuple[int, ...]) -> list[np.ndarray]:
    """For each time, int64 [U]: the index of each user's first event at or after it."""
    results = [np.empty(store.num_users, np.int64) for _ in times]
    for first, last in user_chunks(store.offsets, _SCAN_EVENTS):
        begin = int(store.offsets[first])
        chunk = np.array(store.timestamps[begin : int(store.offsets[last])])  # one sequential read
        bounds = np.asarray(store.offsets[first : last + 1]) - begin
        for time, result in zip(times, results, strict=True):
            low, high = bounds[:-1].copy(), bounds[1:].copy()
            while (active := np.flatnonzero(low < high)).size:  # one bisection for all users at once
                middle = (low[active] + high[active]) // 2
                before = chunk[middle] < time
                low[active[before]] = middle[before] + 1
                high[active[~before]] = middle[~before]
            result[first:last] = low + begin
    return results

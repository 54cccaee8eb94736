"""Windows, targets and packing against a brute-force builder that loops over every event."""

import numpy as np
import pytest
from event_helpers import store_of
from hypothesis import given, settings
from hypothesis import strategies as st

from recml_sasrec.config import Config, SplitConfig
from recml_sasrec.data.events import DataError
from recml_sasrec.data.loader import Data
from recml_sasrec.data.packing import best_fit, make_pattern
from recml_sasrec.data.split import split_leave_last

WHOLE = SplitConfig(kind="leave_last", test_last=0, validation_last=0)


def brute_force_windows(history, n, stride, last_only):
    """(start, end) of the inputs: the last window first, then back by the stride until the history begins."""
    windows, end = [], len(history) - 1
    while end > 0:
        windows.append((max(0, end - n), end))
        if last_only or end - n <= 0:
            break
        end -= stride or n
    return windows


def brute_force_targets(history, position, count, horizon):
    """The set of the next events, in order of first occurrence."""
    targets = []
    for item, time in history[position + 1 : position + 1 + count]:
        if horizon and time > history[position][1] + horizon:
            continue
        if item not in targets:
            targets.append(item)
    return targets


def expected_segments(histories, data):
    """Sorted (items, positions, sets of targets) of every window of every user."""
    result = []
    for history in histories:
        for start, end in brute_force_windows(history, data.length, data.stride, data.windows == "last"):
            items = tuple(item for item, _ in history[start:end])
            positions = tuple(range(end - start))
            if data.position_order == "newest_first":
                positions = positions[::-1]
            targets = tuple(
                tuple(sorted(brute_force_targets(history, p, data.targets, data.horizon))) for p in range(start, end)
            )
            result.append((items, positions, targets))
    return sorted(result)


def segments_of(batch):
    """The same, read from a batch; checks padding on the way."""
    result = []
    for row in range(len(batch.items)):
        ids = batch.segment_ids[row]
        real = ids > 0
        assert np.all(np.diff(real.astype(int)) <= 0), "padding is at the end of a row"
        assert np.all(np.diff(ids[real]) >= 0) and set(ids[real]) == set(range(1, ids.max() + 1))
        assert not batch.items[row][~real].any() and not batch.positions[row][~real].any()
        assert np.all(batch.targets[row][~real] == -1) and not batch.weights[row][~real].any()
        for number in range(1, ids.max() + 1):
            inside = ids == number
            targets = []
            for entries, weight in zip(batch.targets[row][inside], batch.weights[row][inside], strict=True):
                kept = entries[entries >= 0].tolist()
                assert len(kept) == len(set(kept)), "targets are a set"
                assert weight == (1.0 if kept else 0.0)
                targets.append(tuple(sorted(kept)))
            items, positions = (tuple(array[row][inside].tolist()) for array in (batch.items, batch.positions))
            result.append((items, positions, tuple(targets)))
    return result


events = st.tuples(st.integers(0, 4), st.sampled_from([0, 0, 5, 5, 10, 60]))
histories = st.lists(st.lists(events, min_size=1, max_size=25), min_size=1, max_size=8).filter(
    lambda hs: any(len(h) > 1 for h in hs)
)


@settings(max_examples=150, deadline=None)
@given(
    histories=histories,
    length=st.integers(1, 9),
    targets=st.integers(1, 6),
    horizon=st.sampled_from([0, 0, 1, 5, 30]),
    stride=st.integers(0, 12),
    windows=st.sampled_from(["all", "all", "last"]),
    pack=st.booleans(),
    order=st.sampled_from(["oldest_first", "newest_first"]),
    seed=st.integers(0, 5),
)
def test_an_epoch_holds_every_window_once_with_its_targets(
    histories, length, targets, horizon, stride, windows, pack, order, seed
):
    # the second number of a history's events is the gap to the event before
    histories = [
        [(item, int(time)) for (item, _), time in zip(h, np.cumsum([gap for _, gap in h]), strict=True)]
        for h in histories
    ]
    config = Config()
    data = config.data
    data.length, data.targets, data.horizon, data.stride = length, targets, horizon, stride
    data.windows, data.pack, data.position_order = windows, pack, order
    config.train.batch_size, config.train.seed = 1, seed
    store = store_of(histories)
    opened = Data(store, split_leave_last(store, WHOLE))
    source = opened.train_source(config)
    rows = round(opened.steps_per_epoch(config))
    expected = expected_segments(histories, data)
    assert opened.tokens(config) == sum(len(items) for items, _, _ in expected)
    for epoch in (0, 3):
        found = [s for row in range(rows) for s in segments_of(source[epoch * rows + row])]
        assert sorted(found) == expected


def test_targets_never_cross_the_end_of_training():
    store = store_of([[(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5)], [(6, 0), (7, 1), (8, 2)]])
    config = Config()
    config.data.length, config.data.targets, config.train.batch_size = 4, 8, 1
    split = split_leave_last(store, SplitConfig(kind="leave_last", test_last=1, validation_last=1))
    opened = Data(store, split)
    batches = [opened.train_source(config)[i] for i in range(round(opened.steps_per_epoch(config)))]
    found = {int(t) for batch in batches for t in batch.targets[batch.targets >= 0]}
    assert found == {1, 2, 3}  # the held-out 4, 5, 7 and 8 are nobody's targets, user 1 has too few events to train on


def big_data() -> tuple[Data, Config]:
    rng = np.random.default_rng(0)
    histories = [[(int(i), t) for t, i in enumerate(rng.integers(0, 50, n))] for n in rng.integers(1, 70, 60)]
    store = store_of(histories)
    config = Config()
    config.data.length, config.train.batch_size = 16, 7
    return Data(store, split_leave_last(store, WHOLE)), config


def test_a_batch_is_a_function_of_seed_and_step_whatever_came_before():
    data, config = big_data()
    assert data.steps_per_epoch(config) % 1, "the test wants batches that span two epochs"
    steps = round(2.5 * data.steps_per_epoch(config))
    in_order = [data.train_source(config)[step] for step in range(steps)]
    other_way = data.train_source(config)
    for step in reversed(range(steps)):
        for a, b in zip(in_order[step], other_way[step], strict=True):
            np.testing.assert_array_equal(a, b)
    start = steps // 2
    with data.train_batches(config, start) as batches:
        for step in range(start, steps):
            for a, b in zip(in_order[step], next(batches), strict=True):
                np.testing.assert_array_equal(a, b)
    config.train.seed = 1
    assert any((a != b).any() for a, b in zip(in_order[0], data.train_source(config)[0], strict=True))


def test_processes_build_the_rows_of_the_whole_batch():
    data, config = big_data()
    config.train.batch_size = 8
    for step in (0, 3, 9):
        whole = data.train_source(config)[step]
        parts = [data.train_source(config, (i, 4))[step] for i in range(4)]
        for array, *pieces in zip(whole, *parts, strict=True):
            np.testing.assert_array_equal(array, np.concatenate(pieces))


def test_mean_positives_is_the_mean_over_an_epoch():
    data, config = big_data()
    config.train.batch_size = 1
    source, count = data.train_source(config), round(data.steps_per_epoch(config))
    batches = [source[i] for i in range(count)]
    exact = sum((b.targets >= 0).sum() for b in batches) / sum(b.weights.sum() for b in batches)
    assert data.mean_positives(config) == pytest.approx(exact, rel=0.05)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=60))
def test_best_fit_decreasing_equals_the_textbook_algorithm(lengths):
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [b for b in bins if sum(b) + length <= 10]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            bins.append([length])
    groups = best_fit(np.bincount(lengths), 10)
    assert sum(count for _, count in groups) == len(bins)
    pattern = make_pattern(np.array(lengths), 10, pack=True)
    assert sorted(pattern.slot_ranks.tolist()) == list(range(len(lengths)))
    by_rank = np.sort(lengths)[pattern.slot_ranks]
    assert np.add.reduceat(by_rank, pattern.row_offsets[:-1]).max() <= 10


def test_what_makes_no_batch_is_refused_with_numbers():
    config = Config()
    config.data.length = 4
    one_each = store_of([[(0, 0)], [(1, 0)]])
    with pytest.raises(DataError, match=r"no user has 2 training events .* has 1\)"):
        Data(one_each, split_leave_last(one_each, WHOLE)).steps_per_epoch(config)
    few = store_of([[(0, 0), (1, 1), (2, 2)], [(1, 0)]])  # a user with one event beside one with three
    data = Data(few, split_leave_last(few, WHOLE))
    config.train.batch_size = 2
    with pytest.raises(DataError, match=r"train.batch_size 2 is larger than the data: 1 windows fill 1 rows"):
        data.train_batches(config)
    config.train.batch_size, config.data.horizon = 1, 5
    untimed = store_of([[(0, 0), (1, 1)]], has_time=False)
    with pytest.raises(DataError, match=r"data.horizon 5 needs times"):
        Data(untimed, split_leave_last(untimed, WHOLE)).mean_positives(config)
    far_apart = store_of([[(0, 0), (1, 1000)]])
    with pytest.raises(DataError, match=r"within config.data.horizon 5 seconds"):
        Data(far_apart, split_leave_last(far_apart, WHOLE)).mean_positives(config)

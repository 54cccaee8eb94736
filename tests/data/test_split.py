"""Splits against a brute force that looks at every event, and on the boundaries of Yambda's benchmark."""

import numpy as np
import pytest
from event_helpers import store_of
from hypothesis import given, settings
from hypothesis import strategies as st

from recml_sasrec.config import SplitConfig
from recml_sasrec.data import split as split_module
from recml_sasrec.data import yambda
from recml_sasrec.data.events import DataError
from recml_sasrec.data.split import make_split, split_leave_last, split_temporal


def ranges_of(split, u):
    return {
        name: list(range(getattr(split, f"{name}_start")[u], getattr(split, f"{name}_end")[u]))
        for name in ("train", "validation", "test")
    }


@settings(max_examples=150, deadline=None)
@given(
    times=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12).map(sorted), min_size=1, max_size=8),
    test_start=st.integers(0, 45),
    test_length=st.integers(0, 20),
    validation_length=st.integers(0, 20),
    gap=st.integers(0, 8),
    chunk=st.integers(1, 30),
)
def test_temporal_split_equals_a_look_at_every_event(times, test_start, test_length, validation_length, gap, chunk):
    store = store_of([[(0, t) for t in history] for history in times])
    config = SplitConfig("temporal", test_start, test_length, validation_length, gap)
    test_end = test_start + test_length if test_length else 10**9
    validation_end = test_start - gap
    validation_start = validation_end - validation_length
    train_end = validation_start - gap if validation_length else validation_end
    expected = []
    for u, history in enumerate(times):
        at = [(int(store.offsets[u]) + i, t) for i, t in enumerate(history)]
        train = [i for i, t in at if t < train_end]
        expected.append(
            {
                "train": train,
                "validation": [i for i, t in at if train and validation_start <= t < validation_end],
                "test": [i for i, t in at if train and test_start <= t < test_end],
                "history": [i for i, t in at if train and t < validation_end],
            }
        )
    whole = split_module._SCAN_EVENTS
    split_module._SCAN_EVENTS = chunk
    try:
        split = split_temporal(store, config)
    except DataError:
        assert (
            not any(e["train"] for e in expected)
            or not any(e["test"] for e in expected)
            or (validation_length and not any(e["validation"] for e in expected))
        )
        return
    finally:
        split_module._SCAN_EVENTS = whole
    for u, e in enumerate(expected):
        found = ranges_of(split, u)
        assert found == {name: e[name] for name in found}
        assert list(range(split.train_start[u], split.test_history_end[u])) == e["history"]
        assert split.validation_history_end[u] == split.train_end[u]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=10),
    test_last=st.integers(0, 3),
    validation_last=st.integers(0, 3),
)
def test_leave_last_equals_slicing_lists(sizes, test_last, validation_last):
    store = store_of([[(0, 0)] * size for size in sizes])
    config = SplitConfig(kind="leave_last", test_last=test_last, validation_last=validation_last)
    held_out = test_last + validation_last
    if held_out and max(sizes) <= held_out:
        with pytest.raises(DataError, match=f"longest history is of {max(sizes)} but .* needs {held_out + 1}"):
            split_leave_last(store, config)
        return
    split = make_split(store, config)
    for u, size in enumerate(sizes):
        events = [int(store.offsets[u]) + i for i in range(size)]
        if size <= held_out:  # too short to be evaluated: trained on whole
            assert ranges_of(split, u) == {"train": events, "validation": [], "test": []}
            continue
        test = events[size - test_last :]
        validation = events[size - held_out : size - test_last]
        train = events[: size - held_out]
        assert ranges_of(split, u) == {"train": train, "validation": validation, "test": test}
        assert split.validation_history_end[u] == split.train_end[u]
        assert list(range(split.train_start[u], split.test_history_end[u])) == train + validation


def final_run():
    return SplitConfig("temporal", yambda.TEST_START, 0, 0, yambda.GAP)


def tuning_run():
    length = yambda.VALIDATION_END - yambda.VALIDATION_START
    return SplitConfig("temporal", yambda.TEST_START, 0, length, yambda.GAP)


BOUNDARIES = [25_823_595, 25_823_600, 25_825_395, 25_825_400, 25_911_795, 25_911_800, 25_913_595, 25_913_600]


def test_yambda_boundaries_in_the_final_and_the_tuning_run():
    """Train t < 25,911,800 or 25,823,600; validation [25,825,400, 25,911,800); test [25,913,600, end)."""
    only_test = [(7, 25_913_600), (8, 26_000_000)]
    store = store_of([[(i, t) for i, t in enumerate(BOUNDARIES)], only_test, [(1, 5), (9, 26_000_000)]])
    final, tuning = split_temporal(store, final_run()), split_temporal(store, tuning_run())
    assert ranges_of(final, 0) == {"train": [0, 1, 2, 3, 4], "validation": [], "test": [7]}
    assert ranges_of(tuning, 0) == {"train": [0], "validation": [3, 4], "test": [7]}
    assert final.test_history_end[0] == tuning.test_history_end[0] == 5
    for split in (final, tuning):
        assert ranges_of(split, 1) == {"train": [], "validation": [], "test": []}  # no training events: not scored
        assert ranges_of(split, 2)["test"] == [11]  # item 9 occurs in the test only and stays a target
    assert "train t < 25911800" in final.description and "test [25913600, end)" in final.description
    assert "train t < 25823600, validation [25825400, 25911800)" in tuning.description


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            SplitConfig("temporal", 0),
            r"no event lies before the end of training 0, .* gaps of 0 .* \(the events span \[10, 30\]\); raise",
        ),
        (SplitConfig("temporal", 31), r"test interval of config.split.test_start 31 \(the events span \[10, 30\]\)"),
        (SplitConfig("temporal", 30, 0, 5, 1), r"validation interval \[24, 29\) \(the events span \[10, 30\]\)"),
    ],
)
def test_a_split_without_events_says_where_the_events_are(config, message):
    with pytest.raises(DataError, match=message):
        make_split(store_of([[(0, 10), (1, 20), (2, 30)]]), config)


def test_a_temporal_split_needs_times():
    with pytest.raises(DataError, match=r"split.kind='temporal' needs times"):
        make_split(store_of([[(0, 0), (1, 1)]], has_time=False), SplitConfig("temporal", 1))


def test_nothing_is_copied_per_event():
    store = store_of([[(0, t) for t in range(1000)]])
    split = split_temporal(store, SplitConfig("temporal", 900))
    assert all(value.shape == (1,) for value in vars(split).values() if isinstance(value, np.ndarray))

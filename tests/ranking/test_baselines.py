"""Popularity against counting by hand, and its lists against a full sort."""

from types import SimpleNamespace

import numpy as np
import pytest

from recml_sasrec.ranking import baselines
from recml_sasrec.ranking.baselines import decay_pop, most_pop, order_items, random_lists, top_of_order


def make_store(histories, times=None, num_items=6):
    offsets = np.cumsum([0, *map(len, histories)])
    items = np.array([i for history in histories for i in history], np.int32)
    timestamps = np.arange(len(items)) if times is None else np.array(times)
    return SimpleNamespace(
        items=items, timestamps=timestamps, offsets=offsets, num_items=num_items, has_time=times is not None
    )


def random_data(seed, users=30, num_items=20):
    rng = np.random.default_rng(seed)
    histories = [rng.integers(0, num_items, rng.integers(1, 12)) for _ in range(users)]
    store = make_store(histories, rng.integers(0, 1_000_000, sum(map(len, histories))), num_items)
    start, end = store.offsets[:-1].copy(), store.offsets[1:].copy()
    keep = rng.integers(0, 12, users)
    start[5], keep[5] = 0, 0  # a user without training events may have any empty range
    return store, SimpleNamespace(train_start=start, train_end=np.minimum(start + keep, end))


@pytest.mark.parametrize("block", [1, 3, 64, 1 << 24])
def test_only_training_events_are_counted_whatever_the_block(block, monkeypatch):
    monkeypatch.setattr(baselines, "BLOCK", block)
    store, split = random_data(seed=block)
    events = [e for a, b in zip(split.train_start, split.train_end, strict=True) for e in range(a, b)]
    counts = np.zeros(store.num_items, np.int64)
    decayed, now = np.zeros(store.num_items), max(store.timestamps[e] for e in events)
    for e in events:
        counts[store.items[e]] += 1
        decayed[store.items[e]] += 0.9 ** ((now - store.timestamps[e]) / 3600 / 12)
    np.testing.assert_array_equal(most_pop(store, split), counts)
    np.testing.assert_allclose(decay_pop(store, split, 12), decayed, rtol=1e-12)
    np.testing.assert_array_equal(decay_pop(store, split, 0), counts)


def test_decay_pop_by_hand():
    # Item 0 twice, 24 hours and 12 hours before the last training event (item 1); item 2 is a target.
    store = make_store([[0, 0, 1, 2]], [0, 43_200, 86_400, 9_999_999])
    split = SimpleNamespace(train_start=np.array([0]), train_end=np.array([3]))
    np.testing.assert_allclose(decay_pop(store, split, 12)[:3], [0.9**2 + 0.9, 1, 0])


def test_decay_pop_refuses_negative_hours_and_missing_times():
    split = SimpleNamespace(train_start=np.array([0]), train_end=np.array([1]))
    with pytest.raises(ValueError, match="decay_hours is -1"):
        decay_pop(make_store([[0]], [0]), split, -1)
    with pytest.raises(ValueError, match="timestamps"):
        decay_pop(make_store([[0]]), split, 1)


def test_no_training_events_count_nothing():
    store, split = make_store([[0]], [0]), SimpleNamespace(train_start=np.array([0]), train_end=np.array([0]))
    assert not most_pop(store, split).any()
    assert not decay_pop(store, split, 1).any()


def test_counts_beyond_float32_do_not_tie():
    counts = np.array([2**24, 2**24 + 1, 2**60, 2**60 + 1, 2**24], np.int64)
    np.testing.assert_array_equal(order_items(counts), [3, 2, 1, 0, 4])


@pytest.mark.parametrize("k", [1, 4, 30])
@pytest.mark.parametrize("masked", [False, True])
def test_lists_equal_a_full_sort_without_the_seen_items(k, masked):
    rng = np.random.default_rng(k)
    scores, candidates = rng.integers(0, 4, 20), rng.random(20) < 0.6 if masked else None
    seen = [np.flatnonzero(rng.random(20) < p) for p in (0, 0.1, 0.5, 0.9, 1)]
    values, offsets = np.concatenate(seen), np.cumsum([0, *map(len, seen)])
    lists = top_of_order(order_items(scores, candidates), k, 5, 20, (values, offsets))
    unfiltered = top_of_order(order_items(scores, candidates), k, 5, 20)
    allowed = range(20) if candidates is None else np.flatnonzero(candidates)
    order = sorted(allowed, key=lambda i: (-scores[i], i))
    for query, left_out in enumerate(seen):
        for got, expected in ((lists, [i for i in order if i not in left_out]), (unfiltered, order)):
            expected = [*expected, *[-1] * k][:k]
            np.testing.assert_array_equal(got[query], expected)


@pytest.mark.parametrize("masked", [False, True])
def test_random_lists_hold_unseen_candidates_and_depend_on_seed_and_user_alone(masked):
    rng = np.random.default_rng(0)
    candidates = np.flatnonzero(rng.random(20) < 0.6) if masked else None
    allowed = set(range(20) if candidates is None else candidates.tolist())
    seen = [np.flatnonzero(rng.random(20) < p) for p in (0, 0.3, 0.9, 1)]
    values, offsets = np.concatenate(seen), np.cumsum([0, *map(len, seen)])
    users = np.array([3, 8, 5, 1])
    lists = random_lists(7, users, 6, 20, candidates, (values, offsets))
    for row, left_out in zip(lists, seen, strict=True):
        items = row[row >= 0].tolist()
        assert len(items) == len(set(items)) == min(6, len(allowed - set(left_out)))
        assert set(items) <= allowed - set(left_out)
    again = random_lists(7, users[1:2], 6, 20, candidates, (seen[1], np.array([0, len(seen[1])])))
    np.testing.assert_array_equal(again[0], lists[1])
    many = random_lists(7, np.arange(50), 6, 20)
    assert len({tuple(row) for row in many}) == 50
    assert not np.array_equal(many, random_lists(8, np.arange(50), 6, 20))

"""What a store holds, in a few lines for people."""

import numpy as np

from recml_sasrec.data.store import Store, user_chunks
from recml_sasrec.data.times import YEAR_1980, date_of

_SCAN_EVENTS = 1 << 22
_SHARES = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1)


def describe(store: Store) -> str:
    """Counts, repeats, quantiles of events per user (the smallest value that holds for the share), time range."""
    histories = np.sort(np.diff(store.offsets))
    ranks = np.maximum(np.ceil(np.array(_SHARES) * len(histories)).astype(int) - 1, 0)
    names = ["least"] + [f"{share:.0%}" for share in _SHARES[1:-1]] + ["most"]
    quantiles = ", ".join(f"{name} {histories[rank]:,}" for name, rank in zip(names, ranks, strict=True))
    repeats = 1 - different_pairs(store) / store.num_events
    lines = [
        f"{store.num_users:,} users, {store.num_items:,} items, {store.num_events:,} events",
        f"repeats: {repeats:.1%} of the events are of an item that the user has had before",
        f"events a user: mean {histories.mean():,.1f}; {quantiles}",
    ]
    if store.has_time:
        days = (store.last_time - store.first_time) / 86_400
        dates = f"; {date_of(store.first_time)} .. {date_of(store.last_time)}" if store.first_time > YEAR_1980 else ""
        lines.append(f"time: second {store.first_time:,} to {store.last_time:,} ({days:,.1f} days{dates})")
    else:
        lines.append("time: none, events are in the order of the source")
    return "\n".join(lines)


def different_pairs(store: Store) -> int:
    """The number of different (user, item) pairs: one pass over the events, a few million at a time."""
    pairs = 0
    for first, last in user_chunks(store.offsets, _SCAN_EVENTS):
        user = np.repeat(np.arange(last - first), np.diff(store.offsets[first : last + 1]))
        key = np.sort(user << 32 | store.items[int(store.offsets[first]) : int(store.offsets[last])])
        pairs += 1 + int(np.count_nonzero(key[1:] != key[:-1]))
    return pairs

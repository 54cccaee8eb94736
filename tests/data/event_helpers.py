"""What several tests of the data room need: streams read whole, and stores made in memory."""

import numpy as np
import pyarrow as pa

from recml_sasrec.data.store import Store


def collect(batches):
    """(users, items, seconds) of a whole stream; checks the types of the contract."""
    users, items, times = [], [], []
    for batch in batches:
        for ids in (batch.user, batch.item):
            assert ids.type in (pa.int64(), pa.large_string())
        users += batch.user.to_pylist()
        items += batch.item.to_pylist()
        if batch.timestamp is not None:
            assert batch.timestamp.type == pa.int64()
            times += [tick // batch.ticks for tick in batch.timestamp.to_pylist()]
    return users, items, times


def store_of(histories: list[list[tuple[int, int]]], has_time: bool = True) -> Store:
    """A store in memory of (item, time) histories."""
    flat = [event for history in histories for event in history]
    return Store(
        items=np.array([item for item, _ in flat], np.int32),
        timestamps=np.array([time for _, time in flat], np.int64),
        offsets=np.cumsum([0] + [len(history) for history in histories]),
        num_users=len(histories),
        num_items=max(item for item, _ in flat) + 1,
        has_time=has_time,
        fingerprint="",
        vocabulary="",
        user_ids=pa.array(range(len(histories))),
        item_ids=pa.array([]),
        directory="",
        first_time=min(time for _, time in flat),
        last_time=max(time for _, time in flat),
    )

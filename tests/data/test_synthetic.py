"""The generator: Yambda's published proportions, and a sequence that can be learned."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recml_sasrec.config import SyntheticConfig
from recml_sasrec.data import synthetic
from recml_sasrec.data.events import DataError


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "listens.parquet"
    synthetic.write(SyntheticConfig(), str(path))
    return path


@pytest.fixture(scope="module")
def log(file):
    return {name: column.to_numpy() for name, column in zip(synthetic.SCHEMA.names, pq.read_table(file), strict=True)}


def test_the_file_has_yambdas_shape(file, log):
    parquet = pq.ParquetFile(file)
    types = {field.name: (field.type, field.nullable) for field in parquet.schema_arrow}
    assert types == {
        "uid": (pa.uint32(), False),
        "timestamp": (pa.uint32(), False),
        "item_id": (pa.uint32(), False),
        "is_organic": (pa.uint8(), False),
        "played_ratio_pct": (pa.uint16(), True),
        "track_length_seconds": (pa.uint32(), True),
    }
    assert parquet.metadata.row_group(0).column(0).compression == "LZ4"
    assert np.all(log["uid"] % 100 == 0) and np.all(log["timestamp"] % 5 == 0)
    assert log["timestamp"].max() <= 26_000_000
    order = np.lexsort((log["timestamp"], log["uid"]))
    np.testing.assert_array_equal(order, np.arange(len(order)))


def test_published_proportions(log):
    uid, item, time = log["uid"].astype(np.int64), log["item_id"].astype(np.int64), log["timestamp"].astype(np.int64)
    events = len(uid)
    assert 100_000 < events < 150_000
    same_user = uid[1:] == uid[:-1]
    assert np.mean((time[1:] == time[:-1])[same_user]) == pytest.approx(0.19, abs=0.05)  # ties
    repeats = 1 - len(np.unique(uid * 2**32 + item)) / events
    assert repeats == pytest.approx(0.69, abs=0.08)
    counts = np.unique(uid, return_counts=True)[1]
    assert np.mean(counts) / np.median(counts) == pytest.approx(5_030 / 3_024, rel=0.15)
    growth = np.mean(time >= 26_000_000 - 30 * 86_400) / np.mean(time < 30 * 86_400)
    assert growth == pytest.approx(1.84, rel=0.2)
    gaps = (time[1:] - time[:-1])[same_user]
    assert 150 <= np.median(gaps) <= 400


def test_played_ratios(log):
    ratio = log["played_ratio_pct"]  # float with NaN where null
    known = ratio[~np.isnan(ratio)]
    assert 0 < np.isnan(ratio).sum() < 0.01 * len(ratio)
    for low, high, share in ((0, 0, 0.074), (1, 49, 0.292), (50, 99, 0.08), (100, 100, 0.55), (101, 159, 0.0047)):
        assert np.mean((known >= low) & (known <= high)) == pytest.approx(share, abs=0.02)


def test_a_few_items_are_popular_and_the_next_one_can_be_guessed(log):
    item = log["item_id"].astype(np.int64)
    counts = np.sort(np.unique(item, return_counts=True)[1])[::-1]
    top_percent = counts[: len(counts) // 100].sum() / counts.sum()
    assert 0.1 < top_percent < 0.55
    # A first-order Markov guess made on the first half of the log must beat the most popular item by far on the second.
    pairs = np.stack([item[:-1], item[1:]])[:, log["uid"][1:] == log["uid"][:-1]]
    half = pairs.shape[1] // 2
    successors: dict[int, dict[int, int]] = {}
    for a, b in pairs[:, :half].T.tolist():
        successors.setdefault(a, {}).setdefault(b, 0)
        successors[a][b] += 1
    best = {a: max(nexts, key=nexts.get) for a, nexts in successors.items()}
    guessed = np.mean([best.get(a, -1) == b for a, b in pairs[:, half:].T.tolist()])
    popular = np.mean(pairs[1, half:] == np.bincount(item).argmax())
    assert guessed > 0.4 and guessed > 5 * popular


def test_same_seed_same_file_and_another_seed_another(tmp_path):
    config = SyntheticConfig(users=50, items=100, events_per_user=10, seed=1)
    path = synthetic.cached_file(config, str(tmp_path))
    first = pq.read_table(path)
    os.remove(path)
    assert pq.read_table(synthetic.cached_file(config, str(tmp_path))).equals(first)
    config.seed = 2
    other = synthetic.cached_file(config, str(tmp_path))
    assert other != path and not pq.read_table(other).equals(first)


def test_row_groups_stream_and_nothing_is_left_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "GROUP_EVENTS", 100)
    config = SyntheticConfig(users=50, items=100, events_per_user=10)
    synthetic.write(config, str(tmp_path / "a.parquet"))
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 5
    assert np.unique(pq.read_table(tmp_path / "a.parquet")["uid"]).tolist() == [100 * u for u in range(1, 51)]
    calls = []

    def fails_later(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return whole(*arguments)

    whole = synthetic._group
    monkeypatch.setattr(synthetic, "_group", fails_later)
    with pytest.raises(DataError, match="No space left on device"):
        synthetic.write(config, str(tmp_path / "b.parquet"))
    assert os.listdir(tmp_path) == ["a.parquet"]
    with pytest.raises(DataError, match="items 3"):
        synthetic.write(SyntheticConfig(items=3), str(tmp_path / "c.parquet"))

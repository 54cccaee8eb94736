"""The published sizes: exact numbers, the published skew, and both forms of a file."""

from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from recml_sasrec.data import synthetic, synthetic_sizes
from recml_sasrec.data.events import DataError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "GROUP_EVENTS", 60_000)  # several row groups
        goal = synthetic_sizes.scaled("50m", 0.01)
        for number in (0, 1):
            synthetic_sizes.write(goal, str(folder / f"{number}.parquet"), sequential=number == 1)
    assert goal == (92, 8_772, 464_672)
    return [folder / "0.parquet", folder / "1.parquet"]


def test_numbers_are_exact_and_the_skew_is_the_published_one(files):
    table = pq.read_table(files[0])
    assert table.schema == synthetic.SCHEMA and pq.ParquetFile(files[0]).num_row_groups > 3
    uid, item, time = (table[name].to_numpy().astype(np.int64) for name in ("uid", "item_id", "timestamp"))
    listens = Counter(item.tolist())
    assert (len(set(uid.tolist())), len(listens), len(item)) == (92, 8_772, 464_672)
    counts = sorted(listens.values(), reverse=True)
    assert counts.count(1) / len(counts) == pytest.approx(0.357, abs=0.001)
    assert sum(counts[: len(counts) // 100]) / len(item) == pytest.approx(0.492, abs=0.12)  # .493 at full size
    histories = sorted(Counter(uid.tolist()).values())
    for share, published in ((0.5, 3_024), (0.9, 13_044), (0.99, 23_765)):
        assert histories[int(share * len(histories))] == pytest.approx(published, rel=0.25)
    assert list(zip(uid, time, strict=True)) == sorted(zip(uid, time, strict=True))


def test_both_forms_hold_the_same_events(files):
    flat, lists = pq.read_table(files[0]), pq.read_table(files[1]).to_pylist()
    for name in flat.column_names[1:]:
        assert [value for row in lists for value in row[name]] == flat[name].to_pylist()
    assert [row["uid"] for row in lists for _ in row["item_id"]] == flat["uid"].to_pylist()


@pytest.mark.parametrize(("size", "scale", "sentence"), [("5m", 1, "no size '5m'"), ("50m", 2, "--scale 2 of 50m"),
                                                         ("5b", 1e-6, "makes 1 users and 9 items")])  # fmt: skip
def test_sizes_that_make_no_data_are_refused(size, scale, sentence):
    with pytest.raises(DataError, match=sentence):
        synthetic_sizes.scaled(size, scale)

"""What is wrong with a run's files, or with a file of histories, is said in one sentence."""

import io
import json
import types
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recml_sasrec import recommend, run_folder
from recml_sasrec.checkpoint import CheckpointError, Checkpoints
from recml_sasrec.config import Config, ConfigError
from recml_sasrec.data.arrays import write_ids
from recml_sasrec.data.errors import DataError
from recml_sasrec.data.histories import read_histories
from recml_sasrec.data.vocabulary import fingerprint


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, trained=np.ones(3, bool))
    return file.getvalue()


@pytest.mark.parametrize("content", [archive(), b"PK\x03\x04junk", b"", b"\x93NUMPY\x01\x00\x04\x00{((("])
def test_trained_items_that_are_no_array(tmp_path, content):
    config = Config()
    config.evaluation.candidates = "train"
    run_folder.save_trained_items(tmp_path, np.array([True, False, True]))
    assert run_folder.read_trained_items(tmp_path, config, 3).tolist() == [True, False, True]
    (tmp_path / "trained_items.npy").write_bytes(content)
    with pytest.raises(ConfigError, match="which items the run was trained on, is damaged"):
        run_folder.read_trained_items(tmp_path, config, 3)


def test_item_ids_whose_offsets_lead_outside_the_file(tmp_path):
    ids = pa.array(["a", "bc", "d"], pa.large_string())
    path, marks = tmp_path / "item_ids.arrow", {"vocabulary": fingerprint(ids)}
    write_ids(str(path), ids)
    assert run_folder.read_item_ids(tmp_path, marks).equals(ids)
    offsets, beyond = np.array([0, 1, 3, 4]).tobytes(), np.array([0, 1, 2**40, 2**40]).tobytes()
    assert path.read_bytes().count(offsets) == 1
    path.write_bytes(path.read_bytes().replace(offsets, beyond))
    with pytest.raises(ConfigError, match="the raw ids of the run's items, is missing or damaged"):
        run_folder.read_item_ids(tmp_path, marks)


def test_metrics_of_a_checkpoint_cut_short(tmp_path):
    from orbax.checkpoint import v1 as ocp

    with ocp.training.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        for step in (10, 20):
            checkpointer.save_checkpointables(step, {"params": {"x": np.zeros(2)}}, metrics={"ndcg@10": 0.1})
    path = tmp_path / "checkpoints/20/metrics/metrics"
    path.write_text(path.read_text()[:5])
    with pytest.raises(CheckpointError, match=r"step 20 in .* cannot be read \(its metrics are damaged\)"):
        Checkpoints(tmp_path, 2, "ndcg@10", reading=True)


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.int64(), 2), pa.list_view(pa.int64())],
    ids=str,
)
def test_lists_of_every_kind_are_histories(tmp_path, kind):
    table = pa.table({"user": [1, 2], "history": pa.array([[3, 4], None], kind)})
    try:
        pq.write_table(table, tmp_path / "in.parquet")
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"this Arrow does not write them: {error}")
    (chunk,) = read_histories(tmp_path / "in.parquet")
    assert chunk.histories == [[3, 4], []] and chunk.users == [1, 2]


def test_two_columns_of_one_name(tmp_path):
    columns = [pa.array([1]), *[pa.array([[100]])] * 3]
    pq.write_table(pa.Table.from_arrays(columns, ["user", "history", "allow", "allow"]), tmp_path / "in.parquet")
    with pytest.raises(DataError, match="has 2 columns 'allow'; rename all but one"):
        list(read_histories(tmp_path / "in.parquet"))


@pytest.mark.parametrize("text", ["", "[]", "3", json.dumps({"vocabulary": "x"}), "[" * 9999, "\udc80"])
def test_a_config_that_is_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"config.json is damaged; restore it from a checkpoint's metadata"):
        run_folder.read(tmp_path)


@pytest.mark.parametrize("user", ["b", 10**30])
def test_users_that_no_column_can_hold(tmp_path, user):
    recommender: Any = types.SimpleNamespace(item_ids=pa.array([1]))
    with (
        pytest.raises(DataError, match=r"which a column of .parquet must be; write a .jsonl file"),
        recommend._writer(tmp_path / "out.parquet", recommender) as write,
    ):
        write([1, user], [0, 0], [[], []])
    assert not list(tmp_path.iterdir())

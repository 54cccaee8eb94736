"""Exported folders: the same lists as the run's, without this package, and whole or not at all."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from recml_sasrec import Recommender, export, recommend, run_folder, serving
from recml_sasrec.checkpoint import CheckpointError, Checkpoints
from recml_sasrec.config import ConfigError
from recml_sasrec.data.events import DataError
from recml_sasrec.data.loader import open_data
from recml_sasrec.run import Progress, Run
from tests.test_recommender import WORDS, brute, same
from tests.tiny import tiny_config


def untrained(folder, config):
    """A run's folder with the checkpoint of a model that was initialised."""
    (folder / "run").mkdir()
    run = Run(config, open_data(config))
    run_folder.adopt(folder / "run", config, run.data.store)
    with Checkpoints(folder / "run", 1, "ndcg@10") as checkpoints:
        checkpoints.save(3, run.init(), run.info(Progress()))
    return folder / "run"


@pytest.fixture(scope="module")
def integers(tmp_path_factory):
    """(run, its exported folder): 64-bit integer ids, positions from the newest, two blocks."""
    folder = tmp_path_factory.mktemp("integers")
    config = tiny_config(folder / "cache")
    rng = np.random.default_rng(0)
    rows = [f"{user},{2**62 + 7 * rng.integers(60)}" for user in range(30) for _ in range(12)]
    (folder / "log.csv").write_text("user_id,item_id\n" + "\n".join(rows))
    config.data.source, config.data.path, config.data.time_column = "table", str(folder / "log.csv"), ""
    config.split.kind, config.data.position_order, config.model.item_bias = "leave_last", "newest_first", False
    workdir = untrained(folder, config)
    export.export_run(workdir, folder / "model")
    return workdir, folder / "model"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """(run, its exported folder): ids of text with blanks and Unicode, positions from the oldest, post-norm, bfloat16."""
    folder = tmp_path_factory.mktemp("texts")
    config = tiny_config(folder / "cache")
    rng = np.random.default_rng(0)
    rows = [f'{user},"{WORDS[rng.integers(39)]}"' for user in range(30) for _ in range(12)]
    (folder / "log.csv").write_text("user_id,item_id\n" + "\n".join(rows), encoding="utf-8")
    config.data.source, config.data.path, config.data.time_column = "table", str(folder / "log.csv"), ""
    config.split.kind = "leave_last"
    workdir = untrained(folder, config)
    export.export_run(workdir, folder / "model", "latest")
    return workdir, folder / "model"


def test_an_exported_folder_gives_the_lists_of_its_run(integers, texts):
    for workdir, folder in (integers, texts):
        run, exported = Recommender.load(workdir), Recommender.load(folder)
        raw = run.item_ids.to_pylist()
        assert exported.item_ids == run.item_ids
        rng = np.random.default_rng(1)
        histories = [[raw[i] for i in rng.integers(len(raw), size=n)] for n in (1, 5, 16, 40)] + [[]]
        allow = [raw[n:] for n in range(5)]
        for options in ({}, {"filter_seen": True}, {"allow": allow, "block": raw[::3]}, {"k": 1000}):
            for a, b in zip(exported.recommend(histories, **options), run.recommend(histories, **options), strict=True):
                same(a, b)
        same(exported.similar_items(raw[3]), run.similar_items(raw[3]))
        assert exported.recommend([[raw[0], *raw[:2]]]) == exported.recommend([[raw[0], *raw[:2]], raw[5:9]])[:1]
    run, exported = map(Recommender.load, texts)
    same(exported.recommend([WORDS[:20]], k=39)[0], brute(run, WORDS[:20], 39, set(WORDS)))
    with pytest.raises(DataError, match="5 is a int but the run's ids are text"):
        exported.recommend([[5]])

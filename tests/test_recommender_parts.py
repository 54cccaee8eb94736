"""What of recommending needs no shared run: batches, imports, and a run's own candidates."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from recml_sasrec import Recommender, export, trainer
from recml_sasrec.config import ConfigError
from recml_sasrec.data.loader import open_data
from recml_sasrec.recommender import _batches
from tests.test_recommender import brute, command, same
from tests.tiny import tiny_config

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("users", "width", "sizes"),
    [
        (300, 100, [(256, 256), (44, 64)]),
        (9, 100, [(9, 64)]),
        (0, 1, []),
        (70, 1 << 16, [(64, 64), (6, 8)]),
        (9, 10**7, [(8, 8), (1, 8)]),
    ],
)
def test_batches_have_few_sizes_and_fewer_rows_where_lists_are_long(users, width, sizes):
    batches = list(_batches(np.arange(users), width))
    assert [(len(part), rows) for part, rows in batches] == sizes
    assert [user for part, _ in batches for user in part] == list(range(users))


def test_the_package_does_not_load_jax_before_a_recommender_is_asked_for():
    code = "import sys, recml_sasrec; assert 'jax' not in sys.modules; recml_sasrec.__getattr__"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_run_that_ranks_trained_items_alone_recommends_no_others(tmp_path, capsys, caplog):
    config = tiny_config(tmp_path / "cache")
    config.data.synthetic.users, config.data.synthetic.items, config.data.synthetic.events_per_user = 20, 400, 12
    config.train.steps, config.evaluation.every, config.evaluation.candidates = 1, 0, "train"
    trainer.train(config, tmp_path / "run")
    capsys.readouterr()
    data = open_data(config)
    raw = data.store.item_ids.to_pylist()
    spans = zip(data.split.train_start, data.split.train_end, strict=True)
    trained = {raw[item] for start, end in spans for item in data.store.items[start:end]}
    assert 20 < len(trained) < len(raw)
    protocol = json.loads((tmp_path / "run/evaluation.json").read_text())["protocol"]
    assert protocol["candidates"] == len(trained)
    recommender = Recommender.load(tmp_path / "run")
    some = raw[::2]
    same(recommender.recommend([raw[:3]], k=400)[0], brute(recommender, raw[:3], 400, trained))
    same(recommender.recommend([raw[:3]], k=400, allow=some)[0], brute(recommender, raw[:3], 400, trained & set(some)))
    same(
        recommender.recommend([raw[:3]], k=400, allow=[some])[0], brute(recommender, raw[:3], 400, trained & set(some))
    )
    assert {item for item, _ in recommender.similar_items(raw[0], k=400)} == trained - {raw[0]}
    export.export_run(tmp_path / "run", tmp_path / "model")
    exported = Recommender.load(tmp_path / "model")
    same(exported.recommend([raw[:3]], k=400)[0], recommender.recommend([raw[:3]], k=400)[0])
    assert {item for item, _ in exported.similar_items(raw[0], k=400)} == trained - {raw[0]}
    for words, allowed in (((), trained), (("--all-items",), set(raw))):
        code, out, _ = command(capsys, "--workdir", tmp_path / "run", "--history", str(raw[0]), "--k", 400, *words)
        assert code == 0 and {pair["item"] for pair in json.loads(out)["items"]} == allowed

    saved = tmp_path / "run/trained_items.npy"
    saved.write_bytes(b"not an array")
    with pytest.raises(ConfigError, match="which items the run was trained on, is damaged or another run's; start the"):
        Recommender.load(tmp_path / "run")
    saved.unlink()  # as runs of earlier versions are
    code, out, _ = command(capsys, "--workdir", tmp_path / "run", "--history", str(raw[0]), "--k", 400)
    assert code == 0 and len(json.loads(out)["items"]) == len(raw)
    assert "has no trained_items.npy: items without a training event are recommended too" in caplog.text

"""The shipped configs on small files of the real shape: everything but the download and the size."""

import json

import pytest

from recml_sasrec import trainer
from recml_sasrec.config import SyntheticConfig
from recml_sasrec.config_file import load_config
from recml_sasrec.data import synthetic
from tests.test_config import CONFIGS

SMALL = ["train.steps=2", "train.batch_size=4", "model.width=16", "model.blocks=1", "evaluation.batch_users=32"]


@pytest.mark.parametrize("ratio", [0, 50])
def test_yambda50m_trains_and_evaluates_from_a_local_file_of_its_schema(tmp_path, ratio):
    path = str(tmp_path / "listens.parquet")
    synthetic.write(SyntheticConfig(users=300, items=400, events_per_user=100), path)
    overrides = [f"data.path={path}", f"data.cache={tmp_path}", f"data.min_played_ratio={ratio}", *SMALL]
    config = load_config(str(CONFIGS[0].with_name("yambda50m.py")), overrides)
    rows = trainer.train(config, tmp_path / "run")
    assert {"sasrec", "most_pop", "decay_pop"} == set(rows)
    protocol = json.loads((tmp_path / "run/evaluation.json").read_text())["protocol"]
    assert protocol["metric version"] == "v1" and protocol["seen items"] == "kept"
    assert "train t < 25823600" in protocol["split"].replace(",", "")
    assert "25825400" in protocol["split"] and "25911800" in protocol["split"] and "25913600" in protocol["split"]


def test_movielens100k_reads_recbole_columns_and_beauty_reads_lines(tmp_path):
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    rows = [f"{user}\t{(user * 7 + t * t) % 30}\t3\t{1000 + t}\n" for user in range(40) for t in range(40)]
    (tmp_path / "ml.inter").write_text(header + "".join(rows))
    lines = [f"{user} " + " ".join(str((user * 7 + t * t) % 30 + 1) for t in range(12)) + "\n" for user in range(80)]
    (tmp_path / "beauty.txt").write_text("".join(lines))
    for name, file, users in (("movielens100k", "ml.inter", 40), ("beauty", "beauty.txt", 80)):
        overrides = [f"data.path={tmp_path / file}", f"data.cache={tmp_path}", *SMALL]
        config = load_config(str(CONFIGS[0].with_name(f"{name}.py")), overrides)
        trainer.train(config, tmp_path / name)
        protocol = json.loads((tmp_path / name / "evaluation.json").read_text())["protocol"]
        assert (protocol["users"], protocol["target rows"]) == (users, users)

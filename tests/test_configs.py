"""The shipped configs: at their real size abstractly, and run on small files of the real shape."""

import json

import jax
import pytest

from recml_sasrec import optim, trainer
from recml_sasrec.config import SyntheticConfig
from recml_sasrec.config_file import load_config
from recml_sasrec.data import synthetic
from recml_sasrec.data.batch import Batch
from recml_sasrec.step import init_state, make_model, make_train_step
from tests.test_config import CONFIGS, shipped

SMALL = ["train.steps=2", "train.batch_size=4", "model.width=16", "model.blocks=1", "evaluation.batch_users=32"]

# items of the file and the filter that the config names (at most so many of 500m and 5b: those of all listens)
ITEMS = {
    "beauty": 12_101,
    "custom": 10_000,  # any number
    "movielens100k": 1_682,
    "quickstart": 4_000,
    "yambda50m": 631_003,
    "yambda50m_cutbce": 877_168,
    "yambda50m_likes": 181_304,
    "yambda50m_sasrec": 631_003,
    "yambda500m": 3_004_578,
    "yambda5b": 9_390_623,
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_makes_a_step_at_its_real_size(path, shop):
    config, items = shipped(path, shop), ITEMS[path.stem]
    B, N, D, L = config.train.batch_size, config.data.length, config.model.width, config.data.targets
    graph, init = make_model(config, items, 1.0)
    optimizer = optim.make_optimizer(config.optimizer, config.train.steps)
    state = jax.eval_shape(lambda: init_state(init, optimizer))
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    table = (items + N) * D + items * config.model.item_bias
    assert parameters == table + config.model.blocks * (12 * D**2 + 13 * D) + 2 * D  # all have an MLP of 4 D
    assert 16 * parameters < 16e9  # with Adam's moments and the gradient they fit the smallest accelerators
    shapes = [((B, N), "int32")] * 3 + [((B, N, L), "int32"), ((B, N), "float32")]
    batch = Batch(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    after = jax.eval_shape(make_train_step(config, graph, optimizer), state, batch)
    assert [x.shape for x in jax.tree.leaves(after)] == [x.shape for x in jax.tree.leaves(state)]


def test_the_yambda_papers_sasrec_is_trained_as_the_paper_says():
    config = load_config(str(CONFIGS[0].with_name("yambda50m_sasrec.py")))
    assert config.split.test_start - config.split.gap == 25_911_800  # the end of training: no validation
    assert config.split.validation_length == config.evaluation.every == 0
    assert (config.train.batch_size, config.train.seed) == (256, 42)
    assert config.train.steps == 100 * round(9_208 / 256)  # epochs


def test_yambda50m_trains_and_evaluates_from_a_local_file_of_its_schema(tmp_path):
    path = str(tmp_path / "listens.parquet")
    synthetic.write(SyntheticConfig(users=300, items=400, events_per_user=100), path)
    overrides = [f"data.path={path}", f"data.cache={tmp_path}", *SMALL]
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

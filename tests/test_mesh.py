"""Training on eight devices equals training on one, on every mesh; checkpoints move between meshes."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recml_sasrec import heads, sharding
from recml_sasrec.config import ConfigError
from recml_sasrec.ranking.shards import top_k_over
from recml_sasrec.ranking.topk import top_k
from tests.heads.reference import problem, reference
from tests.tiny import tiny_config

MESHES = ("(8, 1)", "(4, 2)", "(2, 4)", "(1, 8)")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    command = [sys.executable, "-m", "tests.on_mesh", str(tmp_path_factory.mktemp("cache"))]
    child = subprocess.run(command, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout.split("RESULT ")[1])


@pytest.mark.parametrize("mesh", MESHES)
def test_fifty_steps_equal_one_device_s(runs, mesh):
    one, many = runs["None"], runs[mesh]
    np.testing.assert_allclose(many["losses"], one["losses"], rtol=1e-5)
    assert many["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
    assert many["ranks"] == one["ranks"] and sum(many["counts"]) == sum(one["counts"])
    # A logit within rounding of the threshold may fall on either side after 50 steps.
    np.testing.assert_allclose(many["counts"], one["counts"], rtol=1e-5, atol=2)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_first_step_s_gradients_equal_one_device_s(runs, mesh):
    """Adam's first moment after a step is the gradient times 1 - b1."""
    for a, b in zip(runs[mesh]["gradients"], runs["None"]["gradients"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


def test_a_repeated_run_is_identical(runs):
    assert runs["again"] == runs["(2, 4)"]


@pytest.mark.parametrize("mesh", MESHES)
def test_table_and_moments_are_split_and_nothing_else(runs, mesh):
    assert runs[mesh]["rows"] == {"(8, 1)": 201, "(4, 2)": 202, "(2, 4)": 204, "(1, 8)": 208}[mesh]
    tables = 0
    for path, spec in runs[mesh]["specs"].items():
        wanted = []
        if "item_table" in path:
            wanted, tables = ["items", None], tables + 1
        elif "item_bias" in path:
            wanted = ["items"]
        assert spec == wanted, path
    assert tables == 3  # the parameter and two moments


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_the_compiled_step_never_gathers_the_table(runs, mesh):
    assert runs[mesh]["gathered"]  # hidden states are
    rows = str(runs[mesh]["rows"])
    assert not [shape for shape in runs[mesh]["gathered"] if rows in shape.split(",")]


@pytest.mark.parametrize("gather", ["hidden", "table", "data"])  # data: a mesh of two groups
@pytest.mark.parametrize("tokens", [("data", "items"), ("data",), ()])
@pytest.mark.parametrize("bias", [True, False])
def test_the_head_on_a_padded_table_in_shards_gives_the_numbers_by_definition(gather, tokens, bias):
    hidden, table, targets, bias_V, weights = problem(3, tokens=6, items=13, width=4)
    bias_V = bias_V if bias else None
    exact = reference(hidden, table, targets, bias_V, weights)
    shape = (2, 1) if gather == "data" else (1, 2)
    mesh = jax.make_mesh(shape, ("data", "items"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placement = heads.Placement(mesh, tokens, "hidden" if gather == "data" else gather)
    padded = np.concatenate([table, 99 * np.ones((1, 4), np.float32)])
    padded_bias = np.append(bias_V, np.float32(9)) if bias else None

    def loss(head, hidden, table, bias):
        options = {"reduction": "sum", "with_ranks": True, "num_items": 13, "placement": placement}
        value, *others = head(hidden, table, targets, bias, weights, **options)
        return value, others

    for head in (heads.cut_bce, heads.dense_bce):
        gradient = jax.jit(jax.value_and_grad(lambda *a: loss(head, *a), (0, 1), has_aux=True))  # noqa: B023
        (value, (counts, ranks)), grads = gradient(hidden, padded, padded_bias)
        np.testing.assert_allclose(value, exact["sum"], rtol=1e-5)
        assert tuple(map(int, counts)) == exact["counts"]
        np.testing.assert_array_equal(ranks, exact["ranks"])
        np.testing.assert_allclose(grads[0], exact["hidden"], atol=1e-5 * np.abs(exact["hidden"]).max())
        np.testing.assert_allclose(grads[1][:13], exact["table"], atol=1e-5 * np.abs(exact["table"]).max())
        np.testing.assert_array_equal(grads[1][13], 0)


@pytest.mark.parametrize("k", [3, 20])
def test_ranking_over_shards_keeps_the_order_of_ties_and_recommends_no_padding(k):
    rng = np.random.default_rng(0)
    config = tiny_config("")
    config.mesh.items = 2
    layout = sharding.make_layout(config, 15)
    assert layout.table_rows == 16 and layout.mesh.shape == {"data": 1, "items": 2}
    table = rng.integers(-1, 2, (16, 2)).astype(np.float32)  # many ties
    table[15] = 50
    hidden, exclude = rng.integers(0, 3, (5, 2)).astype(np.float32), np.array([[3, 9, -1]] * 5, np.int32)
    bias = jnp.zeros(16)
    expected = top_k(jnp.asarray(hidden), jnp.asarray(table[:15]), k, bias=bias[:15], exclude=jnp.asarray(exclude))
    scores, ids = top_k_over(layout)(hidden, table, k, bias=bias, exclude=exclude)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_array_equal(scores, expected[0])


def test_a_mesh_that_does_not_fit_is_refused_in_a_sentence():
    config = tiny_config("")
    config.mesh.data, config.mesh.items = 4, 3
    with pytest.raises(ConfigError, match=r"mesh.data=4 times config.mesh.items=3 is 12, but there are 2 devices"):
        sharding.make_layout(config, 100)
    for config.mesh.data, config.mesh.items, sentence in (
        (3, 0, "config.mesh.data=3 does not divide the 8 devices; the nearest number that does is 2, and 0 lets it"),
        (0, 16, "config.mesh.items=16 does not divide the 8 devices; the nearest number that does is 8, and 0 lets it"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            sharding.make_layout(config, 100, topology=[None] * 8)
    config.mesh.data, config.mesh.items, config.train.batch_size = 2, 1, 7
    with pytest.raises(ConfigError, match=r"batch_size=7.* 2 devices of config.mesh.data; the nearest is 8"):
        sharding.make_layout(config, 100)


def test_what_is_not_set_is_chosen_by_the_bytes_it_moves():
    config = tiny_config("")  # 4 rows of 16 positions a step
    shapes = {items: sharding.make_layout(config, items) for items in (40, 120, 10_000)}
    assert [layout.mesh.shape["items"] for layout in shapes.values()] == [1, 1, 2]
    config.mesh.items = 2
    gathers = [sharding.make_layout(config, items).placement.gather for items in (40, 120)]
    assert gathers == ["table", "hidden"]


def test_a_run_moves_from_eight_devices_to_four_to_one(tmp_path):
    """The loss curve and the evaluation go on as if nothing had happened."""

    def go(workdir, devices, *points):
        command = [sys.executable, "-m", "tests.tiny", str(tmp_path / "cache"), str(workdir), *points]
        environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
        child = subprocess.run(command, env=environment, capture_output=True, text=True)
        return child.returncode, child.stderr

    def curve(workdir):
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row["loss"] for row in lines if "loss" in row}, [
            row["validation/ndcg@10"] for row in lines if "validation/ndcg@10" in row
        ]

    moved, straight = tmp_path / "moved", tmp_path / "straight"
    for devices, points, wanted in ((8, ("stop_at_step=7",), 75), (4, ("stop_at_step=14",), 75), (1, (), 0)):
        code, errors = go(moved, devices, *points)
        assert code == wanted, errors[-2000:]
    code, errors = go(straight, 1)
    assert code == 0, errors[-2000:]
    (moved_losses, moved_ndcg), (losses, ndcg) = curve(moved), curve(straight)
    assert moved_losses.keys() == losses.keys()
    np.testing.assert_allclose(list(moved_losses.values()), list(losses.values()), rtol=1e-5)
    np.testing.assert_allclose(moved_ndcg, ndcg, rtol=1e-5)

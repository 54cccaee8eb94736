"""What is kept of an item's gradients, and the updates made of it, against the formulas in numpy."""

import jax
import numpy as np
import optax
import pytest

from recml_sasrec import optim, sharding
from recml_sasrec.checkpoint import Checkpoints
from recml_sasrec.config import Config
from recml_sasrec.heads import Placement
from recml_sasrec.step import Metrics, TrainState

V, D, RATE, STEPS = 6, 4, 0.1, 3
TABLES = ("adam", "adam_bf16", "adagrad", "adafactor")
# bytes an item of what is kept, beside a few of the whole table's own: what config.py says, at this width
BYTES = {"adam": 8 * D, "adam_bf16": 6 * D, "adagrad": 4, "adafactor": 4}


def make_optimizer(table):
    config = Config().optimizer
    config.learning_rate, config.schedule, config.clip_norm, config.table = RATE, "constant", 0.0, table
    return optim.make_optimizer(config, 100)


def params(rows=V):
    rng = np.random.default_rng(0)
    shapes = {"item_table": (rows, D), "item_bias": (rows,), "kernel": (D, D)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def gradients(step):
    rng = np.random.default_rng(1 + step)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params())


def adam(values, round_moment=lambda m: m):
    """Kingma & Ba, Algorithm 1."""
    m = v = 0
    for t, g in enumerate(values, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        update = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        m = round_moment(m)
    return update


def adagrad(values):
    sums = sum((g**2).mean(1) for g in values)
    return values[-1] / (np.sqrt(sums) + 1e-8)[:, None]


def adafactor(values):
    """Shazeer & Stern, Algorithm 4, with the decay of Section 7.2: R C^T / sum(R) stands for the squares."""
    rows = columns = 0
    for t, g in enumerate(values, start=1):
        decay = 1 - t**-0.8
        rows = decay * rows + (1 - decay) * (g**2).sum(1)
        columns = decay * columns + (1 - decay) * (g**2).sum(0)
    return values[-1] / np.sqrt(np.outer(rows, columns) / rows.sum())


def to_bfloat16(m):
    return np.asarray(jax.numpy.asarray(m, "bfloat16"), np.float64)


REFERENCES = {
    "adam": adam,
    "adam_bf16": lambda values: adam(values, to_bfloat16),
    "adagrad": adagrad,
    "adafactor": adafactor,
}


@pytest.mark.parametrize("table", TABLES)
def test_updates_are_the_formulas_and_the_rest_has_adam(table):
    optimizer, state = make_optimizer(table), make_optimizer(table).init(params())
    for step in range(STEPS):
        updates, state = optimizer.update(gradients(step), state, params())
    of = {name: [gradients(step)[name].astype(np.float64) for step in range(STEPS)] for name in params()}
    # optax corrects the bias of the moment after rounding it, the reference before
    tolerance = 2**-8 if table == "adam_bf16" else 1e-5
    expected = REFERENCES[table](of["item_table"])
    np.testing.assert_allclose(updates["item_table"], -RATE * expected, rtol=tolerance, atol=tolerance * RATE)
    for name in ("item_bias", "kernel"):
        np.testing.assert_allclose(updates[name], -RATE * adam(of[name]), rtol=1e-5)


def of_table(state):
    """(path, leaf) of what is kept of the item table."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [(path, leaf) for path, leaf in leaves if "'item_table'" in jax.tree_util.keystr(path)]


@pytest.mark.parametrize("table", TABLES)
def test_an_item_costs_the_bytes_that_the_config_says_and_every_shard_holds_its_own(table):
    """Seven items on two shards: what has a row an item is split, factored columns and counters are not."""
    mesh = jax.make_mesh((1, 2), ("data", "items"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layout = sharding.Layout(mesh, 7, Placement(mesh))
    optimizer = make_optimizer(table)
    abstract = jax.eval_shape(lambda: optimizer.init(params(layout.table_rows)))
    kept = of_table(jax.jit(lambda: optimizer.init(params(8)), out_shardings=layout.of(abstract))())
    by_row = [leaf for _, leaf in kept if leaf.shape[0] == 8]
    assert sum(leaf.nbytes for leaf in by_row) == 8 * BYTES[table]
    assert all(leaf.addressable_shards[0].data.shape == (4, *leaf.shape[1:]) for leaf in by_row)
    others = [leaf for _, leaf in kept if leaf.shape[0] != 8]
    assert all(leaf.sharding.is_fully_replicated for leaf in others) and sum(x.size for x in others) <= D + 1


@pytest.mark.parametrize("table", TABLES)
def test_a_restored_state_goes_on_as_the_saved_one(table, tmp_path):
    optimizer = make_optimizer(table)

    def step(params, state, i):
        updates, state = optimizer.update(gradients(i), state, params)
        return optax.apply_updates(params, updates), state

    now = jax.tree.map(jax.numpy.asarray, params())
    now, state = step(now, optimizer.init(now), 0)
    saved = TrainState(jax.numpy.int32(1), now, state, Metrics.zeros())
    with Checkpoints(tmp_path, 1, "ndcg@10") as checkpoints:
        checkpoints.save(1, saved, {})
        checkpoints.wait()
        restored = checkpoints.restore(1, saved)
    straight, resumed = step(now, state, 1), step(restored.params, restored.opt_state, 1)
    assert jax.tree.structure(straight) == jax.tree.structure(resumed)
    jax.tree.map(np.testing.assert_array_equal, straight, resumed)

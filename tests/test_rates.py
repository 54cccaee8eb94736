"""The learning rates of groups: what is frozen stays, what is slowed moves by its share, defaults change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recml_sasrec import optim
from recml_sasrec.config import Config

V, D, STEPS = 6, 4, 3
TABLES = ("adam", "adam_bf16", "adagrad", "adafactor")
OLD = np.array([True, False, True, True, False, False])


def config(table="adam", clip_norm=0.0, **rates):
    result = Config().optimizer
    result.schedule, result.clip_norm, result.table, result.weight_decay = "constant", clip_norm, table, 0.1
    for name, value in rates.items():
        setattr(result, name, value)
    return result


def params():
    rng = np.random.default_rng(0)
    shapes = {"item_table": (V, D), "item_bias": (V,), "position_table": (3, D), "blocks": (D, D)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {**values, "blocks": {0: {"kernel": values["blocks"]}}}


def gradient(step):
    rng = np.random.default_rng(1 + step)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params())


def trained(chosen, old=None, change=lambda step, gradient: gradient):
    """Parameters and state after some steps."""
    optimizer = optim.make_optimizer(chosen, 100)
    now = jax.tree.map(jnp.asarray, params())
    state = optimizer.init(now)
    if old is not None:
        state = state._replace(old_rows={"item_table": jnp.asarray(old)})
    for step in range(STEPS):
        updates, state = optimizer.update(change(step, gradient(step)), state, now)
        now = optax.apply_updates(now, updates)
    return now, state


def moments(state):
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if optim.moment_of(path)[1] and optim.moment_of(path)[0] != "old_rows"
    }


def test_rates_of_one_leave_the_state_as_it_was():
    """A checkpoint's leaves are found by their place: chain(clip, chain(adam, decay, schedule))."""
    state = optim.make_optimizer(config(clip_norm=1.0), 100).init(params())
    assert isinstance(state[1][0], optax.ScaleByAdamState) and len(state) == 2 and len(state[1]) == 3
    assert len(jax.tree.leaves(state)) == 2 * 4 + 2


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("frozen", ["backbone", "table"])
def test_a_frozen_group_keeps_its_bits_and_counts_in_no_norm(table, frozen):
    """The other group is trained as if the frozen one had no gradient at all, however large it is."""
    names = {"backbone": {"position_table", "blocks"}, "table": {"item_table", "item_bias"}}[frozen]

    def without(_, grads):
        return {name: jax.tree.map(np.zeros_like, g) if name in names else g for name, g in grads.items()}

    def huge(_, grads):
        return {name: jax.tree.map(lambda x: x * 1e6, g) if name in names else g for name, g in grads.items()}

    chosen = config(table, 1.0, **{f"{frozen}_rate": 0.0})
    now, state = trained(chosen, change=huge)
    usual, _ = trained(config(table, 1.0), change=without)
    for name in params():
        expected = params()[name] if name in names else usual[name]
        jax.tree.map(np.testing.assert_array_equal, now[name], expected)
    fresh = moments(optim.make_optimizer(chosen, 100).init(params()))
    for name, leaf in moments(state).items():
        if any(f"'{frozen_name}'" in name for frozen_name in names):
            np.testing.assert_array_equal(leaf, fresh[name])


@pytest.mark.parametrize("table", TABLES)
def test_frozen_old_rows_keep_their_bits_and_moments_and_new_rows_move_as_alone(table):
    def only_new(_, grads):
        grads = dict(grads)
        for name in ("item_table", "item_bias"):
            grads[name] = np.where(OLD.reshape(-1, *[1] * (grads[name].ndim - 1)), 0, grads[name])
        return grads

    now, state = trained(config(table, 1.0, old_rows_rate=0.0), OLD)
    usual, _ = trained(config(table, 1.0), change=only_new)
    for name in ("item_table", "item_bias"):
        np.testing.assert_array_equal(now[name][OLD], params()[name][OLD])
        np.testing.assert_array_equal(now[name][~OLD], usual[name][~OLD])
    jax.tree.map(np.testing.assert_array_equal, now["blocks"], usual["blocks"])
    for name, leaf in moments(state).items():
        if ("item_table" in name or "item_bias" in name) and leaf.shape[:1] == (V,):
            assert not np.asarray(leaf, np.float32)[OLD].any() and np.asarray(leaf, np.float32)[~OLD].any()


def test_the_first_update_of_each_group_is_its_share_of_the_usual_one():
    optimizer, usual = (optim.make_optimizer(c, 100) for c in (
        config(backbone_rate=0.5, table_rate=0.25, old_rows_rate=0.1), config()
    ))  # fmt: skip
    state = optimizer.init(params())._replace(old_rows={"item_table": jnp.asarray(OLD)})
    got, _ = optimizer.update(gradient(0), state, params())
    expected, _ = usual.update(gradient(0), usual.init(params()), params())
    rows = np.where(OLD, 0.025, 0.25)
    np.testing.assert_allclose(got["item_table"], expected["item_table"] * rows[:, None], rtol=1e-6)
    np.testing.assert_allclose(got["item_bias"], expected["item_bias"] * rows, rtol=1e-6)
    np.testing.assert_allclose(got["position_table"], expected["position_table"] * 0.5, rtol=1e-6)

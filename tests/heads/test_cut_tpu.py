"""The TPU kernel in the TPU interpreter, races and uninitialised memory on, against float64."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from recml_sasrec.heads import counts, cut_bce, cut_tpu, dense_bce, tiles
from tests.heads.reference import problem, reference

TILE = {"tile": 128, "token_tile": 128}


@contextlib.contextmanager
def interpreter(cores=1):
    """Runs Pallas TPU kernels on the host as a TPU of so many cores a device would run them; fails on a race."""
    pltpu.reset_tpu_interpret_mode_state()
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores)
    with pltpu.force_tpu_interpret_mode(params):
        yield
    assert not interpret_pallas_call.races.races_found


def background(tokens, items, width, dtype="float32", bias=True, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    h_TD = jnp.asarray(scale * rng.normal(size=(tokens, width)), dtype)
    table_VD = jnp.asarray(rng.normal(size=(items, width)), dtype)
    bias_V = jnp.asarray(rng.normal(size=items) - 2, jnp.float32) if bias else None
    return h_TD, table_VD, bias_V, jnp.asarray(rng.normal(size=tokens) * (rng.random(tokens) > 0.2), jnp.float32)


def wanted(h_TD, table_VD, bias_V, weight_T, threshold):
    """The contract of ``sweep`` in float64."""
    h, table, weight = (np.asarray(x, np.float64) for x in (h_TD, table_VD, weight_T))
    z = h @ table.T + (0 if bias_V is None else np.asarray(bias_V, np.float64))
    soft = np.logaddexp(0, z)
    slope = np.exp(z - soft) * weight[:, None]
    return soft.sum(1), (z > threshold).sum(1), slope @ table, slope.T @ h, slope.sum(0)


def check(arguments, chip="v6e", threshold=0.0, tolerance=1e-4, **overrides):
    h_TD, table_VD, bias_V, _ = arguments
    shape = (h_TD.shape[0], *table_VD.shape, h_TD.dtype.itemsize, tiles.CHIPS[chip])
    plan = tiles.plan(*shape, **(TILE | overrides))
    forward = tiles.plan(*shape, gradients=False, **(TILE | {k: v for k, v in overrides.items() if k != "dh"}))
    with interpreter(plan.cores):
        results = cut_tpu.sweep(*arguments, threshold=threshold, tile=None, plan=plan)
        loss_T, above_T = cut_tpu.forward_sweep(h_TD, table_VD, bias_V, threshold=threshold, tile=None, plan=forward)
    expected = wanted(*arguments, threshold)
    np.testing.assert_allclose(results[0], expected[0], rtol=1e-6)
    np.testing.assert_array_equal(results[1], expected[1])
    np.testing.assert_allclose(loss_T, results[0], rtol=1e-6)
    np.testing.assert_array_equal(above_T, results[1])
    for actual, exact in zip(results[2:], expected[2:], strict=True):
        if actual is not None:
            assert np.abs(actual - exact).max() <= tolerance * np.abs(exact).max(initial=1e-30)
    return plan


# Every chip takes every way for dh, each with the sub-tiles, packing and matrix unit its own plan has: the plan of the
# reference shape with tiles small enough for the interpreter.
SHAPES = {"resident": (200, 300, 50), "hbm": (200, 300, 128), "blocks": (200, 200, 24)}


@pytest.mark.parametrize("chip", tiles.CHIPS)
@pytest.mark.parametrize("dh", SHAPES)
def test_every_chip_s_plan_and_way_to_accumulate_dh_agree_with_float64_on_ragged_shapes(chip, dh):
    block = {"block": 128} if dh == "blocks" else {}
    plan = check(background(*SHAPES[dh]), chip, dh=dh, **block)
    assert plan.dh == dh and plan.blocks == (2 if block else 1)
    assert (plan.chip, plan.mxu_width, plan.cores) == (chip, tiles.CHIPS[chip].mxu_width, tiles.CHIPS[chip].cores)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_longer_sub_tiles_as_in_the_reference_shape(chip):
    """The plan of 2,048 tokens has sub-tiles of 512 x 512 or 512 x 256; here one tile of one or two of them."""
    full = tiles.plan(2_048, 876_939, 128, 4, tiles.CHIPS[chip])
    plan = check(background(500, 600, 16), chip, tile=512, token_tile=512)
    assert (plan.sub_items, plan.sub_tokens) == (full.sub_items, full.sub_tokens)


@pytest.mark.parametrize("dh", SHAPES)
def test_bfloat16_sums_in_float32_and_rounds_the_table_s_gradient_once(dh):
    block = {"block": 128} if dh == "blocks" else {}
    arguments = background(140, 260, SHAPES[dh][2], "bfloat16", bias=dh != "resident", scale=0.3)
    check(arguments, tolerance=1e-2, dh=dh, **block)


@pytest.mark.parametrize("chip", ["v4", "v6e"])
def test_rows_of_whole_registers_are_read_as_they_lie(chip):
    """v4: the bias and the missing items cost additions; v6e: idle rows of its wider matrix unit add them."""
    check(background(3, 200, 128), chip)


def test_missing_items_of_the_last_tile_do_not_count_without_a_bias():
    check(background(3, 200, 128, bias=False), "v5e", threshold=-0.5)


def test_one_token_and_one_item():
    check(background(1, 1, 1))


def test_huge_logits_are_summed_one_by_one_and_do_not_overflow():
    arguments = background(5, 130, 16, scale=400.0)
    assert np.abs(arguments[0] @ arguments[1].T).max() > 1_000
    check(arguments, "v5e", threshold=1.0)


def test_a_sweep_without_loss_and_counts_has_the_same_gradients():
    arguments = background(9, 140, 16)
    plan = tiles.plan(9, 140, 16, 4, tiles.CHIPS["v6e"], **TILE)
    with interpreter():
        bare = cut_tpu.sweep(*arguments, threshold=None, tile=None, with_loss=False, plan=plan)
    assert bare[0] is None and bare[1] is None
    for actual, exact in zip(bare[2:], wanted(*arguments, 0.0)[2:], strict=True):
        np.testing.assert_allclose(actual, exact, atol=1e-4 * np.abs(exact).max())


def test_ranks_count_the_items_above_a_reference_logit():
    arguments = background(9, 140, 16)
    plan = tiles.plan(9, 140, 16, 4, tiles.CHIPS["v6e"], **TILE)
    reference_T = jnp.linspace(-8.0, 4.0, 9)
    with interpreter():
        results = cut_tpu.sweep(*arguments, threshold=0.0, tile=None, reference_T=reference_T, plan=plan)
    np.testing.assert_array_equal(results[1], wanted(*arguments, 0.0)[1])
    np.testing.assert_array_equal(results[5], wanted(*arguments, np.asarray(reference_T)[:, None])[1])


def test_the_head_gives_loss_gradients_and_counts_by_definition_under_checkpoint():
    hidden, table, targets, bias, weights = problem(3, tokens=9, items=150, width=24)

    def loss(hidden, table, bias, weights):
        return cut_bce(hidden, table, targets, bias, weights, positive_weight=2.0, temperature=0.5, reduction="sum",
                       implementation="pallas_tpu")  # fmt: skip

    with interpreter():
        (value, counts), grads = jax.value_and_grad(jax.checkpoint(loss), (0, 1, 2, 3), has_aux=True)(
            hidden, table, bias, weights
        )
    exact = reference(hidden, table, targets, bias, weights, 2.0, 0.5)
    np.testing.assert_allclose(value, exact["sum"], rtol=1e-5)
    assert tuple(int(c) for c in (counts.tp, counts.fp, counts.fn, counts.tn)) == exact["counts"]
    for actual, name in zip(grads, ("hidden", "table", "bias", "weights"), strict=True):
        assert np.abs(actual - exact[name]).max() <= 1e-4 * np.abs(exact[name]).max()


def test_per_token_losses_take_any_cotangent_and_ranks_come_from_the_forward_sweep():
    hidden, table, targets, bias, weights = problem(6, tokens=12, items=140, width=16)
    cotangent = np.random.default_rng(6).normal(size=12).astype(np.float32)
    options = {"reduction": "none", "with_ranks": True, "implementation": "pallas_tpu"}

    def loss(hidden, table, bias):
        losses, counts, ranks = cut_bce(hidden, table, targets, bias, weights, **options)
        return (losses * cotangent).sum(), (losses, counts, ranks)

    with interpreter():
        (_, results), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(hidden, table, bias)
    exact = reference(hidden, table, targets, bias, weights)
    np.testing.assert_allclose(results[0], exact["losses"] * weights, rtol=1e-5)
    assert tuple(map(int, results[1])) == exact["counts"]
    np.testing.assert_array_equal(results[2], exact["ranks"])
    exact = reference(hidden, table, targets, bias, weights * cotangent)
    for actual, name in zip(grads, ("hidden", "table", "bias"), strict=True):
        assert np.abs(actual - exact[name]).max() <= 1e-4 * np.abs(exact[name]).max()


def test_two_heads_that_share_a_table_add_up_under_vmap_and_grad():
    """Duplicated and padded targets among them; a batch axis of heads, weighed differently."""
    hidden, table, targets, bias, weights = problem(4, tokens=6, items=60, width=16)
    halves = (hidden.reshape(2, 3, -1), targets.reshape(2, 3, -1), weights.reshape(2, 3))

    def loss(hidden, table, bias):
        def head(hidden, targets, weights):
            return cut_bce(hidden, table, targets, bias, weights, reduction="sum", implementation="pallas_tpu")[0]

        first, second = jax.vmap(head)(hidden, *halves[1:])
        return 3 * first - second + head(hidden[0], halves[1][0], halves[2][0])

    with interpreter():
        value, grads = jax.value_and_grad(loss, (0, 1, 2))(halves[0], table, bias)
    exact = reference(hidden, table, targets, bias, weights * np.repeat([4, -1], 3))
    np.testing.assert_allclose(value, exact["sum"], rtol=1e-5)
    for actual, name in zip(grads, ("hidden", "table", "bias"), strict=True):
        assert np.abs(actual.reshape(exact[name].shape) - exact[name]).max() <= 1e-4 * np.abs(exact[name]).max()


def test_order_of_items_and_repeated_targets_do_not_matter():
    hidden, table, targets, bias, weights = problem(8, tokens=5, items=150, width=16)
    order = np.random.default_rng(8).permutation(150)
    place = np.append(np.argsort(order), [-1, -1, -1, -1])  # ids 150, 151 and -2, -1 stay padding
    moved = place[targets].astype(np.int32)
    repeated = np.concatenate([moved, moved[:, ::-1]], 1)

    def head(table, targets, bias):
        options = {"with_ranks": True, "implementation": "pallas_tpu"}
        loss, counts, ranks = cut_bce(hidden, table, targets, bias, weights, **options)
        return loss, (counts, ranks)

    with interpreter():
        (a, others_a), grad_a = jax.value_and_grad(head, has_aux=True)(table, targets, bias)
        (b, others_b), grad_b = jax.value_and_grad(head, has_aux=True)(table[order], repeated, bias[order])
    np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_allclose(grad_a[order], grad_b, atol=1e-5 * np.abs(grad_a).max())
    assert tuple(map(int, others_a[0])) == tuple(map(int, others_b[0]))
    np.testing.assert_array_equal(others_a[1], others_b[1])


@pytest.mark.parametrize("masked", [0.0, 2.0])
def test_one_token_and_one_item_through_the_head(masked):
    hidden, table, _, bias, weights = problem(9, tokens=1, items=1, width=1, masked=masked)
    arguments = hidden, table, np.zeros((1, 1), np.int32), bias, weights
    head = lambda *a: cut_bce(*a, reduction="sum", with_ranks=True, implementation="pallas_tpu")  # noqa: E731
    with interpreter():
        loss, counted, ranks = head(*arguments)
        grad = jax.grad(lambda table: head(hidden, table, *arguments[2:])[0])(table)
    exact = reference(*arguments)
    np.testing.assert_allclose(loss, exact["sum"], rtol=1e-5)
    np.testing.assert_allclose(grad, exact["table"], rtol=1e-5)
    assert tuple(map(int, counted)) == exact["counts"]
    np.testing.assert_array_equal(ranks, exact["ranks"])


def test_bfloat16_is_no_worse_than_the_dense_head_in_bfloat16():
    hidden, table, targets, bias, weights = problem(10, tokens=20, items=260, width=64, scale=0.3)
    hidden, table = jnp.bfloat16(hidden), jnp.bfloat16(table)
    exact = reference(hidden, table, targets, bias, weights)
    loss = lambda head: lambda h, e: head(h, e, targets, bias, weights, reduction="sum")[0]  # noqa: E731
    exactly = jax.grad(loss(dense_bce), (0, 1))(hidden, table)
    with interpreter():
        swept = jax.grad(loss(functools.partial(cut_bce, implementation="pallas_tpu")), (0, 1))(hidden, table)
    for name, dense, cut in zip(("hidden", "table"), exactly, swept, strict=True):
        scale = np.abs(exact[name]).max()
        error = [np.abs(np.asarray(grad, np.float64) - exact[name]).max() / scale for grad in (dense, cut)]
        assert error[1] <= error[0] + 1e-2


@pytest.mark.parametrize(("chip", "width", "popular"), [("v5p", 24, 3), ("v6e", 128, 130), ("v5e", 50, 299)])
def test_bfloat16_keeps_the_digits_of_rows_whose_positives_nearly_cancel_the_background(chip, width, popular):
    """An item that is a target of half of the tokens with sigmoid 1/2: its gradient is what the two sums leave."""
    tokens, items = 160, 300
    h_TD, table_VD, _, weight_T = background(tokens, items, width, "bfloat16", bias=False, scale=0.02)
    h_TD, weight_T = h_TD + 1, jnp.abs(weight_T)
    ids_TL = np.random.default_rng(0).integers(0, items + 1, (tokens, 3)).astype(np.int32)
    ids_TL[:, 0] = np.where(np.arange(tokens) % 2, popular, items)
    ids_TL[:, 1] = np.where(ids_TL[:, 1] == popular, items, ids_TL[:, 1])
    table_VD = table_VD.at[popular].set(0)
    slope_TL = jnp.where(ids_TL < items, -1.0, 0)
    plan = tiles.plan(tokens, items, width, 2, tiles.CHIPS[chip], **TILE)
    with interpreter(plan.cores):
        results = cut_tpu.sweep(
            h_TD, table_VD, None, weight_T, None, (ids_TL, slope_TL), threshold=None, tile=None, plan=plan
        )
    exact = wanted(h_TD, table_VD, None, weight_T, 0.0)[3]
    updates = np.asarray(slope_TL, np.float64)[..., None] * np.asarray(weight_T[:, None] * h_TD, np.float64)[:, None]
    background_V = np.abs(exact[popular]).max()
    padded = np.concatenate([exact, np.zeros((1, width))])
    np.add.at(padded, ids_TL, updates)
    assert np.abs(padded[popular]).max() < 0.1 * background_V  # nearly cancelled
    error = np.abs(np.asarray(results[3], np.float64) - padded[:-1])
    assert results[3].dtype == jnp.bfloat16
    assert (error <= 2**-8 * np.abs(padded[:-1]) + 4e-4 * np.abs(exact).max()).all()
    assert error[popular].max() < 2**-10 * background_V  # rounded before the correction it would be 2**-9


def test_counts_of_the_kernel_carry_over_limbs():
    """The kernel counts a token in int32; sums that overflow take limbs. Limbs of 5 bits overflow here as 31 would."""
    arguments = background(9, 140, 16)
    plan = tiles.plan(9, 140, 16, 4, tiles.CHIPS["v6e"], **TILE)
    with interpreter():
        _, above_T = cut_tpu.forward_sweep(*arguments[:3], threshold=-9.0, tile=None, plan=plan)
    count = counts.total(above_T, bits=5)
    assert int(count) == wanted(*arguments, -9.0)[1].sum() > 2**10
    assert int(count.low) < 2**5 and int(count.high) > 2**5


def test_all_tokens_masked_gives_zero_loss_and_zero_gradients():
    hidden, table, targets, bias, weights = problem(5, tokens=4, items=40, width=16)
    mean = lambda h: cut_bce(h, table, targets, bias, weights * 0, implementation="pallas_tpu")[0]  # noqa: E731
    with interpreter():
        value, grad = jax.value_and_grad(mean)(hidden)
    assert value == 0 and not np.any(grad)


def test_a_plan_that_would_read_dh_while_it_is_written_is_refused():
    with pytest.raises(ValueError, match="dh hbm"):
        tiles.plan(100, 1_000, 16, 4, tiles.CHIPS["v6e"], dh="hbm")


def test_plans_differ_only_in_what_they_were_asked():
    plan = tiles.plan(200, 300, 50, 4, tiles.CHIPS["v6e"], **TILE)
    assert dataclasses.replace(plan, dh="hbm").items == plan.items == 128

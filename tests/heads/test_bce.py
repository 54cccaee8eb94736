"""Both exact heads against float64 numpy, over shapes, paddings, reductions and transformations."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recml_sasrec.heads import Counts, cut_bce, dense_bce
from tests.heads.reference import problem, reference

HEADS = {"dense": dense_bce, "cut": functools.partial(cut_bce, tile=5, implementation="xla")}
NAMES = ("hidden", "table", "bias", "weights")


def gradients(head, arguments, **options):
    """(loss, counts), and gradients by name, of a scalar reduction."""
    hidden, table, targets, bias, weights = arguments

    def loss(hidden, table, bias, weights):
        return head(hidden, table, targets, bias, weights, **options)

    argnums = (0, 1, 2, 3) if bias is not None else (0, 1, 3)
    call = jax.jit(jax.value_and_grad(loss, argnums, has_aux=True))
    value, grads = call(hidden, table, bias, weights)
    return value, dict(zip([NAMES[i] for i in argnums], grads, strict=True))


def assert_close(actual, wanted, tolerance=1e-4):
    """Within tolerance of the largest entry."""
    scale = np.abs(wanted).max(initial=1e-30)
    np.testing.assert_allclose(np.asarray(actual, np.float64) / scale, wanted / scale, atol=tolerance, rtol=0)


def check(head, arguments, **options):
    (loss, counts), grads = gradients(head, arguments, reduction="sum", **options)
    wanted = reference(*arguments, **options)
    assert loss == pytest.approx(wanted["sum"], rel=1e-6, abs=1e-6)
    for name, grad in grads.items():
        assert_close(grad, wanted[name])
    if wanted["margin"] > 1e-4:
        assert tuple(map(int, counts)) == wanted["counts"]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("options", [{}, {"positive_weight": 3.0, "temperature": 0.5, "threshold": 1.0}])
def test_agrees_with_float64(name, options):
    check(HEADS[name], problem(0, tokens=9, items=131), **options)


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**16),
    tokens=st.integers(1, 9),
    items=st.sampled_from([1, 2, 7, 64, 65, 129]),
    width=st.sampled_from([1, 3, 8]),
    slots=st.sampled_from([1, 4, 40]),
    tile=st.sampled_from([None, 1, 3, 64, 100]),
    scale=st.sampled_from([0.0, 0.1, 10.0]),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    bias=st.booleans(),
)
def test_cut_agrees_with_float64_for_any_shape(tile, **shape):
    # One token of one item: the loss is a difference of two near-equal terms, so only its sum's scale is promised.
    hypothesis.assume(tile != 1 or shape["items"] < 65)
    check(functools.partial(cut_bce, tile=tile, implementation="xla"), problem(**shape))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("size", [30.0, 1000.0])
def test_large_logits_stay_finite_and_right(name, size):
    hidden, table, targets, _, weights = problem(1, width=1)
    hidden, table = np.sign(hidden), np.sign(table) * np.float32(size)
    check(HEADS[name], (hidden, table, targets, None, weights))


@pytest.mark.parametrize("shift", [-6.0, -12.0, -18.0, -25.0])
def test_rare_background_keeps_its_digits(shift):
    """Trained logits sit near log(L / V): a logarithm of 1 + exp(z) in float32 would lose them."""
    hidden, table, _, _, weights = problem(2, items=500, scale=0.1)
    bias = np.full(500, shift, np.float32)
    check(functools.partial(cut_bce, tile=128), (hidden, table, np.full((7, 1), -1, np.int32), bias, weights))


@pytest.mark.parametrize("name", HEADS)
def test_all_tokens_masked_is_zero_not_nan(name):
    arguments = problem(3, masked=2.0)
    for reduction in ("token_mean", "mean", "sum"):
        (loss, counts), grads = gradients(HEADS[name], arguments, reduction=reduction)
        assert loss == 0
        assert all(count == 0 for count in counts)
        for tensor in ("hidden", "table", "bias"):
            assert not np.any(grads[tensor])
        assert np.isfinite(grads["weights"]).all()


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens_are_a_loss_of_zero(name, shape):
    _, table, _, bias, _ = problem(5)
    arguments = (np.zeros((*shape, table.shape[1])), table, np.zeros((*shape, 4), int), bias, np.zeros(shape))
    for reduction in ("sum", "token_mean", "mean"):
        (loss, counts), grads = gradients(HEADS[name], arguments, reduction=reduction)
        assert loss == 0 and tuple(map(int, counts)) == (0, 0, 0, 0)
        assert {n: grad.shape for n, grad in grads.items()} == dict(
            zip(NAMES, map(np.shape, [arguments[0], table, bias, arguments[4]]), strict=True)
        )
        assert not any(grad.any() for grad in grads.values())
    losses, _, ranks = HEADS[name](*arguments, reduction="none", with_ranks=True)
    assert losses.shape == ranks.shape == shape


@pytest.mark.parametrize("name", HEADS)
def test_reductions(name):
    arguments = problem(4)
    wanted = reference(*arguments)
    weights, items = arguments[4].astype(np.float64), len(arguments[1])
    call = functools.partial(HEADS[name], *arguments)
    mean = wanted["sum"] / weights.sum()
    assert call(reduction="sum")[0] == pytest.approx(wanted["sum"], rel=1e-6)
    assert call()[0] == pytest.approx(mean, rel=1e-6)
    assert call(reduction="mean")[0] == pytest.approx(mean / items, rel=1e-6)
    np.testing.assert_allclose(call(reduction="none")[0], weights * wanted["losses"], rtol=1e-5)


def test_no_weights_means_ones_and_leading_axes_are_tokens():
    hidden, table, targets, bias, _ = problem(5, tokens=6)
    flat = cut_bce(hidden, table, targets, bias, np.ones(6, np.float32), reduction="none")[0]
    shaped = cut_bce(hidden.reshape(2, 3, -1), table, targets.reshape(2, 3, -1), bias, reduction="none")[0]
    np.testing.assert_allclose(shaped, flat.reshape(2, 3), rtol=1e-6)


@pytest.mark.parametrize("name", HEADS)
def test_per_token_losses_take_any_cotangent(name):
    arguments = problem(6)
    cotangent = np.random.default_rng(6).normal(size=7).astype(np.float32)

    def head(*args, **options):
        losses, counts = HEADS[name](*args, reduction="none", **options)
        return (losses * cotangent).sum(), counts

    _, grads = gradients(head, arguments)
    wanted = reference(*arguments[:4], arguments[4] * cotangent)
    for tensor in ("hidden", "table", "bias"):
        assert_close(grads[tensor], wanted[tensor])
    assert_close(grads["weights"][arguments[4] != 0], (wanted["losses"] * cotangent)[arguments[4] != 0])


def test_ragged_target_sets_with_item_zero():
    """Padding must not be taken for item 0, nor a real item 0 for padding (a known miscount of a peer)."""
    hidden, table, _, bias, weights = problem(7, tokens=3, masked=0.0)
    for targets in ([[0, 3, -1], [0, -1, -1], [-1, -1, -1]], [[3, 0, 37], [99, 0, 0], [37, 38, -5]]):
        check(cut_bce, (hidden, table, np.array(targets, np.int32), bias, weights))


def test_order_of_items_does_not_matter():
    hidden, table, targets, bias, weights = problem(8, items=200)
    order = np.random.default_rng(8).permutation(200)
    place = np.append(np.argsort(order), [-1, -1, -1, -1])  # ids 200, 201 and -2, -1 stay padding
    (loss, counts), grads = gradients(cut_bce, (hidden, table, targets, bias, weights), tile=64)
    moved = (hidden, table[order], place[targets].astype(np.int32), bias[order], weights)
    (moved_loss, moved_counts), moved_grads = gradients(cut_bce, moved, tile=64)
    assert moved_loss == pytest.approx(float(loss), rel=1e-6)
    assert list(map(int, moved_counts)) == list(map(int, counts))
    assert_close(moved_grads["table"], np.asarray(grads["table"])[order], 1e-6)


def test_an_outer_scale_scales_the_gradients():
    arguments = problem(9)
    _, grads = gradients(cut_bce, arguments)
    _, scaled = gradients(lambda *a: (cut_bce(*a)[0] * -3.0, None), arguments)
    for name in grads:
        np.testing.assert_allclose(scaled[name], -3 * grads[name], rtol=1e-5, atol=1e-7)


def test_two_heads_summed_under_checkpoint():
    arguments = problem(10)

    def twice(hidden, table, targets, bias, weights):
        first, counts = cut_bce(hidden, table, targets, bias, weights, reduction="sum")
        second, more = jax.checkpoint(functools.partial(cut_bce, reduction="sum"))(
            hidden, table, targets, bias, 2 * weights
        )
        return first + second, counts + more

    (loss, counts), grads = gradients(twice, arguments)
    wanted = reference(*arguments)
    assert loss == pytest.approx(3 * wanted["sum"], rel=1e-6)
    assert tuple(map(int, counts)) == tuple(2 * c for c in wanted["counts"])
    for name in grads:
        assert_close(grads[name], 3 * wanted[name])


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_vmap_over_an_extra_axis(reduction):
    batch = [problem(seed) for seed in (11, 12, 13)]
    table, bias = batch[0][1], batch[0][3]

    def loss(hidden, table, targets, weights):
        losses, counts = cut_bce(hidden, table, targets, bias, weights, reduction=reduction, tile=16)
        return losses.sum(), counts

    call = jax.vmap(jax.value_and_grad(loss, (0, 1), has_aux=True), (0, None, 0, 0))
    hidden, targets, weights = (np.stack([b[i] for b in batch]) for i in (0, 2, 4))
    (losses, counts), (dhidden, dtable) = call(hidden, table, targets, weights)
    for i in range(3):
        wanted = reference(hidden[i], table, targets[i], bias, weights[i])
        assert losses[i] == pytest.approx(wanted["sum"], rel=1e-6)
        assert np.asarray(counts.tp)[i] == wanted["counts"][0]
        assert_close(dhidden[i], wanted["hidden"])
        assert_close(dtable[i], wanted["table"])


def test_a_batch_axis_of_bfloat16_and_narrow_target_ids():
    hidden, table, *_ = problem(3, tokens=6, items=300, width=8)
    targets = np.array([[127, -1]] * 6, np.int8)
    loss = lambda head, h, e: jax.vmap(lambda h, t: head(h, e, t)[0])(h.reshape(2, 3, -1), targets.reshape(2, 3, -1))  # noqa: E731
    half = [jnp.asarray(x, jnp.bfloat16) for x in (hidden, table)]
    cut, dense = (jax.grad(lambda *a, head=head: loss(head, *a).sum(), (0, 1))(*half) for head in (cut_bce, dense_bce))
    for a, b in zip(cut, dense, strict=True):
        assert_close(np.asarray(a, np.float32), np.asarray(b, np.float64), 1e-2)


def test_bfloat16_is_no_worse_than_dense_bfloat16():
    arguments = problem(14, tokens=32, items=300, width=16)
    half = [jnp.asarray(x, jnp.bfloat16) for x in arguments[:2]]
    exact = reference(*(np.asarray(x, np.float64) for x in half), *arguments[2:])
    errors = {}
    for name in ("dense", "cut"):
        (loss, _), grads = gradients(HEADS[name], (*half, *arguments[2:]), reduction="sum")
        assert loss.dtype == jnp.float32
        assert grads["hidden"].dtype == grads["table"].dtype == jnp.bfloat16
        assert grads["bias"].dtype == jnp.float32
        worst = [np.abs(np.asarray(grads[k], np.float64) - exact[k]).max() / np.abs(exact[k]).max() for k in grads]
        errors[name] = max(*worst, abs(float(loss) / exact["sum"] - 1))
    assert errors["cut"] <= errors["dense"] + 1e-2


def test_dense_and_cut_train_alike():
    """100 steps of Adam from the same start: losses within 1e-5 relative."""
    optax = pytest.importorskip("optax")
    hidden, table, targets, bias, weights = map(jnp.asarray, problem(15, tokens=16, items=150, scale=0.1))
    optimizer = optax.adam(1e-2)

    def losses(head):
        def step(carry, _):
            params, state = carry
            loss, grads = jax.value_and_grad(lambda p: head(*p[:2], targets, p[2], weights)[0])(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        start = (hidden, table * 0.1, bias * 0 - 4.0)
        return jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), length=100)[1])()

    dense, cut = losses(dense_bce), losses(functools.partial(cut_bce, tile=32))
    assert dense[-1] < 0.7 * dense[0]
    np.testing.assert_allclose(cut, dense, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_no_array_of_tokens_by_items(reduction):
    tokens, items, tile = 48, 1000, 64
    arguments = problem(16, tokens=tokens, items=items)

    def loss(hidden, table):
        return cut_bce(hidden, table, *arguments[2:], reduction=reduction, tile=tile, implementation="xla")[0].sum()

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*arguments[:2]).jaxpr
    biggest = max(np.prod(v.aval.shape, dtype=int) for eqn in equations(jaxpr) for v in eqn.outvars)
    assert biggest <= max(tokens * tile, items * 8, tokens * 4 * 8)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from equations(inner.jaxpr)
            elif hasattr(inner, "eqns"):
                yield from equations(inner)


def test_counts_can_be_left_out_and_summed():
    arguments = problem(17)
    assert cut_bce(*arguments, with_counts=False)[1] is None
    assert dense_bce(*arguments, with_counts=False)[1] is None

    def step(total, _):
        return total + cut_bce(*arguments)[1], None

    total = jax.jit(lambda c: jax.lax.scan(step, c, length=3)[0])(Counts.zeros())
    assert tuple(map(int, total)) == tuple(3 * c for c in reference(*arguments)["counts"])


def test_lowering_for_another_platform_keeps_every_implementation_apart():
    arguments = problem(18)
    traced = jax.jit(cut_bce).trace(*arguments)
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"table": np.zeros((37, 9), np.float32)}, "hidden must be"),
        ({"bias": np.zeros(36, np.float32)}, "bias must be"),
        ({"weights": np.zeros(6, np.float32)}, "weights must be"),
        ({"targets": np.zeros((7, 4), np.float32)}, "integer"),
        ({"reduction": "avg"}, "reduction must be"),
        ({"implementation": "cuda"}, "implementation must be"),
        ({"tile": 0}, "tile must be"),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    arguments = dict(zip(("hidden", "table", "targets", "bias", "weights"), problem(19), strict=True))
    with pytest.raises(ValueError, match=words):
        cut_bce(**(arguments | change))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("reduction", ["token_mean", "none"])
def test_ranks_are_those_of_the_best_target(name, reduction):
    arguments = problem(11, tokens=60, items=700, width=24)
    wanted = reference(*arguments)["ranks"]
    assert len(set(wanted)) > 20 and 0 in wanted
    _, counts, ranks = HEADS[name](*arguments, with_ranks=True, reduction=reduction)
    assert ranks.dtype == np.int32
    np.testing.assert_array_equal(ranks, wanted)
    assert counts is not None


@pytest.mark.parametrize("logit", [2.0, 4.0, 8.0])
def test_bfloat16_keeps_the_digits_where_targets_are_almost_certain(logit):
    """A fitted model: targets at +logit, the others at -8. Their gradient is what sigmoid and label leave."""
    tokens, items, width = 60, 96, 32  # weights of 1 / 60 are rounded
    rng = np.random.default_rng(0)
    table = np.linalg.qr(rng.normal(size=(items, items)))[0][:, :width].astype(np.float32)
    targets = rng.integers(0, 4, (tokens, 1)).astype(np.int32)  # few items: each is the target of many tokens
    wanted = np.full((tokens, items), -8.0)
    np.put_along_axis(wanted, targets, logit, 1)
    hidden = (wanted @ table + rng.normal(size=(tokens, width)) * 0.1).astype(np.float32)
    bias = np.where(np.arange(items) < 4, 0, -8).astype(np.float32)
    half = [jnp.asarray(x, jnp.bfloat16) for x in (hidden, table)]
    exact = reference(*half, targets, bias, np.full(tokens, 1 / tokens))
    for name, argument in (("hidden", 0), ("table", 1)):
        errors = []
        for head in (cut_bce, dense_bce):
            loss = lambda h, e, head=head: head(h, e, targets, bias)[0]  # noqa: E731
            gradient = np.asarray(jax.grad(loss, argument)(*half), np.float64)
            errors.append(np.abs(gradient - exact[name]).max() / np.abs(exact[name]).max())
        assert errors[0] <= errors[1] + 1e-2, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_never_outranks_itself(dtype):
    """Every item is a target, so none can be above the best; rounding of the two dot products must not make one so."""
    rng = np.random.default_rng(12)
    hidden = jnp.asarray(rng.normal(size=(200, 300)) * 10, dtype)
    table = jnp.asarray(rng.normal(size=(8, 300)), dtype)
    targets = np.broadcast_to(np.arange(8, dtype=np.int32), (200, 8))
    for width in (300, 299, 64, 7):
        ranks = cut_bce(hidden[:, :width], table[:, :width], targets, np.ones(8, np.float32), with_ranks=True)[2]
        np.testing.assert_array_equal(ranks, 1)


def test_ties_do_not_count_and_ranks_pass_no_gradient():
    hidden, table = np.ones((2, 4), np.float32), np.ones((5, 4), np.float32)
    targets = np.array([[3], [-1]], np.int32)
    for head in HEADS.values():
        np.testing.assert_array_equal(head(hidden, table, targets, with_ranks=True)[2], [1, 0])
        as_float = lambda h, head=head: head(h, table, targets, with_ranks=True)[2].astype(jnp.float32).sum()  # noqa: E731
        assert not np.any(jax.grad(as_float)(hidden))


@pytest.mark.parametrize("reduction", ["token_mean", "none"])
def test_a_step_without_the_loss_has_the_same_gradients_counts_and_ranks(reduction):
    arguments, outputs = problem(13, items=131), []
    for with_loss in (True, False):

        def loss(hidden, table, bias, with_loss=with_loss):
            loss, *others = cut_bce(
                hidden,
                table,
                arguments[2],
                bias,
                arguments[4],
                reduction=reduction,
                with_ranks=True,
                with_loss=with_loss,
            )
            return loss.sum(), (loss, others)

        (_, (value, others)), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arguments[:2], arguments[3])
        assert np.any(value) == with_loss
        outputs.append((others, grads))
    jax.tree.map(np.testing.assert_array_equal, *outputs)

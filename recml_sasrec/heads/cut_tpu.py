"""CutBCE's dense background on TPU: the call of the Pallas kernel in ``cut_tpu_kernel``.

The contract of ``sweep``, ``forward_sweep`` and ``supports`` is in ``cut.py``.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from recml_sasrec.heads import tiles
from recml_sasrec.heads.cut_tpu_kernel import EXTENSION, UPDATES, Spec, kernel
from recml_sasrec.heads.cut_tpu_tile import LANES, ROWS
from recml_sasrec.heads.rows import add_positives, rounded, weighted


def supports(h_TD: jax.Array, table_VD: jax.Array) -> bool:
    """Whether the kernel takes these dtypes, and some plan fits the chip being traced for."""
    if h_TD.dtype != table_VD.dtype or h_TD.dtype not in (jnp.float32, jnp.bfloat16) or not h_TD.size:
        return False
    try:
        plan_for(h_TD, table_VD, ranks=True)
    except ValueError:
        return False
    return True


def plan_for(h_TD: jax.Array, table_VD: jax.Array, **overrides) -> tiles.Plan:
    """The tile sizes ``sweep`` would use on the chip being traced for; see ``tiles.plan``."""
    (tokens, _), (items, width) = h_TD.shape, table_VD.shape
    return tiles.plan(tokens, items, width, h_TD.dtype.itemsize, tiles.current_chip(), **overrides)


def sweep(
    h_TD,
    table_VD,
    bias_V,
    weight_T,
    reference_T: jax.Array | None = None,
    positives: tuple[jax.Array, jax.Array] | None = None,
    *,
    threshold,
    tile,
    with_loss: bool = True,
    plan: tiles.Plan | None = None,
):
    """Loss, counts and gradients of the background from one pass over the logits; see ``cut.py``.

    ``plan`` overrides the choice of ``tiles``.
    """
    plan = plan or plan_for(h_TD, table_VD, tile=tile, ranks=reference_T is not None)
    spec = _spec(plan, table_VD, threshold, with_loss, True, bias_V)._replace(reference=reference_T is not None)
    updates = _sorted_updates(spec, weighted(h_TD, weight_T), positives) if spec.rounded else ()
    loss_T, above_T, dh_TD, dtable_VD, *others = _run(spec, h_TD, table_VD, bias_V, weight_T, reference_T, *updates)
    if positives is not None and not spec.rounded:
        dtable_VD = add_positives(dtable_VD, weighted(h_TD, weight_T), *positives)
    results = loss_T, above_T, dh_TD, dtable_VD, *others
    return results if spec.reference else results[:5]


def forward_sweep(
    h_TD,
    table_VD,
    bias_V,
    reference_T: jax.Array | None = None,
    *,
    threshold,
    tile,
    with_loss: bool = True,
    plan: tiles.Plan | None = None,
):
    """Loss and counts of the background; see ``cut.py``."""
    plan = plan or plan_for(h_TD, table_VD, tile=tile, gradients=False, ranks=reference_T is not None)
    spec = _spec(plan, table_VD, threshold, with_loss, False, bias_V)._replace(reference=reference_T is not None)
    loss_T, above_T, _, _, _, better_T = _run(spec, h_TD, table_VD, bias_V, None, reference_T)
    return (loss_T, above_T, better_T) if spec.reference else (loss_T, above_T)


def kernel_call(plan: tiles.Plan, h_TD, table_VD, bias_V, weight_T):
    """``sweep`` with loss and counts, traced at once: for those who look at the program."""
    spec = _spec(plan, table_VD, 0.0, True, True, bias_V)
    updates = _sorted_updates(spec, h_TD, None) if spec.rounded else ()
    return _sweep(spec, h_TD, table_VD, bias_V, weight_T, None, updates)


def _spec(plan, table_VD, threshold, loss, gradients, bias_V) -> Spec:
    # bfloat16 operands are exact in one pass of the matrix unit; for float32 it is the user's choice.
    precise = table_VD.dtype == jnp.float32 and jax.config.jax_default_matmul_precision not in _ONE_PASS  # type: ignore[attr-defined]
    precision = lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT
    items, width = table_VD.shape
    rounded = gradients and table_VD.dtype == jnp.bfloat16 and plan.blocks == 1
    return Spec(plan, items, width, threshold, loss, gradients, bias_V is not None, False, precision, False, rounded)


_ONE_PASS = (None, "default", "fastest", "bfloat16", "BF16_BF16_F32")

# Tracing the unrolled kernel takes seconds. As a primitive of its own, traced when it is lowered, it costs nothing
# where ``platform_dependent`` only names it and another platform is compiled for.
_sweep_p = Primitive("cut_bce_tpu")
_sweep_p.multiple_results = True


def _run(spec, h_TD, table_VD, bias_V, weight_T, reference_T=None, *updates):
    """(loss_T, above_T, dh_TD, dtable_VD, dbias_V, better_T), None where the spec has none."""
    arrays = [x for x in (h_TD, table_VD, bias_V, weight_T, reference_T, *updates) if x is not None]
    results = iter(_sweep_p.bind(*arrays, spec=spec, batches=()))
    return tuple(next(results) if wanted else None for wanted in _wanted(spec))


def _wanted(spec) -> tuple[bool, ...]:
    gradients = spec.gradients
    return spec.loss, spec.threshold is not None, gradients, gradients, gradients and spec.bias, spec.reference


@_sweep_p.def_abstract_eval
def _(h_TD, table_VD, *arrays, spec, batches):
    """``batches`` has an entry a vmap, outermost first: its size and which arguments have that leading axis."""
    f32, leading = jnp.dtype("float32"), tuple(size for size, _ in batches)
    tokens = h_TD.shape[-2]
    shapes = (tokens,), (tokens,), (tokens, spec.width), (spec.items, spec.width), (spec.items,), (tokens,)
    dtable = table_VD.dtype if spec.rounded else f32
    dtypes = f32, jnp.dtype("int32"), f32, dtable, f32, jnp.dtype("int32")
    results = zip(shapes, dtypes, _wanted(spec), strict=True)
    return [jax.core.ShapedArray((*leading, *shape), dtype) for shape, dtype, wanted in results if wanted]


def _batch(arrays, axes, *, spec, batches):
    mapped = tuple(axis is not None for axis in axes)
    arrays = [jnp.moveaxis(x, axis, 0) if m else x for x, axis, m in zip(arrays, axes, mapped, strict=True)]
    size = next(x.shape[0] for x, m in zip(arrays, mapped, strict=True) if m)
    results = _sweep_p.bind(*arrays, spec=spec, batches=((size, mapped), *batches))
    return results, [0] * len(results)


def _traced(*arrays, spec, batches):
    if batches:  # a loop over the kernel: its scratch and its copies know one batch only
        (_, mapped), *inner = batches

        def one(mapped_arrays):
            each = iter(mapped_arrays)
            return _traced(
                *(next(each) if m else x for x, m in zip(arrays, mapped, strict=True)), spec=spec, batches=inner
            )

        return lax.map(one, [x for x, m in zip(arrays, mapped, strict=True) if m])
    h_TD, table_VD, *rest = arrays
    bias_V = rest.pop(0) if spec.bias else None
    weight_T = rest.pop(0) if spec.gradients else None
    reference_T = rest.pop(0) if spec.reference else None
    if spec.gradients:
        results = _sweep(spec, h_TD, table_VD, bias_V, weight_T, reference_T, rest)
    else:
        blocks = jax.tree.map(lambda x: _blocks(x, spec.plan), (h_TD, None, reference_T))
        outs = lax.map(lambda block: _call(spec, table_VD, bias_V, block)[0], blocks)
        results = _unblock(outs, h_TD.shape[0])
    return [x for x in results if x is not None]


_sweep_p.def_impl(jax.jit(_traced, static_argnames=("spec", "batches")))
batching.primitive_batchers[_sweep_p] = _batch
mlir.register_lowering(_sweep_p, mlir.lower_fun(_traced, multiple_results=True))


def _sorted_updates(spec, weighted_TD, positives):
    """What the positives add to rows of the table, by id: starts of the tiles, and chunks of int32 ids and of rows.

    A row is two of bfloat16, the second what the first lacks, so a chunk has its ids twice. Padding has the id V and
    adds nothing. There is a chunk too much, which a tile without updates may read.
    """
    items = spec.items
    ids_TL, slope_TL = positives or (
        jnp.zeros((weighted_TD.shape[0], 0), jnp.int32),
        jnp.zeros((weighted_TD.shape[0], 0)),
    )
    size, slots = ids_TL.size, max(ids_TL.shape[1], 1)
    padding = (0, UPDATES - size % UPDATES)
    ids_R = jnp.pad(ids_TL.reshape(-1), padding, constant_values=items)
    order_R = jnp.argsort(ids_R)
    ids_R = ids_R[order_R]
    slope_R = jnp.pad(slope_TL.reshape(-1), padding)[order_R]
    tokens_R = jnp.minimum(order_R // slots, weighted_TD.shape[0] - 1)
    updates_RD = slope_R[:, None] * weighted_TD[tokens_R].astype(jnp.float32)
    first_RD = rounded(updates_RD, weighted_TD.dtype)
    halves = [x.astype(weighted_TD.dtype).reshape(-1, UPDATES, spec.width) for x in (first_RD, updates_RD - first_RD)]
    bounds = jnp.minimum(jnp.arange(spec.tiles + 1) * spec.plan.items, items)
    starts = jnp.searchsorted(ids_R, bounds).astype(jnp.int32)
    ids = ids_R.reshape(-1, 1, UPDATES)
    return starts, jnp.concatenate([ids, ids], 2), jnp.concatenate(halves, 1)


def _sweep(spec, h_TD, table_VD, bias_V, weight_T, reference_T, updates=()):
    """One call, or one a block of tokens with the table's gradient handed from call to call."""
    blocks = jax.tree.map(lambda x: _blocks(x, spec.plan), (h_TD, weight_T, reference_T))
    out, dtable_VD, dbias_V = _call(spec, table_VD, bias_V, jax.tree.map(lambda x: x[0], blocks), updates=updates)
    outs = jax.tree.map(lambda x: x[None], out)
    if spec.plan.blocks > 1:
        spec = spec._replace(accumulate=True)

        def step(carry, block):
            out, dtable_VD, dbias_V = _call(spec, table_VD, bias_V, block, carry[0])
            return (dtable_VD, None if dbias_V is None else carry[1] + dbias_V), out

        (dtable_VD, dbias_V), rest = lax.scan(step, (dtable_VD, dbias_V), jax.tree.map(lambda x: x[1:], blocks))
        outs = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), outs, rest)
    loss_T, above_T, dh_TD, better_T = _unblock(outs, h_TD.shape[0])
    return loss_T, above_T, dh_TD, dtable_VD, dbias_V, better_T


def _blocks(x, plan):
    """[T, ...] as [blocks, block, ...], padded with zeros: tokens without weight."""
    x = jnp.pad(x, [(0, plan.blocks * plan.block - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(plan.blocks, plan.block, *x.shape[1:])


def _unblock(outs, tokens):
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], outs)


def _call(spec, table_VD, bias_V, block, dtable_VD=None, updates=()):
    """One kernel over a block of tokens (h, weight, reference): ((loss, above, dh, better), dtable, dbias)."""
    plan = spec.plan
    inputs, outputs, scratch = _operands(spec, table_VD, bias_V, block, dtable_VD, updates)
    names = [*inputs, *outputs, *scratch]
    results = pl.pallas_call(
        lambda *refs: kernel(spec, SimpleNamespace(**dict(zip(names, refs, strict=True)))),
        grid=(spec.cores, spec.tiles_per_core, plan.block // plan.tokens),
        in_specs=[block for _, block in inputs.values()],
        out_specs=[block for _, _, block in outputs.values()],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in outputs.values()],
        scratch_shapes=list(scratch.values()),
        input_output_aliases={names.index("dtable_in"): list(outputs).index("dtable")} if spec.accumulate else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=plan.vmem_limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=(6 if spec.gradients else 2) * plan.block * table_VD.size,
            transcendentals=2 * plan.block * spec.items,
            bytes_accessed=table_VD.size * (table_VD.dtype.itemsize + 4 * spec.gradients),
        ),
        name="cut_bce_sweep" if spec.gradients else "cut_bce_forward",
    )(*(array for array, _ in inputs.values()))
    out = dict(zip(outputs, results, strict=True))
    loss_C = out["loss"].sum((0, 1)) if spec.loss else None
    above_C = None if spec.threshold is None else out["above"].sum((0, 1))
    better_C = out["better"].sum((0, 1)) if spec.reference else None
    if not spec.gradients:
        return (loss_C, above_C, None, better_C), None, None
    dh_CD = out["dh_t"].sum(0).T[:, : spec.width] * block[1][:, None]
    dtable = out["dtable"]
    if spec.accumulate and spec.ragged:
        # The interpreter returns an aliased output with its last tile's padding; for the compiler this is nothing.
        dtable = lax.slice(dtable, (0, 0), table_VD.shape[::-1] if spec.columnar else table_VD.shape)
    return (
        (loss_C, above_C, dh_CD, better_C),
        dtable.T if spec.columnar else dtable,
        out["dbias"][0] if spec.bias else None,
    )


def _operands(spec, table_VD, bias_V, block, dtable_VD, updates):
    """What the variant reads, writes, keeps, by name: inputs (array, block), outputs (shape, dtype, block), scratch."""
    plan, dtype, f32 = spec.plan, table_VD.dtype, jnp.float32
    h_CD, weight_C, reference_C = block
    h_CD = jnp.pad(h_CD, [(0, 0), (0, spec.padded - spec.width)])
    tokens, extension = h_CD.shape[0], EXTENSION if spec.folded else 0
    extended_CD = jnp.concatenate([h_CD, jnp.ones((tokens, extension), dtype)], 1)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def of_items(rows: bool, width: int) -> pl.BlockSpec:
        """A tile of the items, on the first or second axis. A core's tile too much is its last one, left alone."""
        tile = lambda core, v: jnp.minimum(core * spec.tiles_per_core + v, spec.tiles - 1)  # noqa: E731
        if rows:
            return pl.BlockSpec((plan.items, width), lambda core, v, t: (tile(core, v), 0))
        return pl.BlockSpec((width, plan.items), lambda core, v, t: (0, tile(core, v)))

    def of_tokens(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((width, plan.tokens), lambda core, v, t: (0, t))

    table, table_block = table_VD.T if spec.columnar else table_VD, of_items(not spec.columnar, spec.width)

    inputs = {"table": (table, table_block), "hidden_t": (extended_CD.T, of_tokens(spec.padded + extension))}
    outputs: dict = {}
    scratch: dict = {}
    if spec.columnar or spec.copied or spec.folded:
        scratch["rows"] = pltpu.VMEM((plan.items, spec.padded + extension), dtype)
    if spec.copied or (spec.gradients and not spec.columnar):
        scratch["columns"] = pltpu.VMEM((spec.padded, plan.items), dtype)
    if spec.bias:
        inputs["bias"] = (bias_V[None], of_items(False, 1))
    if (spec.bias or spec.ragged) and not spec.folded:
        scratch["offset"] = pltpu.VMEM((plan.items, LANES), f32)
    if spec.loss:
        outputs["loss"] = ((spec.cores, ROWS, plan.block), f32, anywhere)
        scratch["loss_acc"] = pltpu.VMEM((ROWS, plan.block), f32)
    if spec.threshold is not None:
        outputs["above"] = ((spec.cores, ROWS, plan.block), jnp.int32, anywhere)
        scratch["above_acc"] = pltpu.VMEM((ROWS, plan.block), jnp.int32)
    if spec.reference:
        inputs["reference"] = (reference_C[None], of_tokens(1))
        outputs["better"] = ((spec.cores, ROWS, plan.block), jnp.int32, anywhere)
        scratch["better_acc"] = pltpu.VMEM((ROWS, plan.block), jnp.int32)
    if not spec.gradients:
        return inputs, outputs, scratch

    # Column D of the weighted hidden states is the weight alone, which makes dbias a column of dtable.
    beside = (extension if spec.columnar else LANES) if spec.folded else 0
    weighted_CD = jnp.pad(h_CD.astype(f32), [(0, 0), (0, beside)])
    weighted_CD = weighted_CD.at[:, spec.padded : spec.padded + 1].set(1) if beside else weighted_CD
    weighted_CD = (weight_C[:, None] * weighted_CD).astype(dtype)
    if spec.columnar:
        inputs["weighted"] = (weighted_CD.T, of_tokens(spec.padded + beside))
    else:
        rows = pl.BlockSpec((plan.tokens, spec.padded + beside), lambda core, v, t: (t, 0))
        inputs["weighted"] = (weighted_CD, rows)
    outputs["dh_t"] = ((spec.cores, spec.padded, plan.block), f32, anywhere)
    outputs["dtable"] = (table.shape, dtype if spec.rounded else f32, table_block)
    if spec.rounded:
        tile = (spec.width, plan.items) if spec.columnar else (plan.items, spec.width)
        scratch["dtable_acc"] = pltpu.VMEM(tile, f32)
        starts, ids, rows = updates
        inputs["starts"] = (starts, pl.BlockSpec(memory_space=pltpu.SMEM))
        inputs |= {"update_ids": (ids, anywhere), "updates": (rows, anywhere)}
        scratch["update_ids_chunk"] = pltpu.VMEM(ids.shape[1:], jnp.int32)
        scratch["updates_chunk"] = pltpu.VMEM(rows.shape[1:], dtype)
        scratch["update_semaphores"] = pltpu.SemaphoreType.DMA((2,))
    if plan.dh == "hbm":
        scratch["dh_acc"] = pltpu.VMEM((2, spec.padded, plan.tokens), f32)
        scratch["semaphores"] = pltpu.SemaphoreType.DMA((2, 2))
    else:
        scratch["dh_acc"] = pltpu.VMEM((spec.padded, plan.block), f32)
    if spec.bias:
        outputs["dbias"] = ((1, spec.items), f32, of_items(False, 1))
        if not spec.folded:
            inputs["weight"] = (weight_C[None], of_tokens(1))
        if not (spec.folded and spec.columnar):
            scratch["dbias_acc"] = pltpu.VMEM((plan.items, LANES), f32)
    if spec.accumulate:
        inputs["dtable_in"] = (dtable_VD.T if spec.columnar else dtable_VD, table_block)
    return inputs, outputs, scratch

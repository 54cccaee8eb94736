"""The body of CutBCE's TPU kernel: loss, counts, dh, dE and db from each logit tile, once.

Here is what a grid step keeps, copies and adds up; the arithmetic of its tile is in ``cut_tpu_tile.py``.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from recml_sasrec.heads import tiles
from recml_sasrec.heads.cut_tpu_tile import LANES, ROWS, Tile, dot, sums_of

UPDATES = 32  # of the positives, added to a tile at a time
EXTENSION = 16  # rows that hold the offset's pieces, whole registers of 16-bit rows


class Spec(NamedTuple):
    """What the kernel is specialised to."""

    plan: tiles.Plan
    items: int  # V
    width: int  # D
    threshold: float | None
    loss: bool
    gradients: bool
    bias: bool
    accumulate: bool  # dtable starts from an input instead of zero
    precision: lax.Precision  # of the matmuls
    reference: bool  # count the items above each token's reference logit
    rounded: bool  # dtable leaves the chip in bfloat16, the positives' updates among it

    @property
    def padded(self) -> int:
        """D rounded up to whole registers of 16-bit rows."""
        return -(-self.width // 16) * 16

    @property
    def ragged(self) -> bool:
        return self.items % self.plan.items != 0

    @property
    def tiles(self) -> int:
        return -(-self.items // self.plan.items)

    @property
    def cores(self) -> int:
        return min(self.plan.cores, self.tiles)

    @property
    def tiles_per_core(self) -> int:
        return -(-self.tiles // self.cores)

    @property
    def columnar(self) -> bool:
        """The kernel reads and writes [D, V]: how XLA lays out a [V, D] array on TPU if its rows would need padding.

        Asking for rows there makes XLA copy the whole table, twice its size, before the kernel and after it.
        """
        return self.width % LANES != 0

    @property
    def copied(self) -> bool:
        """The table's tile needs zeros where it has no items or columns."""
        return self.ragged or self.padded != self.width

    @property
    def folded(self) -> bool:
        """The matrix unit has idle rows that add the bias, and idle columns or a few more rows that give dbias.

        The bias, -1e30 where the last tile has no item, is then three exact pieces in E against ones in h.
        """
        return self.bias and self.padded % self.plan.mxu_width != 0


class Place(NamedTuple):
    """Where in the grid a step is: a core's tiles of the items, for each of them all tiles of the tokens."""

    core: Any
    v: Any  # tile of the items, of all
    t: Any  # tile of the tokens
    step: Any  # the core's
    steps: Any  # the core's last step + 1
    tokens: Any  # tiles of the tokens

    @classmethod
    def now(cls, spec: Spec) -> "Place":
        core, v, t, tokens = pl.program_id(0), pl.program_id(1), pl.program_id(2), pl.num_programs(2)
        first, step = core * spec.tiles_per_core, v * tokens + t
        tiles_ = spec.tiles if spec.cores == 1 else jnp.minimum(spec.tiles_per_core, spec.tiles - first)
        return cls(core, first + v, t, step, tiles_ * tokens, tokens)


def kernel(spec: Spec, refs):
    """A grid step: core ``program_id(0)``, its tile ``program_id(1)`` of the items, ``program_id(2)`` of the tokens."""
    at = Place.now(spec)
    if spec.tiles % spec.cores:  # the last core has a tile less
        pl.when(at.step < at.steps)(lambda: _step(spec, refs, at))
    else:
        _step(spec, refs, at)


def _step(spec: Spec, refs, at: Place):
    outputs = {"loss_acc": "loss", "above_acc": "above", "better_acc": "better"}
    resident = [name for name in outputs if hasattr(refs, name)]
    if spec.gradients and spec.plan.dh != "hbm":
        outputs["dh_acc"] = "dh_t"
        resident.append("dh_acc")

    @pl.when(at.step == 0)
    def _():
        for name in resident:
            _fill(getattr(refs, name), ROWS)

    @pl.when(at.t == 0)
    def _():
        _start_items(spec, refs, at.v)
        if spec.rounded:
            _copy_updates(refs, refs.starts[at.v] // UPDATES, start=True)

    if spec.gradients and spec.plan.dh == "hbm":
        _exchange_dh(spec, refs, at)
    if spec.ragged and not spec.bias:  # only the last tile pays for its missing items
        tail = at.v == spec.tiles - 1
        pl.when(tail)(lambda: Tile(spec, refs, at, True).run())
        pl.when(jnp.logical_not(tail))(lambda: Tile(spec, refs, at, False).run())
    else:
        Tile(spec, refs, at, spec.bias and not spec.folded).run()
    if spec.gradients and spec.plan.dh == "hbm":
        _store_dh(spec, refs, at)
    if spec.gradients:
        pl.when(at.t == at.tokens - 1)(lambda: _finish_items(spec, refs, at.v))

    @pl.when(at.step == at.steps - 1)
    def _():
        for name in resident:
            pltpu.sync_copy(getattr(refs, name), getattr(refs, outputs[name]).at[at.core])


def _fill(ref, rows, value_of=None):
    """Writes ``value_of(slice of rows)``, or zeros, into a 2-D ref by a loop: unrolled, it'd be hundreds of stores."""
    rows = rows if ref.shape[0] % rows == 0 else ref.shape[0]

    def body(i, _):
        at = pl.ds(pl.multiple_of(i * rows, rows), rows)
        ref[at, :] = jnp.zeros((rows, ref.shape[1]), ref.dtype) if value_of is None else value_of(at)
        return 0

    lax.fori_loop(0, ref.shape[0] // rows, body, 0)


def _start_items(spec, refs, v):
    """At a tile's first step: its copies of the table, its offsets, and zeros to accumulate into."""
    plan = spec.plan

    def chunk(i, _):
        at = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        _copy_table(spec, refs, at, v * plan.items + i * LANES)
        if hasattr(refs, "offset"):
            offset_KC = jnp.zeros((LANES, LANES), jnp.float32)
            if spec.bias:
                offset_KC = jnp.broadcast_to(refs.bias[:, at], (LANES, LANES)).T
            item_KC = v * plan.items + i * LANES + lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
            refs.offset[at, :] = jnp.where(item_KC < spec.items, offset_KC, -jnp.inf)
        return 0

    lax.fori_loop(0, plan.items // LANES, chunk, 0)
    if spec.gradients:
        rows = ROWS if spec.columnar else LANES
        _fill(sums_of(refs), rows, (lambda at: refs.dtable_in[at, :]) if spec.accumulate else None)
        if spec.bias:
            _fill(getattr(refs, "dbias_acc", refs.dbias), LANES)


def _copy_table(spec, refs, at, item):
    """Fills the tile's rows and columns ``at``, the first of them ``item``, as far as they are copies."""
    if spec.columnar:
        columns_DK = refs.table[:, at]
        if spec.copied:
            item_1K = item + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
            refs.columns[:, at] = jnp.zeros((spec.padded, LANES), columns_DK.dtype)
            refs.columns[: spec.width, at] = jnp.where(item_1K < spec.items, columns_DK, jnp.zeros_like(columns_DK))
            columns_DK = refs.columns[:, at]
        if spec.folded:
            columns_DK = jnp.concatenate([columns_DK, _extension(spec, refs, at, item)])
        refs.rows[at, :] = columns_DK.T
        return
    rows_KD = refs.table[at, :]
    if spec.copied:
        item_K1 = item + lax.broadcasted_iota(jnp.int32, (LANES, 1), 0)
        rows_KD = jnp.where(item_K1 < spec.items, rows_KD, jnp.zeros_like(rows_KD))
    if spec.folded:
        refs.rows[at, : spec.width] = rows_KD
        refs.rows[at, spec.width :] = _extension(spec, refs, at, item).T
    elif spec.copied:
        refs.rows[at, :] = rows_KD
    if spec.gradients:
        refs.columns[:, at] = rows_KD.T


def _extension(spec, refs, at, item):
    """[16, 128]: the biases of the items ``at`` as three numbers of 8 bits each, which bfloat16 holds exactly."""
    item_1K = item + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    rest_1K = jnp.where(item_1K < spec.items, jnp.maximum(refs.bias[:, at], -1e30), -1e30)
    row_RK = lax.broadcasted_iota(jnp.int32, (EXTENSION, LANES), 0)
    pieces_RK = jnp.zeros((EXTENSION, LANES), jnp.float32)
    for row in range(3):
        bits_1K = lax.bitcast_convert_type(rest_1K, jnp.int32) & ~0xFFFF
        piece_1K = lax.bitcast_convert_type(bits_1K, jnp.float32)
        pieces_RK = jnp.where(row_RK == row, piece_1K, pieces_RK)
        rest_1K = rest_1K - piece_1K
    return pieces_RK.astype(refs.table.dtype)


def _finish_items(spec, refs, v):
    """At a tile's last step: what its sums become."""
    if spec.rounded:
        _add_updates(spec, refs, v)
        rows = 2 * ROWS if spec.columnar else LANES
        _fill(refs.dtable, rows, lambda at: refs.dtable_acc[at, :].astype(refs.dtable.dtype))
    if hasattr(refs, "dbias_acc"):
        _finish_bias(refs)


def _copy_updates(refs, chunk, start: bool):
    """Starts, or waits for, the copies of a chunk of updates: their rows' ids and what is added to them."""
    for i, name in enumerate(("update_ids", "updates")):
        buffer = getattr(refs, f"{name}_chunk")
        copy = pltpu.make_async_copy(getattr(refs, name).at[chunk], buffer, refs.update_semaphores.at[i])
        copy.start() if start else copy.wait()


def _add_updates(spec, refs, v):
    """Adds the updates of the tile's items, sorted by id, by products with ones where an id is a row's.

    The first chunk has been on its way since the tile's first step; only tiles of popular items have more.
    """
    first, last = refs.starts[v] // UPDATES, (refs.starts[v + 1] + UPDATES - 1) // UPDATES
    sums, rows = sums_of(refs), spec.plan.sub_items

    def add(chunk, _):
        @pl.when(chunk > first)
        def fetch():
            _copy_updates(refs, chunk, start=True)
            _copy_updates(refs, chunk, start=False)

        def block(i, _):
            at = pl.ds(pl.multiple_of(i * rows, rows), rows)
            item_KR = v * spec.plan.items + i * rows + lax.broadcasted_iota(jnp.int32, (rows, 2 * UPDATES), 0)
            ones_KR = jnp.where(item_KR == refs.update_ids_chunk[...], 1.0, 0.0).astype(refs.updates_chunk.dtype)
            updates = refs.updates_chunk[...]
            if spec.columnar:
                sums[:, at] += dot(updates, ones_KR, (0, 1), lax.Precision.DEFAULT)
            else:
                sums[at, :] += dot(ones_KR, updates, (1, 0), lax.Precision.DEFAULT)
            return 0

        return lax.fori_loop(0, spec.plan.items // rows, block, 0)

    _copy_updates(refs, first, start=False)
    lax.fori_loop(first, last, add, 0)


def _finish_bias(refs):
    def chunk(i, _):
        at = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        refs.dbias[:, at] = refs.dbias_acc[at, :].T.sum(0, keepdims=True)
        return 0

    lax.fori_loop(0, refs.dbias.shape[1] // LANES, chunk, 0)


def _dh_copy(spec, refs, at: Place, step, read: bool):
    """The copy of a step's part of dh from HBM into its slot, or back."""
    slot, first = step % 2, pl.multiple_of(step % at.tokens * spec.plan.tokens, spec.plan.tokens)
    hbm = refs.dh_t.at[at.core, :, pl.ds(first, spec.plan.tokens)]
    vmem, semaphore = refs.dh_acc.at[slot], refs.semaphores.at[int(read), slot]
    return pltpu.make_async_copy(hbm, vmem, semaphore) if read else pltpu.make_async_copy(vmem, hbm, semaphore)


def _exchange_dh(spec, refs, at: Place):
    """Before a step's arithmetic: its part of dh is in its slot, the next step's on its way into the other.

    The next part was last written T tiles ago, at the latest by the step before this one, which is waited for here.
    """
    step = at.step
    pl.when(step > 0)(lambda: _dh_copy(spec, refs, at, step - 1, False).wait())
    following = (step + 1 >= at.tokens) & (step + 1 < at.steps)
    pl.when(following)(lambda: _dh_copy(spec, refs, at, step + 1, True).start())
    pl.when(step >= at.tokens)(lambda: _dh_copy(spec, refs, at, step, True).wait())

    @pl.when(step < at.tokens)
    def _():
        _fill(refs.dh_acc.at[step % 2], ROWS)


def _store_dh(spec, refs, at: Place):
    copy = _dh_copy(spec, refs, at, at.step, False)
    copy.start()
    pl.when(at.step == at.steps - 1)(copy.wait)

"""The body of CutBCE's TPU kernel: loss, counts, dh, dE and db from each logit tile, once.

Tiles are transposed, items on sublanes and tokens on lanes (z_KC = E_K h_C^T, C a tile of tokens, K one of items):
sums over items are then adds of whole registers, no operand of the three matmuls has to be transposed in the loop
(dE_K += s_KC (w h)_C and dh^T_C += E_K^T s_KC), and loss and counts end as 8 rows a token, added up outside. Weights
cost nothing per logit: they scale h before dE and dh after.

A step runs over sub-tiles, unrolled. Where the vector unit is the bottleneck (v6e, 7x), the logits of the next and the
gradients of the previous sub-tile are issued around the elementwise work of the current one, so that both units work.

Loss without a logarithm per logit: with g = exp(z), the product of the (1 + g) of 32 logits, kept as p = product - 1 by
p <- p (1 + g) + g, is exact to 3e-8 for g << 1; then one log1p(p). 1 + g is needed for the sigmoid g / (1 + g) anyway.
Where a product reaches exp(80), 32 neighbouring logits that average 2.5 or more, the step's loss is recomputed logit by
logit.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from recml_sasrec.heads import tiles

ROWS = 8  # sublanes of a register
LANES = 128
UPDATES = 32  # of the positives, added to a tile at a time
_GROUP = 32  # logits of a product
EXTENSION = 16  # rows that hold the offset's pieces, whole registers of 16-bit rows
_CLAMP = 80.0  # exp(80) and its reciprocal are normal float32; sigmoid(80) is 1


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


class _Place(NamedTuple):
    """Where in the grid a step is: a core's tiles of the items, for each of them all tiles of the tokens."""

    core: Any
    v: Any  # tile of the items, of all
    t: Any  # tile of the tokens
    step: Any  # the core's
    steps: Any  # the core's last step + 1
    tokens: Any  # tiles of the tokens

    @classmethod
    def now(cls, spec: Spec) -> "_Place":
        core, v, t, tokens = pl.program_id(0), pl.program_id(1), pl.program_id(2), pl.num_programs(2)
        first, step = core * spec.tiles_per_core, v * tokens + t
        tiles_ = spec.tiles if spec.cores == 1 else jnp.minimum(spec.tiles_per_core, spec.tiles - first)
        return cls(core, first + v, t, step, tiles_ * tokens, tokens)


def kernel(spec: Spec, refs):
    """A grid step: core ``program_id(0)``, its tile ``program_id(1)`` of the items, ``program_id(2)`` of the tokens."""
    at = _Place.now(spec)
    if spec.tiles % spec.cores:  # the last core has a tile less
        pl.when(at.step < at.steps)(lambda: _step(spec, refs, at))
    else:
        _step(spec, refs, at)


def _step(spec: Spec, refs, at: _Place):
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
        pl.when(tail)(lambda: _Tile(spec, refs, at, True).run())
        pl.when(jnp.logical_not(tail))(lambda: _Tile(spec, refs, at, False).run())
    else:
        _Tile(spec, refs, at, spec.bias and not spec.folded).run()
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
        _fill(_sums(refs), rows, (lambda at: refs.dtable_in[at, :]) if spec.accumulate else None)
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


def _sums(refs):
    """Where dtable is added up."""
    return getattr(refs, "dtable_acc", refs.dtable)


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
    sums, rows = _sums(refs), spec.plan.sub_items

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
                sums[:, at] += _dot(updates, ones_KR, (0, 1), lax.Precision.DEFAULT)
            else:
                sums[at, :] += _dot(ones_KR, updates, (1, 0), lax.Precision.DEFAULT)
            return 0

        return lax.fori_loop(0, spec.plan.items // rows, block, 0)

    _copy_updates(refs, first, start=False)
    lax.fori_loop(first, last, add, 0)


def _dot(a, b, over, precision):
    """float32 product over dimension over[0] of a and over[1] of b."""
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision, preferred_element_type=jnp.float32)


def _finish_bias(refs):
    def chunk(i, _):
        at = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        refs.dbias[:, at] = refs.dbias_acc[at, :].T.sum(0, keepdims=True)
        return 0

    lax.fori_loop(0, refs.dbias.shape[1] // LANES, chunk, 0)


def _dh_copy(spec, refs, at: _Place, step, read: bool):
    """The copy of a step's part of dh from HBM into its slot, or back."""
    slot, first = step % 2, pl.multiple_of(step % at.tokens * spec.plan.tokens, spec.plan.tokens)
    hbm = refs.dh_t.at[at.core, :, pl.ds(first, spec.plan.tokens)]
    vmem, semaphore = refs.dh_acc.at[slot], refs.semaphores.at[int(read), slot]
    return pltpu.make_async_copy(hbm, vmem, semaphore) if read else pltpu.make_async_copy(vmem, hbm, semaphore)


def _exchange_dh(spec, refs, at: _Place):
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


def _store_dh(spec, refs, at: _Place):
    copy = _dh_copy(spec, refs, at, at.step, False)
    copy.start()
    pl.when(at.step == at.steps - 1)(copy.wait)


def _pack(pieces, dtype):
    """Pairs of registers, joined and cast: two of float32 fill one of bfloat16, and one by one they'd need merging."""
    return [jnp.concatenate(pieces[i : i + 2]).astype(dtype) for i in range(0, len(pieces), 2)]


def _count_positive(logits):
    """int32 [8, tokens]: how many are > 0. bfloat16 keeps the sign, counts to 256, and two share an instruction."""
    ones = [jnp.where(z > 0, jnp.ones_like(z), jnp.zeros_like(z)) for z in _pack(logits, jnp.bfloat16)]
    total = functools.reduce(jnp.add, ones).astype(jnp.float32)
    return (total[:ROWS] + total[ROWS:]).astype(jnp.int32)


class _Tile:
    """The arithmetic of one grid step, sub-tile by sub-tile."""

    def __init__(self, spec: Spec, refs, at: _Place, offset: bool):
        self.spec, self.refs, self.at, self.offset, self.plan = spec, refs, at, offset, spec.plan
        self.rows = getattr(refs, "rows", refs.table)
        self.columns = getattr(refs, "columns", refs.table)
        self.zeros = jnp.zeros((ROWS, self.plan.sub_tokens), jnp.float32)
        # What logits are compared with: a number, or a row of one a token.
        self.limits = {} if spec.threshold is None else {"above_acc": spec.threshold}
        if spec.reference:
            self.limits["better_acc"] = refs.reference

    def run(self):
        plan = self.plan
        tokens = [slice(i, i + plan.sub_tokens) for i in range(0, plan.tokens, plan.sub_tokens)]
        items = [slice(i, i + plan.sub_items) for i in range(0, plan.items, plan.sub_items)]
        subtiles = [(c, k) for c in tokens for k in items]
        # Where the matrix unit is the bottleneck the compiler's own overlap is enough, and keeps fewer values alive.
        ahead = int(plan.mxu_width > LANES)
        logits = [self.logits(*subtiles[0])]
        losses, peak, dh_DC, waiting = [], self.zeros, None, []
        for i, (c, k) in enumerate(subtiles):
            if k == items[0]:
                loss, counts = self.zeros, [self.zeros.astype(jnp.int32) for _ in self.limits]
            logits += [self.logits(*subtile) for subtile in subtiles[len(logits) : i + 1 + ahead]]
            s_KC, loss, peak, counts = self.elementwise(c, k, logits[i], loss, peak, counts)
            waiting.append((c, k, s_KC))
            while self.spec.gradients and len(waiting) > (ahead if i + 1 < len(subtiles) else 0):
                dh_DC = self.gradients(*waiting[0], dh_DC, last=waiting[0][1] == items[-1])
                waiting.pop(0)
            if k == items[-1]:
                losses.append((c, loss))
                for name, count in zip(self.limits, counts, strict=True):
                    getattr(self.refs, name)[:, self.resident(c)] += count
        if self.spec.loss:
            self.add_losses(losses, peak)

    def dot(self, a, b, over=(1, 0)):
        return _dot(a, b, over, self.spec.precision)

    def resident(self, c: slice):
        """The slice of a resident array [8, tokens] that belongs to tokens ``c`` of this tile."""
        start = pl.multiple_of(self.at.t * self.plan.tokens + c.start, self.plan.sub_tokens)
        return pl.ds(start, self.plan.sub_tokens)

    def logits(self, c, k):
        """z_KC without offset."""
        return self.dot(self.rows[k, :], self.refs.hidden_t[:, c])

    def offset_of(self, start, rows: int):
        """[rows, sub_tokens]: the items' bias, -inf where there is no item."""
        return jnp.tile(self.refs.offset[pl.ds(start, rows), :], (1, self.plan.sub_tokens // LANES))

    def elementwise(self, c, k, z_KC, loss, peak, counts):
        """Sigmoids in the table's dtype, and the sums over the sub-tile's items; a register's rows at a time."""
        spec, logits, pieces, product = self.spec, [], [], None
        packed = spec.threshold == 0 and self.plan.packed
        limits = [x if isinstance(x, float) else x[:, c] for x in self.limits.values()]
        for i, row in enumerate(range(0, self.plan.sub_items, ROWS)):
            z = z_KC[row : row + ROWS, :]
            if self.offset:
                z = z + self.offset_of(k.start + row, ROWS)
            for j in range(int(packed), len(limits)):
                counts[j] = counts[j] + (z > limits[j]).astype(jnp.int32)
            logits.append(z)
            g = jnp.exp(jnp.minimum(z, _CLAMP))
            d = 1 + g
            if spec.loss:
                product = g if product is None else product * d + g
                if (i + 1) % _GROUP == 0 or row + ROWS == self.plan.sub_items:
                    log = jnp.log1p(product)
                    loss, peak, product = loss + log, jnp.maximum(peak, log), None
            if spec.gradients:
                # bfloat16 keeps 8 bits of the sigmoid: the hardware's approximation is better than that.
                s = g * pl.reciprocal(d, approx=z_KC.dtype != self.rows.dtype)
                if spec.bias and not spec.folded:
                    self.add_bias_gradient(c, k.start + row, s)
                pieces.append(s)
        if packed:
            counts[0] = counts[0] + _count_positive(logits)
        return (jnp.concatenate(_pack(pieces, self.rows.dtype)) if pieces else None), loss, peak, counts

    def add_bias_gradient(self, c, row, s):
        weighted = s * self.refs.weight[:, c]
        lanes = [weighted[:, i : i + LANES] for i in range(0, self.plan.sub_tokens, LANES)]
        self.refs.dbias_acc[pl.ds(row, ROWS), :] += functools.reduce(jnp.add, lanes)

    def gradients(self, c, k, s_KC, dh_DC, last: bool):
        """Adds to dtable and dbias; returns the tokens' dh so far, None when it was the ``last`` and is stored."""
        refs, spec = self.refs, self.spec
        if spec.columnar:
            dtable_DK = self.dot(refs.weighted[:, c], s_KC, over=(1, 1))
            _sums(refs)[:, k] += dtable_DK[: spec.width]
            if spec.folded:
                refs.dbias[:, k] += dtable_DK[spec.padded : spec.padded + 1]
        else:
            dtable_KD = self.dot(s_KC, refs.weighted[c, :])
            _sums(refs)[k, :] += dtable_KD[:, : spec.width]
            if spec.folded:
                refs.dbias_acc[k, :] += dtable_KD[:, spec.width :]
        part_DC = self.dot(self.columns[:, k], s_KC)
        dh_DC = part_DC if dh_DC is None else dh_DC + part_DC
        if not last:
            return dh_DC
        if self.plan.dh == "hbm":
            refs.dh_acc[self.at.step % 2, :, c] += dh_DC
        else:
            refs.dh_acc[:, self.resident(c)] += dh_DC
        return None

    def add_losses(self, losses, peak):
        """The step's losses, or where a product reached exp(80) or a logit is NaN, the same logit by logit."""
        fine = jnp.max(peak) < _CLAMP

        @pl.when(fine)
        def _():
            for c, loss in losses:
                self.refs.loss_acc[:, self.resident(c)] += loss

        pl.when(jnp.logical_not(fine))(self.add_exact_losses)

    def add_exact_losses(self):
        """As loops over small pieces: hardly ever run, but part of the program."""
        rows, width, refs = 32, self.plan.sub_tokens, self.refs

        def piece(i, _):
            per_token = self.plan.items // rows
            c, start = i // per_token * width, pl.multiple_of(i % per_token * rows, rows)
            c = pl.multiple_of(c, width)
            z = self.dot(self.rows[pl.ds(start, rows), :], refs.hidden_t[:, pl.ds(c, width)])
            if self.offset:
                z = z + self.offset_of(start, rows)
            z = jnp.maximum(z, 0) + jnp.log1p(jnp.exp(-jnp.abs(z)))
            at = pl.ds(pl.multiple_of(self.at.t * self.plan.tokens + c, width), width)
            refs.loss_acc[:, at] += z.reshape(-1, ROWS, width).sum(0)
            return 0

        lax.fori_loop(0, self.plan.tokens // width * (self.plan.items // rows), piece, 0)

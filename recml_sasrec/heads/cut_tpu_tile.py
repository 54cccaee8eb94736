"""The arithmetic of one grid step of CutBCE's TPU kernel: the three products of a tile and what lies between them.

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
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

if TYPE_CHECKING:
    from recml_sasrec.heads.cut_tpu_kernel import Place, Spec

ROWS = 8  # sublanes of a register
LANES = 128
_GROUP = 32  # logits of a product
_CLAMP = 80.0  # exp(80) and its reciprocal are normal float32; sigmoid(80) is 1


def dot(a, b, over, precision):
    """float32 product over dimension over[0] of a and over[1] of b."""
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision, preferred_element_type=jnp.float32)


def _pack(pieces, dtype):
    """Pairs of registers, joined and cast: two of float32 fill one of bfloat16, and one by one they'd need merging."""
    return [jnp.concatenate(pieces[i : i + 2]).astype(dtype) for i in range(0, len(pieces), 2)]


def _count_positive(logits):
    """int32 [8, tokens]: how many are > 0. bfloat16 keeps the sign, counts to 256, and two share an instruction."""
    ones = [jnp.where(z > 0, jnp.ones_like(z), jnp.zeros_like(z)) for z in _pack(logits, jnp.bfloat16)]
    total = functools.reduce(jnp.add, ones).astype(jnp.float32)
    return (total[:ROWS] + total[ROWS:]).astype(jnp.int32)


def sums_of(refs):
    """Where dtable is added up."""
    return getattr(refs, "dtable_acc", refs.dtable)


class Tile:
    """The arithmetic of one grid step, sub-tile by sub-tile."""

    def __init__(self, spec: "Spec", refs, at: "Place", offset: bool):
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
        return dot(a, b, over, self.spec.precision)

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
            sums_of(refs)[:, k] += dtable_DK[: spec.width]
            if spec.folded:
                refs.dbias[:, k] += dtable_DK[spec.padded : spec.padded + 1]
        else:
            dtable_KD = self.dot(s_KC, refs.weighted[c, :])
            sums_of(refs)[k, :] += dtable_KD[:, : spec.width]
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

"""Rows of a table that is split over devices, and their gradient, against numpy."""

import jax
import numpy as np
import pytest

from recml_sasrec.heads import Placement, lookup, placement


@pytest.mark.parametrize("shape", [None, (2, 1), (1, 2)])
@pytest.mark.parametrize(("B", "items"), [(4, 6), (4, 40), (3, 6)])
def test_rows_and_their_gradient_are_those_of_one_table(shape, B, items):
    """Few ids gather the groups' cotangents, many (24 for 6 items) add up tables; three rows don't divide in two."""
    where = None
    if shape:
        mesh = jax.make_mesh(shape, (placement.DATA, placement.ITEMS), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        where = Placement(mesh).for_rows(B)
    rng = np.random.default_rng(0)
    table, ids = rng.normal(size=(items, 3)).astype(np.float32), rng.integers(0, items, (B, 6)).astype(np.int32)
    cotangent = rng.normal(size=(B, 6, 3)).astype(np.float32)

    @jax.jit
    def rows_and_gradient(table, ids, cotangent):
        rows, pullback = jax.vjp(lambda table: lookup(table, ids, where), table)
        return rows, pullback(cotangent)[0]

    rows, gradient = rows_and_gradient(table, ids, cotangent)
    np.testing.assert_array_equal(rows, table[ids])
    expected = np.zeros((items, 3))
    np.add.at(expected, ids, cotangent)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)

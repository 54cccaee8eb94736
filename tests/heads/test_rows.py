"""Reading and adding to rows of a table, whole and a chunk at a time, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recml_sasrec.heads import rows


@pytest.fixture(params=["plain", "chunked"])
def way(request, monkeypatch):
    """(take, add); chunks of 16 items and pieces of 4 ids, so that a small table has many."""
    monkeypatch.setattr(rows, "_CHUNK", 16)
    monkeypatch.setattr(rows, "_PIECE", 4)
    return (rows.take, rows._add_plainly) if request.param == "plain" else (rows._take_chunks, rows._add_chunks)


def problem(seed, items=75, width=3):
    """Repeated ids, padding (V), a chunk with more ids than a piece and one without any."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([rng.integers(0, 30, 21), [items - 1, items, items, 47, 48, 48]]).astype(np.int32)
    table = rng.normal(size=(items, width)).astype(np.float32)
    return table, rng.permutation(ids).reshape(9, 3), jnp.asarray(rng.normal(size=(9, 3, width)), jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_take_reads_rows_and_gives_zeros_for_padding(way, dtype):
    table, ids, _ = problem(0)
    table = jnp.asarray(table, dtype)
    padded = np.concatenate([np.asarray(table), np.zeros((1, 3), dtype)])
    np.testing.assert_array_equal(way[0](table, ids), padded[ids])


@pytest.mark.parametrize("items", [75, 80])
def test_add_sums_repeated_rows_and_drops_padding(way, items):
    table, ids, updates = problem(1, items)
    exact = np.concatenate([table, np.zeros((1, 3))]).astype(np.float64)
    np.add.at(exact, ids, updates)
    np.testing.assert_allclose(way[1](jnp.asarray(table), ids, updates), exact[:-1], rtol=1e-6, atol=1e-6)


def test_both_work_under_vmap(way):
    table, ids, updates = problem(2)
    taken = jax.vmap(way[0], (None, 0))(jnp.asarray(table), ids)
    np.testing.assert_array_equal(taken, way[0](jnp.asarray(table), ids))
    added = jax.vmap(way[1], (None, 0, 0))(jnp.asarray(table), ids, updates)
    single = [way[1](jnp.asarray(table), i, u) for i, u in zip(ids, updates, strict=True)]
    np.testing.assert_allclose(added, np.stack(single), rtol=1e-6, atol=1e-6)

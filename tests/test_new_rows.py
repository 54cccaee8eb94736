"""Where rows of new items start: the rules against numpy and least squares."""

import jax
import numpy as np
import pytest

from recml_sasrec import new_rows, sharding
from tests.tiny import tiny_config


def test_new_rows_of_a_category_are_drawn_around_its_kept_rows_and_others_around_all():
    rng = np.random.default_rng(1)
    V, D = 4_000, 3
    categories = rng.integers(-1, 3, V).astype(np.int32)  # -1: none
    source = np.where(rng.random(V) < 0.5, rng.permutation(V), -1).astype(np.int32)
    categories[:2], source[:2] = 7, (5, -1)  # one kept row has no spread
    table = (rng.normal(size=(V, D)) * (1 + categories[:, None]) + 10 * categories[:, None]).astype(np.float32)
    bias = table[:, 0] - 5
    usable = new_rows.usable(categories, source >= 0)
    assert set(usable[categories == 7]) == {-1} and usable.max() == 2
    noise = 0.02 * rng.normal(size=(V, D)).astype(np.float32)
    got, got_bias = jax.jit(new_rows.drawn, static_argnums=5)(table, bias, noise, source, usable, 3)
    kept = source >= 0
    np.testing.assert_array_equal(got[kept], table[kept])
    for category in (-1, 0, 1, 2):
        here, group = ~kept & (usable == category), kept if category < 0 else kept & (usable == category)
        expected = table[group].mean(0) + table[group].std(0) * noise[here] / 0.02
        np.testing.assert_allclose(got[here], expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(got_bias[here], bias[group].mean(), rtol=1e-3)


def test_new_rows_from_content_are_the_ridge_regression_of_the_kept_ones(monkeypatch):
    """Against augmented least squares: ridge is ordinary least squares with rows of sqrt(s) added."""
    monkeypatch.setattr(new_rows, "_CHUNK", 64)
    rng = np.random.default_rng(2)
    V, C, D = 300, 5, 3
    content = rng.normal(size=(V, C)).astype(np.float32) * [1, 2, 3, 1, 1] + 4
    content = content.astype(np.float32)
    content[::7] = 0
    source = np.where(rng.random(V) < 0.8, rng.permutation(V), -1).astype(np.int32)
    base = np.zeros((V, D), np.float32)
    base[source[source >= 0]] = (content @ rng.normal(size=(C, D)))[source >= 0] + rng.normal(size=(1, D))
    base += rng.normal(size=base.shape).astype(np.float32) * 0.1
    mesh = sharding.make_layout(tiny_config(""), V).mesh
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "items")))
    got = np.asarray(new_rows.fitted(content, source, jax.numpy.asarray(base), 302, split))
    use = (source >= 0) & content.any(1)
    x, y = content[use].astype(np.float64), base[source[use]].astype(np.float64)
    x, y = x - x.mean(0), y - y.mean(0)
    s = new_rows.RIDGE * np.square(x).sum() / C
    weights = np.linalg.lstsq(np.r_[x, np.sqrt(s) * np.eye(C)], np.r_[y, np.zeros((C, D))], rcond=None)[0]
    expected = (content - content[use].mean(0)) @ weights + base[source[use]].mean(0)
    described = content.any(1)
    np.testing.assert_allclose(got[:V][described], expected[described], rtol=1e-4, atol=1e-4)
    assert not got[:V][~described].any() and not got[V:].any()


@pytest.mark.parametrize("value", [0.1, 1, -7e9, 3e-30])
def test_content_that_is_the_same_for_all_kept_items_gives_their_mean(value):
    """The sums that are left are rounding, if anything: a fit to it would be wild, or have no solution."""
    rng = np.random.default_rng(3)
    content = np.full((50, 6), value, np.float32)
    content[45:] = 1.5 * value  # new items, and of other content
    source = np.where(np.arange(50) < 40, np.arange(50), -1).astype(np.int32)
    base = rng.normal(size=(50, 3)).astype(np.float32)
    mesh = sharding.make_layout(tiny_config(""), 50).mesh
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "items")))
    got = np.asarray(new_rows.fitted(content, source, jax.numpy.asarray(base), 50, split))
    np.testing.assert_allclose(got, np.tile(base[:40].mean(0), (50, 1)), atol=1e-3)

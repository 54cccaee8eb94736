"""top_k against a full sort: exact scores, exact ids, whatever the tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recml_sasrec.ranking import topk
from recml_sasrec.ranking.topk import top_k, top_k_jit


def full_sort(scores, k, exclude=None, candidates=None):
    """The definition: sort every score, then take k; -inf is no candidate."""
    scores = np.array(scores, np.float32)
    items = scores.shape[1]
    if candidates is not None:
        scores[:, ~candidates] = -np.inf
    for row, left_out in zip(scores, [] if exclude is None else exclude, strict=exclude is not None):
        row[[e for e in left_out if 0 <= e < items]] = -np.inf
    scores[np.isnan(scores)] = -np.inf
    scores = np.pad(scores, ((0, 0), (0, k)), constant_values=-np.inf)
    order = np.stack([np.lexsort((np.arange(items + k), -row)) for row in scores])[:, :k]
    best = np.take_along_axis(scores, order, 1)
    return best, np.where(best > -np.inf, order, -1)


def assert_equal(got, expected):
    np.testing.assert_array_equal(np.asarray(got[1]), expected[1])
    np.testing.assert_array_equal(np.asarray(got[0]), expected[0])


# (Q, V, k, tile, group, dtype): few of them, each is a compilation; the data varies freely within.
SHAPES = [
    (1, 1, 1, 8192, 16, np.float32),
    (3, 7, 30, 8192, 16, np.float32),  # k > V
    (3, 37, 13, 7, 8, np.float32),  # a group larger than the tile
    (2, 53, 4, 5, 1, jnp.bfloat16),
    (3, 53, 5, 16, 3, np.float32),  # ragged groups and tiles
    (2, 300, 30, 64, 8, np.float32),  # more k than groups in a tile
    (2, 200, 30, 64, 8, np.float32),  # more k groups than items
    (2, 200, 4, 64, 64, jnp.bfloat16),
    (3, 200, 10, 1000, 4, np.float32),
]


@st.composite
def problems(draw):
    queries, items, k, tile, group, dtype = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([1, 2, 50]))  # small integers: exact scores, and ties galore
    hidden = rng.integers(-spread, spread + 1, (queries, 2)).astype(dtype)
    table = rng.integers(-spread, spread + 1, (items, 2)).astype(dtype)
    options = {
        "bias": rng.integers(-1, 2, items).astype(np.float32),
        "exclude": rng.integers(-1, items + 2, (queries, 5)).astype(np.int32),
        "candidates": rng.random(items) < draw(st.sampled_from([0.0, 0.1, 0.8, 1.0])),
    }
    return hidden, table, k, options, {"tile": tile, "group": group}


@settings(max_examples=120, deadline=None)
@given(problems())
def test_top_k_is_a_full_sort_with_ties_by_id(problem):
    hidden, table, k, options, tiles = problem
    scores = hidden.astype(np.float32) @ table.astype(np.float32).T + options["bias"]
    expected = full_sort(scores, k, options["exclude"], options["candidates"])
    assert_equal(top_k_jit(hidden, table, k, **options, **tiles), expected)


@pytest.mark.parametrize("option", [None, "bias", "exclude", "candidates"])
def test_each_option_works_alone(option):
    rng = np.random.default_rng(1)
    hidden, table = (rng.integers(-2, 3, (n, 2)).astype(np.float32) for n in (3, 90))
    values = {
        "bias": rng.normal(size=90).astype(np.float32),
        "exclude": rng.integers(-1, 90, (3, 20)).astype(np.int32),
        "candidates": rng.random(90) < 0.5,
    }
    options = {name: value for name, value in values.items() if name == option}
    scores = hidden @ table.T + options.get("bias", np.float32(0))
    expected = full_sort(scores, 12, options.get("exclude"), options.get("candidates"))
    assert_equal(top_k_jit(hidden, table, 12, tile=40, group=4, **options), expected)


@pytest.mark.parametrize("sweep", [1, 2, 7])
def test_selecting_between_tiles_loses_nothing(sweep, monkeypatch):
    monkeypatch.setattr(topk, "SWEEP", sweep)  # 16 tiles: the last sweep of 7 reaches past the end
    monkeypatch.setattr(topk, "RESCORED", 2)
    rng = np.random.default_rng(sweep)
    hidden, table = (rng.integers(-3, 4, (n, 2)).astype(np.float32) for n in (5, 1_000))
    exclude = rng.integers(-1, 200, (5, 90)).astype(np.int32)  # dozens in one tile
    exclude[1:, 30:] = -1  # and fewer of other queries
    got = jax.jit(lambda h, e, x: top_k(h, e, 9, exclude=x, tile=64, group=4))(hidden, table, exclude)
    assert_equal(got, full_sort(hidden @ table.T, 9, exclude))


@pytest.mark.parametrize("tile", [32, 100, 1000])
def test_all_scores_equal_gives_the_smallest_ids_in_order(tile):
    scores, ids = top_k_jit(np.zeros((2, 4), np.float32), np.ones((777, 4), np.float32), 50, tile=tile)
    np.testing.assert_array_equal(ids, np.tile(np.arange(50), (2, 1)))
    np.testing.assert_array_equal(scores, np.zeros((2, 50)))


def test_the_best_items_may_all_lie_in_one_group_or_one_in_each():
    for table in (np.arange(300.0), -np.arange(300.0), np.tile(np.arange(30.0), 10), np.repeat(np.arange(10.0), 30)):
        table = table.astype(np.float32)[:, None]
        expected = full_sort(table.T, 9)
        assert_equal(top_k_jit(np.ones((1, 1), np.float32), table, 9, tile=96, group=8), expected)


def test_bfloat16_inputs_are_scored_in_float32():
    # In bfloat16, 256 + 1 rounds to 256: items 0 and 1 would tie and item 0 come first.
    table = np.array([[256, 0], [256, 1]], jnp.bfloat16)
    scores, ids = top_k_jit(np.ones((1, 2), jnp.bfloat16), table, 2)
    assert scores.dtype == jnp.float32
    np.testing.assert_array_equal(ids, [[1, 0]])
    np.testing.assert_array_equal(scores, [[257, 256]])


def test_negative_zero_ties_with_zero():
    # -1 * 0 is -0.0, which lax.top_k alone would put behind a 0.0 of a larger id.
    _, ids = top_k_jit(np.array([[-1.0]], np.float32), np.array([[0.0], [-0.0], [0.0]], np.float32), 3)
    np.testing.assert_array_equal(ids, [[0, 1, 2]])


def test_nan_and_minus_infinity_are_never_recommended():
    table = np.array([[np.nan], [1], [-np.inf], [np.inf], [2]], np.float32)
    scores, ids = top_k_jit(np.ones((1, 1), np.float32), table, 5)
    np.testing.assert_array_equal(ids, [[3, 4, 1, -1, -1]])
    np.testing.assert_array_equal(scores, [[np.inf, 2, 1, -np.inf, -np.inf]])


def test_no_array_holds_all_scores_or_a_copy_of_the_table():
    queries, items, width = 64, 100_001, 16
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((queries, width), (items, width))]
    jaxpr = jax.make_jaxpr(lambda h, e: top_k(h, e, 10, tile=4096))(*shapes)
    sizes = [v.aval.size for eqn in equations(jaxpr.jaxpr) for v in eqn.outvars]
    assert max(sizes) < items * width
    # The compiler's own count: XLA may add buffers, but nothing near [Q, V].
    memory = jax.jit(lambda h, e: top_k(h, e, 10, tile=4096)).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * queries * items / 4


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"tile": 0}, "tile is 0"),
        ({"table": np.zeros((5, 3))}, r"hidden \(2, 4\) and table \(5, 3\)"),
        ({"table": np.zeros((0, 4))}, "V >= 1"),
        ({"bias": np.zeros(4)}, r"bias is \(4,\)"),
        ({"candidates": np.ones(6, bool)}, r"candidates is \(6,\)"),
        ({"exclude": np.zeros((3, 1), np.int32)}, r"exclude is \(3, 1\)"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"table": np.zeros((5, 4)), "k": 2} | change
    with pytest.raises(ValueError, match=message):
        top_k(np.zeros((2, 4)), arguments.pop("table"), arguments.pop("k"), **arguments)

"""Popularity on the real files equals the published values to six decimals."""

import importlib.util
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "reproduce_popularity.py"
spec = importlib.util.spec_from_file_location("reproduce_popularity", SCRIPT)
assert spec is not None and spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("published", script.PUBLISHED, ids=lambda p: f"{p.data}, filter {p.filter_seen}")
def test_most_pop_equals_the_published_value(published, cache):
    shared = script.shared_folder()
    if not (shared / "data" / published.path).is_file():
        pytest.skip(f"{shared / 'data' / published.path} is absent; set RECML_SASREC_SHARED to the folder that has it")
    recall, ndcg = script.reproduce(published, shared, cache)
    assert (round(recall, 6), round(ndcg, 6)) == (published.recall, published.ndcg)

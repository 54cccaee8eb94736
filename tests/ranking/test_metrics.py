"""Metrics against ranx, a hand computation, and the definitions written as loops."""

import os

import numpy as np
import pytest

# ranx compiles its loops for a minute and a half; interpreted, these small cases take seconds.
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")

import ranx

from recml_sasrec.ranking.metrics import NAMES, RankingMetrics

KS = (1, 3, 10)


def csr(lists):
    return np.array([v for row in lists for v in row], np.int32), np.cumsum([0, *map(len, lists)])


def compute(ranked, targets, version="standard", ks=KS, items=50, batch=1000):
    metrics = RankingMetrics(ks, items, items, version)
    for start in range(0, len(ranked), batch):
        metrics.add(np.asarray(ranked)[start : start + batch], *csr(targets[start : start + batch]))
    return metrics.result()


def random_case(users=40, items=50, length=10, seed=0, repeats=False):
    rng = np.random.default_rng(seed)
    ranked = np.stack([rng.permutation(items)[:length] for _ in range(users)]).astype(np.int32)
    targets = [list(rng.choice(items, rng.integers(1, 16), replace=repeats)) for _ in range(users)]
    targets[0] = [i for i in range(items) if i not in ranked[0]][:3]  # a user without hits
    targets[1] = list(ranked[1])  # a perfect one
    ranked[2, 4:] = -1  # a short list
    return ranked, targets


def test_standard_equals_ranx():
    ranked, targets = random_case()
    qrels = ranx.Qrels({f"u{u}": {f"i{i}": 1 for i in row} for u, row in enumerate(targets)})
    run = ranx.Run(
        {f"u{u}": {f"i{i}": 1.0 / (r + 1) for r, i in enumerate(row) if i >= 0} for u, row in enumerate(ranked)}
    )
    names = {"hr": "hit_rate", "recall": "recall", "precision": "precision", "ndcg": "ndcg", "mrr": "mrr", "map": "map"}
    expected = ranx.evaluate(qrels, run, [f"{name}@{k}" for name in names.values() for k in KS])
    result = compute(ranked, targets)
    for ours, theirs in names.items():
        for k in KS:
            assert result[f"{ours}@{k}"] == pytest.approx(expected[f"{theirs}@{k}"], abs=1e-6), (ours, k)


def loops(ranked, targets, version, k, items):
    """The definitions, one user at a time."""
    sums = dict.fromkeys((*NAMES, "dcg", "idcg"), 0.0)
    shown = set()
    for row, wanted in zip(ranked, targets, strict=True):
        if not wanted:
            continue
        positives = len(set(wanted)) if version == "standard" else len(wanted)
        h = [1.0 if item >= 0 and item in set(wanted) else 0.0 for item in row[:k]]
        dcg = sum(x / np.log2(i + 2) for i, x in enumerate(h))
        sums["hr"] += any(h)
        sums["recall"] += sum(h) / positives
        sums["recall_capped"] += sum(h) / min(positives, k)
        sums["precision"] += sum(h) / k
        sums["mrr"] += 1 / (h.index(1.0) + 1) if any(h) else 0
        sums["map"] += sum(x * sum(h[: i + 1]) / (i + 1) for i, x in enumerate(h)) / len(set(wanted))
        sums["ndcg"] += dcg / sum(1 / np.log2(i + 2) for i in range(min(positives, k)))
        sums["dcg"] += dcg
        sums["idcg"] += sum(1 / np.log2(i + 2) for i in range(min(positives, 100, k)))
        shown |= {int(i) for i in row[:k] if i >= 0}
    users = sum(bool(t) for t in targets)
    mean = {name: value / users for name, value in sums.items()}
    mean["coverage"] = len(shown) / items
    if version == "v1":
        mean["ndcg"] = sums["dcg"] / sums["idcg"]
    if version == "v2":
        mean["recall"], mean["ndcg"] = mean["recall_capped"], mean["hr"]
    return {f"{name}@{k}": mean[name] for name in NAMES}


@pytest.mark.parametrize("version", ["standard", "v1", "v2", "corrected"])
@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_every_version_equals_its_definition_in_batches_of_any_size(version, batch):
    ranked, targets = random_case(repeats=True, seed=3)
    targets[5] = []  # not scored
    result = compute(ranked, targets, version, batch=batch)
    for k in KS:
        expected = loops(ranked, targets, version, k, 50)
        assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_yambda_versions_by_hand():
    # User 0 wants item 7 three times and item 8 once; user 1 wants item 1, which it doesn't get.
    ranked, targets = [[7, 5], [2, 3]], [[7, 7, 7, 8], [1]]
    dcg, ideal = 1 / np.log2(2), 1 / np.log2(2) + 1 / np.log2(3)
    standard, v1, v2 = (compute(ranked, targets, v, ks=(2,)) for v in ("standard", "v1", "v2"))
    assert standard["recall@2"] == pytest.approx((1 / 2) / 2)
    assert standard["ndcg@2"] == pytest.approx((dcg / ideal) / 2)
    assert v1["recall@2"] == pytest.approx((1 / 4) / 2)  # four rows, not capped at k
    assert v1["ndcg@2"] == pytest.approx(dcg / (ideal + 1))  # a ratio of means
    assert v2["recall@2"] == pytest.approx((1 / 2) / 2)
    assert v2["ndcg@2"] == pytest.approx(1 / 2)  # in fact the hit rate
    assert standard["coverage@2"] == pytest.approx(4 / 50)


def test_v1_ideal_list_ends_at_100():
    ranked, targets = [list(range(150))], [list(range(200))]
    result = compute(ranked, targets, "v1", ks=(150,), items=200)
    discounts = 1 / np.log2(np.arange(2, 152))
    assert result["ndcg@150"] == pytest.approx(discounts.sum() / discounts[:100].sum())
    assert result["recall@150"] == pytest.approx(150 / 200)


def test_coverage_counts_against_the_candidates():
    metrics = RankingMetrics((2,), 10, 4)
    metrics.add(np.array([[1, 2], [2, -1]]), *csr([[1], [1]]))
    assert metrics.result()["coverage@2"] == 2 / 4


def test_nobody_to_score_gives_zeros():
    for version in ("standard", "v1", "v2", "corrected"):
        metrics = RankingMetrics((5,), 10, 10, version)
        metrics.add(np.zeros((1, 5), np.int32), np.zeros(0, np.int32), np.zeros(2, np.int64))
        assert set(metrics.result().values()) == {0.0}


@pytest.mark.parametrize(("ks", "version"), [((), "standard"), ((0, 10), "standard"), ((10,), "yambda")])
def test_wrong_settings_are_refused(ks, version):
    with pytest.raises(ValueError, match=r"ks is|unknown"):
        RankingMetrics(ks, 10, 10, version)

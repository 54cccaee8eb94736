"""Metrics of ranked lists, accumulated over batches of users in numpy.

Four versions, because Yambda's published tables need theirs. A ranked item is a hit if it is among the user's targets.

* ``standard``: a user's targets are the set of its distinct target items; equals ``ranx``.
* ``v1`` (the tables of arXiv 2505.22238), ``v2`` (the benchmark's later code) and ``corrected`` count a user's target
  rows, repeats included, in the denominators. Without repeats ``corrected`` equals ``standard``.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

Version = Literal["standard", "v1", "v2", "corrected"]
NAMES = ("hr", "recall", "recall_capped", "precision", "ndcg", "mrr", "map", "coverage")
YAMBDA_CLIP = 100  # v1's ideal list is as long as its ranked list


def ranking_metrics(
    recommended: np.ndarray,
    targets: Sequence[np.ndarray],
    ks: Sequence[int],
    version: Version = "v1",
    num_candidates: int | None = None,
) -> dict[str, float]:
    """Metrics of all users' lists at once; see ``RankingMetrics`` for what each is.

    Args:
        recommended: int [U, K], any ids from 0 on, best first, distinct in a row; -1: no item.
        targets: for each user an int array of its target rows, repeats kept; an empty one: the user is not scored.
        ks: list lengths.
        version: "standard", "v1", "v2" or "corrected".
        num_candidates: the items that could have been recommended; gives ``coverage@k`` its denominator.

    Returns:
        ``{"ndcg@10": ..., "recall@10": ..., "recall_capped@10": ..., "hit_rate@10": ..., ...}``, with ``coverage@10``
        only where ``num_candidates`` is given.

    Raises:
        ValueError: ``recommended`` has not one row for each user, or a k or the version is not one.
    """
    recommended = np.asarray(recommended)
    if recommended.ndim != 2 or len(recommended) != len(targets):
        raise ValueError(
            f"recommended is {recommended.shape} and there are {len(targets)} users' targets: give it a row for each"
        )
    rows = [np.asarray(row, np.int64) for row in targets]
    values = np.concatenate([recommended.ravel(), *rows])
    _, dense = np.unique(values, return_inverse=True)  # raw ids may be large and sparse
    ranked = np.where(recommended >= 0, dense[: recommended.size].reshape(recommended.shape), -1)
    metrics = RankingMetrics(ks, len(values), num_candidates or 0, version)
    metrics.add(ranked, dense[recommended.size :], np.cumsum([0, *map(len, rows)]))
    names = {"hr": "hit_rate"}
    result = {}
    for key, value in metrics.result().items():
        name, _, k = key.partition("@")
        if name != "coverage" or num_candidates is not None:
            result[f"{names.get(name, name)}@{k}"] = value
    return result


class RankingMetrics:
    """Sums over users, from which ``result`` makes means: memory is one bool [V] per k, whatever the number of users.

    With P the number of a user's targets, h_i whether the item at rank i (from 1) is one of them:

        hr              any hit in the first k                   mrr   1 / rank of the first hit in the first k, else 0
        recall          hits / P                                 map   sum_i h_i * (hits up to i) / i, divided by P
        recall_capped   hits / min(P, k)                         ndcg  sum_i h_i / log2(i + 1), divided by its ideal:
        precision       hits / k                                       the same sum with min(P, k) hits in front
        coverage        distinct items in all first k / number of candidates

    Every mean is over the users that have targets; a user without any is not scored. The versions differ so:

        standard    P = distinct targets; ndcg is the mean of the users' ratios
        v1          P = target rows; ndcg = mean of DCG / mean of ideal DCG, where P is at most 100
        v2          P = target rows; recall is recall_capped; its "ndcg" is in fact the hit rate
        corrected   P = target rows; ndcg is the mean of the users' ratios

    ``map`` always divides by the distinct targets.
    """

    def __init__(self, ks: Sequence[int], num_items: int, num_candidates: int, version: Version = "standard"):
        """``ks``: list lengths, each at least 1; ``num_items``: V; ``num_candidates``: items that can rank."""
        if not ks or min(ks) < 1:
            raise ValueError(f"ks is {tuple(ks)}: it needs at least one list length, each at least 1")
        if version not in get_args(Version):
            raise ValueError(f"metric version {version!r} is unknown; choose one of {', '.join(get_args(Version))}")
        self.ks = tuple(sorted(set(ks)))
        self.version = version
        self.num_candidates = num_candidates
        self.users = 0
        self.sums = {f"{name}@{k}": 0.0 for k in self.ks for name in (*NAMES[:-1], "dcg", "idcg")}
        self.recommended = {k: np.zeros(num_items, bool) for k in self.ks}

    def add(self, ranked: np.ndarray, values: np.ndarray, offsets: np.ndarray) -> None:
        """Add a batch of users.

        Args:
            ranked: int [U, K], item ids best first, -1 where a list is shorter; K may be below the largest k.
            values: int [R], the users' target items, rows as they come (repeats allowed).
            offsets: int [U + 1]; user u's targets are ``values[offsets[u]:offsets[u + 1]]``.
        """
        if len(offsets) != len(ranked) + 1:
            raise ValueError(f"{len(ranked)} ranked lists need {len(ranked) + 1} offsets, not {len(offsets)}")
        rows = np.diff(offsets)
        scored = rows > 0
        hits, distinct = _hits(ranked, values, rows)
        hits, distinct, rows, ranked = hits[scored], distinct[scored], rows[scored], ranked[scored]
        if not len(rows):
            return
        self.users += len(rows)
        positives = distinct if self.version == "standard" else rows
        discounts = 1.0 / np.log2(np.arange(2, max(self.ks) + 2))
        ideal = np.concatenate([[0.0], np.cumsum(discounts)])  # ideal[n]: n hits in front
        found = np.cumsum(hits, 1)
        ranks = np.arange(1, hits.shape[1] + 1)
        first = np.where(hits.any(1), hits.argmax(1) + 1, np.inf)
        for k in self.ks:
            hits_k, number = hits[:, :k], hits[:, :k].sum(1)
            dcg = hits_k @ discounts[: hits_k.shape[1]]
            idcg = ideal[np.minimum(positives, k)]
            self._sum("hr", k, number > 0)
            self._sum("recall", k, number / positives)
            self._sum("recall_capped", k, number / np.minimum(positives, k))
            self._sum("precision", k, number / k)
            self._sum("ndcg", k, dcg / idcg)
            self._sum("mrr", k, np.where(first <= k, 1 / first, 0))
            self._sum("map", k, (hits_k * found[:, :k] / ranks[:k]).sum(1) / distinct)
            self._sum("dcg", k, dcg)
            self._sum("idcg", k, ideal[np.minimum(np.minimum(positives, YAMBDA_CLIP), k)])
            items = ranked[:, :k]
            self.recommended[k][items[items >= 0]] = True

    def _sum(self, name: str, k: int, per_user: np.ndarray) -> None:
        self.sums[f"{name}@{k}"] += float(np.sum(per_user, dtype=np.float64))

    def result(self) -> dict[str, float]:
        """``{"ndcg@10": ..., ...}`` for every name in ``NAMES`` and every k; all 0 when no user was scored."""
        result = {}
        for k in self.ks:
            mean = {name: self.sums[f"{name}@{k}"] / max(self.users, 1) for name in NAMES[:-1]}
            if self.version == "v1":
                mean["ndcg"] = self.sums[f"dcg@{k}"] / self.sums[f"idcg@{k}"] if self.users else 0.0
            elif self.version == "v2":
                mean["recall"], mean["ndcg"] = mean["recall_capped"], mean["hr"]
            mean["coverage"] = int(self.recommended[k].sum()) / max(self.num_candidates, 1)
            result.update({f"{name}@{k}": mean[name] for name in NAMES})
        return result


def _hits(ranked: np.ndarray, values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each ranked item is a target of its user, bool [U, K], and the users' distinct targets, int64 [U]."""
    users = len(ranked)
    base = max(int(values.max(initial=0)), int(ranked.max(initial=0))) + 1
    keys = np.unique(np.repeat(np.arange(users, dtype=np.int64), rows) * base + values)
    wanted = np.arange(users, dtype=np.int64)[:, None] * base + ranked
    hits = np.isin(wanted, keys, kind="sort") & (ranked >= 0)
    return hits, np.bincount(keys // base, minlength=users)

"""Loss heads over the catalogue: ``(hidden, table, targets, bias, weights) -> (loss, counts)``."""

from recml_sasrec.heads.counts import Count, Counts, accuracy, add, f_beta, precision, recall
from recml_sasrec.heads.cut import cut_bce
from recml_sasrec.heads.dense import dense_bce
from recml_sasrec.heads.placement import Placement, lookup
from recml_sasrec.heads.ranks import RankSums
from recml_sasrec.heads.recml import cut_binary_cross_entropy
from recml_sasrec.heads.sampled import sampled_bce

__all__ = [
    "Count",
    "Counts",
    "Placement",
    "RankSums",
    "accuracy",
    "add",
    "cut_bce",
    "cut_binary_cross_entropy",
    "dense_bce",
    "f_beta",
    "lookup",
    "precision",
    "recall",
    "sampled_bce",
]

"""Our multi-label setting on Yambda-500M, Listen+: yambda50m.py where it differs.

    python -m recml_sasrec.train --config configs/yambda500m.py --workdir runs/yambda500m

466,512,103 listens (3.7 GB) of 100,000 users, of which some 295 million are Listen+, over at most 3,004,578 items.
Hardware: 6 GB for the parameters, Adam's moments and the gradient, 1.5e14 FLOPs a step of the head: 45,000 steps (10
epochs) take 5 hours at 40 % of an H200's peak (computed, not measured); several devices divide the batch.

Published (final run, metric v1), NDCG@10, NDCG@100, Recall@10, Recall@100: SASRec .0754 .0884 .0336 .1240,
DecayPop .0267 .0340 .0127 .0505.
"""

import pathlib

from recml_sasrec.config import Config
from recml_sasrec.config_file import load_config

CHANGES = ["data.yambda_size=500m", "train.batch_size=256", "train.steps=45_000", "evaluation.every=4_500"]


def get_config() -> Config:
    return load_config(str(pathlib.Path(__file__).with_name("yambda50m.py")), CHANGES)

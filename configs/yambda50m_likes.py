"""Our multi-label setting on Yambda-50M, likes: yambda50m.py where it differs.

    python -m recml_sasrec.train --config configs/yambda50m_likes.py --workdir runs/yambda50m-likes

881,456 likes of 8,283 users over 181,304 items: a step sees 2 % of them, so that training is short and often validated.
Hardware: any accelerator; 2.3e12 FLOPs a step of the head, 3,000 steps in a minute at 40 % of an H200's peak (computed,
not measured).

Published (final run, metric v1), NDCG@10, NDCG@100, Recall@10, Recall@100: SASRec .0100 .0208 .0175 .0603,
DecayPop .0180 .0269 .0333 .0651.
"""

import pathlib

from recml_sasrec.config import Config
from recml_sasrec.config_file import load_config

CHANGES = [
    "data.yambda_event=likes",
    "data.min_played_ratio=0",
    "train.steps=3_000",
    "optimizer.warmup_steps=100",
    "checkpoint.every=150",
    "evaluation.every=150",
]


def get_config() -> Config:
    return load_config(str(pathlib.Path(__file__).with_name("yambda50m.py")), CHANGES)

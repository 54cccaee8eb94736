"""Our multi-label setting on Yambda-5B, Listen+: yambda50m.py where it differs.

    python -m recml_sasrec.train --config configs/yambda5b.py --workdir runs/yambda5b

4,649,567,411 listens (36.7 GB) of 1,000,000 users, of which some 2.9 billion are Listen+, over at most 9,390,623 items.
The store takes 12 bytes an event, 35 GB of disk.
Hardware: 10 GB for the parameters, Adam's moments and the gradient (D 64), 4.7e14 FLOPs a step of the head: 30,000
steps (1.3 epochs) take 10 hours at 40 % of an H200's peak (computed, not measured); meant for several devices.

Published (final run, metric v1), NDCG@10, NDCG@100, Recall@10, Recall@100: SASRec .0647 .0847 .0289 .1214,
DecayPop .0271 .0348 .0130 .0509. Likes (--config.data.yambda_event=likes --config.data.min_played_ratio=0):
SASRec .0136 .0348 .0217 .1026.
"""

import pathlib

from recml_sasrec.config import Config
from recml_sasrec.config_file import load_config

CHANGES = ["data.yambda_size=5b", "model.width=64", "train.batch_size=512", "evaluation.every=5_000"]


def get_config() -> Config:
    return load_config(str(pathlib.Path(__file__).with_name("yambda50m.py")), CHANGES)

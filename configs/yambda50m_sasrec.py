"""The SASRec of the Yambda paper (arXiv 2505.22238) on Yambda-50M, as its benchmark trains and scores it.

    python -m recml_sasrec.train --config configs/yambda50m_sasrec.py --workdir runs/yambda50m-sasrec

Listen+ as it stands; likes with --config.data.yambda_event=likes --config.data.min_played_ratio=0. A user is one sample
an epoch: its last 200 events, each position's target the next one, binary cross-entropy against one uniform negative.
It is the final run: nothing is tuned, training ends at 25,911,800, and 3,600 steps are 100 epochs of 9,200 users.

Hardware: any accelerator, or a CPU: a step took 2.3 core seconds and 2.2 GiB on generated events with 57,646 items, so
that all of it is some three core hours, Adam over 40 million parameters included (computed from that).

Published (metric v1), NDCG@10, NDCG@100, Recall@10, Recall@100: .0748 .0764 .0325 .1026 on Listen+,
.0100 .0208 .0175 .0603 on likes.

What differs from the published program: its weights start from a normal distribution cut at two standard deviations,
ours is not cut; its negative may be the position's own target, by chance of one in 629,298, ours never is; its table
has the items of the training events alone, ours the 0.3 % more of the file, which are not recommended.
"""

from recml_sasrec.config import Config
from recml_sasrec.data import yambda


def get_config() -> Config:
    config = Config()
    config.data.source = "yambda"
    config.data.yambda_size = "50m"
    config.data.yambda_event = "listens"
    config.data.min_played_ratio = yambda.LISTEN_PLUS
    config.data.length = 200
    config.data.targets = 1
    config.data.windows = "last"
    config.data.pack = False
    config.data.position_order = "newest_first"
    config.split.kind = "temporal"
    config.split.test_start = yambda.TEST_START
    config.split.gap = yambda.GAP
    config.model.width = 64
    config.model.blocks = 2
    config.model.heads = 2
    config.model.mlp_width = 256
    config.model.norm = "post"
    config.model.norm_eps = 1e-9
    config.model.activation = "gelu_exact"
    config.model.dropout = 0.0
    config.model.item_bias = False
    config.head.name = "sampled_bce"
    config.head.negatives = 1
    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule = "constant"
    config.optimizer.clip_norm = 0.0
    config.optimizer.eps = 2e-8  # its loss is the mean over both pairs, half of ours: Adam with half its eps on that
    config.train.batch_size = 256
    config.train.steps = 3_600
    config.train.seed = 42
    config.train.log_every = 36
    config.checkpoint.every = 360
    config.evaluation.ks = (10, 50, 100)
    config.evaluation.candidates = "train"
    config.evaluation.metric_version = "v1"
    config.evaluation.decay_hours = (1.0,)
    return config

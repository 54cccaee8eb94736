"""The CutBCE paper's run (arXiv 2610.05559): multi-label SASRec on all listens of Yambda-50M, dense or cut by one word.

    python -m recml_sasrec.train --config configs/yambda50m_cutbce.py --workdir runs/yambda50m-cutbce
    python -m recml_sasrec.train --config configs/yambda50m_cutbce.py --workdir runs/yambda50m-dense \
        --config.head.name=dense_bce

46,467,212 listens of 9,238 users over 877,168 items; N 256, the next 8 items as targets, global batch 64. A user's last
8 events are the test, and hr@8 of the table is the paper's Hit@8; scripts/reproduce_cutbce.py makes the whole table.

Hardware: the paper used 8 TPU v6e chips, where 30,000 steps take 25 minutes at its cut and 81 at its dense rate.
Published: dense BCE 22.37 GiB a chip, 6.14 steps/s, Hit@8 .186; CutBCE 7.67 GiB, 20.01 steps/s, Hit@8 .183.

Not published, and so ours: the width, the depth, the optimizer, the number of steps, and which events were held out
(its catalogue has 876,939 items, 229 fewer than the file).
"""

from recml_sasrec.config import Config


def get_config() -> Config:
    config = Config()
    config.data.source = "yambda"
    config.data.yambda_size = "50m"
    config.data.yambda_event = "listens"
    config.data.length = 256
    config.data.targets = 8
    config.data.position_order = "newest_first"
    config.split.kind = "leave_last"
    config.split.test_last = 8
    config.split.validation_last = 0
    config.model.width = 128
    config.model.norm = "post"
    config.model.dtype = "bfloat16"
    config.head.name = "cut_bce"
    config.optimizer.warmup_steps = 1_000
    config.train.batch_size = 64
    config.train.steps = 30_000
    config.train.log_every = 100
    config.checkpoint.every = 1_000
    config.evaluation.ks = (8,)
    config.evaluation.best_metric = "hr@8"
    config.evaluation.candidates = "train"
    config.evaluation.baselines = ("most_pop",)
    return config

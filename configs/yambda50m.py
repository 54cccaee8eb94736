"""Yambda-50M, all listens: the shape of the CutBCE paper's run (arXiv 2610.05559).

    python -m recml_sasrec.train --config configs/yambda50m.py --workdir runs/yambda50m

46,467,212 listens of 9,238 users over 877,168 items; N 256, the next 8 items, global batch 64. Meant for an
accelerator: the paper used 8 TPU v6e chips. The file (369 MB) comes from the Hugging Face Hub on first use;
with a local copy, set --config.data.path=listens.parquet. --config.data.min_played_ratio=50 keeps Listen+, the
benchmark's positives.

The split is the benchmark's tuning run (arXiv 2505.22238): validation on [25,825,400, 25,911,800), test from
25,913,600, half an hour left out before each, training before 25,823,600. --config.split.validation_length=0
--config.evaluation.every=0 is its final run, trained up to 25,911,800.
"""

from recml_sasrec.config import Config
from recml_sasrec.data import yambda


def get_config() -> Config:
    config = Config()
    config.data.source = "yambda"
    config.data.yambda_size = "50m"
    config.data.yambda_event = "listens"
    config.data.length = 256
    config.data.targets = 8
    config.data.position_order = "newest_first"
    config.split.kind = "temporal"
    config.split.test_start = yambda.TEST_START
    config.split.validation_length = 86_400
    config.split.gap = 1_800
    config.model.width = 128  # not published
    config.model.norm = "post"
    config.model.dtype = "bfloat16"
    config.head.name = "cut_bce"
    config.optimizer.warmup_steps = 1_000
    config.train.batch_size = 64
    config.train.steps = 30_000
    config.train.log_every = 100
    config.checkpoint.every = 1_000
    config.evaluation.every = 3_000
    config.evaluation.ks = (8, 10, 50, 100)
    config.evaluation.candidates = "train"
    config.evaluation.metric_version = "v1"
    config.evaluation.decay_hours = (1.0,)
    return config

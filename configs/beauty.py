"""Amazon Beauty 5-core as S3-Rec prepared it (lines of `user item item ...`), leave-one-out.

    python -m recml_sasrec.train --config configs/beauty.py --workdir runs/beauty --config.data.path=Beauty.txt

22,363 users, 12,101 items, 198,502 events; short histories, packed 2,050 tokens a batch.
"""

from recml_sasrec.config import Config


def get_config() -> Config:
    config = Config()
    config.data.source = "lines"
    config.data.path = "data/Beauty.txt"
    config.data.length = 50
    config.data.targets = 1
    config.data.position_order = "newest_first"  # as the left-padded implementations count
    config.split.kind = "leave_last"
    config.model.width = 64
    config.model.blocks = 2
    config.model.heads = 2
    config.model.norm = "post"
    config.model.dropout = 0.5
    config.optimizer.learning_rate = 1e-3
    config.optimizer.final_fraction = 0.02
    config.train.batch_size = 41
    config.train.steps = 6_400
    config.train.log_every = 64
    config.checkpoint.every = 320
    config.evaluation.every = 320
    config.evaluation.ks = (5, 10, 20)
    return config

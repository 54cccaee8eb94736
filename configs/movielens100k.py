"""MovieLens 100K (GroupLens, in RecBole's .inter format), leave-one-out.

    python -m recml_sasrec.train --config configs/movielens100k.py --workdir runs/ml-100k \
        --config.data.path=ml-100k.inter

943 users, 1,682 items, 100,000 ratings. Any two-core machine.
"""

from recml_sasrec.config import Config


def get_config() -> Config:
    config = Config()
    config.data.source = "table"
    config.data.path = "data/ml-100k.inter"
    config.data.length = 200
    config.data.targets = 1
    config.data.stride = 100
    config.split.kind = "leave_last"
    config.model.dropout = 0.3
    config.train.batch_size = 16
    config.train.steps = 2_000
    config.train.log_every = 100
    config.evaluation.every = 200
    config.evaluation.patience = 5
    config.evaluation.filter_seen = True
    config.evaluation.ks = (10, 20)
    return config

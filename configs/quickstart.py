"""The embedded default: generated Yambda-shaped events, trained and evaluated in about a minute on two CPU cores.

python -m recml_sasrec.train --config configs/quickstart.py --workdir runs/quickstart
"""

from recml_sasrec.config import Config


def get_config() -> Config:
    config = Config()
    config.data.source = "synthetic"
    config.data.min_played_ratio = 50  # Listen+, as in Yambda's benchmark
    config.data.length = 50
    config.data.targets = 8
    config.split.test_start = 25_308_800  # the last 8 days of the generated 300.9
    config.split.validation_length = 604_800
    config.split.gap = 1_800
    config.train.batch_size = 32
    config.train.steps = 300
    config.evaluation.every = 100
    return config

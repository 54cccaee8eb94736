"""Your own catalogue: the settings that ``prepare`` suggested for a store, each of them yours to change.

    python -m recml_sasrec.prepare --input log.parquet --output data/shop
    python -m recml_sasrec.train --config configs/custom.py --workdir runs/shop --config.data.path=data/shop

``data/shop/suggestion.json`` holds each value with its reason; any field can be set on the command line as ever.
"""

from recml_sasrec.config import Config
from recml_sasrec.config_file import set_value
from recml_sasrec.data import suggest


def get_config(path: str) -> Config:
    config = Config()
    config.data.source = "store"
    config.data.path = path
    for name, value in suggest.read(path).items():
        set_value(config, name, value)
    return config

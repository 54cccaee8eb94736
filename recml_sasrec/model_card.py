"""The README.md of an exported model: what it is, how good by which protocol, how to use it."""

import json
import pathlib
from typing import Any

from recml_sasrec.config import Config
from recml_sasrec.ranking.evaluation import format_table

_CARD = """---
library_name: recml_sasrec
pipeline_tag: other
tags:
- recommendation
- sequential-recommendation
- sasrec
- jax
- stablehlo
---

# {title}

SASRec, a transformer that reads a history of items, oldest first, and scores every item of its catalogue as the next.

| | |
|---|---|
| data | {data} |
| items, V | {items:,} (raw ids are {ids}) |
| last items of a history that count, N | {length} |
| next items trained on at a position, L | {targets} |
| width, blocks, heads | {width}, {blocks}, {heads} |
| loss | {loss} |
| checkpoint | {checkpoint}, step {step} |
{restricted}
## Evaluation

{evaluation}

## Use

With `jax`, `numpy`, `safetensors` and `pyarrow` alone, on CPU, CUDA or TPU; the items are raw ids, oldest first:

```
python example.py ID ID ID
```

With `recml_sasrec`, which also filters, restricts, and reads and writes files:

```python
from recml_sasrec import Recommender

Recommender.load("FOLDER or hf://user/name").recommend([[{history}]], k=10)
```

## Files

* `encoder.stablehlo`: (weights, item vectors [v, D], items int32 [b, N], lengths int32 [b]) -> hidden float32 [b, D].
  The first `lengths[r]` places of row r are rows of `items.parquet`, oldest first; what follows has no effect.
* `model.safetensors`: `item_vectors` [V, D] and `item_bias` [V], by which scores are
  `hidden @ item_vectors.T + item_bias`, and the encoder's weights.
* `items.parquet`: raw ids by row. `config.json`: sizes, versions, the run's config.
"""


def card(title: str, config: Config, about: dict[str, Any], history: list, evaluation: str) -> str:
    """The card as Markdown; ``history`` is an example of raw ids."""
    data = config.data
    if data.source == "yambda":
        source = f"Yambda {data.yambda_size}, {data.yambda_event}"
    else:
        source = pathlib.PurePath(data.path).name or f"{data.source} events"
    restricted = (
        "\nItems without a training event are not ranked: their bias is -inf.\n"
        if config.evaluation.candidates == "train"
        else ""
    )
    return _CARD.format(
        title=title,
        data=source,
        items=about["items"],
        ids="integers" if about["ids"] == "int64" else "text",
        length=data.length,
        targets=data.targets,
        width=config.model.width,
        blocks=config.model.blocks,
        heads=config.model.heads,
        loss=config.head.name,
        checkpoint=about["checkpoint"],
        step=about["step"],
        restricted=restricted,
        evaluation=evaluation,
        history=", ".join(json.dumps(item, ensure_ascii=False) for item in history),
    )


def evaluation_of(workdir: pathlib.Path, step: int) -> str:
    """The table of a run's ``evaluation.json`` with its protocol, or that this checkpoint was not evaluated."""
    path = workdir / "evaluation.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        protocol, rows = saved["protocol"], saved["rows"]
        if protocol.get("checkpoint") == f"step {step}":
            return f"```\n{format_table(protocol, rows)}\n```"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return "Not evaluated at this checkpoint."

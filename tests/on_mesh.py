"""Runs the tiny model on meshes of eight CPU devices and prints what came out as JSON: python -m tests.on_mesh CACHE"""

import json
import os
import re
import sys

os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import numpy as np
import optax

from recml_sasrec import sharding
from recml_sasrec.data.loader import open_data
from recml_sasrec.preemption import StopRequest
from recml_sasrec.run import Run
from tests.tiny import tiny_config

STEPS = 50
MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))


def train(data, mesh: tuple[int, int] | None, config) -> dict:
    """Losses of every step, the first gradients, final sums and test metrics; on one device without a mesh."""
    if mesh is None:
        sharding.jax.device_count = lambda: 1
    else:
        config.mesh.data, config.mesh.items = mesh
    run = Run(config, data)
    sharding.jax.device_count = DEVICES
    compiled = run.compile_step()
    state, batches, losses = run.init(), run.batches(0), []
    for step in range(STEPS):
        before = float(state.metrics.loss)
        state = compiled(state, next(batches))
        losses.append(float(state.metrics.loss) - before)
        if step == 0:
            (adam,) = (x for x in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(x))
            gradients = [np.asarray(x)[: data.store.num_items].tolist() for x in jax.tree.leaves(adam.mu)]
    batches.close()
    specs = {jax.tree_util.keystr(path): list(leaf.sharding.spec) for path, leaf in jax.tree.leaves_with_path(state)}
    return {
        "losses": losses,
        "gradients": gradients,
        "counts": [int(x) for x in state.metrics.counts],
        "ranks": [int(state.metrics.ranks.tokens), *state.metrics.ranks.hits.tolist()],
        "metrics": run.evaluate(state.params, "test", StopRequest()),
        "specs": specs,
        "rows": run.layout.table_rows,
        "gathered": re.findall(r"= \w+\[([\d,]*)\]\S* all-gather", compiled.as_text()),
    }


def is_adam(node: object) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


DEVICES = jax.device_count


def main() -> None:
    config = tiny_config(sys.argv[1])
    config.train.batch_size, config.data.synthetic.items = 8, 203
    data = open_data(config)
    results = {str(mesh): train(data, mesh, config) for mesh in (None, *MESHES)}
    results["again"] = train(data, (2, 4), config)
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main()

"""The ten best items after a history of raw ids, oldest first: python example.py ID ID ..."""

import dataclasses
import json
import pathlib
import sys

import jax.export
import numpy as np
from pyarrow import array, compute, parquet
from safetensors.numpy import load_file

folder = pathlib.Path(__file__).parent
about, ids = json.loads((folder / "config.json").read_text()), parquet.read_table(folder / "items.parquet")["id"]
weights, N, D = load_file(folder / "model.safetensors"), about["length"], about["width"]
table, bias = jax.device_put(weights.pop("item_vectors")), weights.pop("item_bias")
# a function of the encoder's signature, whose code is then replaced by the encoder's
(b, v), spec = jax.export.symbolic_shape("b, v"), jax.ShapeDtypeStruct
like = jax.jit(lambda weights, table, items, lengths: jax.numpy.zeros((items.shape[0], D)), keep_unused=True)
export = jax.export.export(like, platforms=about["platforms"])
encoder = export(weights, spec((v, D), "f4"), spec((b, N), "i4"), spec((b,), "i4"))
module, version = (folder / "encoder.stablehlo").read_bytes(), about["calling_convention"]
encoder = dataclasses.replace(encoder, mlir_module_serialized=module, calling_convention_version=version)
rows = compute.index_in(array(sys.argv[1:], "string").cast(ids.type), value_set=ids).drop_null().to_numpy()[-N:]
if not len(rows):
    sys.exit("give raw ids of items, of which at least one is the model's")
items, lengths = np.pad(rows, (0, N - len(rows))).astype("i4"), np.array([len(rows)], "i4")
hidden = jax.jit(encoder.call)(weights, table, items[None], lengths)
scores, best = jax.lax.top_k(jax.numpy.matmul(hidden, table.T, precision="highest") + bias, min(10, len(ids)))
print(*(f"{ids[int(i)]}\t{s}" for i, s in zip(best[0], scores[0], strict=True) if s > -np.inf), sep="\n")  # -inf: never

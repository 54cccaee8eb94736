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
(b, v), spec, code = jax.export.symbolic_shape("b, v"), jax.ShapeDtypeStruct, folder / "encoder.stablehlo"
like = jax.jit(lambda weights, table, items, lengths: jax.numpy.zeros((items.shape[0], D)), keep_unused=True)
export = jax.export.export(like, platforms=about["platforms"])
encoder = export(weights, spec((v, D), "f4"), spec((b, N), "i4"), spec((b,), "i4"))
encoder = dataclasses.replace(encoder, mlir_module_serialized=code.read_bytes())
encoder = dataclasses.replace(encoder, calling_convention_version=about["calling_convention"])
rows = compute.index_in(array(sys.argv[1:], "string").cast(ids.type), value_set=ids).drop_null().to_numpy()[-N:]
items, lengths = np.pad(rows, (0, N - len(rows))).astype("i4"), np.array([len(rows)], "i4")
hidden = jax.jit(encoder.call)(weights, table, items[None], lengths)
scores, best = jax.lax.top_k(jax.numpy.matmul(hidden, table.T, precision="highest") + bias, min(10, len(ids)))
best, scores = best[scores > -np.inf], scores[scores > -np.inf]  # it says never
print(*(f"{ids[int(row)]}\t{score}" for row, score in zip(best, scores, strict=True)), sep="\n")

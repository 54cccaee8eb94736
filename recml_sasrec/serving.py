"""A model to recommend with, from a run's folder or from an exported one (``export.py`` writes those)."""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from flax import nnx
from jax import export
from jax.extend.mlir.dialects import stablehlo
from safetensors import SafetensorError, safe_open

from recml_sasrec import config_file, model, run_folder
from recml_sasrec.checkpoint import CheckpointError, Checkpoints
from recml_sasrec.config import Config, ConfigError, MeshConfig
from recml_sasrec.data import folders
from recml_sasrec.data.batch import QueryBatch
from recml_sasrec.data.vocabulary import fingerprint
from recml_sasrec.sharding import Layout, make_layout
from recml_sasrec.step import Params, make_encoder, make_model

FORMAT = 1  # of exported folders
PLATFORMS = ("cpu", "cuda", "tpu")  # that the encoder is lowered for; the order is part of its calling convention
ENCODER, TENSORS, ITEMS, ABOUT = "encoder.stablehlo", "model.safetensors", "items.parquet", "config.json"
CARD, EXAMPLE = "README.md", "example.py"
FILES = (ENCODER, TENSORS, ITEMS, ABOUT, CARD, EXAMPLE)
WEIGHTS = "encoder."  # what the names of the encoder's own arrays start with


class Served(NamedTuple):
    """What ``Recommender`` works with."""

    config: Config
    item_ids: pa.Array  # int64 or large_string [V], raw ids by table row
    layout: Layout
    params: Params  # what encode takes
    encode: Callable[[Params, QueryBatch], jax.Array]  # -> float32 hidden [Q, D]
    table: jax.Array  # float32 [rows, D] item vectors
    bias: jax.Array | None  # float32 [rows]
    candidates: np.ndarray | None  # bool [V], the items that the run ranks; None: all of them


class Restored(NamedTuple):
    """A checkpoint of a run."""

    config: Config
    marks: dict[str, str]
    item_ids: pa.Array
    layout: Layout
    graphdef: nnx.GraphDef
    params: Params
    step: int
    candidates: np.ndarray | None


def open_model(path: str | pathlib.Path, checkpoint: str = "best") -> Served:
    """Opens a run's folder, an exported one, or ``hf://user/name[@revision]``.

    Raises:
        ConfigError: it is none of these, or incomplete, damaged or too new for the installed JAX.
        CheckpointError: there is no such checkpoint, or it can't be read.
        DataError: the hub doesn't give the model.
    """
    from recml_sasrec import model_hub

    path = model_hub.local_folder(path)
    restore(path)
    if is_exported(path):
        return open_exported(path, checkpoint)
    run = restore_run(path, checkpoint)
    return served(run.config, run.item_ids, run.layout, run.graphdef, run.params, run.candidates)


def served(
    config: Config,
    item_ids: pa.Array,
    layout: Layout,
    graphdef: nnx.GraphDef,
    params: Params,
    candidates: np.ndarray | None = None,
) -> Served:
    """Parameters in memory, as what ``Recommender`` works with."""
    encode = jax.jit(make_encoder(graphdef, layout), out_shardings=layout.replicated)
    table, bias = model.item_vectors(params), model.ranking_bias(params)
    return Served(config, item_ids, layout, params, encode, table, bias, candidates)


def restore_run(workdir: pathlib.Path, checkpoint: str, on_host: bool = False) -> Restored:
    """The params of a run's checkpoint, on all devices here; not its optimizer's state.

    Args:
        checkpoint: ``best`` (by validation), ``latest`` or a step.
        on_host: as numpy arrays instead.

    Raises:
        ConfigError: the folder holds no run, or its item ids are missing or not those of the checkpoint.
        CheckpointError: there is no such checkpoint, or it can't be read.
    """
    config, marks = run_folder.read(workdir)
    item_ids = run_folder.read_item_ids(workdir, marks)
    if not (workdir / "checkpoints").is_dir():
        raise CheckpointError(f"{workdir} has no checkpoint yet; let its training go on to the first one")
    config.mesh = MeshConfig()
    layout = make_layout(config, len(item_ids), jax.local_devices()[:1] if on_host else None)

    def like(x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> Any:
        if on_host:
            return np.broadcast_to(np.zeros((), x.dtype), x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with Checkpoints(workdir, config.checkpoint.keep, config.evaluation.best_metric, reading=True) as checkpoints:
        step = checkpoints.find(str(checkpoint))
        info = checkpoints.info(step)
        if info.get("vocabulary") != marks["vocabulary"]:
            raise ConfigError(
                f"the checkpoint of step {step} in {checkpoints.directory} doesn't say that it is of the items of "
                f"{workdir / 'item_ids.arrow'}; copy that file and config.json from the run's own folder"
            )
        _, init = make_model(config, len(item_ids), 1.0, layout.table_rows, info.get("content_width", 0))
        graphdef, shapes = model.abstract(init)
        params = checkpoints.restore_params(step, jax.tree.map(like, shapes, layout.of(shapes)))
    candidates = run_folder.read_trained_items(workdir, config, len(item_ids))
    return Restored(config, marks, item_ids, layout, graphdef, params, step, candidates)


def is_exported(path: pathlib.Path) -> bool:
    """Whether a folder looks like an exported model, complete or not; a run may have files of these names beside it."""
    return not (path / "checkpoints").is_dir() and any((path / name).exists() for name in (ENCODER, TENSORS, ITEMS))


def is_from_export(folder: pathlib.Path) -> bool:
    """Whether an export wrote a folder's ``config.json``: those of other models have the same name."""
    try:
        return "encoder_sha256" in dict(json.loads((folder / ABOUT).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def restore(folder: pathlib.Path) -> None:
    """Puts an exported model back that a kill, while another took its place, has left without its name."""
    folders.restore(os.path.realpath(folder))


def open_exported(folder: pathlib.Path, checkpoint: str = "best") -> Served:
    """Opens an exported folder on one device.

    Raises:
        ConfigError: a part is missing, damaged, of another model or too new for the installed JAX.
        CheckpointError: another checkpoint than the one it holds is asked for.
    """
    about, config, item_ids, tensors, exported = read_exported(folder)
    if checkpoint not in ("best", about["checkpoint"], str(about["step"])):
        raise CheckpointError(
            f"{folder} was exported from checkpoint {about['checkpoint']} (step {about['step']}) and holds no other; "
            f"leave --checkpoint out, or export {checkpoint} from the run"
        )
    device = jax.local_devices()[:1]
    layout = make_layout(config, len(item_ids), device)
    ranked = np.isfinite(tensors["item_bias"])
    arrays = {name: jax.device_put(tensors.pop(name), device[0]) for name in list(tensors)}
    table, bias = arrays.pop("item_vectors"), arrays.pop("item_bias")
    params: Params = {"weights": arrays, "item_table": table}

    def encode(params: Params, queries: QueryBatch) -> jax.Array:
        lengths_B = jnp.sum(jnp.asarray(queries.segment_ids) > 0, 1, dtype=jnp.int32)  # a query is a row
        return exported.call(params["weights"], params["item_table"], queries.items, lengths_B)

    return Served(config, item_ids, layout, params, jax.jit(encode), table, bias, None if ranked.all() else ranked)


def read_exported(
    folder: pathlib.Path,
) -> tuple[dict[str, Any], Config, pa.Array, dict[str, np.ndarray], export.Exported]:
    """(what ``config.json`` says, the run's config, raw ids, arrays, encoder) of an exported folder, all checked.

    Raises:
        ConfigError: a part is missing, damaged, of another model or too new for the installed JAX.
    """
    about = read_about(folder)
    config = config_file.from_json(json.dumps(about["config"]))
    item_ids = _read_items(folder, about)
    tensors = _read_tensors(folder, about)
    return about, config, item_ids, tensors, _read_encoder(folder, about, tensors)


def read_about(folder: pathlib.Path) -> dict[str, Any]:
    """``config.json`` of an exported folder.

    Raises:
        ConfigError: it is missing, damaged or of a later version.
    """
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        version = about["format"]
        if version <= FORMAT and about["sha256"] != about_sha256(about):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"{folder / ABOUT} of the exported model is missing, damaged or edited; copy it anew or export again"
        ) from None
    if version > FORMAT:
        raise ConfigError(
            f"{folder} has format {version} of exported models but this version reads up to {FORMAT}; upgrade "
            "recml_sasrec, or export the run again with this version"
        )
    return about


def about_sha256(about: dict[str, Any]) -> str:
    """The digest of all else that ``config.json`` says, so that each of its fields can be taken as it was written."""
    rest = {name: value for name, value in about.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def file_sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def signature(
    weights: dict[str, Any], table: Any, length: int
) -> tuple[dict[str, Any], jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The encoder's arguments: (its weights, item vectors [v, D], items int32 [b, N], lengths int32 [b])."""
    b, v = export.symbolic_shape("b, v")
    spec = jax.ShapeDtypeStruct
    return (
        {name: spec(x.shape, x.dtype) for name, x in weights.items()},
        spec((v, table.shape[1]), jnp.float32),
        spec((b, length), jnp.int32),
        spec((b,), jnp.int32),
    )


def _read_items(folder: pathlib.Path, about: dict[str, Any]) -> pa.Array:
    path = folder / ITEMS
    try:
        column = pq.read_table(path, columns=["id"])["id"]
        integers = pa.types.is_integer(column.type)
        ids = column.cast(pa.int64() if integers else pa.large_string()).combine_chunks()
    except (OSError, KeyError, pa.ArrowException):
        raise ConfigError(f"{path}, the raw ids of the model's items, is missing or damaged; export again") from None
    if len(ids) != about["items"]:
        raise ConfigError(f"{path} has {len(ids):,} items but the model {about['items']:,}; export again")
    if fingerprint(ids) != about["vocabulary"]:
        raise ConfigError(f"{path} holds other item ids than the model was trained on; export again")
    return ids


def _read_tensors(folder: pathlib.Path, about: dict[str, Any]) -> dict[str, np.ndarray]:
    path = folder / TENSORS
    try:
        # of two checkpoints of a run the arrays differ in nothing but their values
        if file_sha256(path) == about["tensors_sha256"]:
            with safe_open(path, "numpy") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a file is no mapping)
    except (OSError, SafetensorError):
        pass
    raise ConfigError(
        f"{path}, the model's arrays, is missing, damaged or of another export; copy the whole folder anew or export "
        "again"
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def _read_encoder(folder: pathlib.Path, about: dict[str, Any], tensors: dict[str, np.ndarray]) -> export.Exported:
    """The encoder: a function of its signature, whose StableHLO is then replaced by that of the file.

    ``jax.export.deserialize`` would do the same from a format of JAX alone, and needs a package that JAX does not.
    """
    path = folder / ENCODER
    try:
        module = path.read_bytes()
    except OSError:
        module = b""
    if hashlib.sha256(module).hexdigest() != about["encoder_sha256"]:
        raise ConfigError(f"{path}, the model's encoder, is missing or damaged; copy it anew or export again")
    lowest, highest = (
        export.minimum_supported_calling_convention_version,
        export.maximum_supported_calling_convention_version,
    )
    version = about["calling_convention"]
    too_old = (
        f"{path} was exported with jax {about['jax']}, whose StableHLO jax {jax.__version__} can't read; install "
        f"jax {about['jax']} or later, or export the run with jax {jax.__version__}"
    )
    written = re.match(rb"ML\xefR.StableHLO_v([0-9.]+)", module, re.DOTALL)  # the head of a portable artifact
    if version > highest or (written and _numbers(written[1].decode()) > _numbers(stablehlo.get_current_version())):
        raise ConfigError(too_old)
    if version < lowest:
        raise ConfigError(
            f"{path} was exported with jax {about['jax']}, which jax {jax.__version__} no longer reads; export again"
        )
    weights = {name: x for name, x in tensors.items() if name.startswith(WEIGHTS)}
    specs = signature(weights, tensors["item_vectors"], about["length"])
    like = jax.jit(lambda *arguments: jnp.zeros((arguments[2].shape[0], about["width"])), keep_unused=True)
    exported = dataclasses.replace(
        export.export(like, platforms=PLATFORMS)(*specs),
        mlir_module_serialized=module,
        calling_convention_version=version,
    )
    try:
        exported.mlir_module()
    except Exception:  # MLIR's own, whatever a module of another version leads to
        raise ConfigError(too_old) from None
    return exported

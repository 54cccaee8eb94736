"""Exports a run as a folder that serves without this package:
python -m recml_sasrec.export --workdir runs/shop --output shop-model

The folder has encoder.stablehlo, model.safetensors, items.parquet, config.json, README.md and example.py, which needs
jax, numpy, safetensors and pyarrow alone. --push user/name uploads it to the Hugging Face Hub; --workdir may then be a
run, with --output, or a folder that was exported before.
"""

import argparse
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recml_sasrec import command, files
from recml_sasrec.config import Config, ConfigError
from recml_sasrec.data import folders

if TYPE_CHECKING:
    from jax import export as jax_export

    from recml_sasrec.serving import Restored

log = logging.getLogger("recml_sasrec")
_PATHS = (("data", "path"), ("data", "items_path"), ("data", "cache"), ("init", "from_run"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recml_sasrec.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", required=True, help="folder of the run; with --push also an exported one")
    parser.add_argument("--output", help="folder to write")
    parser.add_argument("--checkpoint", default="best", help="best, latest or a step")
    parser.add_argument("--replace", action="store_true", help="replace the exported model that --output holds")
    parser.add_argument("--push", metavar="USER/NAME", help="model repository of the Hugging Face Hub")
    parser.add_argument("--private", action="store_true", help="make that repository private where it is new")

    def export() -> None:
        flags, overrides = command.parse(parser, argv)
        if overrides:
            raise ConfigError(f"config.{overrides[0].partition('=')[0]} can't change after training; leave it out")
        from recml_sasrec import model_hub, serving

        workdir = pathlib.Path(flags.workdir)
        serving.restore(workdir)
        if flags.push:
            model_hub.check_name(flags.push, "--push")
        if serving.is_exported(workdir):
            if flags.output or not flags.push:
                raise ConfigError(f"{workdir} is exported already; push it with --push user/name and without --output")
            serving.read_exported(workdir)  # an incomplete one isn't worth a commit
            output = workdir
        elif not flags.output:
            raise ConfigError("--output is missing; name the folder to write")
        else:
            output = pathlib.Path(flags.output)
            export_run(workdir, output, flags.checkpoint, flags.replace)
        if flags.push:
            log.info("pushed to %s", model_hub.push(output, flags.push, flags.private))

    return command.run(export)


def export_run(workdir: pathlib.Path, output: pathlib.Path, checkpoint: str = "best", replace: bool = False) -> None:
    """Writes a run's checkpoint as a folder that serves without this package; there whole or not at all.

    Args:
        checkpoint: ``best``, ``latest`` or a step.
        replace: an exported model that ``output`` holds.

    Raises:
        ConfigError: there is something at ``output``, or no run or item ids in ``workdir``.
        CheckpointError: there is no such checkpoint, or it can't be read.
        OSError: no room.
    """
    from recml_sasrec import serving

    output = pathlib.Path(os.path.realpath(output))  # a link keeps leading to it
    serving.restore(output)
    _check_output(output, replace)
    folders.remove_stale(str(output.parent), output.name)
    run = serving.restore_run(workdir, checkpoint, on_host=True)
    temporary = output.with_name(folders.temporary_name(output.name))
    with files.unfinished(str(temporary)):
        temporary.mkdir()
        _write(temporary, workdir, output.name, run, checkpoint)
        _check_output(output, replace)  # what was put there meanwhile is not to be lost
        folders.put_in_place(str(temporary), str(output), lambda: False)
    size = sum(path.stat().st_size for path in output.iterdir())
    log.info(
        "exported step %d with %d items to %s (%.1f MB)", run.step, len(run.item_ids), output, size / 1e6
    )  # fmt: skip


def _check_output(output: pathlib.Path, replace: bool) -> None:
    from recml_sasrec import serving

    if not output.parent.is_dir():
        raise ConfigError(f"the folder of --output {output} does not exist; make it first")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not serving.is_from_export(output):
        raise ConfigError(f"--output {output} exists and is no exported model; name another folder")
    others = sorted(path.name for path in output.iterdir() if path.name not in serving.FILES or path.is_dir())
    if others:
        raise ConfigError(
            f"--output {output} holds {others[0]!r} too, which no export wrote; move it away or name another folder"
        )
    if not replace:
        raise ConfigError(f"--output {output} exists; name another folder, or replace it with --replace")


def _write(folder: pathlib.Path, workdir: pathlib.Path, title: str, run: "Restored", checkpoint: str) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from recml_sasrec import model_card, serving

    tensors = tensors_of(run)
    _check_room(folder, sum(x.nbytes for x in tensors.values()))
    encoder = exported_encoder(run.config, tensors)
    (folder / serving.ENCODER).write_bytes(encoder.mlir_module_serialized)
    _save_tensors(folder / serving.TENSORS, tensors)
    pq.write_table(pa.table({"id": run.item_ids}), folder / serving.ITEMS)
    about = about_of(run, checkpoint, encoder, tensors)
    about["tensors_sha256"] = serving.file_sha256(folder / serving.TENSORS)
    about["sha256"] = serving.about_sha256(about)
    (folder / serving.ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    history = run.item_ids.take(pa.array(np.arange(min(3, len(run.item_ids))))).to_pylist()
    evaluation = model_card.evaluation_of(workdir, run.step)
    card = model_card.card(title, run.config, about, history, evaluation)
    (folder / serving.CARD).write_text(card, encoding="utf-8")
    shutil.copyfile(pathlib.Path(__file__).with_name("serve_example.py"), folder / serving.EXAMPLE)


def tensors_of(run: "Restored") -> dict[str, Any]:
    """numpy arrays by name: item_vectors [V, D], item_bias [V] and the encoder's weights.

    The bias is 0 in a model without, and -inf for items that the run does not rank. The vectors are a view of the
    params where nothing is added to the table, so that one of gigabytes is in memory once.
    """
    import jax
    import numpy as np

    from recml_sasrec import model

    V = len(run.item_ids)
    bias = model.ranking_bias(run.params)
    bias_V = np.zeros(V, np.float32) if bias is None else np.asarray(bias)[:V]
    if run.candidates is not None:
        bias_V = np.where(run.candidates, bias_V, np.float32(-np.inf))
    tensors = {"item_vectors": np.asarray(model.item_vectors(run.params))[:V], "item_bias": bias_V}
    shapes = _encoder_model(run.config)[1]
    for path, array in jax.tree_util.tree_leaves_with_path({name: run.params[name] for name in shapes}):
        tensors[_weight_name(path)] = np.asarray(array)
    return tensors


def exported_encoder(config: Config, tensors: dict[str, Any]) -> "jax_export.Exported":
    """(weights, item vectors [v, D], items int32 [b, N], lengths int32 [b]) -> hidden float32 [b, D] of each history.

    A history fills the first places of its row, oldest first; what follows has no effect. Weights and vectors are
    arguments, so that the module is small whatever the catalogue.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax import export

    from recml_sasrec import serving

    N = config.data.length
    graphdef, shapes = _encoder_model(config)
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes)
    names = [_weight_name(path) for path, _ in paths]

    def encode(weights, vectors_VD, items_BN, lengths_B):
        params = jax.tree.unflatten(tree, [weights[name] for name in names])
        params |= {"item_table": vectors_VD}
        if config.model.item_bias:
            params |= {"item_bias": vectors_VD[:, 0]}  # the hidden states don't depend on it
        place = jnp.arange(N)
        real_BN = place < lengths_B[:, None]
        newest_first = config.data.position_order == "newest_first"
        positions_BN = jnp.where(real_BN, lengths_B[:, None] - 1 - place if newest_first else place, 0)
        model = nnx.merge(graphdef, params)
        h_BND = model(jnp.where(real_BN, items_BN, 0), positions_BN, real_BN.astype(jnp.int32))
        last_B = jnp.maximum(lengths_B, 1) - 1
        return jnp.take_along_axis(h_BND, last_B[:, None, None], axis=1)[:, 0].astype(jnp.float32)

    weights = {name: x for name, x in tensors.items() if name.startswith(serving.WEIGHTS)}
    specs = serving.signature(weights, tensors["item_vectors"], N)
    return export.export(jax.jit(encode, keep_unused=True), platforms=serving.PLATFORMS)(*specs)


def _encoder_model(config: Config) -> tuple[Any, dict[str, Any]]:
    """The graph definition and the shapes of the params, but those by item, of the model over given item vectors.

    Item vectors have what content adds to the table, so that the model that reads them has none.
    """
    from recml_sasrec import model
    from recml_sasrec.sharding import BY_ITEM
    from recml_sasrec.step import make_model

    config = dataclasses.replace(config, model=dataclasses.replace(config.model, content="none"))
    graphdef, shapes = model.abstract(make_model(config, 1, 1.0)[1])
    return graphdef, {name: shape for name, shape in shapes.items() if name not in BY_ITEM}


def _weight_name(path: tuple) -> str:
    from recml_sasrec import serving

    return serving.WEIGHTS + ".".join(str(key.key) for key in path)


def about_of(
    run: "Restored", checkpoint: str, encoder: "jax_export.Exported", tensors: dict[str, Any]
) -> dict[str, Any]:
    """What ``config.json`` of the folder says: all that a reader needs, and the run's config without its paths."""
    import jax
    import pyarrow as pa

    from recml_sasrec import serving

    config = dataclasses.asdict(run.config)
    for section, name in _PATHS:  # the last part says which data; the rest is about the machine that trained
        config[section][name] = pathlib.PurePath(config[section][name]).name
    return {
        "format": serving.FORMAT,
        "model_type": "sasrec",
        "items": len(run.item_ids),
        "length": run.config.data.length,
        "width": run.config.model.width,
        "ids": "int64" if pa.types.is_integer(run.item_ids.type) else "string",
        "vocabulary": run.marks["vocabulary"],
        "checkpoint": checkpoint,
        "step": run.step,
        "platforms": encoder.platforms,
        "calling_convention": encoder.calling_convention_version,
        "jax": jax.__version__,
        "encoder_sha256": hashlib.sha256(encoder.mlir_module_serialized).hexdigest(),
        "tensors": {name: f"{array.dtype} {list(array.shape)}" for name, array in tensors.items()},
        "config": config,
    }


def _save_tensors(path: pathlib.Path, tensors: dict[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    from recml_sasrec import serving

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path.name} can't be written ({error}); free some space and export again") from None
    shutil.copymode(path.with_name(serving.ENCODER), path)  # it is written for its owner alone


def _check_room(folder: pathlib.Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"the exported model needs {needed:,} bytes but {folder.parent} has room for {free:,}; free some space or "
            "name another folder"
        )


if __name__ == "__main__":
    sys.exit(main())

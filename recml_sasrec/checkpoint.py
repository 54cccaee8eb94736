"""Checkpoints: Orbax v1, asynchronous, the newest n and the best by a validation metric.

A checkpoint holds params and optimizer state apart (evaluation restores params only) and, as JSON, what a resumed run
must know: config, vocabulary and the progress of early stopping.
"""

import contextlib
import json
import logging
import pathlib
from typing import Any

import jax
import numpy as np
import optax
from orbax.checkpoint import v1 as ocp

from recml_sasrec.hosts import HostLost
from recml_sasrec.step import Params, TrainState

# Orbax reports each step of a save at INFO and each failure with its traceback at ERROR, beside raising it
logging.getLogger("absl").setLevel(logging.CRITICAL)
# what its tasks raise beside the error that reaches the caller is printed with a traceback when they are collected
logging.getLogger("asyncio").setLevel(logging.CRITICAL)

Info = dict[str, Any]
_Saving = ocp.options.ArrayOptions.Saving
# in one piece, as it is by default, a table is read into memory beside the array that it becomes
_PIECES = ocp.options.ArrayOptions(saving=_Saving(storage_options=_Saving.StorageOptions(chunk_byte_size=1 << 26)))
_ANY_PADDING = ocp.options.ArrayOptions(loading=ocp.options.ArrayOptions.Loading(enable_padding_and_truncation=True))


class CheckpointError(OSError):
    """A checkpoint that could not be written or read; the message is one sentence for the user."""


class Checkpoints:
    """The checkpoints of a run's folder; a context that waits for the last save when left.

    Args:
        workdir: the run's folder; checkpoints lie in its ``checkpoints/``.
        keep: how many of the newest to keep; the best one is kept besides.
        best_metric: the key of the metrics given to ``save`` that decides which is best (higher is better).
        reading: nothing will be saved, and what another process is saving is left alone.
    """

    def __init__(self, workdir: pathlib.Path, keep: int, best_metric: str, reading: bool = False):
        policies = ocp.training.preservation_policies
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics[best_metric], n=1, keep_checkpoints_without_metrics=False
        )
        self.best_metric = best_metric
        self.directory = (workdir / "checkpoints").absolute()
        try:
            self._checkpointer = ocp.training.Checkpointer(
                self.directory,
                save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
                cleanup_tmp_directories=not reading,
            )
        except Exception as error:  # it reads the metrics of all steps
            if (step := self._without_metrics()) is not None:
                raise self._unreadable(step, "its metrics are damaged") from error
            raise CheckpointError(f"cannot use {self.directory} for checkpoints: {_reason(error)}") from error
        self._pending: Any = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            # closing reports a failed save once more; the first report is the one that reaches the user
            # and without the process it was shared with it can't end
            if kind is not HostLost:
                with contextlib.suppress(Exception):
                    self._checkpointer.close()

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    @property
    def latest(self) -> int | None:
        return self.steps[-1] if self.steps else None

    @property
    def best(self) -> int | None:
        """The step with the best validation metric (the earliest of equals), the latest where none was validated."""
        scored = [
            (-checkpoint.metrics[self.best_metric], checkpoint.step)
            for checkpoint in self._checkpointer.checkpoints
            if checkpoint.metrics and self.best_metric in checkpoint.metrics
        ]
        return min(scored)[1] if scored else self.latest

    def find(self, name: str) -> int:
        """The step that ``best``, ``latest`` or a number names.

        Raises:
            CheckpointError: there is none.
        """
        step = {"best": self.best, "latest": self.latest}.get(name, int(name) if name.isdecimal() else None)
        if step is None or step not in self.steps:
            have = ", ".join(map(str, self.steps)) or "none"
            raise CheckpointError(f"{self.directory} has no checkpoint {name!r}; it has {have}")
        return step

    def save(
        self,
        step: int,
        state: TrainState,
        info: Info,
        metrics: dict[str, float] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Starts writing a checkpoint; returns once the arrays are copied, with the former save complete.

        Raises:
            CheckpointError: the former or this save failed, for example on a full disk; complete checkpoints survive.
        """
        self.wait()
        try:
            with ocp.Context(array_options=_PIECES):
                self._pending = self._checkpointer.save_checkpointables_async(
                    step, _items(state), metrics=metrics, overwrite=overwrite, custom_metadata={"run": json.dumps(info)}
                )
        except Exception as error:
            raise self._failure(step, error) from error
        self._pending_step = step

    def wait(self) -> None:
        """Returns when the last save is complete.

        Raises:
            CheckpointError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except Exception as error:
                raise self._failure(self._pending_step, error) from error

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        last = self._last_complete(step)
        survives = f"the checkpoint of step {last} is intact" if last is not None else "no earlier one exists"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.directory} ({_reason(error)}); {survives}; "
            "free some space and run the same command again"
        )

    def _without_metrics(self) -> str | None:
        """The first step whose metrics are no JSON."""
        for path in sorted(self.directory.glob("*/metrics/metrics")):
            try:
                json.loads(path.read_bytes())
            except (OSError, ValueError):
                return path.parts[-3]
        return None

    def _last_complete(self, failed: int) -> int | None:
        """The newest step that is complete on disk; the checkpointer itself lists a step from its first byte on."""
        done = [int(p.name) for p in self.directory.iterdir() if p.name.isdecimal() and int(p.name) != failed]
        return max(done, default=None)

    def info(self, step: int) -> Info:
        """What ``save`` was given as ``info``."""
        try:
            return json.loads(self._checkpointer.checkpointables_metadata(step).custom_metadata["run"])
        except Exception as error:
            raise self._unreadable(step, "its metadata is missing or damaged") from error

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of a step, with the shapes, dtypes and shardings of ``like`` (arrays or ShapeDtypeStructs)."""
        loaded = self._load(step, _items(like))
        counters = loaded["counters"]
        return TrainState(counters["step"], loaded["params"], loaded["opt_state"], counters["metrics"])

    def restore_params(self, step: int, like: Params) -> Params:
        """The params alone; numpy arrays where ``like`` has some, which are in memory once where jax's are twice."""
        return self._load(step, {"params": like})["params"]

    def restore_opt_state(self, step: int, like: optax.OptState) -> optax.OptState:
        """The optimizer's state alone."""
        return self._load(step, {"opt_state": like})["opt_state"]

    def _load(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        abstract = jax.tree.map(
            lambda x: x if isinstance(x, np.ndarray) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            like,
        )
        try:
            # Another mesh pads the item table by another number of rows that are no items.
            with ocp.Context(array_options=_ANY_PADDING):
                return self._checkpointer.load_checkpointables(step, abstract)
        except Exception as error:
            raise self._unreadable(step, _reason(error)) from error

    def _unreadable(self, step: int | str, reason: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} in {self.directory} cannot be read ({reason}); if an earlier one will do, "
            f"move {self.directory / str(step)} away and run the same command again"
        )


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _items(state: TrainState) -> dict[str, Any]:
    return {
        "params": state.params,
        "opt_state": state.opt_state,
        "counters": {"step": state.step, "metrics": state.metrics},
    }

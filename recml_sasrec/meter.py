"""Takes the device's sums at a log step, reads them one step later, and measures the time between."""

import contextlib
import time
from collections.abc import Iterator

import jax

from recml_sasrec.checkpoint import Checkpoints
from recml_sasrec.heads import counts as confusion
from recml_sasrec.run import Run
from recml_sasrec.step import Metrics, TrainState
from recml_sasrec.writers import RunLog


class Diverged(ArithmeticError):
    """A loss or gradient was not finite; the message names the steps and the last good checkpoint."""


class Meter:
    """Rates leave out pauses: validation and checkpoints.

    Args:
        run: the run that is trained.
        run_log: where the rows go.
        step: steps already done.
    """

    def __init__(self, run: Run, run_log: RunLog, step: int):
        self.run, self.log = run, run_log
        self._logged = step
        self._taken: tuple[int, Metrics] | None = None
        self._fresh = jax.jit(Metrics.zeros, out_shardings=run.layout.replicated)
        self._start, self._waited = time.perf_counter(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent inside counts as waiting for data."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    def take(self, state: TrainState, step: int) -> TrainState:
        """Keeps the sums for the next ``flush`` and returns the state with empty ones."""
        self._taken = step, state.metrics
        return state._replace(metrics=self._fresh())

    def flush(self, checkpoints: Checkpoints) -> None:
        """Reads the sums taken, if any, and logs them.

        Raises:
            Diverged: one of their steps was not finite.
        """
        if self._taken is None:
            return
        (step, metrics), self._taken = self._taken, None
        self.check_finite(metrics, step, checkpoints)  # waits for the step
        seconds = time.perf_counter() - self._start
        steps = int(metrics.steps)
        counts = metrics.counts
        row = {
            "loss": float(metrics.loss) / steps,
            "precision": confusion.precision(counts),
            "recall": confusion.recall(counts),
            "accuracy": confusion.accuracy(counts),
            "f1": confusion.f_beta(counts),
            **metrics.ranks.metrics(),
            "grad_norm": float(metrics.grad_norm) / steps,
            "learning_rate": float(self.run.schedule(step - 1)),
            "tokens_per_s": int(metrics.tokens) / seconds,
            "seconds_per_step": seconds / (step - self._logged),
            "data_wait": self._waited / seconds,
            "epoch": step / self.run.data.steps_per_epoch(self.run.config),
        }
        self.log.write(step, row)
        self.log.progress(step, row)
        self._logged, self._start, self._waited = step, time.perf_counter(), 0.0

    def check_finite(self, metrics: Metrics, step: int, checkpoints: Checkpoints) -> None:
        """Raises:
        Diverged: one of the summed steps was not finite.
        """
        bad = int(metrics.bad_step)
        if bad < 0:
            return
        checkpoints.wait()
        last = checkpoints.latest
        kept = f"the checkpoint of step {last} is good" if last is not None else "no checkpoint was written yet"
        clip = "" if self.run.config.optimizer.clip_norm else " or set config.optimizer.clip_norm"
        raise Diverged(
            f"the loss or its gradient is not finite at step {bad} (between steps {self._logged + 1} and {step}); "
            f"{kept}; lower config.optimizer.learning_rate{clip}, in a new --workdir"
        )

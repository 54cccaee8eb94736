"""The training loop, from a config and a folder to a trained and evaluated model.

Invariants of the loop:
* the data of a step and its dropout depend on nothing but (seed, step), so a resumed run equals an uninterrupted one;
* metrics are read one step after they were dispatched, never of the step just dispatched;
* a checkpoint is written only of a state whose losses were all finite;
* the test split is read once, after training, with the checkpoint that validation chose.
"""

import logging
import os
import pathlib

import jax

from recml_sasrec import config_checks, config_file, grow, hosts, run_folder
from recml_sasrec.checkpoint import Checkpoints
from recml_sasrec.config import Config, ConfigError
from recml_sasrec.meter import Meter
from recml_sasrec.preemption import Interrupted, StopRequest
from recml_sasrec.ranking import evaluation
from recml_sasrec.ranking.evaluation import Rows
from recml_sasrec.run import Progress, Run
from recml_sasrec.step import TrainState
from recml_sasrec.writers import RunLog

log = logging.getLogger("recml_sasrec")


def train(config: Config, workdir: str | os.PathLike[str]) -> Rows:
    """Trains, or goes on training, in a folder, and evaluates the best checkpoint on the test split.

    Args:
        config: the run's configuration.
        workdir: the run's folder, made where it lacks; holding a run of the same config, that run is resumed.

    Returns:
        The rows of the evaluation, ``{"sasrec": {"ndcg@10": ...}, "most_pop": {...}, ...}``.

    Raises:
        ConfigError, DataError, MemoryLimitError, CheckpointError: what the user must mend, in one sentence.
        Interrupted: SIGTERM or Ctrl-C came; the state is saved.
        Diverged: the loss is not finite any more.
    """
    config_checks.validate(config)
    workdir = pathlib.Path(workdir)
    base = grow.open_base(config, workdir)  # before the data, which may take an hour to read
    kept = run_folder.kept_ids(workdir, config) if base is None else base.item_ids
    data = run_folder.open_together(config, kept if config.init.vanished == "keep" else None)
    run = Run(config, data)
    log.info("%s", run.overview())
    with run_folder.claimed(workdir):
        hosts.together(lambda: run_folder.check(workdir, config, data.store))
        saved = Checkpoints(workdir, config.checkpoint.keep, config.evaluation.best_metric)
        with saved as checkpoints, hosts.watched():
            stop = StopRequest()
            progress = run.restore_progress(checkpoints)
            if progress.step > config.train.steps:
                raise ConfigError(
                    f"{workdir} holds a run of {progress.step} steps, more than "
                    f"config.train.steps={config.train.steps}; raise it or use another --workdir"
                )
            if hosts.is_first():
                run_folder.save_trained_items(workdir, evaluation.candidate_mask(config, data))
            if (progress.step < config.train.steps and not progress.stopped) or progress.interrupted:
                growth = None if base is None else hosts.together(lambda: grow.plan(base, data, config))
                train_step = run.compile_step()  # says what it needs before the state takes its memory
                state = run.restore_state(checkpoints) if growth is None else grow.grown_state(run, growth)
                if hosts.is_first():
                    run_folder.adopt(workdir, config, data.store)
                    grow.report(workdir, growth)
                with RunLog(workdir, progress.step, config.train.steps, hosts.is_first()) as run_log, stop:
                    fit(run, train_step, state, progress, checkpoints, run_log, stop)
            checkpoints.wait()
            with stop:
                return run.final_evaluation(workdir / "evaluation.json", checkpoints, stop)


def fit(
    run: Run,
    train_step: jax.stages.Compiled,
    state: TrainState,
    progress: Progress,
    checkpoints: Checkpoints,
    run_log: RunLog,
    stop: StopRequest,
) -> None:
    """Steps from the state's step to the last one, logging, validating and checkpointing on the way."""
    config, every = run.config, run.config.evaluation.every
    run_log.text("config", f"```\n{config_file.to_json(config)}```")
    meter = Meter(run, run_log, progress.step)
    batches = run.batches(progress.step)
    try:
        if progress.interrupted:
            metrics = run.validate(state.params, progress, run_log, stop)
            checkpoints.save(progress.step, state, run.info(progress), metrics, overwrite=True)
            leave_if_asked(stop, progress, checkpoints)
        while progress.step < config.train.steps and not progress.stopped:
            with meter.waiting():
                batch = next(batches)
            state = train_step(state, batch)
            progress.step = step = progress.step + 1
            meter.flush(checkpoints)
            done = step == config.train.steps
            stop.poll()
            if step % config.train.log_every == 0 or done:
                state = meter.take(state, step)
            validate = bool(every) and (step % every == 0 or done)
            if validate or done or stop or step % config.checkpoint.every == 0:
                meter.flush(checkpoints)
                meter.check_finite(state.metrics, step, checkpoints)
                with meter.paused():
                    metrics = run.validate(state.params, progress, run_log, stop) if validate else None
                    checkpoints.save(step, state, run.info(progress), metrics)
            leave_if_asked(stop, progress, checkpoints)
    finally:
        batches.close()


def leave_if_asked(stop: StopRequest, progress: Progress, checkpoints: Checkpoints) -> None:
    """Raises Interrupted after a stop request, when the checkpoint of the last step is complete."""
    if stop:
        checkpoints.wait()
        raise Interrupted(f"{stop.requested}: saved step {progress.step}; the same command goes on from there")

"""A config, its data and the model built for them: what training and evaluation both need."""

import dataclasses
import functools
import logging
import math
import pathlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from recml_sasrec import hosts, memory, optim, sharding
from recml_sasrec.checkpoint import Checkpoints
from recml_sasrec.config import Config, ConfigError
from recml_sasrec.data.batch import Batch
from recml_sasrec.data.catalogue import content_mark
from recml_sasrec.data.loader import Data
from recml_sasrec.model import item_vectors, ranking_bias
from recml_sasrec.preemption import Interrupted, StopRequest
from recml_sasrec.ranking import evaluation
from recml_sasrec.ranking.evaluation import Which
from recml_sasrec.ranking.shards import top_k_over
from recml_sasrec.step import Params, TrainState, init_state, make_encoder, make_model, make_train_step
from recml_sasrec.writers import RunLog

log = logging.getLogger("recml_sasrec")


@dataclass(slots=True)
class Progress:
    """Where the run stands, and what early stopping must remember across a restart."""

    step: int = 0  # steps done
    best: float = -math.inf
    best_step: int = 0
    worse: int = 0  # validations since the best one
    stopped: bool = False
    interrupted: bool = False  # a stop request cut the validation of this step short


class Run:
    """A config, its data and the model built for them."""

    def __init__(self, config: Config, data: Data):
        self.config, self.data = config, data
        self.layout = sharding.make_layout(config, data.store.num_items)
        self.mean_positives = data.mean_positives(config)
        self.content_width = 0 if data.content is None else data.content.shape[1]
        self.graphdef, self._init_model = make_model(
            config, data.store.num_items, self.mean_positives, self.layout.table_rows, self.content_width
        )
        self.optimizer = optim.make_optimizer(config.optimizer, config.train.steps)
        self.schedule = optim.make_schedule(config.optimizer, config.train.steps)
        init = lambda: init_state(self._init_model, self.optimizer)  # noqa: E731
        abstract = jax.eval_shape(init)
        self.shardings: TrainState = self.layout.of(abstract)
        self._init = jax.jit(init, out_shardings=self.shardings)
        self.abstract_state: TrainState = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract, self.shardings
        )
        self._encode = jax.jit(make_encoder(self.graphdef, self.layout), out_shardings=self.layout.replicated)
        self._top_k = top_k_over(self.layout)

    def init(self) -> TrainState:
        """A fresh state, with the content of the items where the model has it."""
        state = self._init()
        if self.data.content is None:
            return state
        params, shardings = state.params, self.shardings.params
        put = lambda name, rows_VX: self.layout.put_rows(rows_VX, shardings[name])  # noqa: E731
        given = {"item_content": put("item_content", self.data.content), "item_warm": put("item_warm", self._warm())}
        # what a cold item is known by is its content alone
        table = jax.jit(lambda table_VD, warm_V: table_VD * warm_V[:, None], donate_argnums=0)
        return state._replace(params=params | given | {"item_table": table(params["item_table"], given["item_warm"])})

    def _warm(self) -> np.ndarray:
        """float32 [V]: 1 for items with a training event."""
        return (evaluation.train_counts(self.data) > 0).astype(np.float32)

    def overview(self) -> str:
        """The data and the model in three lines, and one of the content if there is."""
        store, config = self.data.store, self.config
        params = {name: p for name, p in self.abstract_state.params.items() if name != "item_warm"}
        counts = {name: sum(x.size for x in jax.tree.leaves(p)) for name, p in params.items()}
        parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        content = ""
        if self.data.content is not None:
            cold = int((self._warm() == 0).sum())
            content = (
                f"\ncontent: {self.content_width} numbers an item, {config.model.content}; {cold:,} items without a "
                "training event are left out of the loss and ranked by their content"
            )
        return (
            f"data: {store.num_users:,} users, {store.num_items:,} items, {len(store.items):,} events; "
            f"{self.data.split.description}\n"
            f"batches: {config.train.batch_size} rows x {config.data.length} positions, "
            f"next {config.data.targets} events ({self.mean_positives:.2f} distinct items a position), "
            f"{self.data.steps_per_epoch(config):.1f} steps an epoch\n"
            f"model: {sum(counts.values()):,} parameters ({parts}){content}"
        )

    def batches(self, start_step: int) -> Generator[Batch, None, None]:
        """Batches on the devices, from a step on; a process reads the rows of its own. Close it when done."""
        rows, B = self.layout.rows, self.config.train.batch_size
        batches = self.data.train_batches(self.config, start_step, sharding.block_of_process(rows, B))
        put = lambda x: jax.make_array_from_process_local_data(rows, x, (B, *x.shape[1:]))  # noqa: E731
        try:
            for batch in batches:
                yield jax.device_put(batch, rows) if hosts.count() == 1 else jax.tree.map(put, batch)
        finally:
            batches.close()

    def compile_step(self) -> jax.stages.Compiled:
        """The train step, compiled once, ahead of the loop; says what memory it needs and stops where it can't fit."""
        config, B, N = self.config, self.config.train.batch_size, self.config.data.length
        shapes = [((B, N), np.int32)] * 3 + [((B, N, config.data.targets), np.int32), ((B, N), np.float32)]
        abstract: Any = [jax.ShapeDtypeStruct(*shape, sharding=self.layout.rows) for shape in shapes]
        batch = Batch(*abstract)
        step = jax.jit(
            make_train_step(config, self.graphdef, self.optimizer, self.layout),
            donate_argnums=0,
            out_shardings=self.shardings,
        )
        start = time.perf_counter()
        compiled = step.lower(self.abstract_state, batch).compile()
        device = self.layout.mesh.devices.flat[0]
        needed, words = memory.describe(compiled)
        limit = memory.device_limit(device)
        has = memory.size(limit) if limit else "an unknown amount"
        log.info(
            "step: compiled in %.1f s for %d x %s; needs %s a device, which has %s",
            time.perf_counter() - start, self.layout.mesh.size, device.device_kind, words, has,
        )  # fmt: skip
        memory.check_fits(needed, words, limit, config.head.name)
        return compiled

    def restore_progress(self, checkpoints: Checkpoints) -> Progress:
        """That of the newest checkpoint, or of a run that has not begun."""
        step = checkpoints.latest
        return Progress() if step is None else Progress(**self.info_of(checkpoints, step)["progress"])

    def info_of(self, checkpoints: Checkpoints, step: int) -> dict[str, Any]:
        """What a checkpoint says of its run.

        Raises:
            ConfigError: it is of other items or content; a restore would cut its arrays to these, or keep its own.
        """
        info = checkpoints.info(step)
        if info["vocabulary"] != self.data.store.vocabulary:
            raise ConfigError(
                f"the checkpoint of step {step} in {checkpoints.directory} is of other items than this data's "
                f"{self.data.store.num_items:,}; give the data it was trained on or use another --workdir"
            )
        width = info.get("content_width", 0)
        if width != self.content_width:
            raise ConfigError(
                f"the checkpoint of step {step} in {checkpoints.directory} has content of {width} numbers an item, but "
                f"config.data.items_path has {self.content_width}; give the vectors it was trained on or use another "
                "--workdir"
            )
        if info.get("content", self.content_mark) != self.content_mark:  # early checkpoints say nothing of it
            raise ConfigError(
                f"the checkpoint of step {step} in {checkpoints.directory} has other content vectors than "
                "config.data.items_path; give the vectors it was trained on or use another --workdir"
            )
        return info

    @functools.cached_property
    def content_mark(self) -> str | None:
        """A fingerprint of the content vectors, where the items have some."""
        return None if self.data.content is None else content_mark(self.data.content)

    def restore_state(self, checkpoints: Checkpoints) -> TrainState:
        """The newest checkpoint's state, or a fresh one."""
        step = checkpoints.latest
        if step is None:
            return self.init()
        log.info("resuming from step %d", step)
        return checkpoints.restore(step, self.abstract_state)

    def info(self, progress: Progress) -> dict[str, Any]:
        """What a checkpoint says of its run."""
        return {
            "config": dataclasses.asdict(self.config),
            "vocabulary": self.data.store.vocabulary,
            "content_width": self.content_width,
            "content": self.content_mark,
            "progress": dataclasses.asdict(progress),
        }

    def validate(
        self, params: Params, progress: Progress, run_log: RunLog, stop: StopRequest
    ) -> dict[str, float] | None:
        """Metrics on the validation split, noted in the progress; None where a stop was requested meanwhile."""
        try:
            metrics = self.evaluate(params, "validation", stop)
        except evaluation.Stopped:
            progress.interrupted = True
            return None
        progress.interrupted = False
        step = progress.step
        run_log.write(step, {f"validation/{name}": value for name, value in metrics.items()})
        name = self.config.evaluation.best_metric
        value = metrics[name]
        if value > progress.best:
            progress.best, progress.best_step, progress.worse = value, step, 0
        else:
            progress.worse += 1
        progress.stopped = 0 < self.config.evaluation.patience <= progress.worse
        run_log.say(
            f"step {step}: validation {name} {value:.4f} (best {progress.best:.4f} at step {progress.best_step})"
        )
        if progress.stopped:
            run_log.say(f"stopping early: {progress.worse} validations without a better {name}")
        return metrics

    def evaluate(self, params: Params, which: Which, stop: StopRequest) -> dict[str, float]:
        """Metrics of the model by exact full ranking."""
        return evaluation.evaluate(
            self.config,
            self.data,
            lambda queries: self._encode(params, queries),
            item_vectors(params),
            ranking_bias(params),
            which,
            should_stop=lambda: stop.poll(at_once=True),
            top_k=self._top_k,
        )

    def final_evaluation(
        self,
        output: pathlib.Path | None,
        checkpoints: Checkpoints,
        stop: StopRequest,
        which: Which = "test",
        step: int | None = None,
    ) -> evaluation.Rows:
        """Evaluates a checkpoint (the best one unless told) beside the baselines; prints the table and writes it."""
        step = checkpoints.best if step is None else step
        assert step is not None
        self.info_of(checkpoints, step)
        params = checkpoints.restore_params(step, self.abstract_state.params)
        try:
            rows = {"sasrec": self.evaluate(params, which, stop)}
            asked = lambda: stop.poll(at_once=True)  # noqa: E731
            rows |= evaluation.evaluate_baselines(self.config, self.data, which, asked)
        except evaluation.Stopped:
            raise Interrupted(f"{stop.requested}: training is complete; the same command evaluates it") from None
        protocol = evaluation.protocol(self.config, self.data, which) | {"checkpoint": f"step {step}"}
        if hosts.is_first():
            print(evaluation.format_table(protocol, rows), flush=True)
        if output is not None and hosts.is_first():
            evaluation.write_evaluation(output, protocol, rows)
        return rows

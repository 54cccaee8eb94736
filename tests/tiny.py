"""A run small enough for a test, in this process or in a child that the test kills.

As a module: python -m tests.tiny CACHE WORKDIR [POINT=N] [config.FIELD=VALUE], see ``_install`` for the points.
"""

import hashlib
import os
import pathlib
import signal
import sys
import threading
import time

import numpy as np

from recml_sasrec.config import Config


def tiny_config(cache: object) -> Config:
    config = Config()
    config.data.cache = str(cache)
    config.data.synthetic.users, config.data.synthetic.items = 80, 120
    config.data.synthetic.events_per_user = 40
    config.data.length, config.data.targets = 16, 4
    config.split.test_start, config.split.validation_length, config.split.gap = 23_000_000, 3_000_000, 1_800
    config.model.width, config.model.blocks = 8, 1
    config.train.steps, config.train.batch_size, config.train.log_every = 24, 4, 5
    config.optimizer.learning_rate = 1e-2
    config.checkpoint.every, config.checkpoint.keep = 6, 2
    config.evaluation.every, config.evaluation.ks, config.evaluation.batch_users = 8, (5, 10), 32
    return config


def log_of(folder: pathlib.Path, histories: list[list[object]]) -> Config:
    """The config of a log without times, a history of raw item ids a user, written into the folder as CSV."""
    rows = [f'{user},"{item}"' for user, items in enumerate(histories) for item in items]
    (folder / "log.csv").write_text("user_id,item_id\n" + "\n".join(rows), encoding="utf-8")
    config = tiny_config(folder / "cache")
    config.data.source, config.data.path, config.data.time_column = "table", str(folder / "log.csv"), ""
    config.split.kind = "leave_last"
    return config


def untrained_run(folder: pathlib.Path, config: Config) -> pathlib.Path:
    """A run's folder with the checkpoint, of step 3, of a model that was only initialised."""
    from recml_sasrec import run_folder
    from recml_sasrec.checkpoint import Checkpoints
    from recml_sasrec.data.loader import open_data
    from recml_sasrec.run import Progress, Run

    (folder / "run").mkdir()
    run = Run(config, open_data(config))
    run_folder.adopt(folder / "run", config, run.data.store)
    with Checkpoints(folder / "run", 1, "ndcg@10") as checkpoints:
        checkpoints.save(3, run.init(), run.info(Progress()))
    return folder / "run"


def params_hash(workdir: pathlib.Path, step: int) -> str:
    """SHA-256 over the bytes of a checkpoint's params, in the order of their names."""
    from orbax.checkpoint import v1 as ocp

    params = ocp.load_checkpointables(workdir / "checkpoints" / str(step))["params"]
    digest = hashlib.sha256()

    def walk(node):
        if isinstance(node, dict):
            for key in sorted(node, key=str):
                digest.update(str(key).encode())
                walk(node[key])
        else:
            digest.update(np.asarray(node).tobytes())

    walk(params)
    return digest.hexdigest()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _install(points: dict[str, int], workdir: pathlib.Path) -> None:
    """Makes this process kill, or ask to stop, itself at the named points."""
    from recml_sasrec.ranking import evaluation
    from recml_sasrec.run import Run

    batches, validations = Run.batches, [0]
    evaluate = evaluation.evaluate

    def killing_batches(self, start_step):
        for step, batch in enumerate(batches(self, start_step), start=start_step + 1):
            if step == points.get("kill_at_step"):
                _kill()
            if step == points.get("stop_at_step"):
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    def killing_evaluate(*args, **kwargs):
        validations[0] += 1
        if validations[0] == points.get("kill_in_validation"):
            _kill()
        if validations[0] == points.get("stop_in_validation"):
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args, **kwargs)

    def watch():
        folder = workdir / "checkpoints"
        while True:
            if folder.exists() and any("tmp" in p.name and p.name.startswith(step) for p in folder.iterdir()):
                _kill()
            time.sleep(0)

    Run.batches, evaluation.evaluate = killing_batches, killing_evaluate
    if "kill_in_save" in points:
        step = f"{points['kill_in_save']}."
        threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    cache, workdir, *words = sys.argv[1:]
    overrides = [word for word in words if word.startswith("config.")]
    points = {name: int(value) for name, value in (word.split("=") for word in words if word not in overrides)}
    from recml_sasrec import command, hosts, trainer
    from recml_sasrec.config_file import set_field

    def train() -> None:
        hosts.initialise()
        config = tiny_config(cache)
        for override in overrides:
            set_field(config, *override.removeprefix("config.").split("="))
        trainer.train(config, workdir)

    _install(points, pathlib.Path(workdir))
    return command.run(train)


if __name__ == "__main__":
    sys.exit(main())

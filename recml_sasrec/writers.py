"""Where the numbers of a run go: metrics.jsonl, TensorBoard and the console."""

import contextlib
import datetime
import json
import os
import pathlib
import sys
from typing import Any

from tqdm import tqdm

from recml_sasrec.files import write_atomically

Row = dict[str, Any]


class RunLog:
    """Writes rows of metrics; a context.

    On a terminal a progress bar shows the last row; elsewhere each row is a plain line. Rows of steps after
    ``start``, left by a run that was killed, are dropped from metrics.jsonl: the resumed run writes them again.

    Args:
        workdir: the run's folder.
        start: steps already done.
        total: steps of the whole run.
        writes: false in processes that leave it to the first one.
    """

    def __init__(self, workdir: pathlib.Path, start: int, total: int, writes: bool = True):
        from tensorboardX import SummaryWriter

        self.total, self._writes = total, writes
        path = workdir / "metrics.jsonl" if writes else pathlib.Path(os.devnull)
        if writes:
            drop_rows_after(path, start)
        self._file = path.open("a")
        purge = start + 1 if start else None
        self._tensorboard = SummaryWriter(str(workdir), purge_step=purge, write_to_disk=writes)
        bar = writes and sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=start, unit="step", disable=not bar, dynamic_ncols=True)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()
        # on a full disk closing fails as writing did, which has been told already
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._tensorboard.close()

    def text(self, name: str, text: str) -> None:
        """Shows a text in TensorBoard, for example the config."""
        self._tensorboard.add_text(name, text)

    def write(self, step: int, row: Row) -> None:
        """Adds a row to metrics.jsonl and TensorBoard."""
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()
        for name, value in row.items():
            self._tensorboard.add_scalar(name, value, step)

    def progress(self, step: int, row: Row) -> None:
        """Shows a training row on the console."""
        if not self._writes:
            return
        shown = {
            "loss": f"{row['loss']:.4f}",
            # 0 as long as no logit is above the threshold, which says nothing of the ranking
            **{name: f"{row[name]:.4f}" for name in ("precision", "recall") if row[name]},
            **({"hit@10": f"{row['hit@10']:.4f}"} if "hit@10" in row else {}),
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "data wait": f"{row['data_wait']:.1%}",
        }
        if self._bar.disable:
            eta = datetime.timedelta(seconds=round(row["seconds_per_step"] * (self.total - step)))
            numbers = "  ".join(f"{name} {value}" for name, value in shown.items())
            print(f"step {step}/{self.total} {step / self.total:4.0%}  {numbers}  eta {eta}", flush=True)
        else:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix(shown)

    def say(self, line: str) -> None:
        """A line on the console that leaves the progress bar whole."""
        if self._writes:
            tqdm.write(line)
        sys.stdout.flush()


def drop_rows_after(path: pathlib.Path, step: int) -> None:
    """Keeps the complete rows of a metrics file up to a step, replacing the file atomically."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            done = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            continue  # torn by a kill, or damaged
        if done:
            kept.append(line + "\n")
    write_atomically(path, "".join(kept))

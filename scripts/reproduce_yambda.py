"""Yambda's published tables (arXiv 2505.22238) beside ours, every row trained and scored by the benchmark's protocol.

    python scripts/reproduce_yambda.py --size 50m --interaction listens --workdir runs/yambda50m-listens \
        --write docs/reproduction.md

Writes table.md and table.json into the folder. What is chosen is chosen on the tuning run, trained up to 25,823,600 and
scored on the validation day: the h of DecayPop and ItemKNN, and the step at which our model's training ends. The
numbers are of the final run, trained up to 25,911,800 and scored on the test day, by the metrics of the published
tables (v1).

Killed and run again with the same --workdir, it goes on: rows that are done are kept, training resumes at its
checkpoint. --rehearse runs all of it on a generated miniature in about a minute.
"""

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import reproduction  # beside this script

from recml_sasrec import command
from recml_sasrec.config import Config
from recml_sasrec.config_file import load_config
from recml_sasrec.ranking import item_knn
from recml_sasrec.ranking.baselines import DECAY_HOURS

if TYPE_CHECKING:
    from recml_sasrec.data.loader import Data

Baseline = Literal["random", "most_pop", "decay_pop", "item_knn"]
METRICS = ("ndcg@10", "ndcg@100", "recall@10", "recall@100")
OURS = "SASRec, cut_bce, next 8"
# Metric v1, in the order of METRICS. Rows without a model here stand for comparison.
PUBLISHED: dict[tuple[str, str], dict[str, tuple[float, ...]]] = {
    ("50m", "listens"): {
        "MostPop": (0.0186, 0.0249, 0.0064, 0.0321),
        "DecayPop": (0.0260, 0.0323, 0.0122, 0.0479),
        "ItemKNN": (0.0781, 0.0934, 0.0373, 0.1297),
        "iALS": (0.0407, 0.0642, 0.0128, 0.0808),
        "BPR": (0.0389, 0.0641, 0.0139, 0.0836),
        "SANSA": (0.0069, 0.0095, 0.0031, 0.0137),
        "SASRec": (0.0748, 0.0764, 0.0325, 0.1026),
    },
    ("50m", "likes"): {
        "MostPop": (0.0046, 0.0097, 0.0083, 0.0222),
        "DecayPop": (0.0180, 0.0269, 0.0333, 0.0651),
        "ItemKNN": (0.0125, 0.0251, 0.0199, 0.0648),
        "iALS": (0.0078, 0.0224, 0.0103, 0.0568),
        "BPR": (0.0056, 0.0187, 0.0073, 0.0526),
        "SANSA": (0.0068, 0.0203, 0.0105, 0.0616),
        "SASRec": (0.0100, 0.0208, 0.0175, 0.0603),
    },
    ("500m", "listens"): {
        "DecayPop": (0.0267, 0.0340, 0.0127, 0.0505),
        "SASRec": (0.0754, 0.0884, 0.0336, 0.1240),
    },
    ("5b", "listens"): {
        "DecayPop": (0.0271, 0.0348, 0.0130, 0.0509),
        "SASRec": (0.0647, 0.0847, 0.0289, 0.1214),
    },
    ("5b", "likes"): {"SASRec": (0.0136, 0.0348, 0.0217, 0.1026)},
}
FINAL = ["split.validation_length=0", "evaluation.every=0"]
BASELINES: dict[str, Baseline] = {
    "Random": "random",
    "MostPop": "most_pop",
    "DecayPop": "decay_pop",
    "ItemKNN": "item_knn",
}
EPOCHS = 100  # of the paper's SASRec
REHEARSAL = [
    "data.source=synthetic",
    "data.synthetic.users=1_000",
    "data.synthetic.items=500",
    "data.length=32",
    "model.width=16",
    "model.blocks=1",
    "model.mlp_width=64",
    "train.batch_size=64",
    "train.steps=16",
    "train.log_every=4",
    "optimizer.warmup_steps=0",
    "checkpoint.every=4",
    "evaluation.batch_users=128",
]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=reproduction.one_of("50m", "500m", "5b"), default="50m")
    interactions = reproduction.one_of("listens", "likes")
    parser.add_argument(
        "--interaction", type=interactions, default="listens", help="listens, which is Listen+, or likes"
    )
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder of the rows, runs and tables")
    parser.add_argument("--data", help="local file, or folder of the hub's layout; empty: from the hub")
    parser.add_argument("--rehearse", action="store_true", help="on a generated miniature")
    parser.add_argument("--write", type=pathlib.Path, metavar="FILE", help="put the table into this document")
    parser.epilog = "Fields such as --config.data.cache=FOLDER hold for every row."

    def reproduce() -> None:
        flags, overrides = command.parse(parser, argv)
        Reproduction(flags, overrides).run()

    return command.run(reproduce)


class Reproduction:
    """The rows of one table. ``flags`` are the command line's, ``overrides`` hold for every row."""

    def __init__(self, flags: argparse.Namespace, overrides: Sequence[str]):
        self.flags, self.overrides, self.workdir = flags, list(overrides), flags.workdir
        self.epochs = 1 if flags.rehearse else EPOCHS

    def config(self, file: str, changes: Sequence[str] = ()) -> Config:
        """A shipped config with this table's data."""
        ratio = 50 if self.flags.interaction == "listens" else 0
        data = [
            "evaluation.baselines=()",
            f"data.yambda_event={self.flags.interaction}",
            f"data.min_played_ratio={ratio}",
        ]
        data += [f"data.yambda_size={self.flags.size}", f"data.path={self.flags.data or ''}"]
        if self.flags.rehearse:
            data += [*REHEARSAL, f"data.cache={self.workdir / 'cache'}"]
        return load_config(str(reproduction.CONFIGS / file), [*data, *self.overrides, *changes])

    def ours(self, changes: Sequence[str] = ()) -> Config:
        file = f"yambda{self.flags.size}.py"
        if (self.flags.size, self.flags.interaction) == ("50m", "likes"):
            file = "yambda50m_likes.py"
        return self.config(file, [*(["evaluation.every=8"] if self.flags.rehearse else []), *changes])

    def run(self) -> None:
        from recml_sasrec import run_folder
        from recml_sasrec.data.loader import open_data

        final = self.ours(FINAL)
        data = open_data(final)
        settings = {name: getattr(self.flags, name) for name in ("size", "interaction", "rehearse")}
        settings |= {"overrides": self.overrides, **run_folder.data_marks(data.store)}
        reproduction.adopt(self.workdir, settings, self.flags.write)
        made = {
            row: reproduction.kept_row(self.workdir, row, functools.partial(self.baseline, name))
            for row, name in BASELINES.items()
        }
        made["SASRec"] = reproduction.kept_row(self.workdir, "SASRec", self.sasrec)
        made[OURS] = reproduction.kept_row(self.workdir, OURS, self.multi_label)
        self.write(made, final, data)

    def baseline(self, name: Baseline) -> dict[str, Any]:
        """A row of no training; of several hours the best by validation NDCG@10 of the tuning run is taken."""
        from recml_sasrec.data.loader import open_data
        from recml_sasrec.ranking import evaluation

        tuning = self.ours()
        tuning.evaluation.decay_hours = DECAY_HOURS
        tuning.evaluation.knn_hours = item_knn.HOURS[self.flags.interaction]
        hours = evaluation.chosen_hours(tuning, open_data(tuning), name)
        final = self.ours(FINAL)
        final.evaluation.baselines = (name,)
        final.evaluation.decay_hours = final.evaluation.knn_hours = (hours,)
        metrics = evaluation.evaluate_baselines(final, open_data(final), "test")[name]
        return {"metrics": metrics, "settings": f"h {hours:g}" if name in ("decay_pop", "item_knn") else ""}

    def sasrec(self) -> dict[str, Any]:
        """The paper's model: its settings are published, nothing is chosen."""
        from recml_sasrec import trainer
        from recml_sasrec.data.loader import open_data

        config = self.config("yambda50m_sasrec.py")
        config.train.steps = max(1, round(self.epochs * open_data(config).steps_per_epoch(config)))
        rows = trainer.train(config, self.workdir / "runs/sasrec")
        return {"metrics": rows["sasrec"], "settings": f"epochs: {self.epochs}, steps: {config.train.steps:,}"}

    def multi_label(self) -> dict[str, Any]:
        """Our model: the tuning run's best step is where the final run, with a schedule as long, ends."""
        from recml_sasrec import trainer

        tuning = self.ours()
        folder = self.workdir / "runs/multi_label_tuning"
        trainer.train(tuning, folder)
        metric = f"validation/{tuning.evaluation.best_metric}"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        best = max((line for line in lines if metric in line), key=lambda line: line[metric])
        rows = trainer.train(self.ours([*FINAL, f"train.steps={best['step']}"]), self.workdir / "runs/multi_label")
        chosen = f"{best['step']:,} of {tuning.train.steps:,} steps by {metric} {best[metric]:.4f}"
        return {"metrics": rows["sasrec"], "settings": chosen}

    def write(self, made: dict[str, dict[str, Any]], config: Config, data: "Data") -> None:
        """The table: published, ours and the difference."""
        from recml_sasrec.ranking import evaluation

        published = PUBLISHED.get((self.flags.size, self.flags.interaction), {})
        protocol = evaluation.protocol(config, data, "test")
        name = f"Yambda-{self.flags.size}, {'Listen+' if self.flags.interaction == 'listens' else 'likes'}"
        rows = []
        for model in dict.fromkeys((*made, *published)):
            values = published.get("SASRec" if model == OURS else model, ())  # ours stands against the published SASRec
            theirs = dict(zip(METRICS, values, strict=False))
            ours = {metric: made[model]["metrics"][metric] for metric in METRICS} if model in made else {}
            difference = {metric: ours[metric] - theirs[metric] for metric in METRICS if metric in ours and theirs}
            row = {"model": model, "published": theirs, "ours": ours, "difference": difference}
            rows.append(row | {"settings": made.get(model, {}).get("settings", "")})
        result = {"table": name, "rehearsal": self.flags.rehearse, "protocol": protocol, "rows": rows}
        text = markdown(result)
        reproduction.write_table(self.workdir, text, result)
        if self.flags.write:
            marker = f"reproduce_yambda {self.flags.size} {self.flags.interaction}"
            reproduction.put_between_markers(self.flags.write, marker, text)


def markdown(result: dict[str, Any]) -> str:
    """The document's section: what the numbers mean, and a cell "published / ours / difference" a metric."""
    lines = f"## {result['table']}: published / ours / difference\n\n"
    if result["rehearsal"]:
        lines += "**A rehearsal on generated events: the numbers of ours say nothing about the published ones.**\n\n"
    lines += "; ".join(f"{name}: {value}" for name, value in result["protocol"].items()) + ". "
    lines += f"`{OURS}` stands against the published SASRec.\n\n"
    lines += reproduction.markdown_row("model", *(metric.replace("ndcg", "NDCG").replace("recall", "Recall")
                                                  for metric in METRICS), "settings")  # fmt: skip
    lines += reproduction.markdown_row(*["---"] * (len(METRICS) + 2))
    for row in result["rows"]:
        cells = (" / ".join((number(row["published"], metric), number(row["ours"], metric),
                             number(row["difference"], metric, "+"))) for metric in METRICS)  # fmt: skip
        lines += reproduction.markdown_row(row["model"], *cells, row["settings"])
    return lines


def number(values: dict[str, float], metric: str, sign: str = "") -> str:
    return f"{values[metric]:{sign}.4f}".replace("0.", ".") if metric in values else "-"


if __name__ == "__main__":
    sys.exit(main())

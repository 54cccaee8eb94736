"""What sweep.py shows: points ranked by validation, with mean and spread over seeds, and the test of the chosen one."""

import argparse
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import reproduction  # beside this script

from recml_sasrec.config import Config

Point = dict[str, Any]  # field: value


def run_name(index: int, seed: int) -> str:
    return f"{index:03d}-seed{seed}"


def best_of(folder: pathlib.Path, metric: str) -> dict[str, Any]:
    """The step that validation chose, and its validation metrics."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    best = max((row for row in rows if f"validation/{metric}" in row), key=lambda row: row[f"validation/{metric}"])
    prefix = "validation/"
    metrics = {name.removeprefix(prefix): value for name, value in best.items() if name.startswith(prefix)}
    return {"step": best["step"], "validation": metrics}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation, None where there are too few values."""
    return {
        "mean": statistics.fmean(values) if values else None,
        "sd": statistics.stdev(values) if len(values) > 1 else None,
    }


def summary(
    flags: argparse.Namespace, base: Config, points: list[Point], seeds: list[int], rows: dict[tuple[int, int], dict]
) -> dict[str, Any]:
    """What results.json holds: points with the best first; those of which a run failed come after the others."""
    metric, table, protocol = base.evaluation.best_metric, [], {}
    for index, point in enumerate(points):
        made = {seed: rows[index, seed] for seed in seeds}
        done = {seed: row for seed, row in made.items() if "error" not in row}
        tests = {seed: read_test(flags.workdir / "runs" / run_name(index, seed)) for seed in done}
        protocol = protocol or next((test["protocol"] for test in tests.values()), {})
        table.append(
            {
                "point": index,
                "fields": point,
                "n": len(done),
                "validation": spread([row["validation"][metric] for row in done.values()]),
                "steps": [row["step"] for row in done.values()],
                "errors": {seed: row["error"] for seed, row in made.items() if "error" in row},
                "test": {name: spread([t["rows"]["sasrec"][name] for t in tests.values()])
                         for test in tests.values() for name in test["rows"]["sasrec"]},
            }
        )  # fmt: skip
    table.sort(key=lambda row: (len(row["errors"]), row["n"] == 0, -(row["validation"]["mean"] or 0)))
    for row in table[0 if flags.test else 1 :]:
        if not flags.test:
            del row["test"]
    protocol = {
        name: value
        for name, value in protocol.items()
        if name not in ("checkpoint", "baselines", "decay_pop", "item_knn")
    }
    return {"metric": metric, "config": flags.config, "seeds": seeds, "protocol": protocol, "points": table}


def read_test(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / "evaluation.json").read_text())


def markdown(result: dict[str, Any]) -> str:
    """The table of points, and the test metrics of the chosen one."""
    metric, points = result["metric"], result["points"]
    fields = list(points[0]["fields"])
    all_tests = sum("test" in point for point in points) > 1
    lines = f"## {result['config']}: {len(points)} points, {len(result['seeds'])} seeds\n\n"
    lines += f"By validation {metric} of the best checkpoint, mean and sample standard deviation over the seeds.\n\n"
    test = [f"test {metric}", "sd"] if all_tests else []
    lines += reproduction.markdown_row("point", *fields, f"validation {metric}", "sd", "n", "best step", *test, "")
    lines += reproduction.markdown_row(*["---"] * (len(fields) + len(test) + 6))
    for point in points:
        steps = point["steps"]
        step = f"{min(steps)} to {max(steps)}" if len(set(steps)) > 1 else str(*steps[:1]) or "-"
        cells = [*point["fields"].values(), *numbers(point["validation"]), point["n"], step]
        cells += numbers(point["test"].get(metric, {})) if all_tests else []
        by_sentence: dict[str, list[str]] = {}
        for seed, error in point["errors"].items():
            by_sentence.setdefault(error.replace("|", "\\|"), []).append(str(seed))
        errors = "; ".join(f"seed {', '.join(seeds)} failed: {error}" for error, seeds in by_sentence.items())
        lines += reproduction.markdown_row(f"{point['point']:03d}", *cells, errors)
    best = points[0]
    if not best["n"]:
        return lines
    lines += f"\nTest metrics of point {best['point']:03d}, n {best['n']}"
    lines += ", the best by validation:\n\n" if len(points) > 1 else ":\n\n"
    lines += reproduction.markdown_row("metric", "mean", "sd") + reproduction.markdown_row("---", "---", "---")
    for name, values in best["test"].items():
        lines += reproduction.markdown_row(name, *numbers(values))
    return lines + "\n" + "; ".join(f"{name}: {value}" for name, value in result["protocol"].items()) + ".\n"


def numbers(values: dict[str, float | None]) -> tuple[str, str]:
    """Mean and standard deviation as the table shows them."""
    mean, sd = values.get("mean"), values.get("sd")
    return "-" if mean is None else f"{mean:.4f}", "-" if sd is None else f"{sd:.4f}"

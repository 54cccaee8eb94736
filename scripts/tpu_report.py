"""What the TPU compiler makes of the CutBCE kernel, on a machine that needs no TPU: memory, FLOPs and schedule.

    pip install libtpu            # Linux x86-64
    python scripts/tpu_report.py --chips v5e v5p v6e 7x --write docs/benchmarks.md

Compiles ahead of time for each chip, in a process of its own, and prints a table; ``--write`` puts it between the
markers of the section "TPU: compiled schedule and memory". The schedule comes from undocumented dump flags of libtpu:
VLIW bundles, about one a cycle, of the kernel's code listed once (with the parts that run once a table tile and the
logit-by-logit loss that hardly ever runs), without waits for HBM. A measure for tuning, not something to build on.
"""

import argparse
import glob
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
SLOTS = ("MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
ITEMS = 876_939  # Yambda-50M
LOGITS = 2**20
TARGETS = 8  # slots a token


def case(tokens, width, dtype="bfloat16", items=ITEMS, bias=False, what="sweep", schedule=False):
    return {
        "tokens": tokens,
        "width": width,
        "dtype": dtype,
        "items": items,
        "bias": bias,
        "what": what,
        "schedule": schedule,
    }


def cases(chip: str, part: str) -> list[dict]:
    """``quick``: what CI compiles. ``schedule``: the race. ``memory``: the whole grid of shapes."""
    even = 64 * 2048  # whole tiles: the code of the last, ragged one would be listed a second time
    races = [case(2048, 128, items=even, schedule=True), case(2048, 128, items=even, bias=True, schedule=True)]
    if part == "quick":
        return [case(512, 128, items=100_003), case(512, 64, bias=True, items=100_003)]
    if part == "schedule":
        return races + [case(2048, width, items=even, bias=True, schedule=True) for width in (64, 256)]
    dtypes = ("bfloat16", "float32")
    grid = [case(t, d, dtype, what="head") for t in (2048, 4096) for d in (64, 128, 256) for dtype in dtypes]
    grid += [case(4096, 128, dtype, bias=True, what=what) for dtype in dtypes for what in ("sweep", "head")]
    return grid + ([case(65_536, 64, items=10**7, what="head")] if chip == "v6e" else [])


def environment(chip: str, dump: str | None) -> dict[str, str]:
    """libtpu reads these once, when a process first uses it; off a TPU they keep it from asking the metadata server."""
    generation = TOPOLOGIES[chip].split(":")[0]
    accelerator = "v5litepod-8" if generation == "v5e" else f"{generation}-8"
    variables = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_ID": "0",
    }
    variables |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": accelerator}
    if dump:
        variables["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
    return {**os.environ, **variables, "PYTHONPATH": ROOT}


def run(chip: str, selected: list[dict]) -> list[dict]:
    """Compiles the cases in another process; yields a result a case, ``error`` in it where the compiler refused."""
    with tempfile.TemporaryDirectory() as dump:
        wants_schedule = any(c["schedule"] for c in selected)
        command = [sys.executable, __file__, "--child", chip, json.dumps(selected), dump]
        child = subprocess.run(
            command, env=environment(chip, dump if wants_schedule else None), stdout=subprocess.PIPE, text=True
        )
    results = [json.loads(line[7:]) for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    missing = [{**c, "chip": chip, "error": f"exit code {child.returncode}"} for c in selected[len(results) :]]
    return results + missing


def compile_cases(chip: str, selected: list[dict], dump: str) -> None:
    """The child: prints ``RESULT {...}`` a case."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[:1]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for selected_case in selected:
        for old in glob.glob(f"{dump}/*"):
            os.remove(old)
        try:
            with jax.set_mesh(mesh):
                result = compile_case(mesh, selected_case)
            if selected_case["schedule"]:
                result |= schedule(dump, result["plan_logits"])
        except Exception as error:  # the compiler's refusal is the answer for this shape
            result = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        print("RESULT " + json.dumps({"chip": chip, **selected_case, **result}), flush=True)


def compile_case(mesh, c: dict) -> dict:
    import jax

    from recml_sasrec.heads import cut_tpu

    def spec(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, jax.P()))

    h, table = spec((c["tokens"], c["width"]), c["dtype"]), spec((c["items"], c["width"]), c["dtype"])
    bias = spec((c["items"],), "float32") if c["bias"] else None
    weights, targets = spec((c["tokens"],), "float32"), spec((c["tokens"], TARGETS), "int32")
    plan = cut_tpu.plan_for(h, table)
    fn, arguments = program(c["what"], plan), (h, table, bias, weights, targets)
    compiled = jax.jit(fn, keep_unused=False).lower(*arguments).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    assert memory is not None
    arrays = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)]
    flops = update_flops(c, plan) + matmul_flops(
        jax.make_jaxpr(lambda *a: cut_tpu.kernel_call(plan, *a))(h, table, bias, weights).jaxpr
    )
    return {
        "plan": str(plan),
        "dh": plan.dh,
        "plan_logits": plan.items * plan.tokens,
        "output": memory.output_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "dense": c["tokens"] * c["items"] * (2 if c["dtype"] == "bfloat16" else 4),
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "largest_share": max(arrays) / (c["tokens"] * c["items"]),
        "flops": flops / (6 * c["tokens"] * c["items"] * c["width"]),
    }


def program(what: str, plan):
    """``sweep``: the kernel's own outputs, loss and counts included. ``head``: cut_bce and all its gradients."""
    import jax

    from recml_sasrec.heads import cut_bce, cut_tpu

    if what == "sweep":
        return lambda h, table, bias, weights, _: cut_tpu.sweep(
            h, table, bias, weights, threshold=0.0, tile=None, plan=plan
        )
    loss = lambda h, table, bias, weights, targets: cut_bce(h, table, targets, bias, weights)  # noqa: E731
    return lambda *arguments: jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arguments)


def update_flops(c: dict, plan) -> int:
    """Of the products that add the targets' updates to a bfloat16 gradient: those of targets spread over all items.

    A tile of the items takes the chunks that hold its updates, at their ends shared with its neighbours.
    """
    from recml_sasrec.heads.cut_tpu_kernel import UPDATES

    if c["what"] != "head" or c["dtype"] != "bfloat16" or plan.blocks > 1:
        return 0
    chunks = -(-c["items"] // plan.items) + -(-c["tokens"] * TARGETS // UPDATES)
    return 2 * chunks * plan.items * 2 * UPDATES * c["width"]


def matmul_flops(jaxpr) -> int:
    """FLOPs of the matmuls of a program with a kernel, padding included.

    Of a kernel's conditional parts only the costliest counts: the two forms of a tile exclude each other, and the
    exact loss of overflowing tiles is cheaper than either.
    """
    total, conditional = 0, 0
    for eqn in jaxpr.eqns:
        name, inner = (
            eqn.primitive.name,
            [x for p in eqn.params.values() for x in (p if isinstance(p, tuple) else (p,))],
        )
        inner = [getattr(x, "jaxpr", x) for x in inner if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
        if name == "dot_general":
            ((contract, _), _), a, b = eqn.params["dimension_numbers"], *(v.aval.shape for v in eqn.invars)
            total += 2 * math.prod(a) * math.prod(b) // math.prod(a[i] for i in contract)
        elif name == "cond":
            conditional = max(conditional, *map(matmul_flops, inner))
        elif name == "pallas_call":
            total += math.prod(eqn.params["grid_mapping"].grid) * matmul_flops(eqn.params["jaxpr"])
        else:
            total += eqn.params.get("length", 1) * sum(map(matmul_flops, inner))
    return total or conditional


def schedule(dump: str, logits: int) -> dict:
    """Bundles and the bound of the busiest unit, per 2**20 logits, of the kernel's dumped schedule."""
    paths = glob.glob(f"{dump}/*-cut_bce_sweep*-final_hlo-static-per-bundle-utilization.txt")
    rows = [
        [int(n) for n in line.split()]
        for line in pathlib.Path(paths[0]).read_text().splitlines()
        if re.fullmatch(r"[\d ]+\s*", line)
    ]
    capacity, *rows = [row for row in rows if len(row) == len(SLOTS)]
    used = {slot: sum(row[i] for row in rows) for i, slot in enumerate(SLOTS)}
    shares = {slot: used[slot] / capacity[i] for i, slot in enumerate(SLOTS) if slot not in ("FILL", "SPILL")}
    busiest = max(shares, key=lambda slot: shares[slot])
    scale = LOGITS / logits
    return {
        "bundles": len(rows) * scale,
        "bound": shares[busiest] * scale,
        "unit": busiest,
        "fills": used["FILL"] * scale,
    }


def table(results: list[dict]) -> str:
    """Markdown: the schedules, then memory and FLOPs."""
    lines = _row("chip", "D", "bias", "bundles / 2^20 logits", "bound", "share of bound", "busiest unit", "refills")
    lines += _row(*["---"] * 8)
    for r in (r for r in results if "bundles" in r):
        share = r["bound"] / r["bundles"]
        bundles, bound, fills = (f"{r[name]:,.0f}" for name in ("bundles", "bound", "fills"))
        lines += _row(r["chip"], r["width"], _yes(r["bias"]), bundles, bound, f"{share:.0%}", r["unit"], fills)
    names = ("chip", "what", "T", "V", "D", "dtype", "bias", "dh", "outputs MiB", "temporaries MiB", "of dense logits")
    lines += ["", *_row(*names, "largest array / TV", "FLOPs / 6TVD"), *_row(*["---"] * 13)]
    for r in (r for r in results if not r["schedule"]):
        shape = (f"{r['tokens']:,}", f"{r['items']:,}", r["width"], r["dtype"], _yes(r["bias"]))
        if "error" in r:
            lines += _row(r["chip"], r["what"], *shape, r["error"], *[""] * 5)
            continue
        memory = (f"{r['output'] / 2**20:,.0f}", f"{r['temp'] / 2**20:,.1f}", f"{r['temp'] / r['dense']:.2%}")
        counted = (f"{r['largest_share']:.4f}", f"{r['flops']:.3f}")
        lines += _row(r["chip"], r["what"], *shape, r["dh"], *memory, *counted)
    return "\n".join(lines)


def _row(*cells) -> list[str]:
    return ["| " + " | ".join(map(str, cells)) + " |"]


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def write(path: str, text: str, marker: str = "tpu_report", title: str = "TPU: compiled schedule and memory") -> None:
    """Replaces what is between the markers; appends the section where there is none."""
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    file = pathlib.Path(path)
    old = file.read_text() if file.exists() else "# Benchmarks\n"
    if begin not in old:
        old = f"{old.rstrip()}\n\n## {title}\n\n{begin}\n{end}\n"
    before, rest = old.split(begin)
    file.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=["v5e", "v5p", "v6e", "7x"])
    parser.add_argument("--parts", nargs="+", choices=("quick", "schedule", "memory"), default=["schedule", "memory"])
    parser.add_argument("--write", metavar="FILE", help="put the table into this Markdown file")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    parser.add_argument("--read", nargs="+", metavar="JSON", help="tables of earlier results; compiles nothing")
    args = parser.parse_args()
    if args.read:
        results = [r for path in args.read for r in json.loads(pathlib.Path(path).read_text())]
    else:
        results = [r for chip in args.chips for part in args.parts for r in run(chip, cases(chip, part))]
    print(json.dumps(results, indent=1) if args.json else table(results))
    if args.write:
        write(args.write, table(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        compile_cases(sys.argv[2], json.loads(sys.argv[3]), sys.argv[4])
    else:
        main()

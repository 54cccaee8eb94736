"""What a training step needs of each chip of a TPU slice, and what the chips send each other, without a TPU.

    pip install libtpu            # Linux x86-64
    python scripts/mesh_report.py --topology v6e:2x4 --batch 64 --length 256 --items 876939 --width 128 --layout sharded
    python scripts/mesh_report.py --grid --write docs/benchmarks.md      # the table of that file, half an hour
    python scripts/mesh_report.py --scaling --write docs/benchmarks.md   # on 1 to 8 CPU devices, without libtpu

Compiles the whole step (two blocks, L = 8, ranks, float32 state) ahead of time, in a process of its own. ``dense`` is
the head with all logits in memory on copies of the table, ``replicated`` CutBCE on copies, ``sharded`` CutBCE with
table, gradient and moments split over all chips; ``--data`` and ``--shards`` set another mesh.

``peak_bytes_per_chip`` is state, batch, temporaries and the program. ``collective_bytes_per_step`` is what a chip
sends in rings: of n chips and the bytes of the whole array, (n - 1)/n for an all-gather, a reduce-scatter or an
all-to-all, twice that for an all-reduce, all of it for a permutation.
"""

import argparse
import json
import math
import pathlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from typing import NamedTuple

import tpu_report

HEADS = {"dense": "dense_bce", "replicated": "cut_bce", "sharded": "cut_bce"}
TARGETS = 8
SMALL = {"batch": 8, "length": 128, "items": 1_000_000, "width": 64}  # of the shares of CPU devices
GRID = (
    *({"layout": layout, "width": width} for width in (128, 256) for layout in HEADS),
    *({"layout": layout, "width": 128, "dtype": "bfloat16"} for layout in ("replicated", "sharded")),
    {"layout": "sharded", "width": 64},
    {"layout": "sharded", "width": 128, "data": 2, "shards": 4},
    *({"layout": "sharded", "width": 128, "items": 10**7, "optimizer": name} for name in ("adam", "adagrad")),
)

SCALING = tuple(
    {"layout": layout, "data": n if layout == "dense" else 1, "shards": 1 if layout == "dense" else n} | SMALL
    for layout in ("dense", "sharded")
    for n in (1, 2, 4, 8)
)


def make_step(c: dict, devices):
    """(the compiled step of a case for these devices, the bytes of its whole float32 table)."""
    import jax
    import numpy as np

    from recml_sasrec import optim, sharding
    from recml_sasrec.config import Config
    from recml_sasrec.data.batch import Batch
    from recml_sasrec.step import init_state, make_model, make_train_step

    config, (B, N, L) = Config(), (c["batch"], c["length"], TARGETS)
    config.data.length, config.data.targets, config.train.batch_size = N, L, B
    config.model.width, config.model.dtype, config.head.name = c["width"], c["dtype"], HEADS[c["layout"]]
    config.optimizer.table, config.mesh.data, config.mesh.items = c["optimizer"], c["data"], c["shards"]
    layout = sharding.make_layout(config, c["items"], devices)
    graphdef, init_model = make_model(config, c["items"], L, layout.table_rows)
    optimizer = optim.make_optimizer(config.optimizer, config.train.steps)
    state = jax.eval_shape(lambda: init_state(init_model, optimizer))
    shardings = layout.of(state)
    shaped = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    shapes = [((B, N), np.int32)] * 3 + [((B, N, L), np.int32), ((B, N), np.float32)]
    batch = Batch(*(jax.ShapeDtypeStruct(*shape, sharding=layout.rows) for shape in shapes))
    step = jax.jit(make_train_step(config, graphdef, optimizer, layout), donate_argnums=0, out_shardings=shardings)
    with jax.set_mesh(layout.mesh):  # tells the kernel which chip it's traced for
        compiled = step.lower(jax.tree.map(shaped, state, shardings), batch).compile()
    return compiled, 4 * layout.table_rows * c["width"]


def compile_case(c: dict) -> dict:
    """The child's: memory and traffic of a case."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=c["topology"]).devices
    c = {**c, **mesh_of(c, len(devices))}
    compiled, table = make_step(c, devices)
    # jax below 0.12 can't read the text of a program for v6e that scatters on a SparseCore
    memory, program = compiled.memory_analysis(), Program(compiled.as_text())
    parts = {
        "state_and_batch": memory.argument_size_in_bytes,
        "outputs_not_aliased": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    found = program.collectives()
    by_kind: Counter = Counter()
    for x in found:
        by_kind[x.kind] += x.sent
    return {
        **c,
        "peak_bytes_per_chip": sum(parts.values()),
        "collective_bytes_per_step": sum(by_kind.values()),
        "peak_parts": parts,
        "table_bytes": table,
        "collectives": dict(by_kind),
        "largest_collectives": [x._asdict() for x in sorted(found, key=lambda x: -x.sent)[:8]],
        "collectives_in_loops": sum(x.in_loop for x in found),
        "largest_gather_bytes": max((x.array for x in found if x.kind == "all-gather"), default=0),
        "largest_temporaries": program.largest(8),
    }


def mesh_of(c: dict, chips: int) -> dict[str, int]:
    """The mesh that the layout means, unless one was named."""
    if c["data"] or c["shards"]:
        return {}
    return {"data": 1, "shards": chips} if c["layout"] == "sharded" else {"data": chips, "shards": 1}


CALLEES = r"\b(?:calls|to_apply|body|condition|(?:true|false|branch|called)_computations?)=(\{[^}]*\}|%?[\w.\-]+)"


class Collective(NamedTuple):
    kind: str
    op_name: str
    chips: int  # that take part
    array: int  # bytes of the whole array
    sent: int  # bytes a chip sends in a step
    in_loop: bool


class Program:
    """A compiled program's text: its computations, how often a step runs each, and whether a loop does."""

    def __init__(self, text: str):
        self.instructions: dict[str, list[str]] = defaultdict(list)
        name = entry = ""
        for line in text.splitlines():
            if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                name = header[2]
                entry = name if header[1] else entry
            elif line.startswith(" ") and " = " in line:
                self.instructions[name].append(line)
        self.entry, self.runs, self.looped = entry, Counter[str](), set[str]()
        self._visit(entry, 1, False)

    def _visit(self, name: str, runs: int, looped: bool) -> None:
        self.runs[name] += runs
        self.looped |= {name} if looped else set()
        for line in self.instructions[name]:
            loop = " while(" in line
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line) if loop else None
            for callee in re.findall(r"[\w.\-]+", " ".join(re.findall(CALLEES, line))):
                self._visit(callee, runs * (int(trips[1]) if trips else 1), looped or loop)

    def collectives(self) -> list[Collective]:
        """Those of a step, each with its bytes of all runs.

        Raises:
            ValueError: a form this reader doesn't know.
        """
        found = []
        pattern = r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?"
        for name, runs in self.runs.items():
            for line in self.instructions[name]:
                result, opcode = parse(line)
                if kind := re.fullmatch(pattern, opcode):
                    arrays = sizes(result)
                    if kind[2] and kind[1] == "all-gather":  # (operands, results)
                        arrays = arrays[len(arrays) // 2 :]
                    if kind[2] and kind[1] == "collective-permute":  # (operand, result, contexts)
                        arrays = arrays[1:2]
                    n = group_size(line) if kind[1] != "collective-permute" else 1
                    array = sum(arrays) * (n if kind[1] == "reduce-scatter" else 1)
                    share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(kind[1], (n - 1) / n)
                    sent = round(array * share) * runs
                    found.append(Collective(kind[1], op_name(line), n, array, sent, name in self.looped))
        return found

    def matmul_flops(self) -> int:
        """Of a step on a device."""
        total = 0
        for name, runs in self.runs.items():
            shapes = {}
            for line in self.instructions[name]:
                result, opcode = parse(line)
                shapes[re.match(r"\s+(?:ROOT )?%?(\S+) =", line)[1]] = dims = dimensions(result)
                if opcode == "dot":
                    left = shapes[re.search(r" dot\(.*?%?([\w.\-]+),", line)[1]]
                    contracted = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", line)[1].split(",")
                    total += runs * 2 * math.prod(dims) * math.prod(left[int(d)] for d in contracted)
        return total

    def largest(self, count: int) -> list[dict]:
        """The largest arrays that the step writes outside of its loops, in main memory."""
        arrays: Counter = Counter()
        for line in self.instructions[self.entry]:
            result, opcode = parse(line)
            if opcode in ("parameter", "tuple", "get-tuple-element", "bitcast") or opcode.endswith(("-start", "-done")):
                continue
            for array in re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", result):
                if "S(" not in array:
                    key = re.sub(r"\{.*", "", array), op_name(line)
                    arrays[key] = sizes(array)[0]
        return [{"array": a, "op_name": op, "bytes": size} for (a, op), size in arrays.most_common(count)]


def parse(line: str) -> tuple[str, str]:
    """(type of the result, opcode) of an instruction."""
    found = re.match(r"\s+(?:ROOT )?%?\S+ = (.*?) ([a-z][a-z0-9\-]*)\(", line)
    return (found[1], found[2]) if found else ("", "")


def dimensions(result: str) -> list[int]:
    found = re.search(r"\w+\[([\d,]*)\]", result)
    return [int(d) for d in found[1].split(",") if d] if found else []


def sizes(result: str) -> list[int]:
    """Bytes of each array of a type."""
    arrays = re.findall(r"([a-z]+)(\d*)\w*\[([\d,]*)\]", result)
    return [math.prod(int(d) for d in dims.split(",") if d) * max(int(bits or 8), 8) // 8 for _, bits, dims in arrays]


def group_size(line: str) -> int:
    """Devices of a group: a mesh's axes, groups by count and size, or lists of devices."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line):
        axes = dict(re.findall(r"(\w+)'?=(\d+)", mesh[1]))
        return math.prod(int(axes[name]) for name in re.findall(r"'(\w+)'", mesh[2]))
    if groups := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(groups[1])
    if groups := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(groups[1].split(","))
    raise ValueError(f"no known form of replica_groups in: {line.strip()[:300]}")


def op_name(line: str) -> str:
    found = re.search(r'op_name="([^"]*)"', line)
    return found[1].removeprefix("jit(train_step)/") if found else ""


def scaling_case(c: dict) -> dict:
    """The child's: a device's share of the same step on the first n CPU devices."""
    import jax

    compiled, _ = make_step(c, jax.devices()[: c["data"] * c["shards"]])
    flops = Program(compiled.as_text()).matmul_flops()
    return {**c, "flops": flops, "temporaries": compiled.memory_analysis().temp_size_in_bytes}


def run(c: dict, child: str = "--child") -> dict:
    """Compiles a case in another process: libtpu takes its settings from the environment once."""
    chip = c.get("topology", "v6e").split(":")[0].removeprefix("tpu")
    env = tpu_report.environment(chip, None) | {"JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, __file__, child, json.dumps(c)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return results[0] if results else {**c, "error": f"exit code {done.returncode}"}


def table(results: list[dict]) -> str:
    """Markdown: memory, then traffic."""
    size = lambda n: f"{n / 2**30:.2f}"  # noqa: E731
    row = tpu_report._row
    names = ("layout", "mesh", "V", "D", "computes in", "table's optimizer", "**peak GiB**", "state, batch")
    lines = row(*names, "temporaries", "program", "largest arrays written, MiB") + row(*["---"] * 11)
    for r in results:
        case = [*_case(r), r["optimizer"]]
        if "error" in r:
            lines += row(*case, r["error"], *[""] * 4)
            continue
        parts = r["peak_parts"]
        held = parts["state_and_batch"] + parts["outputs_not_aliased"]
        arrays = Counter(f"{a['array']} {a['bytes'] / 2**20:,.0f}" for a in r["largest_temporaries"][:6])
        largest = ", ".join(f"{name} (x{n})" if n > 1 else name for name, n in list(arrays.items())[:3])
        lines += row(
            *case, *map(size, (r["peak_bytes_per_chip"], held, parts["temporaries"], parts["program"])), largest
        )
    results = [r for r in results if "error" not in r]
    lines += [
        "",
        *row("layout", "mesh", "V", "D", "computes in", "**MiB a step**", "of the copies'", *KINDS, "largest"),
    ]
    lines += row(*["---"] * (8 + len(KINDS)))
    copies = {_case(r)[2:]: r["collective_bytes_per_step"] for r in results if r["layout"] == "replicated"}
    for r in results:
        total, of = r["collective_bytes_per_step"], copies.get(_case(r)[2:])
        kinds = (f"{r['collectives'].get(kind, 0) / 2**20:,.1f}" for kind in KINDS)
        first = r["largest_collectives"][0]
        what = f"{first['kind']} of {first['array'] / 2**20:,.1f} MiB"
        lines += row(*_case(r), f"{total / 2**20:,.1f}", f"1/{of / total:.1f}" if of else "", *kinds, what)
    return "\n".join(lines)


KINDS = ("all-reduce", "all-gather", "reduce-scatter")


def _case(r: dict) -> tuple[str, ...]:
    mesh = f"{r['data']} x {r['shards']}"
    return r["layout"], mesh, f"{r['items']:,}", str(r["width"]), r["dtype"]


def scaling_table(results: list[dict]) -> str:
    lines = tpu_report._row("layout", "mesh", "matmul GFLOP a device", "x n", "temporaries MiB a device", "x n")
    lines += tpu_report._row(*["---"] * 6)
    for r in results:
        n = r["data"] * r["shards"]
        first = next(x for x in results if x["layout"] == r["layout"])
        shares = (r[name] * n / first[name] for name in ("flops", "temporaries"))
        cells = f"{r['flops'] / 1e9:,.2f}", f"{r['temporaries'] / 2**20:,.1f}"
        both = (x for pair in zip(cells, (f"{share:.3f}" for share in shares), strict=True) for x in pair)
        lines += tpu_report._row(r["layout"], f"{r['data']} x {r['shards']}", *both)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v6e:2x4", help="chip and slice, for example v5e:2x4 or v5p:2x2x2")
    parser.add_argument("--batch", type=int, default=64, help="rows of a step, over all chips")
    parser.add_argument("--length", type=int, default=256, help="positions of a row")
    parser.add_argument("--items", type=int, default=tpu_report.ITEMS, help="of the catalogue")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layout", choices=HEADS, default="sharded")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    parser.add_argument("--optimizer", choices=("adam", "adam_bf16", "adagrad", "adafactor"), default="adam")
    parser.add_argument("--data", type=int, default=0, help="config.mesh.data, if the layout's own mesh isn't meant")
    parser.add_argument("--shards", type=int, default=0, help="config.mesh.items, likewise")
    parser.add_argument("--grid", action="store_true", help="all the cases of docs/benchmarks.md")
    parser.add_argument("--scaling", action="store_true", help="shares of 1, 2, 4 and 8 CPU devices instead")
    parser.add_argument("--read", nargs="+", metavar="JSON", help="tables of earlier results; compiles nothing")
    parser.add_argument("--write", metavar="FILE", help="put the table into this Markdown file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    names = "topology batch length items width layout dtype optimizer data shards".split()
    case = {name: getattr(args, name) for name in names}
    if args.scaling:
        results = [run({**case, **c}, "--scaling-child") for c in SCALING]
        text, marker, title = scaling_table(results), "mesh_scaling", "Mesh: a device's share"
    else:
        if args.read:
            results = [json.loads(pathlib.Path(path).read_text()) for path in args.read]
        else:
            results = [run({**case, **c}) for c in (GRID if args.grid else [{}])]
        text, marker, title = table(results), "mesh_report", "Mesh: memory and traffic per chip"
    print(json.dumps(results if len(results) > 1 else results[0], indent=1) if args.json else text)
    if args.write:
        tpu_report.write(args.write, text, marker, title)
    if any("error" in r for r in results):
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] in (["--child"], ["--scaling-child"]):
        case = json.loads(sys.argv[2])
        try:
            result = {"--child": compile_case, "--scaling-child": scaling_case}[sys.argv[1]](case)
        except Exception as error:  # the compiler's refusal is the answer for this case
            result = {**case, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        print("RESULT " + json.dumps(result), flush=True)
    else:
        main()

"""Time and peak memory of the loss head's variants: loss, counts and gradients of hidden, table and bias.

    python scripts/bench_head.py                    T 1,024, V 200,000, D 64, L 8, float32
    python scripts/bench_head.py --threads 1 --tokens 2048 --items 12101

Each variant is compiled and run in a subprocess of its own. The subprocesses take turns, one call each, so that a busy
machine disturbs all of them alike; the table shows medians. Peak memory on a CPU is the process's peak resident set,
Python, JAX, its compiler and the arguments included (an idle process has about 300 MiB); elsewhere it is the device's
peak bytes in use, arguments included. Runs on whatever device JAX finds.
"""

import argparse
import functools
import os
import resource
import statistics
import subprocess
import sys
import time

VARIANTS = {
    "dense": "dense, multi-hot labels",
    "dense_sparse": "dense logits, sparse targets",
    "three_sweep": "three sweeps in XLA: loss, dh, dE and db",
    "two_sweep": "two sweeps (recomputing backward)",
    "cut": "single sweep (cut_bce)",
    "matmuls": "the three matmuls alone",
}


def main() -> None:
    flags = parse_flags()
    if flags.variant:
        work(flags)
        return
    environment = dict(os.environ)
    if flags.threads == 1:
        one = " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "") + one
    workers = {}
    for variant in flags.variants.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        workers[variant] = subprocess.Popen(command, **pipes)
        workers[variant].device = workers[variant].stdout.readline().strip()  # "ready" comes after compilation
    times: dict[str, list[float]] = {variant: [] for variant in workers}
    cpu: dict[str, list[float]] = {variant: [] for variant in workers}
    for _ in range(flags.repeats):
        for variant, worker in workers.items():
            wall, busy = map(float, ask(worker, "run").split())
            times[variant].append(wall)
            cpu[variant].append(busy)
    peaks = {variant: float(ask(worker, "peak")) for variant, worker in workers.items()}
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    report(flags, next(iter(workers.values())).device, times, cpu, peaks)


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tile", type=int, default=0, help="items of a tile; 0: the default")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="1: one thread; 0: all of the machine's")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, comma-separated")
    parser.add_argument("--variant", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def ask(worker: subprocess.Popen, question: str) -> str:
    worker.stdin.write(question + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise SystemExit(f"a variant stopped with code {worker.wait()}; out of memory?")
    return answer


def work(flags: argparse.Namespace) -> None:
    """A subprocess: compiles its variant, then runs it once whenever asked to."""
    if flags.threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import jax

    arguments = jax.block_until_ready(problem(flags))
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    call = jax.jit(build(flags, flags.variant)).lower(*arguments).compile()
    jax.block_until_ready(call(*arguments))
    print(f"{device.platform} {device.device_kind}", flush=True)
    for line in sys.stdin:
        if line.strip() == "run":
            start, busy = time.perf_counter(), time.process_time()
            jax.block_until_ready(call(*arguments))
            print(time.perf_counter() - start, time.process_time() - busy, flush=True)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            if not on_cpu:
                peak = device.memory_stats()["peak_bytes_in_use"] / 2**20
            print(peak, flush=True)


def problem(flags: argparse.Namespace) -> tuple:
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 3)
    h_TD = jax.random.normal(keys[0], (flags.tokens, flags.width), flags.dtype)
    table_VD = (jax.random.normal(keys[1], (flags.items, flags.width)) * 0.05).astype(flags.dtype)
    targets_TL = jax.random.randint(keys[2], (flags.tokens, flags.targets), 0, flags.items)
    bias_V = jnp.full(flags.items, jnp.log(flags.targets / flags.items))
    return h_TD, table_VD, targets_TL, bias_V, jnp.ones(flags.tokens)


def build(flags: argparse.Namespace, variant: str):
    """The function of ``problem``'s arrays that a variant times."""
    import jax

    from recml_sasrec.heads import cut_bce, dense_bce

    if variant == "matmuls":
        return functools.partial(matmuls, tile=flags.tile or None)
    if variant == "three_sweep":
        return functools.partial(three_sweep, tile=flags.tile or None)
    head = {"dense": dense_bce, "dense_sparse": dense_sparse, "cut": cut_bce, "two_sweep": two_sweep}[variant]
    if variant in ("cut", "two_sweep") and flags.tile:
        head = functools.partial(head, tile=flags.tile)

    def loss(h_TD, table_VD, bias_V, targets_TL, weight_T):
        return head(h_TD, table_VD, targets_TL, bias_V, weight_T)

    gradient = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    return lambda h, table, targets, bias, weight: gradient(h, table, bias, targets, weight)


def default_tile(tokens: int) -> int:
    import jax

    from recml_sasrec.heads import cut_xla

    return cut_xla.default_tile(tokens, cut_xla.CPU_LOGITS if jax.default_backend() == "cpu" else cut_xla.GPU_LOGITS)


def two_sweep(h_TD, table_VD, targets_TL, bias_V, weight_T, **options):
    """Forward sweep, then a backward that computes the logits again: cut_bce's per-token form, averaged."""
    from recml_sasrec.heads import cut_bce

    loss_T, counts = cut_bce(h_TD, table_VD, targets_TL, bias_V, weight_T, reduction="none", **options)
    return loss_T.sum() / weight_T.sum(), counts


def three_sweep(h_TD, table_VD, targets_TL, bias_V, weight_T, tile):
    """What XLA does without a kernel: the logits are computed for the loss, for dh, and for dE and db; 10 T V D."""
    import jax
    import jax.numpy as jnp

    from recml_sasrec.heads import cut_bce, rows
    from recml_sasrec.heads.arguments import positive_set

    loss, counts = cut_bce(h_TD, table_VD, targets_TL, bias_V, weight_T, tile=tile)
    weight_T = weight_T / weight_T.sum()
    weighted_TD = rows.weighted(h_TD, weight_T)
    items = table_VD.shape[0]
    tile = min(tile or default_tile(h_TD.shape[0]), items)
    starts = jnp.arange(-(-items // tile)) * tile  # the last tile is whole, and what it repeats is left out

    def sigmoids(start):
        first = jnp.minimum(start, items - tile)
        rows_KD, bias_K = (jax.lax.dynamic_slice_in_dim(x, first, tile) for x in (table_VD, bias_V))
        z_KT = jnp.matmul(rows_KD, h_TD.T, preferred_element_type=jnp.float32) + bias_K[:, None]
        fresh_K1 = (jnp.arange(tile) >= start - first)[:, None]
        return first, rows_KD, jnp.where(fresh_K1, jax.nn.sigmoid(z_KT), 0)

    def add_dh(dh_DT, start):
        _, rows_KD, s_KT = sigmoids(start)
        s_KT = s_KT.astype(h_TD.dtype)
        return dh_DT + jnp.einsum("kd,kt->dt", rows_KD, s_KT, preferred_element_type=jnp.float32), None

    def add_rows(carry, start):
        first, _, s_KT = sigmoids(start)
        parts = jnp.matmul(s_KT.astype(h_TD.dtype), weighted_TD, preferred_element_type=jnp.float32), s_KT @ weight_T
        old = [jax.lax.dynamic_slice_in_dim(x, first, tile) for x in carry]
        return [
            jax.lax.dynamic_update_slice_in_dim(x, y + z, first, 0) for x, y, z in zip(carry, old, parts, strict=True)
        ], None

    dh_DT, _ = jax.lax.scan(add_dh, jnp.zeros(h_TD.shape[::-1]), starts)
    (dtable_VD, dbias_V), _ = jax.lax.scan(add_rows, [jnp.zeros(table_VD.shape), jnp.zeros(items)], starts)
    ids_TL, _ = positive_set(targets_TL, items)
    rows_TLD = rows.take(table_VD, ids_TL)
    dh_TD = weight_T[:, None] * (dh_DT.T - rows_TLD.astype(jnp.float32).sum(1))
    dtable_VD = dtable_VD.at[ids_TL].add(-weighted_TD[:, None].astype(jnp.float32), mode="drop")
    dbias_V = dbias_V.at[ids_TL].add(-weight_T[:, None], mode="drop")
    return (loss, counts), (dh_TD.astype(h_TD.dtype), dtable_VD.astype(table_VD.dtype), dbias_V)


def dense_sparse(h_TD, table_VD, targets_TL, bias_V, weight_T):
    """Materialised logits, but targets gathered from them: no multi-hot labels."""
    import jax
    import jax.numpy as jnp

    from recml_sasrec.heads import counts
    from recml_sasrec.heads.arguments import positive_set

    ids_TL, mask_TL = positive_set(targets_TL, table_VD.shape[0])
    z_TV = jnp.einsum("td,vd->tv", h_TD, table_VD, preferred_element_type=jnp.float32) + bias_V
    z_TL = jnp.take_along_axis(z_TV, ids_TL, 1, mode="fill", fill_value=0)
    loss_T = jax.nn.softplus(z_TV).sum(1) - jnp.where(mask_TL, z_TL, 0).sum(1)
    true_T, positives_T = (x.sum(1, dtype=jnp.int32) for x in (mask_TL & (z_TL > 0), mask_TL))
    above_T = (z_TV > 0).sum(1, dtype=jnp.int32)
    stats = counts.from_tokens((true_T, above_T, positives_T), weight_T, table_VD.shape[0])
    return (weight_T * loss_T).sum() / weight_T.sum(), stats


def matmuls(h_TD, table_VD, targets_TL, bias_V, weight_T, tile):
    """h E^T, its product with E and with h, tile by tile as in the single sweep, and nothing else."""
    import jax
    import jax.numpy as jnp

    tile = min(tile or default_tile(h_TD.shape[0]), table_VD.shape[0])
    h_DT = h_TD.T

    def step(dh_DT, start):
        rows_KD = jax.lax.dynamic_slice_in_dim(table_VD, start, tile)
        z_KT = jnp.matmul(rows_KD, h_DT, preferred_element_type=jnp.float32).astype(h_TD.dtype)
        product_KD = jnp.matmul(z_KT, h_TD, preferred_element_type=jnp.float32)
        return dh_DT + jnp.einsum("kd,kt->dt", rows_KD, z_KT, preferred_element_type=jnp.float32), product_KD

    # The last start is clamped by dynamic_slice: a full tile for the ragged rest, at most one tile too much.
    starts = jnp.arange(-(-table_VD.shape[0] // tile)) * tile
    return jax.lax.scan(step, jnp.zeros(h_DT.shape, jnp.float32), starts)


def report(flags, device: str, times: dict, cpu: dict, peaks: dict[str, float]) -> None:
    seconds = {variant: statistics.median(values) for variant, values in times.items()}
    threads = flags.threads or (os.cpu_count() if device.startswith("cpu") else "-")
    shape = f"T {flags.tokens:,}, V {flags.items:,}, D {flags.width}, L {flags.targets}, {flags.dtype}"
    print(f"{shape}; {device}, {threads} threads, median of {flags.repeats} interleaved calls")
    if hasattr(os, "getloadavg"):
        print("load average {:.1f}, {:.1f}, {:.1f} (1, 5, 15 minutes)".format(*os.getloadavg()))
    base = seconds.get("cut", min(seconds.values()))
    rate = 6e-9 * flags.tokens * flags.items * flags.width
    print("\n| variant | ms | lowest ms | CPU ms | x single sweep | peak MiB | of the matmul rate |")
    print("|---|---|---|---|---|---|---|")
    for variant, value in seconds.items():
        share = seconds["matmuls"] / value if "matmuls" in seconds else float("nan")
        print(
            f"| {VARIANTS[variant]} | {value * 1e3:,.0f} | {min(times[variant]) * 1e3:,.0f} "
            f"| {min(cpu[variant]) * 1e3:,.0f} | {value / base:.2f} | {peaks[variant]:,.0f} | {share:.0%} |"
        )
    if "matmuls" in seconds:
        print(f"\nThe matmuls alone run at {rate / seconds['matmuls']:,.0f} GFLOP/s (6 T V D).")


if __name__ == "__main__":
    main()

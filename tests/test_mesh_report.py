"""The report on a program written by hand, and what the TPU compiler makes of a small sharded step."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "mesh_report.py"

PROGRAM = """\
HloModule step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %x = f32[8,4]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %y = f32[4,2]{1,0} constant(0)
  %dot.1 = f32[8,2]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %gather = f32[32,2]{1,0} all-gather(%dot.1), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %tuple = (s32[], f32[8,4]) tuple(%i, %x)
}

%wrapped (p: bf16[16]) -> bf16[4] {
  ROOT %scatter = bf16[4]{0} reduce-scatter(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
}

ENTRY %main (h: f32[8,4]) -> f32[8,4] {
  %h = f32[8,4]{1,0} parameter(0)
  %while.1 = (s32[], f32[8,4]) while(%init), condition=%sum, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %all-reduce.1 = (f32[8,4]{1,0:T(8,128)}, s32[3]{0}) all-reduce(%h, %s), replica_groups=mesh['data'=2,'items'=4] \
{'items'}, to_apply=%sum, metadata={op_name="jit(train_step)/psum"}
  %start = (f32[8,4]{1,0}, f32[64,4]{1,0}) all-gather-start(%h), replica_groups=mesh['data'=2,'items'=4] \
{'data','items'}, dimensions={0}
  %permute = (f32[8,4], f32[8,4], u32[], u32[]) collective-permute-start(%h), source_target_pairs={{0,1},{1,0}}
  %async = ((bf16[16]), bf16[4]) async-start(%b), calls=%wrapped
  %vmem = f32[1024]{0:T(1024)S(1)} broadcast(%h)
  ROOT %copy = f32[8,4]{1,0} copy(%h)
}
"""


@pytest.fixture(scope="module")
def report():
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("mesh_report", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


def test_bytes_are_those_of_a_ring_and_count_as_often_as_they_run(report):
    found = {x.kind + str(x.chips): x for x in report.Program(PROGRAM).collectives()}
    sent = {name: x.sent for name, x in found.items()}
    assert sent == {
        "all-gather4": 5 * 3 / 4 * 32 * 2 * 4,  # in a loop of five rounds, float32
        "reduce-scatter4": 3 / 4 * 16 * 2,  # of bfloat16 [16], of which four remain
        "all-reduce4": 2 * 3 / 4 * (8 * 4 + 3) * 4,
        "all-gather8": 7 / 8 * 64 * 4 * 4,
        "collective-permute1": 8 * 4 * 4,
    }
    assert [name for name, x in found.items() if x.in_loop] == ["all-gather4"]
    assert found["all-reduce4"].op_name == "psum"


def test_flops_count_as_often_as_they_run_and_what_lies_in_vector_memory_is_left_out(report):
    program = report.Program(PROGRAM)
    assert program.matmul_flops() == 5 * 2 * 8 * 2 * 4
    assert all(array["array"] != "f32[1024]" for array in program.largest(10))


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, which compiles for TPUs without one, is not installed (pip install libtpu, Linux x86-64 only)",
)
def test_a_sharded_step_moves_hidden_states_and_no_table():
    """Four chips; v5e, whose programs every supported jax can print. The arithmetic is the test's own."""
    B, N, V, D, chips = 8, 16, 100_003, 128, 4
    shape = f"--topology v5e:2x2 --batch {B} --length {N} --items {V} --width {D} --layout sharded --json"
    command = [sys.executable, str(SCRIPT), *shape.split()]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert result["collectives_in_loops"] == 0
    assert result["largest_gather_bytes"] == 4 * B * N * D  # the hidden states
    table = 4 * V * D
    assert result["collective_bytes_per_step"] < 2 * (chips - 1) / chips * table / 10  # a ring's, of table gradients
    # hidden states and looked-up rows, there and back
    moved = result["collectives"]["all-gather"] + result["collectives"]["reduce-scatter"]
    assert moved == pytest.approx(4 * (chips - 1) / chips * 4 * B * N * D, rel=0.25)  # ids and targets beside
    # parameters, two moments, and no more than two gradients of a quarter of the table
    parts = result["peak_parts"]
    assert 3 * table / chips < parts["state_and_batch"] < 3 * table / chips + 2**23
    assert result["peak_bytes_per_chip"] < 5.2 * table / chips
    assert parts["outputs_not_aliased"] < 2**12  # the state is donated

"""The real TPU compiler on the kernel: it compiles, needs no temporaries and holds no [T, V] array."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "tpu_report.py"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, which compiles for TPUs without one, is not installed (pip install libtpu, Linux x86-64 only)",
)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_the_compiled_sweep_is_one_kernel_without_temporaries(chip):
    """In a process of its own: libtpu takes its settings from the environment once."""
    command = [sys.executable, str(SCRIPT), "--chips", chip, "--parts", "quick", "--json"]
    results = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(results) == 2
    for result in results:
        assert "error" not in result, result["error"]
        assert result["kernels"] == 1
        assert result["temp"] <= 0.002 * result["dense"]  # hidden states transposed, targets sorted; no table
        assert result["largest_share"] < 0.5
        if not result["bias"]:  # with it, idle rows of the matrix unit add the bias and give its gradient
            assert 1 <= result["flops"] <= 1.02

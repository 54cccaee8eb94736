"""The notebooks run from top to bottom."""

import pathlib

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("RECML_SASREC_CACHE", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert all(not cell.get("outputs") or cell["outputs"][-1].output_type != "error" for cell in notebook.cells)

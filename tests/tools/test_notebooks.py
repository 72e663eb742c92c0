"""The notebooks run from top to bottom, and keep no outputs of another machine."""

import json
from pathlib import Path

import pytest
import torch

import tencache_fx

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_steps", "will_it_fit"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 3
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    torch.compiler.reset()
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in cells:
        exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), names)
    tencache_fx.close()
    assert capsys.readouterr().out

"""What the README says is so: its programs run, its names exist, its tables agree with the source."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tencache_fx
from tencache_fx import options
from tencache_fx.cli import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def table_rows(text: str) -> list[list[str]]:
    """Return a Markdown table without its heading; a row whose first cell is empty goes on with the one before."""
    rows: list[list[str]] = []
    for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE)[2:]:
        cells = [cell.strip() for cell in line.split("|")]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [f"{before} {more}".strip() for before, more in zip(rows[-1], cells, strict=True)]
    return rows


def test_the_readme_has_the_programs_and_the_place_of_the_measurements():
    assert len(PROGRAMS) == 4
    assert "\n<!-- bench:h200 -->\n" in README


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("number", "spills"), [(0, True), (1, True), (2, False), (3, True)])
def test_programs_run(number, spills, tmp_path):
    program = PROGRAMS[number] + (
        "\nimport tencache_fx\n"
        "print('spilled', sum(len(record.plan.spills) for record in tencache_fx.regions()))\n"
        "tencache_fx.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ
        | {"TENCACHE_COMPILER": "eager", "TENCACHE_CALIBRATE": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (count,) = re.findall(r"^spilled (\d+)$", done.stdout, re.MULTILINE)
    assert (int(count) > 0) == spills


def test_the_first_program_is_six_lines_long():
    assert len(PROGRAMS[0].splitlines()) == 6


def test_options_are_those_of_the_source():
    (block,) = re.findall(r"<!-- options:.*?-->\n(.*?)\n<!-- /options -->", README, re.DOTALL)
    rows = [[cell.strip("`") for cell in cells[:2]] + cells[2:] for cells in table_rows(block)]
    docstring = options.__doc__
    assert docstring is not None
    assert rows == table_rows(docstring)
    assert [row[0] for row in rows] == [field.name for field in dataclasses.fields(options.Options)]


def test_names_exist():
    for name in re.findall(r"tencache_fx\.(\w+)", README):
        places = (ROOT / "tencache_fx" / f"{name}.py", ROOT / "tencache_fx" / name / "__init__.py")
        assert name in tencache_fx.__all__ or any(place.exists() for place in places), name
    for name in re.findall(r"\b(\w+Error)\b", README):
        assert issubclass(getattr(tencache_fx, name), tencache_fx.TencacheError), name
    for path in re.findall(r"(?:examples|passes|tencache_fx|\.ci)/[\w./]*", README):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"\bTENCACHE_([A-Z_]+)", README):
        assert name.lower() in {field.name for field in dataclasses.fields(options.Options)}, name


def test_commands_exist(tmp_path, capsys):
    commands = set(re.findall(r"`tencache ([a-z]+)", README))
    assert commands == {"dump", "plan", "fit", "doctor", "options"}
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
    helped = capsys.readouterr().out
    used = {flag for call in re.findall(r"`tencache ([^`]+)`", README) for flag in re.findall(r"--[a-z-]+", call)}
    assert used == {"--what", "--format", "--policy", "--device-budget", "--sweep", "--plot", "--spill-dir"}
    assert all(flag in helped for flag in used)


def test_the_budget_error_reads_as_shown():
    """Names and numbers depend on the torch version; the sentences do not."""
    (shown,) = re.findall(r"^```text\n(BudgetError: .*?)^```$", README, re.MULTILINE | re.DOTALL)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    given = {"device_budget": "1300kB", "recompute": "none", "compiler": "eager", "calibrate": False}
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as failed:
        torch.compile(model, backend=tencache_fx.tencache, options=given)(torch.randn(1024, 64))
    assert isinstance(failed.value.inner_exception, tencache_fx.BudgetError)
    raised = f"BudgetError: {failed.value.inner_exception}"
    said, wanted = ([re.sub(r"\S*\d\S*", "#", line) for line in text.strip().splitlines()] for text in (raised, shown))
    assert said[0] == wanted[0]
    assert said[1].startswith("  Held there: ")
    assert said[2:] == wanted[2:]

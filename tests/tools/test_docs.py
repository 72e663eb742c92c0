"""README and docs are so: their programs run, names and links exist, what is copied from the source is current.

A Python block runs unless the line before it is `<!-- not run: REASON -->`.
"""

import ast
import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from weakref import WeakSet

import pytest
import torch
from torch import nn

import tencache_fx
from tencache_fx import options
from tencache_fx.cli import main
from tencache_fx.region.registry import REGIONS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
TEXT = "\n".join(PAGES.values())
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```python\n(?P<program>.*?)^```$", re.MULTILINE | re.DOTALL
)
TRANSFERS = {"README.md:1", "README.md:2", "getting-started.md:1", "offloading.md:1", "diagnostics.md:1", "steps.md:1"}
TRANSFERS |= {f"recipes.md:{index}" for index in range(1, 5)}
"""Programs whose budgets are small enough for transfers to be needed."""


class Program(NamedTuple):
    name: str
    text: str
    reason: str | None


PROGRAMS = [
    Program(f"{path.name}:{index}", found["program"], found["reason"])
    for path, page in PAGES.items()
    for index, found in enumerate(BLOCK.finditer(page), 1)
]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_blocks_are_found():
    names = {program.name for program in PROGRAMS if program.reason is None}
    assert names >= {*TRANSFERS, "options.md:1", "offloading.md:2", "diagnostics.md:2"}
    assert len(PROGRAMS) == len(re.findall("^```python$", TEXT, re.MULTILINE))
    left_out = {p.name for p in PROGRAMS if p.reason not in (None, "it needs several ranks")}
    assert all(name.startswith("integrations.md") for name in left_out)


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.reason is None], ids=lambda program: program.name)
def test_programs_run(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENCACHE_COMPILER", "eager")
    monkeypatch.setenv("TENCACHE_CALIBRATE", "0")
    torch.compiler.reset()
    monkeypatch.setattr(REGIONS, "_live", WeakSet())  # regions that a test before, which failed, may have left
    own = ModuleType(re.sub(r"\W", "_", program.name))  # kept here: regions live as long as their code
    monkeypatch.setitem(sys.modules, own.__name__, own)  # torch looks there for what its functions name
    exec(compile(program.text, program.name, "exec"), vars(own))
    plans = [record.plan for record in tencache_fx.regions()]
    assert any(plan.transfers for plan in plans) == (program.name in TRANSFERS)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_are_python(program):
    """Those that do not run here, too."""
    assert ast.parse(program.text, program.name).body, "an empty program"


def test_the_first_program_is_six_lines_long():
    assert len(PROGRAMS[0].text.splitlines()) == 6


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_the_options_page_is_current():
    page = ROOT / "docs" / "options.md"
    writer = script("write_options")
    assert page.read_text() == writer.with_options(page.read_text()), "run: python docs/write_options.py"
    rows = writer.table_rows(options.__doc__)
    assert [row[0] for row in rows] == [field.name for field in dataclasses.fields(options.Options)]


def test_docstrings_in_pages_are_the_sources(tmp_path):
    hooks = script("hooks")
    for path, page in PAGES.items():
        assert "<!-- docstring of" not in hooks.on_page_markdown(page), path.name
    (tmp_path / "module.py").write_text(
        '"""First.\n\nProse of\ntwo lines.\n\n    a = b   indented\n\nx      columns\n"""'
    )
    read = hooks.read_docstring(tmp_path / "module.py")
    assert read == "Prose of\ntwo lines.\n\n```text\na = b   indented\n```\n\n```text\nx      columns\n```"


def test_packages_are_listed_in_their_order():
    test_architecture = (ROOT / "tests" / "test_architecture.py").read_text()
    (ranks,) = re.findall(r"^RANKS = \((.*?)^\)", test_architecture, re.MULTILINE | re.DOTALL)
    page = PAGES[ROOT / "docs" / "architecture.md"]
    table = page[page.index("| package or module |") :].split("\n\n")[0]
    listed = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert listed == re.findall(r'"(\w+)"', ranks)


def test_names_exist():
    for name in re.findall(
        r"tencache_fx\.(\w+)", re.sub(r"^\| .*renam.*|^\| modules? .*", "", TEXT, flags=re.MULTILINE)
    ):
        places = (ROOT / "tencache_fx" / f"{name}.py", ROOT / "tencache_fx" / name / "__init__.py")
        assert name in tencache_fx.__all__ or any(place.exists() for place in places), name
    for name in re.findall(r"\b((?!Other|Import)[A-Z]\w+Error)\b", TEXT):
        assert issubclass(getattr(tencache_fx, name), tencache_fx.TencacheError), name
    for name in re.findall(r"\bTENCACHE_([A-Z_]+)", TEXT):
        assert name.lower() in {field.name for field in dataclasses.fields(options.Options)}, name


def test_files_exist():
    for path in re.findall(r"(?<![\w/])(?:examples|passes|tests|docs|tencache_fx|\.ci)/[\w./-]*\w", TEXT):
        assert (ROOT / path).exists(), path


def anchors(page: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    for path, page in PAGES.items():
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page):
            file, _, anchor = link.partition("#")
            target = path.parent / file
            assert target.exists(), f"{path.name}: {link}"
            assert not anchor or anchor in anchors(target.read_text()), f"{path.name}: {link}"


def test_every_page_is_in_the_navigation():
    pages = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert pages == {path.name for path in PAGES} - {"README.md"}


def test_marks_of_the_benchmarks_are_there():
    page = PAGES[ROOT / "docs" / "benchmarks.md"]
    assert all(f"\n<!-- {mark} -->\n" in page for mark in ("bench:h200", "bench:A", "/bench:A"))


def test_commands_exist(capsys):
    commands = set(re.findall(r"`tencache ([a-z]+)", TEXT))
    assert commands == {"dump", "view", "plan", "fit", "doctor", "options"}
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
    helped = capsys.readouterr().out
    used = {flag for call in re.findall(r"`tencache ([^`]+)`", TEXT) for flag in re.findall(r"--[a-z-]+", call)}
    assert used >= {"--what", "--format", "--policy", "--device-budget", "--sweep", "--plot", "--spill-dir"}
    assert all(flag in helped for flag in used)


def test_counters_are_those_of_the_runtime():
    page = PAGES[ROOT / "docs" / "diagnostics.md"]
    table = page[page.index("### Counters of") :].split("\n\n")[1]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    given = {"device_budget": "2MB", "recompute": "none", "compiler": "eager", "calibrate": False}
    torch.compile(model, backend=tencache_fx.tencache, options=given)(torch.randn(1024, 64)).sum().backward()
    assert listed == set(tencache_fx.stats())


def test_the_budget_error_reads_as_shown():
    """Names and numbers depend on the torch version; the sentences do not."""
    (shown,) = re.findall(r"^```text\n(BudgetError: .*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
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

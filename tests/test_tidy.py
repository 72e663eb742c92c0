"""The shape of the source: who imports whom, how long things are, what is packaged."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# These bring passes and runtime together.
TOP = {
    "backend",
    "drafts",
    "surroundings",
    "study",
    "feedback",
    "phases",
    "cli",
    "doctor",
    "session",
    "sizes",
    "optim",
    "optim_home",
    "optim_kept",
    "optim_places",
    "optim_updates",
    "live",
    "model_state",
    "departures",
    "guards",
    "sketch",
    "fitting",
}
TORCH_FREE = (
    "plan",
    "errors",
    "tables",
    "dump",
    "fitness",
    "tiers",
    "options",
    "cli",
    "simulate",
    "passes.planner",
    "passes.alternatives",
)
MOST_LINES = 400
MOST_TEST_LINES = 600
MOST_FUNCTION_LINES = 70
BANNED = re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X|H[A]CK|Not[I]mplementedError)\b")


def source_files() -> dict[str, Path]:
    """Return every module of the package by its dotted name within it."""
    package = ROOT / "tencache_fx"
    folders = ("", "runtime/", "integrations/")
    found = {path.relative_to(package): path for folder in folders for path in package.glob(f"{folder}*.py")}
    found |= {Path("passes") / path.name: path for path in (ROOT / "passes").glob("*.py")}
    return {".".join(name.with_suffix("").parts).removesuffix(".__init__"): path for name, path in found.items()}


SOURCES = source_files()
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}
ALL_FILES = sorted(
    {*SOURCES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")}, key=lambda path: str(path)
)


def imported(tree: ast.AST, *, at_start: bool = False) -> Iterator[str]:
    """Yield the modules that `tree` imports; `at_start` leaves out those in functions and under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (at_start and runs_later(node)):
            yield from imported(node, at_start=at_start)


def runs_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def ours(modules: Iterator[str]) -> set[str]:
    return {name for module in modules if (name := module.removeprefix("tencache_fx.")) in SOURCES and name != module}


def layer(name: str) -> str:
    folder = name.split(".")[0]
    return folder if folder in ("passes", "runtime", "integrations") else "top" if name in TOP else "values"


def test_the_sources_are_found():
    assert {"plan", "passes.planner", "passes", "runtime", "backend", "runtime.engine", "integrations.hf"} <= set(
        SOURCES
    )
    assert ours(imported(ast.parse("from tencache_fx import plan, x\nimport tencache_fx.errors"))) == {"plan", "errors"}
    nested = ast.parse("def f():\n  import a\nif TYPE_CHECKING:\n  import b\nclass C:\n  import c")
    assert set(imported(nested)) == {"a", "b", "c"}
    assert set(imported(nested, at_start=True)) == {"c"}


@pytest.mark.parametrize("name", sorted(TOP))
def test_the_top_is_what_brings_the_layers_together(name):
    assert name in SOURCES
    assert {layer(other) for other in ours(imported(TREES[name]))} & {"passes", "runtime", "top"}


@pytest.mark.parametrize("name", SOURCES)
def test_imports_point_one_way(name):
    allowed = {
        "values": {"values"},
        "passes": {"values", "passes"},
        "runtime": {"values", "runtime"},
        "top": {"values", "passes", "runtime", "top"},
        "integrations": {"values", "passes", "runtime", "top", "integrations"},
    }[layer(name)]
    if name != "__init__":
        wrong = {other for other in ours(imported(TREES[name])) if layer(other) not in allowed}
        assert not wrong, f"{name} is of the layer {layer(name)} and must not import {wrong}"


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_passes_by_another_name(path):
    assert not [module for module in imported(ast.parse(path.read_text())) if module.split(".")[0] == "passes"]


@pytest.mark.parametrize("name", TORCH_FREE)
def test_what_commands_and_the_planner_need_starts_without_torch(name):
    reached, waiting = set(), [name]
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        modules = list(imported(TREES[module], at_start=True))
        assert "torch" not in {other.split(".")[0] for other in modules}, (
            f"{name} reaches {module}, which imports torch"
        )
        waiting.extend(ours(iter(modules)))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    text = path.read_text()
    in_tests = path.is_relative_to(ROOT / "tests")
    assert len(text.splitlines()) <= (MOST_TEST_LINES if in_tests else MOST_LINES)
    lines = {node.name: node.end_lineno - node.lineno + 1 for node in functions(ast.parse(text))}
    assert in_tests or not {name: count for name, count in lines.items() if count > MOST_FUNCTION_LINES}


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_unfinished_work(path):
    found = BANNED.findall(path.read_text())
    assert not found


@pytest.mark.parametrize("name", SOURCES)
def test_no_error_is_swallowed_and_no_state_is_global(name):
    for node in ast.walk(TREES[name]):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: global"
        if isinstance(node, ast.ExceptHandler):
            caught = "" if node.type is None else ast.unparse(node.type)
            passes_on = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            assert caught != "Exception", f"line {node.lineno}: except Exception"
            assert passes_on or caught not in ("", "BaseException"), f"line {node.lineno}: everything is swallowed"


def test_files_are_named_for_what_they_yield():
    assert not {path.stem for path in SOURCES.values()} & {"utils", "util", "helpers", "helper", "common", "misc"}


def test_every_folder_is_packaged():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in SOURCES.values()}
    places = {setuptools["package-dir"].get(name, name.replace(".", "/")) for name in setuptools["packages"]}
    assert {str(folder.relative_to(ROOT)) for folder in folders} == places
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_passes_is_a_link_so_that_a_bare_checkout_works():
    link = ROOT / "tencache_fx" / "passes"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "passes"


def test_passes_refuses_a_second_name(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(ImportError, match="Import tencache_fx.passes, not passes"):
        importlib.import_module("passes")


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = (ROOT / "tencache_fx" / "__init__.py").read_text()
    assert f'__version__ = "{project["version"]}"' in source
    assert f"\n## {project['version']}\n" in (ROOT / "CHANGELOG.md").read_text()

"""The shape of the source: who imports whom, how long things are, what is packaged."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import tencache_fx

ROOT = Path(__file__).resolve().parents[1]
RANKS = (
    "version",
    "errors",
    "renames",
    "units",
    "garbage",
    "stages",
    "serialization",
    "tensors",
    "ops",
    "planning",
    "records",
    "hardware",
    "option_values",
    "options",
    "kept_code",
    "compat",
    "native_code",
    "thread_safe",
    "passes",
    "runtime",
    "model_state",
    "reporting",
    "region",
    "fitting",
    "backend",
    "api",
    "doctor",
    "replan",
    "cli",
    "optim",
    "integrations",
)
"""Packages and modules of the top folder, bottom to top: each imports only what stands before it, or itself."""

TORCH_FREE = (
    "errors",
    "units",
    "records",
    "options",
    "cli",
    "replan",
    "reporting.dump",
    "reporting.tables",
    "reporting.fit_report",
    "reporting.page",
)
"""These, and all of `planning`, start without torch: commands answer at once."""

CHECKERS = {
    "planning.verify": {"planning.plan", "planning.problem"},
    "passes.verify_graph": {"passes.graphs", "planning.plan", "planning.problem"},
    "passes.verify_collectives": set(),
    "passes.verify_owners": set(),
    "passes.verify_parameters": {"planning.problem"},
    "passes.verify_code": set(),
}
"""What checkers may import besides one another: the values that they check, and what these are written with."""

MOST_LINES = 400
MOST_TEST_LINES = 600
MOST_FUNCTION_LINES = 70
BANNED = re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X|H[A]CK|Not[I]mplementedError)\b")


def source_files() -> dict[str, Path]:
    """Return every module of the package by its dotted name within it."""
    package = ROOT / "tencache_fx"
    found = {path.relative_to(package): path for path in package.rglob("*.py")}  # does not follow the link to passes
    found |= {Path("passes") / path.relative_to(ROOT / "passes"): path for path in (ROOT / "passes").rglob("*.py")}
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


def rank(name: str) -> int:
    return RANKS.index(name.split(".")[0])


def upward(trees: Mapping[str, ast.AST]) -> set[tuple[str, str]]:
    """Return the imports that point up the list, in functions and for types, too."""
    return {
        (name, other)
        for name, tree in trees.items()
        if name != "__init__"
        for other in ours(imported(tree))
        if other == "__init__" or rank(other) > rank(name)
    }


def cycles(trees: Mapping[str, ast.AST]) -> list[tuple[str, ...]]:
    """Return chains of modules that import each other in a circle, for types, too."""
    reads = {name: ours(imported(tree)) - {name} for name, tree in trees.items()}
    found, done = [], set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append(path[path.index(name) :])
        elif name not in done:
            for other in sorted(reads.get(name, ())):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(reads):
        visit(name, ())
    return found


def reach_torch(trees: Mapping[str, ast.AST], name: str) -> set[str]:
    """Return the modules that import torch as soon as `name` is imported."""
    reached, waiting = set(), [name]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting.extend(ours(imported(trees[module], at_start=True)))
    return {module for module in reached if "torch" in roots(imported(trees[module], at_start=True))}


def roots(modules: Iterator[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


def test_the_sources_are_found():
    assert {"planning.planner", "passes", "runtime", "backend", "runtime.engine", "integrations.hf"} <= set(SOURCES)
    found = ours(imported(ast.parse("from tencache_fx import backend, x\nimport tencache_fx.errors")))
    assert found == {"backend", "errors"}
    nested = ast.parse("def f():\n  import a\nif TYPE_CHECKING:\n  import b\nclass C:\n  import c")
    assert set(imported(nested)) == {"a", "b", "c"}
    assert set(imported(nested, at_start=True)) == {"c"}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Return all Python files of the project, by their path."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in ALL_FILES}


def test_every_module_has_a_rank():
    assert {name.split(".")[0] for name in SOURCES} - {"__init__"} == set(RANKS)


def test_no_public_name_is_hidden_by_a_module():
    """`import tencache_fx.fit` would put a module of this name in the function's place."""
    assert set(tencache_fx.__all__) & {name.split(".")[0] for name in SOURCES} == {"optim"}


def test_imports_point_down_the_list():
    assert upward(TREES) == set()


def test_no_import_cycles():
    assert cycles(TREES) == []


PLANNING = [name for name in SOURCES if name.split(".")[0] == "planning"]


def test_commands_and_planning_start_without_torch():
    found = {name: reach_torch(TREES, name) for name in (*TORCH_FREE, *PLANNING)}
    assert not {name: through for name, through in found.items() if through}


def test_planning_never_imports_torch():
    assert PLANNING
    assert not [name for name in PLANNING if "torch" in roots(imported(TREES[name]))]


@pytest.mark.parametrize("name", CHECKERS)
def test_checkers_share_no_code_with_what_they_check(name):
    allowed = CHECKERS[name] | CHECKERS.keys() | {"errors", "ops", "tensors"}
    assert ours(imported(TREES[name])) <= allowed
    assert CHECKERS.keys() == {each for each in SOURCES if each.split(".")[-1].startswith("verify")}


def test_planted_faults_are_found():
    """The checks above see an upward import, a cycle, and torch in planning."""
    planted = ast.parse("def f():\n  from tencache_fx.region import registry")
    assert ("planning.plan", "region.registry") in upward({**TREES, "planning.plan": planted})
    planted = ast.parse("from tencache_fx.planning import planner")
    assert any("planning.problem" in each for each in cycles({**TREES, "planning.problem": planted}))
    assert reach_torch({**TREES, "planning.problem": ast.parse("import torch")}, "cli") == {"planning.problem"}


def test_nothing_imports_passes_by_another_name(texts):
    found = {
        path: [module for module in imported(ast.parse(text)) if module.split(".")[0] == "passes"]
        for path, text in texts.items()
    }
    assert not {path: modules for path, modules in found.items() if modules}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_files_are_short(texts):
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    most = {path: MOST_TEST_LINES if path.startswith("tests/") else MOST_LINES for path in texts}
    assert not {path: count for path, count in lines.items() if count > most[path]}


def test_functions_are_short(texts):
    lines = {
        (path, node.name): node.end_lineno - node.lineno + 1
        for path, text in texts.items()
        if not path.startswith("tests/")
        for node in functions(ast.parse(text))
    }
    assert not {place: count for place, count in lines.items() if count > MOST_FUNCTION_LINES}


def test_no_unfinished_work(texts):
    found = {path: BANNED.findall(text) for path, text in texts.items()}
    assert not {path: words for path, words in found.items() if words}


def test_no_error_is_swallowed_and_no_state_is_global():
    assert not [f"{name}, line {line}: {fault}" for name, tree in TREES.items() for line, fault in faults(tree)]


def faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines of global statements, and of handlers of all errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, "global"
        if isinstance(node, ast.ExceptHandler):
            caught = "" if node.type is None else ast.unparse(node.type)
            passes_on = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            if caught == "Exception":
                yield node.lineno, "except Exception"
            elif caught in ("", "BaseException") and not passes_on:
                yield node.lineno, "everything is swallowed"


def test_planted_handlers_are_found():
    planted = "try:\n  f()\nexcept {}:\n  {}"
    assert list(faults(ast.parse(planted.format("Exception", "raise")))) == [(3, "except Exception")]
    assert list(faults(ast.parse(planted.format("BaseException", "pass")))) == [(3, "everything is swallowed")]
    assert not list(faults(ast.parse(planted.format("BaseException", "raise"))))
    assert list(faults(ast.parse("def f():\n  global g"))) == [(2, "global")]


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
    source = (ROOT / "tencache_fx" / "version.py").read_text()
    assert f'__version__ = "{project["version"]}"' in source
    assert f"\n## [{project['version']}]\n" in (ROOT / "CHANGELOG.md").read_text()

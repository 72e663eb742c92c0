"""Words that were replaced do not come back: old names of modules and classes, and private words for known things.

`docs/concepts.md` has the words to use.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".md", ".toml", ".yml"}
TELL_OLD_FROM_NEW = {"CHANGELOG.md", "docs/concepts.md", "tests/test_words.py"}


class Word(NamedTuple):
    """A regular expression, what to say instead, and the files in which it may be all the same."""

    pattern: str
    instead: str
    allowed: frozenset[str] = frozenset()


def old_modules(names: str, instead: str) -> Word:
    """Return the rule for modules of the top folder that are somewhere else now, as they are imported or named."""
    either = names.replace(" ", "|")
    return Word(rf"\btencache_fx[./](?:{either})\b(?!/)|from tencache_fx import (?:\w+, )*(?:{either})\b", instead)


# They refuse old names with the new ones.
OLD_NAMES = frozenset(
    {
        "tencache_fx/runtime/stats.py",
        "tencache_fx/planning/plan.py",
        "tencache_fx/planning/problem.py",
        "tencache_fx/renames.py",
        "tests/test_renames.py",
        "tests/runtime/test_engine.py",
        "tests/planning/test_plan.py",
    }
)

GONE = (
    old_modules("between given_up surroundings drafts study", "tencache_fx/region/"),
    old_modules("live register session phases feedback expected sizes copies", "tencache_fx/region/, api.py"),
    old_modules("sketch fakes fitness", "tencache_fx/fitting/, reporting/"),
    old_modules("memory measure machine calibrate tiers disk cache", "tencache_fx/hardware/"),
    old_modules("values tables dump plot", "serialization.py, units.py, reporting/"),
    old_modules("capture plan simulate bounds segments", "passes/graphs.py, planning/"),
    old_modules("optim_rules optim_kept optim_places optim_traced optim_updates", "tencache_fx/model_state/"),
    Word(r"\bpasses[./](?:region|moves|ledger|alternatives|reasons|sweep|frontier|planner|verify_plan)\b", "planning/"),
    Word(r"\bpasses[./](?:model_state|home_transfers)\b", "passes/parameter_markers.py, parameter_transfers.py"),
    Word(r"\bpasses[./](?:products|views|mutations|in_place)\b", "addmm_fusion, fake_aliasing, inplace_inputs ..."),
    Word(r"\bpasses[./](?:fusion|fused_groups|traffic)\b", "passes/inductor_model.py, op_kinds.py"),
    Word(r"\bpasses[./](?:weigh_code|listing|order)\b", "code_memory, graph_listing, barriers"),
    Word(
        r"\bruntime[./](?:custody|slots|carving|pinned|kernels)\b",
        "trips, transfers, suballocator, buffers, op_kernels",
    ),
    Word(r"\bruntime[./](?:flights|rounds|additions|homes?|gradients|updates)\b", "tencache_fx/model_state/"),
    Word(
        r"\b(?:Between|GivenUp|Drafts?|Halves|Study|Sketch)\b(?=[(\[.])", "BoundaryMemory, DonatedInputs, Candidate ..."
    ),
    Word(r"\b(?:Lesson|Learned|Rival)\b(?=[(\[])", "Correction, StoredCorrection, PreviousPlan"),
    Word(r"\bHomes?\(", "OffloadedParameter, ParameterStore"),
    Word(r"\bSpill\(", "Transfer"),
    Word(
        r"\bHomeOptimizer\b",
        "OffloadedOptimizer",
        frozenset({"tencache_fx/optim.py", "tests/model_state/test_optimizer.py", "tests/test_renames.py"}),
    ),
    Word(r"\bWay\.(?:ROUND|IN|OUT)\b", "TransferKind"),
    Word(r"\bsurroundings\b", "environment"),
    Word(r"\bHomeGradient\b", "HostGradient"),
    Word(r"\b(?:custody|limbo|flights?)\b", "transfer lifecycle, pending frees, pending backward"),
    Word(r"\b(?:goes|has a|at) home\b", "offloaded; its host copy"),
    Word(r"\b[Tt]rips?\b|\btravels?\b", "transfer; is offloaded, is prefetched", OLD_NAMES),
    Word(r"\bfences?\b", "scheduling barrier"),
    Word(r"\b(?:tight|bare) spills?\b", "zero-slack swap, minimal swaps"),
    Word(r"\b(?:lent|lends?)\b|_lent_", "acquired, acquire", OLD_NAMES),
    Word(r"\boutside_bytes\b|\bwhat others hold\b", "external_bytes, external memory"),
    Word(r"\.spills\b", "plan.transfers", OLD_NAMES),
    Word(r"\bbetween_bytes\b", "boundary_bytes", OLD_NAMES),
    Word(r"\bforetold\b", "predicted, forecast"),
    Word(r"\b(?:tenants?|lodge[sd]?)\b", "suballocation"),
    Word(r"\bdrafts?\b", "candidate"),
    Word(r"\bgiven[_ ]up\b", "donated"),
    Word(r"\bSay whether\b", "Return whether", frozenset({"pyproject.toml"})),
    Word(r"\bMended\b", "Fixed"),
)


def texts() -> Iterator[tuple[str, str]]:
    """Yield each file's name from the root, and its text."""
    folders = ("tencache_fx", "passes", "tests", "examples", "docs", ".ci")
    files = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    for path in sorted(files):
        name = str(path.relative_to(ROOT))
        if path.suffix in SUFFIXES and path.is_file() and not name.startswith(("tencache_fx/passes/", ".ci/venv")):
            yield name, path.read_text()


TEXTS = {name: text for name, text in texts() if name not in TELL_OLD_FROM_NEW}


def found(word: Word) -> list[str]:
    """Return the lines with the word, as `file:line: text`."""
    return [
        f"{name}:{number}: {line.strip()}"
        for name in TEXTS
        if name not in word.allowed and re.search(word.pattern, TEXTS[name])
        for number, line in enumerate(TEXTS[name].splitlines(), 1)
        if re.search(word.pattern, line)
    ]


@pytest.mark.parametrize("word", GONE, ids=lambda word: word.pattern)
def test_words_that_are_gone(word):
    assert found(word) == [], f"say instead: {word.instead}"


def test_planted_words_are_found():
    assert {"README.md", "docs/index.md", "tencache_fx/backend.py", "passes/costs.py", "pyproject.toml"} <= set(TEXTS)
    planted = {
        "from tencache_fx import errors, drafts": 0,
        "see tencache_fx/surroundings.py": 0,
        "tencache_fx.memory": 3,
        "passes/moves.py": 7,
        "from tencache_fx.runtime.slots import Slot": 12,
        "Halves(forward, backward)": 14,
    }
    for line, index in planted.items():
        assert re.search(GONE[index].pattern, line), line
    for fine in ("from tencache_fx import compat", "tencache_fx.region.register", "tencache_fx/fitting/dry_run.py"):
        assert not [word for word in GONE if re.search(word.pattern, fine)], fine

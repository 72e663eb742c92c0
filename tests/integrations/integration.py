"""What tests of other libraries share: the examples as modules, and what the runtime moved."""

import importlib.util
from pathlib import Path
from types import ModuleType

import tencache_fx

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Return a fresh copy of an example, as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spilled_bytes() -> int:
    """Return the bytes of the transfers that this test's regions have planned, for each step."""
    return sum(transfer.nbytes for record in tencache_fx.regions() for transfer in record.plan.transfers)

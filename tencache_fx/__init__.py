"""Train models that do not fit the device: `torch.compile(model, backend="tencache", options={...})`.

The names below are loaded on first use, so that `tencache dump` and the planner work without importing torch.
"""

import importlib
from typing import Any

from tencache_fx.version import __version__

_EXPORTS = {
    "tencache": "tencache_fx.backend",
    "configure": "tencache_fx.api",
    "engines": "tencache_fx.runtime.engine_registry",
    "peak_bytes": "tencache_fx.hardware.peak",
    "regions": "tencache_fx.api",
    "steps": "tencache_fx.api",
    "report": "tencache_fx.api",
    "explain": "tencache_fx.api",
    "stats": "tencache_fx.api",
    "close": "tencache_fx.api",
    "offload": "tencache_fx.model_state.modules",
    "summon": "tencache_fx.model_state.summoning",
    "fit": "tencache_fx.fitting.fitness",
}
_EXPORTS |= dict.fromkeys(
    ("TencacheError", "OptionError", "BudgetError", "StoreError", "UsageError", "RankError", "InvariantError"),
    "tencache_fx.errors",
)
__all__ = ["__version__", "optim", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module("tencache_fx.optim")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'tencache_fx' has no attribute {name!r}; it has {', '.join(sorted(__all__))}.")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

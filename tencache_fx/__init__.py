"""Train models that do not fit the device: `torch.compile(model, backend="tencache", options={...})`.

The names below are loaded on first use, so that `tencache dump` and the planner work without importing torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "tencache": "tencache_fx.backend",
    "configure": "tencache_fx.session",
    "engines": "tencache_fx.runtime.registry",
    "peak_bytes": "tencache_fx.measure",
    "regions": "tencache_fx.session",
    "report": "tencache_fx.session",
    "explain": "tencache_fx.session",
    "stats": "tencache_fx.session",
    "close": "tencache_fx.session",
    "offload": "tencache_fx.model_state",
    "summon": "tencache_fx.model_state",
    "fit": "tencache_fx.fitting",
}
_HOMES |= dict.fromkeys(
    ("TencacheError", "OptionError", "BudgetError", "StoreError", "UsageError", "InvariantError"), "tencache_fx.errors"
)
__all__ = ["__version__", "optim", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module("tencache_fx.optim")
    if name not in _HOMES:
        raise AttributeError(f"module 'tencache_fx' has no attribute {name!r}; it has {', '.join(sorted(__all__))}.")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

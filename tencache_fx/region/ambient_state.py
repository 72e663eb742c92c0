"""Settings of a thread and its process: those that tracing may leave changed, and those of torch's compilers.

Torch runs the code that it traces. A region may end with `torch.set_grad_enabled(False)`, or draw random numbers;
traced once more from there it would become another graph. Dynamo takes most of that back behind a compilation of its
own (torch: `_dynamo/convert_frame.py: preserve_global_state`), not between two traces of ours, nor where a region is
compiled again as it runs.

AOTAutograd and Inductor may have other settings around the first call than later. torchtitan's SimpleFSDP sets a pass
over the joint graph so, which has weights gathered again in the backward; compiled without it, they would be kept.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import _disable_current_modes


def remember(device: torch.device) -> Callable[[], None]:
    """Return a function that sets all back to what it is now: modes of autograd, autocast, defaults, random numbers.

    Of accelerators only the generator of `device` counts.
    """
    grad, forward_grad = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    dtype, precision = torch.get_default_dtype(), torch._C._get_fp32_precision_getter("cuda", "matmul")
    casts = {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in sorted({"cpu", device.type})
        if torch.amp.is_autocast_available(kind)
    }
    cast_once = torch.is_autocast_cache_enabled()
    draws_there = device.type == "cuda" and torch.cuda.is_initialized()
    with _disable_current_modes():  # the states are real, though fakes are being traced
        drawn, drawn_by_python = torch.random.get_rng_state(), random.getstate()
        drawn_there = torch.cuda.get_rng_state(device) if draws_there else None

    def restore() -> None:
        torch._C._set_grad_enabled(grad)
        torch._C._set_fwd_grad_enabled(forward_grad)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_default_dtype(dtype)
        torch._C._set_fp32_precision_setter("cuda", "matmul", precision)
        for kind, (enabled, cast_to) in casts.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, cast_to)
        torch.set_autocast_cache_enabled(cast_once)
        random.setstate(drawn_by_python)
        with _disable_current_modes():
            torch.random.set_rng_state(drawn)
            if drawn_there is not None:
                torch.cuda.set_rng_state(drawn_there, device)

    return restore


@contextlib.contextmanager
def unchanged(device: torch.device) -> Iterator[None]:
    """Have all that `remember` keeps set back at the end."""
    restore = remember(device)
    try:
        yield
    finally:
        restore()


@dataclass(frozen=True, slots=True)
class CompilerSettings:
    """What AOTAutograd (torch: `_functorch/config.py`) and Inductor are set to, by name. The values are no copies."""

    functorch: Mapping[str, Any]
    inductor: Mapping[str, Any]

    @classmethod
    def now(cls) -> "CompilerSettings":
        """Return what is in force in this thread."""
        return cls(functorch=_values_of(functorch_config), inductor=_values_of(inductor_config))

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Have these in force; all is set back at the end."""
        with (
            functorch_config.patch(_differing(functorch_config, self.functorch)),
            inductor_config.patch(_differing(inductor_config, self.inductor)),
        ):
            yield


def _values_of(config: Any) -> dict[str, Any]:
    # torch's own copies are deep: passes that hold a model would be copied with it
    return {name: getattr(config, name) for name, entry in config._config.items() if entry.alias is None}


def _differing(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if getattr(config, name) is not value}

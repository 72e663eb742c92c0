"""Device memory that will be taken later: the state that optimizers make in their first step.

A region is planned in the first forward, and that state comes behind the first backward. A plan that has filled the
budget by then would have to be made again, and its code generated once more.
"""

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from tencache_fx.compat import has_bytes
from tencache_fx.errors import OptionError
from tencache_fx.garbage import living
from tencache_fx.model_state.step_tracing import trace_step
from tencache_fx.tensors import storage_of

_SHAPE = (2, 3)  # no array of another kind, such as a count of steps, has it


def expected_state_bytes(device: torch.device) -> int:
    """Return the bytes of state on `device` that torch's own optimizers have yet to make for what they train there.

    Optimizers are found by Python's collector. Of an optimizer whose state is not of its parameters' shapes, and of
    other classes than torch's, nothing is expected. Takes about 0.1 s in a large process.
    """
    return sum(_missing_bytes(optimizer, device) for optimizer in _optimizers())


def _optimizers() -> Iterator[Optimizer]:
    return (each for each in living(Optimizer) if type(each).__module__.startswith("torch.optim."))


def _missing_bytes(optimizer: Optimizer, device: torch.device) -> int:
    nbytes = 0
    for group in optimizer.param_groups:
        waiting = [p for p in group["params"] if p.requires_grad and p.device == device and not optimizer.state.get(p)]
        storages = ((p, storage_of(p)) for p in waiting)
        held_bytes = sum(p.nbytes for p, storage in storages if storage is not None and has_bytes(storage))
        if held_bytes:
            try:
                step = trace_step(type(optimizer), optimizer.defaults, group, _SHAPE, {}, ())
            except (OptionError, AssertionError):  # torch's classes assert, too
                continue
            nbytes += len(step.names) * held_bytes
    return nbytes

"""Offloaded parameters for everybody to read and change, for the time of a context."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tencache_fx.errors import UsageError
from tencache_fx.model_state.arguments import need_model
from tencache_fx.model_state.module_guards import alias_of, restore
from tencache_fx.model_state.modules import ALONE, take_over, watch_readers
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.model_state.sharded_modules import whole


@contextlib.contextmanager
def summon(model: nn.Module, *, write: bool = True) -> Iterator[nn.Module]:
    """Load all parameters of `model` for the time of the context, to read and to change; all at once, so budget or not.

    What is spread over ranks is whole in the context, which all ranks enter; each takes its own part of changes over.
    With `write=False` changes are dropped. A tensor assigned to a parameter's `data` is copied, as any other change.
    Of parameters that are summoned already, whoever did so first decides what becomes of changes. Raises
    `UsageError` when none is offloaded.
    """
    found = [find_offloaded(parameter) for parameter in need_model(model).parameters()]
    all_offloaded = [each for each in found if each is not None]
    if not all_offloaded:
        raise UsageError("no parameter of this model is offloaded; call tencache_fx.offload(model) first.")
    with contextlib.ExitStack() as undo:
        undo.callback(watch_readers, model)  # some may have got their parameters in the context
        for offloaded in all_offloaded:
            if not offloaded.summoned:
                undo.enter_context(_summoned(offloaded, write=write))
        undo.callback(_copy_shared, model)
        yield model


@contextlib.contextmanager
def _summoned(offloaded: OffloadedParameter, *, write: bool) -> Iterator[None]:
    """Load one parameter for the time of the context."""
    offloaded.wait_update()
    offloaded.sync_host()  # so that what is done to it here can be dropped
    was_absent, offloaded.summoned = offloaded.load(), True
    own = alias_of(offloaded)
    if torch.is_grad_enabled():
        offloaded.gradient.expect(ALONE)
    try:
        with whole(offloaded, write=write):
            yield
    finally:
        offloaded.summoned = False
        if not offloaded.is_dead:
            _leave(offloaded, own, was_absent=was_absent, write=write)


def _leave(offloaded: OffloadedParameter, own: Tensor, *, was_absent: bool, write: bool) -> None:
    """Take over what a parameter is when its context ends, or drop that; evict it if it `was_absent`."""
    given = restore(offloaded, own)
    if write and given is not None and not take_over(offloaded, given):
        return
    try:
        if write:
            offloaded.write_back()
    finally:
        if was_absent:
            offloaded.evict()
        if not write and offloaded.on_device:
            offloaded.refresh()


def _copy_shared(model: nn.Module) -> None:
    """Give bytes of its own to every parameter that was made of an offloaded one's, which are about to go.

    So `weight_norm` makes one.
    """
    for parameter in model.parameters():
        offloaded = find_offloaded(parameter)
        if offloaded is not None and offloaded.parameter is not parameter:
            parameter.data = parameter.detach().clone()

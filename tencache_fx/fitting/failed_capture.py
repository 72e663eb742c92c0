"""Why a model cannot be captured, in one sentence: whether it fails by itself, reads values, or torch.compile fails."""

import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from tencache_fx.errors import TencacheError, UsageError
from tencache_fx.fitting.fake_model import FactoryResult
from tencache_fx.fitting.user_code import place_of, reason_of, reason_of_torch

_NO_VALUE = (DataDependentOutputException, DynamicOutputShapeException)
_LOSS = "the loss function"


def failed_capture(error: BaseException, made: FactoryResult, mode: FakeTensorMode) -> TencacheError:
    """Return what to raise for the error of a capture of a model that is on fake tensors of this mode.

    The model is called once more without torch.compile: if that fails likewise, torch.compile has no part in it, and
    the traceback has the module.
    """
    if (ours := _own_error(error)) is not None:
        return ours
    cause: BaseException = getattr(error, "inner_exception", error)
    who, fails_alone = "the model", False
    try:
        _call(made, mode)
    except _PlainFailureError as failure:
        alone = failure.__cause__
        assert alone is not None
        if isinstance(alone, _NO_VALUE) and type(alone) is type(cause) or reason_of(alone) == reason_of_torch(error):
            who, cause, fails_alone = str(failure), alone, True
    place = place_of(cause) or place_of(error)
    if isinstance(cause, DataDependentOutputException):
        return UsageError(
            f"{who} reads the value of a tensor{place}, and nothing is run here that would give it one; keep it a "
            "tensor there, or have the model take a Python number instead while it is fitted."
        )
    if isinstance(cause, DynamicOutputShapeException):
        return UsageError(
            f"{who} makes a tensor whose size depends on values{place} ({cause.func}), and nothing is run here that "
            "would give them; use an op whose result has a fixed size there, such as torch.where."
        )
    if fails_alone:
        return UsageError(f"{who} fails{place}, {reason_of(cause)}; {_advice(who, made, cause)}.")
    return UsageError(
        f"the model cannot be captured{place}, {reason_of_torch(error)}; see that it runs under torch.compile, with "
        "such inputs."
    )


class _PlainFailureError(Exception):
    """The model or the loss function fails without torch.compile, too; the message says which module does."""


def _call(made: FactoryResult, mode: FakeTensorMode) -> None:
    """Call the model, and then its loss function; raises `_PlainFailureError` from whatever one of them raises."""
    names = {id(module): name for name, module in made.model.named_modules()}
    called = "the model"
    try:
        with mode, torch.enable_grad():
            output = made.model(*made.inputs, **made.named_inputs)
            if made.loss_fn is not None:
                called = _LOSS
                made.loss_fn(output)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        modules = [(names[id(each)], each) for each in map(_self_of, _frames(error)) if id(each) in names]
        name, module = modules[-1] if modules else ("", None)
        raise _PlainFailureError(f"the model's {name} ({type(module).__name__})" if name else called) from error


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _self_of(frame: FrameType) -> nn.Module | None:
    """Return the module that a frame is a method of."""
    found = frame.f_locals.get("self")
    return found if isinstance(found, nn.Module) else None


def _advice(who: str, made: FactoryResult, cause: BaseException) -> str:
    """Return what to do about a model that does not take its inputs, or that fails for another reason."""
    if who == _LOSS:
        return "it is given the model's output and nothing else: mend it there"
    if isinstance(cause, TypeError) and isinstance(made.named_inputs, Mapping) and made.named_inputs:
        named = ", ".join(map(str, made.named_inputs))
        return (
            f"a dict names the model's arguments ({named}): give others, or one that is an input by itself in a tuple"
        )
    return f"its inputs were {_described((made.inputs, made.named_inputs))}: give others, or mend it there"


def _described(inputs: Any) -> str:
    """Return inputs by sizes and dtypes."""
    kinds = [
        f"{str(each.dtype).removeprefix('torch.')} {'x'.join(map(str, each.shape))}"
        if isinstance(each, Tensor)
        else type(each).__name__
        for each in tree_leaves(inputs)
    ]
    return ", ".join(kinds[:4]) + (f" and {len(kinds) - 4} more" if len(kinds) > 4 else "") or "none"


def _own_error(error: BaseException) -> TencacheError | None:
    """Return the error of this package that one of torch's was raised for."""
    within: BaseException | None = error
    while within is not None:
        if isinstance(within, TencacheError):
            return within
        within = getattr(within, "inner_exception", None) or within.__cause__ or within.__context__
    return None

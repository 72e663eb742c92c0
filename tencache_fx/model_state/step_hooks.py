"""Hooks by which an optimizer takes a gradient during backward, and whoever else is to see that gradient.

An optimizer that was made with `step_in_backward=True` updates a parameter as soon as autograd has added its gradient
up, and leaves None. Hooks that run later than that see no gradient; a reducer, which averages gradients over ranks,
would do so with zeros, and each rank would go its own way.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from tencache_fx import compat
from tencache_fx.errors import UsageError
from tencache_fx.model_state.gradient_parts import PartHook
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter


class StepHook:
    """Calls `method` of an optimizer with a parameter whose gradient has come, and keeps neither alive.

    Python's collector does not see what torch's hooks hold (THPVariable_subclass_traverse, python_variable.cpp).
    """

    def __init__(self, parameter: Tensor, method: Callable[[Tensor], None]) -> None:
        self._method = weakref.WeakMethod(method)
        self._handle = parameter.register_post_accumulate_grad_hook(self)

    @property
    def is_dead(self) -> bool:
        """Return whether the optimizer is gone."""
        return self._method() is None

    def remove(self) -> None:
        """Never call it again."""
        self._handle.remove()

    @compat.run_as_is
    def __call__(self, parameter: Tensor) -> None:
        """Call the optimizer; warn, once for all that are gone, if there is none any more."""
        method = self._method()
        if method is not None:
            method(parameter)
        elif not any(isinstance(other, StepHook) for other in _living_hooks(parameter)):
            warnings.warn(
                f"a gradient of size {tuple(parameter.shape)} is left as it is: the optimizer that was made with "
                "step_in_backward=True for its parameter is gone; keep a reference to it.",
                stacklevel=2,
            )


def hook(parameter: Tensor, method: Callable[[Tensor], None]) -> None:
    """Have an optimizer's `method` called when a parameter's gradient has come."""
    StepHook(parameter, method)


def step_hooks(parameter: Tensor) -> list[StepHook]:
    """Return the hooks of optimizers, also of those that are gone."""
    return [each for each in _hooks(parameter) if isinstance(each, StepHook)]


def is_hooked_once(parameter: Tensor) -> bool:
    """Return whether one hook is all that looks at a parameter's gradient before an optimizer does."""
    others = [each for each in (parameter._backward_hooks or {}).values() if not isinstance(each, PartHook)]
    return len(_living_hooks(parameter)) == 1 and not others


def is_updated_in_backward(offloaded: OffloadedParameter) -> bool:
    """Return whether an optimizer updates a parameter as soon as its gradient is there."""
    parameter = offloaded._parameter()
    if parameter is None or not getattr(parameter, "_post_accumulate_grad_hooks", None):
        return False  # as of most: this is asked of each parameter as a tensor is offloaded without a plan
    return not all(hook.is_dead for hook in step_hooks(parameter))


def check_updates_in_backward(all_offloaded: Iterable[OffloadedParameter]) -> None:
    """Raise `UsageError` if a gradient is to be taken during backward that others are to see later.

    It is for the forward, before anything has run: in it torch says which reducer is active, and all wrapping is done,
    in whatever order. Costs a look at each parameter's hooks.
    """
    updated = [each for each in all_offloaded if is_updated_in_backward(each)]
    reduced = _reduced_parameters() if updated else set()
    for offloaded in updated:
        if id(offloaded.parameter) in reduced:
            raise UsageError(
                f"{offloaded.name} would be updated during backward, before DistributedDataParallel has averaged its "
                "gradient over the ranks; make the optimizer without step_in_backward=True."
            )
        check_last(offloaded.parameter, offloaded.name)


def check_last(parameter: Tensor, name: str) -> None:
    """Raise `UsageError` if a hook on the parameter runs behind the one by which an optimizer takes its gradient."""
    hooks = _living_hooks(parameter)
    if hooks and not isinstance(hooks[-1], StepHook) and any(isinstance(each, StepHook) for each in hooks):
        called = getattr(hooks[-1], "__qualname__", type(hooks[-1]).__name__)
        raise UsageError(
            f"{name} is updated during backward, and the hook {called} on it, registered after its optimizer was made, "
            "would find no gradient; register it before that, or make the optimizer without step_in_backward=True."
        )


def check_node(parameter: Tensor, name: str) -> None:
    """Raise `UsageError` if somebody has a hook in autograd's graph that runs once the gradient has been taken."""
    if is_watched_in_graph(parameter):
        raise UsageError(
            f"{name} is updated during backward, and a hook on its AccumulateGrad node, as reducers of gradients have "
            "it, would find no gradient; make the optimizer without step_in_backward=True."
        )


def is_watched_in_graph(parameter: Tensor) -> bool:
    """Return whether somebody has registered a hook on the node that adds up a parameter's gradient.

    A handle shows the hooks beside its own, and nothing else of torch does; those made in C++, as by a reducer, it does
    not show.
    """
    if not parameter.requires_grad:  # any more
        return False
    handle = get_gradient_edge(parameter).node.register_hook(_look_away)
    others = handle.hooks_dict_ref()
    handle.remove()
    return bool(others)


def _look_away(*_: object) -> None:
    """Do nothing."""


def _reduced_parameters() -> set[int]:
    """Return the ids of the parameters whose gradients the reducer averages in whose forward this is."""
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None:
        return set()
    named = wrapper.module.named_parameters()
    reduced = [parameter for name, parameter in named if name not in wrapper.parameters_to_ignore]
    return {id(parameter) for parameter in (*reduced, *wrapper._delay_all_reduce_params)}


def _living_hooks(parameter: Tensor) -> list[object]:
    """Return the hooks, but for those of optimizers that are gone."""
    return [each for each in _hooks(parameter) if not (isinstance(each, StepHook) and each.is_dead)]


def _hooks(parameter: Tensor) -> list[object]:
    hooks: dict[int, object] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return list(hooks.values())

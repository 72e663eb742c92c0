"""Which modules read which parameters."""

from collections.abc import Iterable, Iterator

from torch import nn

from tencache_fx.garbage import living
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import find_offloaded

_READ_THEIR_CHILDRENS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # parameters, without calling these


def parameters_read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that a module's forward reads: its own, and those of children that have no forward.

    Such are `ParameterList` and `ParameterDict`. A few of torch's modules read all that is below them.
    """
    yield from module.parameters(recurse=isinstance(module, _READ_THEIR_CHILDRENS))
    for child in module.children():
        if getattr(child.forward, "__func__", None) is nn.Module.forward:
            yield from parameters_read_by(child)


def offloaded_read_by(module: nn.Module) -> list[OffloadedParameter]:
    """Return the offloaded ones of these, each once."""
    found = map(find_offloaded, parameters_read_by(module))
    return list({offloaded: None for offloaded in found if offloaded is not None})


def modules_beside(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are no part of `model` and share a parameter with it, as a tied head does.

    Nothing is called of those that do not, whatever they are. Of some `__init__` has not run.
    """
    inside, shared = {id(module) for module in model.modules()}, {id(each) for each in model.parameters()}
    found = [module for module in living(nn.Module) if id(module) not in inside]

    def own(module: nn.Module | None) -> Iterable[object]:
        return () if module is None else vars(module).get("_parameters", {}).values()

    def shares(module: nn.Module) -> bool:
        parts = (module, *vars(module).get("_modules", {}).values())  # some read their children's by themselves
        return any(id(each) in shared for part in parts for each in own(part))

    return [each for each in found if shares(each)]

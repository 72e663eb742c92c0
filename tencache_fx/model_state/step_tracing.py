"""What one step of any elementwise optimizer does to each element, found by having it step over a few elements.

The optimizer's own `step` runs, uncompiled, on a parameter of a few elements, and each op on elements is noted. What
else it computes, from its step count, its learning rate and so on, is a number of that step: the noted graph takes such
numbers as an input. So the graph is compiled once, and its numbers are found anew for each step by another run of it:
only that shows whether a class goes another way than before, by its step count or its options.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tencache_fx.errors import OptionError
from tencache_fx.model_state.step_graph import Node, StepGraph

_UNFUSED = ("foreach", "fused", "capturable", "differentiable")
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step. Its `graph` makes of a gradient, a weight, arrays it `reads` and numbers the new weight and the arrays.

    Graphs that do the same have the same key. `names` are of all arrays; `initial` has those which there were none
    of, with what they are full of where they are read. `scalars` are what else the optimizer then has of the parameter.
    """

    graph: StepGraph
    reads: tuple[str, ...]
    names: tuple[str, ...]
    initial: Mapping[str, float]
    numbers: tuple[float, ...]
    scalars: Mapping[str, Any]


def trace_step(
    optimizer_class: type[torch.optim.Optimizer],
    given: Mapping[str, Any],
    group: Mapping[str, Any],
    shape: tuple[int, ...],
    scalars: Mapping[str, Any],
    names: Sequence[str],
) -> TracedStep:
    """Return what a step of `optimizer_class` does to a parameter of `shape` in `group`, given what it has of it.

    That are arrays called `names`, and `scalars`; at its first step, nothing. The class is made with what it takes of
    `given` and of the group. Raises `OptionError` when what it does to one element depends on others, and when it keeps
    what it has elsewhere than in the parameter's state.
    """
    options = {
        name: float(value) if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }
    with torch.no_grad(), _on_cpu():
        held = {name: _copied(value) for name, value in scalars.items()}
        weight, gradient, *more = (torch.zeros(shape, dtype=torch.float32) for _ in range(2 + len(names)))
        weight, arrays = torch.nn.Parameter(weight), dict(zip(names, more, strict=True))
        weight.grad = gradient
        try:
            with _Recorder(optimizer_class, (gradient, weight, *more)) as recorder:
                inner = optimizer_class([weight], **_accepted(optimizer_class, {**given, **options}))
                (own,) = inner.param_groups
                own.update(options, **{name: False for name in _UNFUSED if name in own})
                if scalars or arrays:
                    inner.state[weight] = {**held, **arrays}
                before = dict(own), _own_values(inner)
                inspect.unwrap(optimizer_class.step)(inner)
        except OptionError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise OptionError(f"{optimizer_class.__name__} cannot update an offloaded parameter: {error}") from error
    if (own, _own_values(inner)) != before:
        raise OptionError(f"{optimizer_class.__name__} changes its own options as it steps; use another optimizer.")
    if set(inner.state) - {weight}:
        raise OptionError(f"{optimizer_class.__name__} has state of more than its parameters; use another optimizer.")
    state = inner.state[weight]
    made = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == shape}
    memories = {_memory(each) for each in (weight, *made.values())}
    if len(memories) <= len(made) or not all(each.is_floating_point() for each in made.values()):
        raise OptionError(
            f"{optimizer_class.__name__} keeps what shares memory, or is of integers ({', '.join(made)}), of a "
            "parameter; use another optimizer."
        )
    initial = recorder.take_for_inputs({name: each for name, each in made.items() if name not in arrays})
    return TracedStep(
        graph=recorder.finish((weight, *made.values())),
        reads=(*arrays, *initial),
        names=tuple(made),
        initial={name: initial.get(name, 0.0) for name in made if name not in arrays},
        numbers=tuple(recorder.numbers),
        scalars={name: value for name, value in state.items() if name not in made and value is not None},
    )


def _on_cpu() -> contextlib.AbstractContextManager[object]:
    """Return a context in which new tensors are on the CPU: none where they are anyway, for it looks at each call."""
    return contextlib.nullcontext() if torch.empty(0).device.type == "cpu" else torch.device("cpu")


def _accepted(optimizer_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a group's options that the class takes: some it derives itself."""
    taken = _options_of(optimizer_class)
    return {name: value for name, value in options.items() if name in taken}


@functools.cache
def _options_of(optimizer_class: type) -> frozenset[str]:
    return frozenset(inspect.signature(optimizer_class).parameters)


def _copied(value: Any) -> Any:
    """Return a copy for a step to change: `deepcopy` of a single number takes as long as half a step."""
    return value.clone() if type(value) is Tensor else copy.deepcopy(value)


def _own_values(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}


class _Recorder(TorchDispatchMode):
    """Notes what is done to elements; a change in place gives a new value to all that shares the memory."""

    def __init__(self, owner: type, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: list[float] = []
        self._owner, self._shape = owner, inputs[0].shape
        self._calls: list[Node] = []
        self._alive = list(inputs)  # so that no two have the same memory
        self._inputs, self._given = [Node() for _ in inputs], Node()
        self._values = {_memory(each): node for each, node in zip(inputs, self._inputs, strict=True)}
        self._filled: dict[int, tuple[Node, float]] = {}  # what has been made, of one number, of which memory

    def take_for_inputs(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Make inputs of those which were full of one number at first, and return that of each."""
        found: dict[str, float] = {}
        for name, tensor in tensors.items():
            if _memory(tensor) in self._filled:
                node, found[name] = self._filled.pop(_memory(tensor))
                node.become("")
                self._inputs.append(node)
        return found

    def finish(self, outputs: Sequence[Tensor]) -> StepGraph:
        """Return the graph that gives the values which these tensors have now."""
        inputs, results = (*self._inputs, self._given), tuple(self._values[_memory(each)] for each in outputs)
        graph = StepGraph.of(inputs, self._calls, results)
        used = [(node, number) for node, number in self._filled.values() if number and node in graph.calls]
        for node, number in used:
            at, zeros = self._calls.index(node), Node("zeros_like", node.args)
            self._calls[at:at] = [zeros, select := self._number(number)]
            node.become("add", zeros, select)
        return StepGraph.of(inputs, self._calls, results) if used else graph

    def call(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """Note a call, on nodes."""
        self._calls.append(node := Node(name, args, kwargs))
        return node

    def value(self, given: Any) -> Any:
        """Return what stands for an argument: the node of elements, that of a number of the step, or itself."""
        if isinstance(given, Tensor):
            return self._values[_memory(given)] if _memory(given) in self._values else self.value(float(given))
        if isinstance(given, float):
            self._calls.append(node := self._number(given))
            return node
        return given

    def _number(self, given: float) -> Node:
        """Return what takes a number from those of the step."""
        self.numbers.append(given)
        return Node("select", (self._given, 0, len(self.numbers) - 1))

    def like(self, elements: Tensor, number: Any) -> Node:
        """Return as many elements, all of which are `number`."""
        return self.call("add", self.call("zeros_like", self.value(elements)), self.value(number))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse(func)
        result = func(*args, **kwargs)
        if any(isinstance(each, Tensor) and _memory(each) in self._values for each in _flat((*args, *kwargs.values()))):
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, written = _schema_of(func)
        if not isinstance(result, Tensor) or result.shape != self._shape or name in ("view", "index"):
            self._refuse(func)
        if name in ("detach", "alias"):
            return
        name = name.removesuffix("_") if written == ["self"] else name
        kwargs = {key: each for key, each in kwargs.items() if key != "out"}
        if name in _FULL:
            number = _FULL[name] if len(args) == 1 else float(args[1])
            value = self.call("zeros_like", self.value(args[0]))
            self._filled[_memory(result)] = value, number
        elif name in _REWRITES:
            value = _REWRITES[name](self, *args, **{key: each for key, each in kwargs.items() if key in _NUMBERS})
        elif _is_pointwise(name, func) and written in ([], ["self"], ["out"]):
            # An exponent is a part of the op: compilers know some. What else is a number may be another one each step.
            values = [each if name == "pow" and isinstance(each, int | float) else self.value(each) for each in args]
            if name in ("mul", "div"):
                values = [self.value(float(each)) if type(each) is int else each for each in values]
            value = self.call(name, *values, **{key: self.value(each) for key, each in kwargs.items()})
        else:
            self._refuse(func)
        self._values[_memory(result)] = value
        self._alive.append(result)

    def _refuse(self, func: Any) -> NoReturn:
        raise OptionError(
            f"{self._owner.__name__} does more than arithmetic on single elements ({func}): it cannot update a "
            "parameter in pieces, on the host; use tencache_fx.optim.StreamedOptimizer, which updates whole parameters."
        )


@functools.cache
def _schema_of(func: Any) -> tuple[str, list[str]]:
    """Return the name of an op, without its namespace, and those of the arguments that it writes."""
    written = [each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return func._schema.name.removeprefix("aten::"), written


@functools.cache
def _is_pointwise(name: str, func: Any) -> bool:
    """Return whether the op that returns what `func` may write is one of single elements: not all variants say so."""
    packet = getattr(_aten, name)
    overloads = (func, getattr(packet, func._overloadname, func))
    return any(torch.Tag.pointwise in each.tags for each in overloads)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def _flat(args: Any) -> list[Any]:
    return [each for given in args for each in (_flat(given) if isinstance(given, list | tuple) else [given])]


def _add(to: _Recorder, one: Any, other: Any, alpha: float = 1) -> Node:
    return to.call("add", to.value(one), _times(to, _operand(to, other), alpha))


def _sub(to: _Recorder, one: Any, other: Any, alpha: float = 1) -> Node:
    return to.call("sub", to.value(one), _times(to, _operand(to, other), alpha))


def _rsub(to: _Recorder, one: Tensor, other: Any, alpha: float = 1) -> Node:
    return to.call("sub", to.like(one, float(other)), _times(to, to.value(one), alpha))


def _addcmul(to: _Recorder, one: Tensor, first: Tensor, second: Tensor, value: float = 1) -> Node:
    return to.call("add", to.value(one), to.call("mul", _times(to, to.value(first), value), to.value(second)))


def _addcdiv(to: _Recorder, one: Tensor, first: Tensor, second: Tensor, value: float = 1) -> Node:
    return to.call("add", to.value(one), to.call("div", _times(to, to.value(first), value), to.value(second)))


def _lerp(to: _Recorder, start: Tensor, end: Tensor, weight: Any) -> Node:
    one, other = to.value(start), to.value(end)
    way = to.call("sub", other, one)
    if isinstance(weight, Tensor) and weight.dim():
        return to.call("lerp", one, other, to.value(weight))
    if abs(float(weight)) < 0.5:
        return to.call("add", one, to.call("mul", way, to.value(float(weight))))
    return to.call("sub", other, to.call("mul", way, to.value(1 - float(weight))))


def _copy(to: _Recorder, old: Tensor, new: Tensor) -> Any:
    return to.value(new) if new.dim() else to.like(old, float(new))


def _clamp(to: _Recorder, one: Tensor, least: Any = None, most: Any = None) -> Node:
    limits = [
        None if each is None else to.value(each if isinstance(each, Tensor) else float(each)) for each in (least, most)
    ]
    return to.call("clamp", to.value(one), *limits)


def _operand(to: _Recorder, given: Any) -> Any:
    return to.value(float(given) if type(given) is int else given)


def _times(to: _Recorder, value: Any, factor: float) -> Any:
    return value if factor == 1 else to.call("mul", value, to.value(float(factor)))


_NUMBERS = ("alpha", "value", "weight", "min", "max")
_FULL = MappingProxyType({"zeros_like": 0.0, "empty_like": 0.0, "ones_like": 1.0, "full_like": 0.0})
# Where a number is not an argument that a tensor may take the place of, or memory is more than an element's.
_REWRITES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": _add,
        "sub": _sub,
        "rsub": _rsub,
        "addcmul": _addcmul,
        "addcdiv": _addcdiv,
        "lerp": _lerp,
        "copy": _copy,
        "clone": lambda to, one: to.value(one),
        "fill": lambda to, one, value: to.like(one, float(value)),
        "zero": lambda to, one: to.like(one, 0.0),
        "clamp": _clamp,
        "index_put": lambda to, one, indices, value: to.call(
            "where", to.value(indices[0]), _copy(to, one, value), to.value(one)
        ),
    }
)

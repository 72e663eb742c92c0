"""What a step of an optimizer does to elements, as a graph of ops that takes little time to record.

Each step is recorded anew, and few of these graphs are compiled: nodes of `torch.fx` took a third of a step's time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx


class Node:
    """A call of the ATen op `name`, or an input of the graph where there is no name; arguments may be nodes."""

    __slots__ = ("args", "kwargs", "name")

    def __init__(self, name: str = "", args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs or {}

    def become(self, name: str, *args: Any) -> None:
        """Stand for another call, or an input, wherever the node is an argument."""
        self.name, self.args, self.kwargs = name, args, {}

    @property
    def sources(self) -> list[Any]:
        """The arguments, nodes and others."""
        return [*self.args, *self.kwargs.values()]


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """Ops in the order in which they run, that make `results` of `inputs`; each has a use."""

    inputs: tuple[Node, ...]
    calls: tuple[Node, ...]
    results: tuple[Node, ...]

    @classmethod
    def of(cls, inputs: Sequence[Node], calls: Sequence[Node], results: Sequence[Node]) -> "StepGraph":
        """Return the graph of those calls that are needed."""
        needed, left = set[Node](), list[Any](results)
        while left:
            node = left.pop()
            if isinstance(node, Node) and node not in needed:
                needed.add(node)
                left += node.sources
        found = tuple(call for call in calls if call in needed and call.name)
        return cls(inputs=tuple(inputs), calls=found, results=tuple(results))

    @cached_property
    def key(self) -> str:
        """A text that graphs have in common which do the same: each argument is there with its type and all digits."""
        texts = {node: f"%{index}" for index, node in enumerate((*self.inputs, *self.calls))}

        def text(value: Any) -> str:
            if isinstance(value, tuple):  # an argument with its name
                return f"{value[0]}={text(value[1])}"
            return texts[value] if isinstance(value, Node) else repr(value)

        lines = [", ".join((each.name, *map(text, each.args), *map(text, each.kwargs.items()))) for each in self.calls]
        return "\n".join((str(len(self.inputs)), *lines, ", ".join(map(text, self.results))))

    def as_fx(self) -> fx.Graph:
        """Return the graph for a compiler."""
        graph = fx.Graph()
        made = {node: graph.placeholder(f"x{index}") for index, node in enumerate(self.inputs)}
        found: Callable[[Any], Any] = lambda value: made[value] if isinstance(value, Node) else value  # noqa: E731
        for call in self.calls:
            args, kwargs = tuple(map(found, call.args)), {name: found(each) for name, each in call.kwargs.items()}
            made[call] = graph.call_function(getattr(torch.ops.aten, call.name), args, kwargs)
        graph.output(tuple(map(found, self.results)))
        return graph

"""Which arrays of an optimizer never have a number below zero, by the graph of its step: sums of squares do not."""

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tencache_fx.model_state.step_graph import Node
from tencache_fx.model_state.step_tracing import TracedStep


def nonnegative(traced: TracedStep, given: frozenset[str]) -> frozenset[str]:
    """Return which arrays have no number below zero after a step, if those `given` have none before it.

    Where an op is not known, its result may be of any sign.
    """
    _, _, *reads, _ = traced.graph.inputs
    before = {node for node, name in zip(reads, traced.reads, strict=True) if name in given}
    facts = _Signs(before, traced.numbers)
    after = {
        name for name, node in zip(traced.names, traced.graph.results[1:], strict=True) if facts.is_nonnegative(node)
    }
    return frozenset(name for name in after if traced.initial.get(name, 0.0) >= 0)


class _Signs:
    def __init__(self, before: set[Node], numbers: tuple[float, ...]) -> None:
        self._numbers = numbers
        self._known: dict[Node, bool] = dict.fromkeys(before, True)

    def is_nonnegative(self, value: Any) -> bool:
        if not isinstance(value, Node):
            return isinstance(value, int | float) and value >= 0
        if value not in self._known:
            self._known[value] = _RULES.get(value.name, _is_unknown)(self, value)
        return self._known[value]

    def is_product_nonnegative(self, product: Node) -> bool:
        """Return whether each factor that is there an odd number of times is: others are squares."""
        left: list[Any] = [product]
        factors = Counter[Any]()
        while left:
            node = left.pop()
            if isinstance(node, Node) and node.name in ("mul", "div"):
                left += node.args[:2]
            else:
                factors[node] += 1
        return all(self.is_nonnegative(factor) for factor, times in factors.items() if times % 2)

    def is_number_nonnegative(self, node: Node) -> bool:
        return bool(self._numbers[node.args[2]] >= 0)


def _all(signs: _Signs, node: Node) -> bool:
    return all(map(signs.is_nonnegative, node.args))


def _is_unknown(signs: _Signs, node: Node) -> bool:
    return False


_RULES: Mapping[str, Callable[[_Signs, Node], bool]] = MappingProxyType(
    {
        "select": _Signs.is_number_nonnegative,
        "mul": _Signs.is_product_nonnegative,
        "div": _Signs.is_product_nonnegative,
        "add": _all,
        "minimum": _all,
        "sqrt": _all,
        "maximum": lambda signs, node: any(map(signs.is_nonnegative, node.args)),
        "where": lambda signs, node: all(map(signs.is_nonnegative, node.args[1:])),
        "abs": lambda signs, node: True,
        "zeros_like": lambda signs, node: True,
        "pow": lambda signs, node: bool(node.args[1] == 2) or signs.is_nonnegative(node.args[0]),
    }
)

"""Finds equal layers in a Dynamo graph: where it repeats itself, and where it may be cut.

A graph is read as a word whose letters are its ops: what each calls, with which constants, on values of which sort. A
stretch that follows itself a few times is a run of layers. Where exactly a layer begins is chosen so that the fewest
values pass from one to the next: in a transformer that is the residual stream, between two layers. Layers whose letters
are equal are *of one form* if their values are wired alike, too, and the same ones of them are read behind the layer.
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols

from tencache_fx.passes.graphs import placeholders, step_nodes
from tencache_fx.tensors import tensors_in

_Integers = np.ndarray[Any, np.dtype[np.int64]]

_LEAST_LAYERS = 3  # two that are equal are met by chance, too, and each is a region of its own
_LEAST_OPS = 4  # in a layer: what runs before and after a region costs more than the ops of a smaller one
_WRITERS = (operator.setitem, operator.delitem)  # they return nothing, and change nothing but a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive ops of a Dynamo graph; those of one `form` compute the same from other inputs.

    `ops` are its nodes by name, `inputs` the values that it reads, and `outputs` those that are read behind it: in the
    same order in all pieces of the form. Symbols that its sizes depend on are among the inputs.
    """

    form: int
    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def find_pieces(gm: fx.GraphModule) -> tuple[Piece, ...] | str:
    """Return the pieces that a Dynamo graph with equal layers is to be cut into; a reason if it is not to be cut."""
    ops = step_nodes(gm.graph)
    if (reason := _why_whole(gm, ops)) is not None:
        return reason
    letters, cuts = _Letters(gm), _Cuts.find(ops)
    word = np.array([letters.of(node) for node in ops], dtype=np.int64)
    sizes = np.array([_ops_within(gm, node) for node in ops], dtype=np.int64)
    segments = _segments(word, sizes, cuts, range(len(ops)))
    forms = {segment: _form(word, ops, segment, cuts) for segment in segments}
    counts = Counter(forms.values())
    segments = _joined([(segment, counts[form] == 1) for segment, form in forms.items()])
    forms = {segment: _form(word, ops, segment, cuts) for segment in segments}
    counts = Counter(forms.values())
    if max(counts.values(), default=0) < _LEAST_LAYERS:
        return "it has no run of equal layers between which it can be cut"
    numbers = {form: number for number, form in enumerate(counts)}
    symbols = _symbol_inputs(gm)
    return tuple(
        Piece(
            form=numbers[form],
            ops=tuple(ops[k].name for k in segment),
            inputs=tuple(node.name for node in _inputs(ops, segment, symbols)),
            outputs=tuple(ops[k].name for k in _outputs(segment, cuts)),
        )
        for segment, form in forms.items()
    )


def _why_whole(gm: fx.GraphModule, ops: Sequence[fx.Node]) -> str | None:
    """Return why a graph cannot be cut anywhere; None if it can."""
    (output,) = gm.graph.find_nodes(op="output")
    returned = output.args[0]
    if not isinstance(returned, (list, tuple)) or not all(isinstance(each, fx.Node) for each in returned):
        return "it returns more than a flat list of values"
    symbols = _symbol_inputs(gm)
    for node in gm.graph.nodes:
        if node.op == "call_module":
            return f"its modules hold their parameters themselves, as {node.target}"
        if node.op == "get_attr" and not isinstance(_attribute(gm, node), fx.GraphModule):
            return f"{node.target} is no input of it, but a constant"
        value = node.meta.get("example_value")
        if isinstance(value, (torch.Tensor, torch.SymInt)) and free_unbacked_symbols(value):
            return f"sizes in it, such as that of {node.name}, are known only when it runs"
        if isinstance(value, torch.SymFloat):
            return f"the number {node.name} is read from a tensor when it runs"
        if hidden := _symbols_of(node) - symbols.keys():
            return f"the size {min(map(str, hidden))} is no input of it"
    for node in ops:
        if _may_change_state(node):
            return f"{node.name} ({node._pretty_print_target(node.target)}) may change more than its inputs"
    return None


def _may_change_state(node: fx.Node) -> bool:
    """Return whether an op returns nothing that anybody reads, and is not known to change no more than tensors."""
    value = node.meta.get("example_value")
    if node.users or node.target in _WRITERS or node.target is torch._C._set_grad_enabled:
        return False
    if any(
        isinstance(each, fx.Node) and not _may_cross(each) for each in node.all_input_nodes if each.op != "get_attr"
    ):
        return False  # it leaves what an op before it has entered: no cut comes between the two
    return (
        not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
        and next(iter(tensors_in(value)), None) is None
    )


def _may_cross(node: fx.Node) -> bool:
    """Return whether a value may pass from one piece to another: a tensor, not of a class of its own, or a size."""
    value = node.meta.get("example_value")
    return type(value) is FakeTensor and value.layout is torch.strided or isinstance(value, torch.SymInt)


def _attribute(gm: fx.GraphModule, node: fx.Node) -> object:
    found: object = gm
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def _ops_within(gm: fx.GraphModule, node: fx.Node) -> int:
    """Return how many ops a node stands for, with those of the graphs that it calls."""
    bodies = (_attribute(gm, each) for each in node.all_input_nodes if each.op == "get_attr")
    graphs = [body for body in bodies if isinstance(body, fx.GraphModule)]
    return 1 + sum(_ops_within(body, inner) for body in graphs for inner in step_nodes(body.graph))


class _Letters:
    """Numbers for the ops of a graph: equal for those that do the same with values of the same sort."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._numbers: dict[object, int] = {}

    def of(self, node: fx.Node) -> int:
        """Return the number of an op of the graph itself."""
        return self._numbers.setdefault(self._told(self._gm, node), len(self._numbers))

    def _told(self, gm: fx.GraphModule, node: fx.Node) -> object:
        if node.op in ("placeholder", "get_attr"):  # whatever its name is
            return node.op, self._sort_of(gm, node)
        arguments = _frozen((node.args, node.kwargs), lambda each: self._sort_of(gm, each))
        return node.op, node.target, arguments, _sort(node.meta.get("example_value"))

    def _sort_of(self, gm: fx.GraphModule, node: fx.Node) -> object:
        if node.op == "get_attr":
            body = _attribute(gm, node)
            return self._body(body) if isinstance(body, fx.GraphModule) else id(body)
        static = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
        return _sort(node.meta.get("example_value")), bool(static)

    def _body(self, body: fx.GraphModule) -> object:
        """Return what tells a graph that an op calls from others: its ops and how they are wired, and its settings."""
        places = {node: k for k, node in enumerate(body.graph.nodes)}
        settings = tuple(sorted((str(key), id(value)) for key, value in body.meta.items() if callable(value)))
        wired = tuple(tuple(places[each] for each in _read(node) if each in places) for node in body.graph.nodes)
        return settings, wired, tuple(self._told(body, node) for node in body.graph.nodes)


def _sort(value: object) -> object:
    """Return all that code may depend on of a value that is traced: a tensor's layout and dtype, a size's formula."""
    if isinstance(value, torch.Tensor):
        strides = (*value.stride(), value.storage_offset()) if value.layout is torch.strided else ()
        sizes = tuple(str(each) for each in (*value.shape, *strides))
        flags = value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference()
        return type(value), value.dtype, str(value.device), value.layout, sizes, flags
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(value), str(value)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_sort, value))
    return type(value)


def _frozen(value: object, told: Callable[[fx.Node], object]) -> object:
    """Return arguments as a value that can be compared, with `told` of each node in them."""
    if isinstance(value, fx.Node):
        return told(value)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_frozen(each, told) for each in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(each, told)) for key, each in value.items())
    if isinstance(value, slice):
        return slice, tuple(_frozen(each, told) for each in (value.start, value.stop, value.step))
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return type(value), repr(value)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return type(value), str(value)
    return id(value)


def _read(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among an op's arguments as they come, those that come twice included."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cuts:
    """The places between ops, from before the first to behind the last.

    `crossing` counts the values that pass each, inputs of the graph not among them, `allowed` says whether a graph may
    be cut there, and `last` is where each op's value is read last; one that is returned is read behind the last op.
    """

    crossing: _Integers
    allowed: "np.ndarray[Any, np.dtype[np.bool_]]"
    last: tuple[int, ...]

    @staticmethod
    def find(ops: Sequence[fx.Node]) -> "_Cuts":
        places = {node: k for k, node in enumerate(ops)}
        count, crossing, stuck = len(ops), np.zeros(len(ops) + 1, np.int64), np.zeros(len(ops) + 1, np.int64)
        last = []
        for k, node in enumerate(ops):
            last.append(max((places.get(user, count) for user in node.users), default=k))
            crossing[k + 1 : last[k] + 1] += 1
            if not _may_cross(node):
                stuck[k + 1 : last[k] + 1] += 1
        grads, enabled = [torch.is_grad_enabled()], torch.is_grad_enabled()
        for node in ops:
            if node.target is torch._C._set_grad_enabled:
                enabled = bool(node.args[0])
            grads.append(enabled)
        allowed = (stuck == 0) & (np.array(grads) == torch.is_grad_enabled())
        return _Cuts(crossing=crossing, allowed=allowed, last=tuple(last))


def _segments(word: _Integers, sizes: _Integers, cuts: _Cuts, within: range) -> list[range]:
    """Return the layers among the ops `within`, and what is between runs of them, in order."""
    if not within:
        return []
    best = _best_run(word, sizes, cuts, within)
    if best is None:
        return [within]
    first, period, layers = best
    end = first + period * layers
    return [
        *_segments(word, sizes, cuts, range(within.start, first)),
        *(range(k, k + period) for k in range(first, end, period)),
        *_segments(word, sizes, cuts, range(end, within.stop)),
    ]


def _best_run(word: _Integers, sizes: _Integers, cuts: _Cuts, within: range) -> tuple[int, int, int] | None:
    """Return where a run of layers begins, how many ops each has, and how many there are: the run that saves most."""
    found: list[tuple[int, int, int, int]] = []
    before = np.concatenate(([0], np.cumsum(sizes)))
    start, stop = within.start, within.stop
    for period in range(1, len(within) // _LEAST_LAYERS + 1):
        same = word[start + period : stop] == word[start : stop - period]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            layers, first = (end - begin) // period + 1, start + begin
            ops = int(before[first + period] - before[first])
            if layers >= _LEAST_LAYERS and ops >= _LEAST_OPS:
                found.append(((layers - 1) * ops, -period, first, end - begin + period))
    for _, period, first, length in sorted(found, reverse=True):
        if (run := _begin(-period, first, length, cuts)) is not None:
            return run
    return None


def _begin(period: int, first: int, length: int, cuts: _Cuts) -> tuple[int, int, int] | None:
    """Return the run within `length` equal ops that passes the fewest values on, then has the most layers; or None."""
    runs: list[tuple[int, int, int]] = []
    for begin in range(first, first + min(period, length - _LEAST_LAYERS * period + 1)):
        layers = (first + length - begin) // period
        at = np.arange(begin, begin + layers * period + 1, period)
        if cuts.allowed[at].all():
            runs.append((int(cuts.crossing[at[1:-1]].max()), -layers, begin))
    if not runs:
        return None
    _, layers, begin = min(runs)
    return begin, period, -layers


def _form(word: _Integers, ops: Sequence[fx.Node], segment: range, cuts: _Cuts) -> object:
    """Return what tells a piece from those of another form: its ops, how they are wired, what is read behind it."""
    slots: dict[fx.Node, int] = {ops[k]: k - segment.start for k in segment}
    read_there = (each for k in segment for each in _read(ops[k]) if each.op != "get_attr")
    wired = [slots.setdefault(each, len(slots)) for each in read_there]
    read = tuple(k - segment.start for k in _outputs(segment, cuts))
    return tuple(word[segment.start : segment.stop].tolist()), tuple(wired), read


def _outputs(segment: range, cuts: _Cuts) -> list[int]:
    return [k for k in segment if cuts.last[k] >= segment.stop]


def _inputs(ops: Sequence[fx.Node], segment: range, symbols: Mapping[object, fx.Node]) -> list[fx.Node]:
    """Return what a piece reads: first the symbols that its sizes depend on, then the others by their first reader."""
    own = {ops[k]: None for k in segment}
    read = dict.fromkeys(each for k in segment for each in _read(ops[k]) if each.op != "get_attr" and each not in own)
    needed = set().union(*(_symbols_of(node) for node in (*read, *own))) if symbols else set()
    shown = sorted((node for symbol, node in symbols.items() if symbol in needed), key=lambda node: node.name)
    return list(dict.fromkeys((*shown, *read)))


def _symbols_of(node: fx.Node) -> set[object]:
    """Return the symbols in the sizes that a node makes or stands for."""
    value = node.meta.get("example_value")
    parts = (value,) if isinstance(value, torch.SymInt) else tensors_in(value)
    return {symbol for part in parts for symbol in free_symbols(part)}


def _symbol_inputs(gm: fx.GraphModule) -> dict[object, fx.Node]:
    """Return the graph's inputs that are symbols, by symbol."""
    found = ((node.meta.get("example_value"), node) for node in placeholders(gm.graph))
    return {value.node.expr: node for value, node in found if isinstance(value, torch.SymInt)}


def _joined(segments: Sequence[tuple[range, bool]]) -> list[range]:
    """Return the segments with neighbours made one that are, as their flags say, both alone of their form."""
    found: list[range] = []
    was_alone = False
    for segment, alone in segments:
        if found and was_alone and alone:
            found[-1] = range(found[-1].start, segment.stop)
        else:
            found.append(segment)
        was_alone = alone
    return found

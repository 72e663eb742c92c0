"""Check the code that Inductor generated: the runtime ops must run between the kernels that the plan put them between.

Only the generated source is read (with `ast`), never what our passes hoped for. Three things can go wrong behind our
back: an op moves across a heavy kernel, so that memory is held longer than planned; a storage is recycled while its
copy out is still running, which would corrupt it; and a kernel reads a storage that was released, so that it stays.
Between two heavy kernels, Inductor fuses and orders the small ones as it likes, and the ops with them.

Where a heavy kernel will run is read off the graph anew, without the model of Inductor that the passes plan with: a
product runs at its node, or at the sum that is its only reader. A runtime op between these two may be on either side.
"""

import ast
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from tencache_fx.errors import InvariantError
from tencache_fx.ops import RUNTIME_OPS, by_name, label_of, source_of

log = logging.getLogger("tencache_fx")

_OURS = "torch.ops.tencache."
_SLIPPING = ("wait", "take_grad", "refresh_param")  # may run later than planned
_HEAVY = ("extern_kernels.", "triton_tem_", "cpp_CppMicroGemm", "cpp_CppBmm")  # calls in the code
_HEAVY_OPS = re.compile(  # targets in the graph: those that Inductor has extern kernels or templates for
    r"aten\.(?:mm|addmm|bmm|baddbmm|_scaled_mm|_slow_conv2d_forward|(?:_|cudnn_)?convolution|convolution_overrideable)\."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCalls:
    """The runtime ops of one graph before the compiler has touched it.

    `segments` gives, for each (role, storage), how many heavy kernels run before it, of `heavy` in all: at least and at
    most. `handles` names the storages of the handles that the graph takes as inputs.
    """

    segments: Mapping[tuple[str, str], tuple[int, int]]
    handles: Mapping[str, str]
    heavy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A runtime op as the code calls it, behind `heavy_before` heavy kernels."""

    role: str
    label: str
    heavy_before: int


def planned_calls(graph: fx.Graph) -> PlannedCalls:
    """Read the runtime ops of `graph`, in order."""
    labels: dict[str, str] = {}
    handles: dict[str, str] = {}
    segments: dict[tuple[str, str], tuple[int, int]] = {}
    least = most = 0
    sums: dict[fx.Node, int] = {}  # where products run that are computed together with a sum
    for node in graph.nodes:
        if node.target in RUNTIME_OPS:
            if (label := label_of(node)) is not None:
                labels[node.name] = label
            else:
                source = source_of(node)
                if source.op == "placeholder":
                    labels[source.name] = handles[source.name] = source.name
                labels[node.name] = labels[source.name]
            segments[str(node.target).split(".")[1], labels[node.name]] = least, most
        least += sums.pop(node, 0)
        if _HEAVY_OPS.match(str(node.target)):
            most += 1
            (last,) = node.users if len(node.users) == 1 else (node,)
            if str(last.target) == "aten.add.Tensor":
                sums[last] = sums.get(last, 0) + 1
            else:
                least += 1
    assert least == most
    return PlannedCalls(segments=segments, handles=handles, heavy=most)


def verify_code(planned: PlannedCalls, source: str | None) -> bool:
    """Raise `InvariantError` if `source` moves a runtime op across heavy kernels, loses one, frees early or reads late.

    `source` None means that the graph itself runs, in its own order. Inductor can make loops of small products, or one
    kernel of two: where it made another number of heavy kernels than planned, ops are compared with one another only.
    Returns whether they were compared with the heavy kernels. O(lines).
    """
    if source is None:
        return True
    calls, found = _follow(ast.parse(source), planned.handles)
    if sorted(planned.segments) != sorted((call.role, call.label) for call in calls):
        raise InvariantError(
            f"code: the graph has the runtime ops {sorted(planned.segments)}, "
            f"the code {sorted((call.role, call.label) for call in calls)}."
        )
    _check_order(planned, calls)
    if found != planned.heavy:
        log.info(
            "generated code has %d heavy kernels, the graph %d: %d runtime ops were compared with one another only",
            found,
            planned.heavy,
            len(calls),
        )
        return False
    _check_segments(planned, calls)
    log.debug("generated code has %d heavy kernels; the places of %d runtime ops are as planned", found, len(calls))
    return True


def _check_order(planned: PlannedCalls, calls: Sequence[_Call]) -> None:
    reached = 0
    for call in calls:
        least, most = planned.segments[call.role, call.label]
        if most < reached and call.role not in _SLIPPING:  # a wait may slip to its reader: its bytes are there already
            raise InvariantError(
                f"code: {call.role} of {call.label} runs behind heavy kernel {reached}, "
                f"planned before kernel {most + 1}."
            )
        reached = max(reached, least)


def _check_segments(planned: PlannedCalls, calls: Sequence[_Call]) -> None:
    for call in calls:
        least, most = planned.segments[call.role, call.label]
        if call.heavy_before < least or (call.heavy_before > most and call.role not in _SLIPPING):
            raise InvariantError(
                f"code: {call.role} of {call.label} runs behind {call.heavy_before} heavy kernels, planned behind "
                f"{least}{'' if least == most else f' or up to {most}'}."
            )


def _follow(tree: ast.Module, handles: Mapping[str, str]) -> tuple[list[_Call], int]:
    """Return the runtime ops as they are called, and how many heavy kernels are.

    Handles and buffers are followed from variable to variable.
    """
    found: list[_Call] = []
    name_of: dict[str, str] = dict(handles)
    leaving: dict[str, str] = {}  # source variable -> storage
    released: dict[str, str] = {}  # buffer -> storage
    buffer_of: dict[str, str] = {}  # what a variable is another name, or a view, of
    heavy = 0
    for statement in statements(tree):
        nodes = tuple(ast.walk(statement))
        _check_reads(statement, nodes, released, buffer_of)
        targets = [as_written(t) for t in statement.targets] if isinstance(statement, ast.Assign) else []
        called = [node for node in nodes if isinstance(node, ast.Call)]
        for role, given in filter(None, map(runtime_call, called)):
            if "label" in given:
                label = str(ast.literal_eval(given["label"]))
                if role in ("offload", "offload_grad"):
                    leaving[_variable(given["src"])] = label
            else:
                label = name_of[_variable(given["ticket" if role == "wait" else "handle"])]
                if role == "release":
                    leaving = {name: other for name, other in leaving.items() if other != label}
                    released[_buffer(given["src"], buffer_of)] = label
            name_of |= dict.fromkeys(targets, label)
            found.append(_Call(role=role, label=label, heavy_before=heavy))
        heavy += sum(as_written(node.func).startswith(_HEAVY) for node in called)
        if isinstance(statement, ast.Assign) and _names_buffer(statement.value):
            buffer_of |= dict.fromkeys(targets, _buffer(statement.value, buffer_of))
            if (source := _variable(statement.value)) in name_of:
                name_of |= dict.fromkeys(targets, name_of[source])
        if isinstance(statement, ast.Delete):
            for name in map(as_written, statement.targets):
                if name in leaving:
                    raise InvariantError(f"code: {name} is freed while {leaving[name]} is being copied out.")
    return found, heavy


def _check_reads(
    statement: ast.stmt, nodes: Sequence[ast.AST], released: Mapping[str, str], buffer_of: Mapping[str, str]
) -> None:
    """Nothing but `del` may name a buffer behind its release, nor a view of it; `nodes` are those of `statement`."""
    if isinstance(statement, ast.Delete):
        return
    for node in nodes:
        if isinstance(node, ast.Name) and (label := released.get(buffer_of.get(node.id, node.id))) is not None:
            raise InvariantError(f"code: {node.id} is read after the release of {label}: {ast.unparse(statement):.80}")


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the straight-line statements of the generated `call` function, `with` blocks looked into."""
    for node in (inner for outer in tree.body for inner in (outer, *getattr(outer, "body", ()))):  # or it is a method
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            yield from _flat(node.body)


def bodies(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Return the functions of the graphs that generated code calls, such as the branches of a `torch.cond`, by name."""
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != "call")
    return {each.name: list(_flat(each.body)) for each in functions if [arg.arg for arg in each.args.args] == ["args"]}


def as_written(expression: ast.expr) -> str:
    """Return the source of an expression; of one such as `a.b.c`, as most are, in much less time than `ast` takes."""
    names, inner = [], expression
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    return ".".join((inner.id, *reversed(names))) if isinstance(inner, ast.Name) else ast.unparse(expression)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _flat(statement.body)
        else:
            yield statement


def runtime_call(call: ast.Call) -> tuple[str, dict[str, ast.expr]] | None:
    """Return which runtime op is called, and its arguments by name; None for other calls."""
    function = as_written(call.func)
    if not function.startswith(_OURS):
        return None
    role = function.removeprefix(_OURS).split(".")[0]
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    return role, by_name(getattr(torch.ops.tencache, role).default, call.args, named)


def _variable(argument: ast.expr) -> str:
    """Return the buffer behind an argument: itself, or what `reinterpret_tensor(buffer, ...)` views."""
    while isinstance(argument, ast.Call):
        argument = argument.args[0]
    return as_written(argument)


def _names_buffer(value: ast.expr) -> bool:
    """Return whether a value is a variable, or a view of one."""
    viewed = isinstance(value, ast.Call) and as_written(value.func) == "reinterpret_tensor"
    return isinstance(value, ast.Name) or viewed


def _buffer(argument: ast.expr, buffer_of: Mapping[str, str]) -> str:
    """Return the buffer behind an argument, under the name that it was allocated under."""
    name = _variable(argument)
    return buffer_of.get(name, name)

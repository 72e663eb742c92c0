"""How many device bytes the generated code holds at most: read from the code itself, before it runs.

Inductor decides late which kernels it fuses and when it drops a buffer, so a plan rests on a model of that. This is the
check on the model: the generated Python is followed statement by statement (`ast`), what it allocates, renames, deletes
and returns, forward and backward one after the other, as autograd runs them. Of the graphs only their inputs, their
outputs, and the sizes of what library operations return are used.
"""

import ast
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tencache_fx.passes.code_interface import Interface, Part, operation_name
from tencache_fx.passes.verify_code import as_written, bodies, runtime_call, statements
from tencache_fx.tensors import allocated_bytes

_OPERATIONS = ("torch.ops.", "extern_kernels.", "aten.")
_RANDOM_STATE = "rng_state_output"  # torch: `_functorch/partitioners.py: functionalize_rng_ops`
# In sizes over symbols: torch's `utils/_sympy/printers.py: PythonPrinter`.
_IN_SIZES = {"abs": abs, "math": math, "max": max, "min": min, "round": round, "torch": torch}
_UNKNOWN_ITEM_BYTES = 8  # of an operation that the graph does not have: no element is larger, but a complex one


class UnreadableCodeError(Exception):
    """The code is not written as this torch's Inductor is known to write it."""


def code_peak_bytes(graphs: Sequence[tuple[Interface, str]], num_outputs: int) -> int:
    """Return the most bytes held while the generated graphs run, forward first, what they are given included.

    The caller keeps the forward's inputs, but for those that leave, until the forward ends; the first `num_outputs` of
    its outputs; and the gradients it hands in.
    Raises `UnreadableCodeError`. O(lines).
    """
    return max(map(max, code_bytes(graphs, num_outputs)))


def code_bytes(graphs: Sequence[tuple[Interface, str]], num_outputs: int) -> list[list[int]]:
    """Return the most bytes held in each part of each graph's code, as `code_peak_bytes` counts them.

    Our operations divide the code: part `n` is what runs behind `n` of them. Raises `UnreadableCodeError`. O(lines).
    """
    try:
        return _weigh_graphs(graphs, num_outputs)
    except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError) as error:
        # Another compiler's code, of versions to come: that it is written in a new way must not stop a training.
        raise UnreadableCodeError(f"{type(error).__name__}: {error}") from error


def _weigh_graphs(graphs: Sequence[tuple[Interface, str]], num_outputs: int) -> list[list[int]]:
    (interface, source), *later = graphs
    forward = _Run(interface, source)
    forward.enter({name: frozenset({forward.storage_of(part)}) for name, part in interface.takes.items()})
    forward.keep(*forward.env.values())
    returned = forward.follow()
    found = [forward.part_bytes]
    for interface, source in later:
        backward = _Run(interface, source, beside=forward)
        crossing = _cross(forward, returned[num_outputs:], interface)
        given = {name: crossing.get(name) or frozenset({backward.storage_of(p)}) for name, p in interface.takes.items()}
        gradients = [value for name, value in given.items() if name not in crossing]
        staying = [value for value in forward.entered.values() if not value & forward.donated]
        backward.keep(*gradients, *staying, *returned[:num_outputs])
        backward.enter(given)
        backward.follow()
        found.append(backward.part_bytes)
    return found


@dataclass
class _Asserted:
    """What the code's own assertions tell of a variable."""

    shape: dict[str, tuple[int, ...]] = field(default_factory=dict)
    item_bytes: dict[str, int] = field(default_factory=dict)
    parts: dict[str, dict[int, str]] = field(default_factory=dict)  # of a tuple: the variable of each element
    waited: dict[str, dict[str, ast.expr]] = field(default_factory=dict)  # by ticket: what the wait is told


class _Run:
    """One graph's code, followed: which variable stands for which storages, and what is alive."""

    def __init__(self, interface: Interface, source: str, beside: "_Run | None" = None) -> None:
        self.interface = interface
        tree = ast.parse(source)
        self.lines, self._bodies = list(statements(tree)), bodies(tree)
        self._args: Sequence[frozenset[int]] = ()  # those of the body that runs
        self.env: dict[str, frozenset[int]] = {}
        self.entered: Mapping[str, frozenset[int]] = {}
        self.donated: frozenset[int] = frozenset()  # donated by the caller: free by the backward
        self.part_bytes: list[int] = [0]  # the most held in each part
        self._nbytes: list[int] = [] if beside is None else beside._nbytes  # by storage, of both graphs
        self._tuples: dict[str, tuple[frozenset[int], ...]] = {}
        self._kept: frozenset[int] = frozenset()
        self._leaving: dict[str, frozenset[int]] = {}  # handle -> what the runtime holds until its release
        self._ids: dict[int, int] = {}
        self._known = self._read_assertions()

    def storage_of(self, part: Part) -> int:
        """Return the number of an input's storage."""
        if part.key not in self._ids:
            self._ids[part.key] = self._new(part.nbytes)
        return self._ids[part.key]

    def enter(self, values: Mapping[str, frozenset[int]]) -> None:
        """Begin with these inputs."""
        self.entered = self.env = dict(values)

    def keep(self, *values: frozenset[int]) -> None:
        """Have somebody else hold these storages to the end."""
        self._kept = self._kept.union(*values)

    def follow(self) -> tuple[frozenset[int], ...]:
        """Follow the code to its end; return the storages behind each value it returns."""
        self.env = dict(self.env)
        self._args = [self.env.get(given, frozenset()) for given in self.interface.inputs]
        self._weigh()
        return self._run(self.lines)

    def _run(self, lines: Sequence[ast.stmt]) -> tuple[frozenset[int], ...]:
        """Follow lines, each branch by itself and loops for two turns; return the storages behind what they return."""
        for line in lines:
            if isinstance(line, ast.Return):
                self._weigh()
                return tuple(self._read(value) for value in _elements(line.value))
            if isinstance(line, ast.While):
                self._run([*line.body, *line.body])
            elif isinstance(line, ast.If):
                before = dict(self.env), dict(self._tuples)
                self._run(line.body)
                self.env, self._tuples = before
                self._run(line.orelse)
            elif isinstance(line, ast.Delete):
                for target in line.targets:
                    self.env.pop(as_written(target), None)
                    self._tuples.pop(as_written(target), None)
            elif isinstance(line, ast.Assign):
                known = len(self._nbytes)
                self._assign(line)
                scratch_bytes = self._scratch_bytes(line.value)
                if scratch_bytes or len(self._nbytes) > known:
                    self._weigh(scratch_bytes)
            # An assertion may stand between a release and the `del` of what it has freed.
            elif (
                isinstance(line, ast.Expr)
                and not self._note_runtime(line.value, None)
                and not _is_assertion(line.value)
            ):
                self._weigh(self._scratch_bytes(line.value))
        return ()

    def _scratch_bytes(self, value: ast.expr) -> int:
        """Return what an operation allocates for itself while it runs."""
        if not isinstance(value, ast.Call) or not (function := as_written(value.func)).startswith(_OPERATIONS):
            return 0
        return self.interface.scratch.get(operation_name(function), 0)

    def _assign(self, line: ast.Assign) -> None:
        (target,) = line.targets
        value, name = line.value, as_written(target)
        if isinstance(value, ast.Call) and as_written(value.func) in self._bodies:
            self._put(target, self._run_body(value))
        elif isinstance(target, ast.Tuple):
            names = [as_written(each) for each in target.elts]
            if as_written(value) == "args":  # the inputs by position: mostly, not always, under their own names
                if len(names) != len(self._args):
                    raise UnreadableCodeError(f"it takes {len(names)} inputs, its graph {len(self._args)}")
                self.env = dict(zip(names, self._args, strict=True))
        elif isinstance(target, ast.Subscript):
            self._put(target, (self._read_element(value),))
        elif isinstance(value, ast.List):  # the arguments of a body
            self._put(target, tuple(map(self._read_element, value.elts)))
        elif _element(value) is not None:
            self.env[name] = self._read_element(value)
        elif isinstance(value, ast.Call) and not self._note_runtime(value, name):
            self._call(value, name)
        elif isinstance(value, ast.Name):
            self.env[name] = self._read(value)
            if value.id in self._tuples:
                self._tuples[name] = self._tuples[value.id]
            if value.id in self._leaving:
                self._leaving[name] = self._leaving[value.id]

    def _put(self, target: ast.expr, values: tuple[frozenset[int], ...]) -> None:
        """Assign what a body returns to a variable, or to several; or one value to an element of a list."""
        if isinstance(target, ast.Tuple):
            for each, value in zip(target.elts, values, strict=True):
                self._put(each, (value,))
        elif (element := _element(target)) is not None:
            base, index = element
            held = dict(enumerate(self._tuples.get(base, ()))) | {index: values[0]}
            every = tuple(held.get(each, frozenset[int]()) for each in range(max(held) + 1))
            self._tuples[base], self.env[base] = every, frozenset().union(*every)
        else:
            self._tuples[as_written(target)], self.env[as_written(target)] = values, frozenset().union(*values)

    def _read_element(self, value: ast.expr) -> frozenset[int]:
        """Return the storages behind a variable or a view, or behind an element of a variable."""
        if (element := _element(value)) is None:
            return self._read(value)
        base, index = element
        return self._tuples[base][index] if base in self._tuples else self.env.get(base, frozenset())

    def _run_body(self, call: ast.Call) -> tuple[frozenset[int], ...]:
        """Follow what takes a list of arguments, and empties it; return the storages behind its results."""
        (given,) = map(as_written, call.args)
        args = self._tuples.pop(given, ())
        self.env.pop(given, None)
        before = self.env, self._tuples, self._kept, self._args
        self.env, self._tuples, self._args = {}, {}, args
        self.keep(*before[0].values())
        self._weigh()
        results = self._run(self._bodies[as_written(call.func)])
        self.env, self._tuples, self._kept, self._args = before
        return results

    def _call(self, call: ast.Call, name: str) -> None:
        function = as_written(call.func)
        device = self.interface.device.type
        if function == "reinterpret_tensor":
            self.env[name] = self._read(call.args[0])
        elif function == f"empty_strided_{device}":
            self.env[name] = frozenset({self._new(self._strided_bytes(*call.args[:3]))})
        elif function.startswith(_OPERATIONS):
            elements = self._made(function, name)
            read = [self._read(argument) for argument in call.args]
            shared = next((value for value in read if value), frozenset())
            made = tuple(
                frozenset() if part is None else frozenset({self._new(part.nbytes)}) if part.fresh else shared
                for part in elements
            )
            self.env[name] = frozenset().union(*made)
            if len(made) > 1 or name in self._known.parts:
                self._tuples[name] = made

    def _made(self, function: str, name: str) -> Sequence[Part | None]:
        """Return what an operation returns: as the graph has it, or as the code asserts where the graph does not."""
        elements = self._known.parts.get(name, {0: name})
        shapes = {index: self._known.shape[each] for index, each in elements.items() if each in self._known.shape}
        fitting = [node for node in self.interface.made.get(operation_name(function), ()) if _fits(node, shapes)]
        if fitting:
            return max(fitting, key=lambda node: sum(part.nbytes for part in node if part is not None))
        made: list[Part | None] = [None] * (max(elements, default=0) + 1)
        for index, shape in shapes.items():
            usual_bytes = self.interface.item_bytes.get(shape, _UNKNOWN_ITEM_BYTES)
            item_bytes = self._known.item_bytes.get(elements[index], usual_bytes)
            nbytes = allocated_bytes(math.prod(shape) * item_bytes, self.interface.device)
            made[index] = Part(key=0, nbytes=nbytes, shape=shape)
        return made

    def _note_runtime(self, call: ast.expr, name: str | None) -> bool:
        """Follow one of our own operations; return whether it is one."""
        if not isinstance(call, ast.Call) or (found := runtime_call(call)) is None:
            return False
        role, given = found
        self._weigh()
        self.part_bytes.append(0)
        if role in ("offload", "offload_grad") and name is not None:
            self._leaving[name] = self._read(given["src"])
        elif role == "release":
            held = self._leaving.get(as_written(given["handle"]))
            self._leaving = {handle: value for handle, value in self._leaving.items() if value is not held}
            if "donated" in given and as_written(given["donated"]) == "True":
                self.donated |= self._read(given["src"])
        elif role in ("prefetch", "fetch_param") and name is not None:
            if (wait := self._known.waited.get(name)) is None:
                raise UnreadableCodeError(f"nothing waits for {name}")
            sizes = self._strided_bytes(wait["size"], wait["stride"], wait["dtype"])
            self.env[name] = frozenset({self._new(sizes)})
        elif role == "wait" and name is not None:
            self.env[name] = self._read(given["ticket"])
        if role != "release":  # what that frees is deleted behind it
            self._weigh()
        return True

    def _read(self, value: ast.expr) -> frozenset[int]:
        """Return the storages behind a variable, or behind what is made of it in place."""
        while isinstance(value, ast.Call) and value.args:
            value = value.args[0]
        return self.env.get(as_written(value), frozenset())

    def _weigh(self, scratch_bytes: int = 0) -> None:
        alive = self._kept.union(*self.env.values(), *self._leaving.values())
        held_bytes = sum(self._nbytes[storage] for storage in alive) + scratch_bytes
        self.part_bytes[-1] = max(self.part_bytes[-1], held_bytes)

    def _new(self, nbytes: int) -> int:
        self._nbytes.append(nbytes)
        return len(self._nbytes) - 1

    def _strided_bytes(self, size: ast.expr, stride: ast.expr, dtype: ast.expr) -> int:
        sizes, strides = self._numbers(size), self._numbers(stride)
        if 0 in sizes:
            return 0
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        return allocated_bytes(span * _item_bytes(dtype), self.interface.device)

    def _numbers(self, sequence: ast.expr) -> tuple[int, ...]:
        return tuple(self._evaluate(element) for element in _elements(sequence))

    def _evaluate(self, expression: ast.expr) -> int:
        """Return the value of a size, which Inductor writes as Python over the symbols."""
        if isinstance(expression, ast.Constant):
            return int(expression.value)  # type: ignore[arg-type]
        known: dict[str, object] = {"__builtins__": {}, **_IN_SIZES, **self.interface.sizes}
        try:
            return int(eval(ast.unparse(expression), known))
        except NameError as error:
            raise UnreadableCodeError(f"the size {ast.unparse(expression)} has no value: {error}") from error

    def _read_assertions(self) -> _Asserted:
        known = _Asserted()
        first_name: dict[str, str] = {}  # of a variable that is another name of one
        for line in _all_lines((*self.lines, *itertools.chain.from_iterable(self._bodies.values()))):
            value = line.value if isinstance(line, (ast.Assign, ast.Expr)) else None
            if isinstance(line, ast.Assign) and (element := _element(line.value)) is not None:
                base, index = element
                known.parts.setdefault(base, {})[index] = as_written(line.targets[0])
            if isinstance(line, ast.Assign) and isinstance(value, ast.Name):
                first_name[as_written(line.targets[0])] = first_name.get(value.id, value.id)
            if not isinstance(value, ast.Call):
                continue
            function = as_written(value.func)
            if (call := runtime_call(value)) is not None and call[0] == "wait":
                ticket = as_written(call[1]["ticket"])
                known.waited[first_name.get(ticket, ticket)] = call[1]
            for variable, shape, dtype in _assertions(function, value):
                known.shape[as_written(variable)] = self._numbers(shape)
                if dtype is not None:
                    known.item_bytes[as_written(variable)] = _item_bytes(dtype)
        return known


def _cross(forward: _Run, saved: Sequence[frozenset[int]], interface: Interface) -> dict[str, frozenset[int]]:
    """Return the storages that a backward gets from its forward, by the name of the input.

    By name, as torch's partitioner has it; states of random numbers go by other names, in the same order.
    """
    names = forward.interface.returns[-len(saved) :] if saved else ()
    given = {name: value for name, value in zip(names, saved, strict=True) if name is not None}
    crossing = {name: given.get(name) or forward.entered.get(name) for name in interface.takes}
    nameless = [value for name, value in given.items() if name not in interface.takes and value]
    states = [name for name, value in crossing.items() if value is None and name.startswith(_RANDOM_STATE)]
    crossing |= dict(zip(states, nameless, strict=False))
    return {name: value for name, value in crossing.items() if value}


def _all_lines(lines: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield lines, with those in branches and loops."""
    for line in lines:
        yield line
        if isinstance(line, (ast.If, ast.While)):
            yield from _all_lines((*line.body, *line.orelse))


def _is_assertion(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and as_written(value.func).startswith("assert_")


def _assertions(function: str, call: ast.Call) -> Iterator[tuple[ast.expr, ast.expr, ast.expr | None]]:
    """Yield the variable, shape and dtype of what an assertion in the code is about."""
    if function == "assert_size_stride":
        yield call.args[0], call.args[1], None
    elif function == "assert_tensor_metadata":
        yield call.args[0], call.args[1], call.args[3]
    elif function == "assert_size_stride_grouped":
        for variable, shape in zip(*map(_elements, call.args[:2]), strict=False):
            yield variable, shape, None


def _elements(sequence: ast.expr | None) -> Sequence[ast.expr]:
    """Return the elements of a tuple or list as written."""
    if isinstance(sequence, (ast.Tuple, ast.List)):
        return sequence.elts
    raise UnreadableCodeError(f"{'nothing' if sequence is None else ast.unparse(sequence)} stands where a tuple should")


def _element(value: ast.expr) -> tuple[str, int] | None:
    """Return the variable and the index of `variable[index]`."""
    index = value.slice.value if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) else None
    return (as_written(value.value), index) if isinstance(value, ast.Subscript) and isinstance(index, int) else None


def _item_bytes(dtype: ast.expr) -> int:
    """Return the bytes of an element, of a dtype spelled as in Python ("torch.float32")."""
    found = getattr(torch, as_written(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise UnreadableCodeError(f"{as_written(dtype)} is no dtype")
    return found.itemsize


def _fits(made: Sequence[Part | None], shapes: Mapping[int, tuple[int, ...]]) -> bool:
    """Return whether the elements that were asserted have the shapes of what a node makes."""
    parts = {index: made[index] if index < len(made) else None for index in shapes}
    return all((part := parts[index]) is not None and part.shape == shape for index, shape in shapes.items())

"""Dynamic shapes: the memory that a region's plan needs at the sizes at hand.

A plan is made for one size of every symbol and carried out at all that the compiled code is valid for. Each storage's
size is a formula in the symbols, so the peak at other sizes is a sum, known before anything runs. The sizes torch
traced with (its *hints*) stay what they were: a region that is planned again for larger sizes is traced with the same
ones, so that the code makes no choice that its guards do not cover.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tencache_fx.errors import TencacheError
from tencache_fx.passes.lifetimes import StorageNodes, formula_of
from tencache_fx.passes.symbols import evaluate, storage_places, symbol_places
from tencache_fx.planning.external import is_input
from tencache_fx.planning.liveness import device_changes, live_bytes
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.pool_sizing import host_buffers, pool_classes, total_bytes
from tencache_fx.planning.problem import Collective, Problem, Tier
from tencache_fx.tensors import allocated_bytes, byte_hint, storage_of, tensors_of

Sizes = tuple[int, ...]  # one for each symbol of a region, in the order of `SizeFormulas.symbols`
NamedSizes = Mapping[str, int]  # by the names of their symbols, of which another compilation may find some constant
_Integers = np.ndarray[Any, np.dtype[np.int64]]
_REMEMBERED = 1024  # sizes whose needs are kept


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one size from a region's inputs: from the one at `index`, or from a part of it, behind its `attributes`.

    That is the size itself, or a tensor that has it as its dimension `dim`, or as the bytes of its storage. A value, so
    that a plan which is kept on disk can be taken up again.
    """

    index: int
    attributes: tuple[str, ...] = ()
    dim: int | None = None
    of_storage: bool = False

    def read(self, inputs: Sequence[Any]) -> Any:
        """Return the size."""
        found = functools.reduce(getattr, self.attributes, inputs[self.index])
        if self.of_storage:
            return found.untyped_storage().nbytes()
        return found if self.dim is None else found.shape[self.dim]


class SizeFormulas:
    """The storages' sizes as expressions in the symbols that a region's inputs define.

    Where shapes do not define all symbols of an input's storage, because the input is a view, the bytes of that storage
    stand for a symbol, named like their formula.
    `columns` number the formulas for arithmetic on all of them; column 0 stands for the sizes that never change.
    `hints` are the sizes torch traced with, `planned` those that plans are made for: the same unless given.
    Raises `TencacheError` when a size depends on what no input shows.
    """

    def __init__(
        self,
        inputs: Sequence[object],
        storages: Iterable[StorageNodes],
        device: torch.device,
        planned: NamedSizes | None = None,
    ) -> None:
        self._device = device
        expressions: dict[str, sympy.Expr] = {}
        for item in storages:
            if item.storage.formula and (size := _size_of(item)) is not None:
                expressions[item.storage.formula] = size.node.expr
        found, parts = zip(*parts_of(inputs), strict=True) if inputs else ((), ())
        readers = {symbol: replace(found[at], dim=dim) for symbol, (at, dim) in symbol_places(parts).items()}
        behind = {size: replace(found[at], of_storage=True) for size, at in storage_places(parts).items()}
        for formula, expression in expressions.items():
            if not expression.free_symbols <= readers.keys() and (whole := sympy.expand(expression)) in behind:
                expressions[formula] = symbol = sympy.Symbol(formula)
                readers[symbol] = behind[whole]
        self._expressions = tuple(expressions.values())
        self.columns = {formula: column for column, formula in enumerate(("", *expressions))}
        used: frozenset[sympy.Symbol] = frozenset().union(*(each.free_symbols for each in self._expressions))
        if hidden := used - readers.keys():
            raise TencacheError(
                f"the sizes {', '.join(sorted(map(str, hidden)))} of this region cannot be read from its inputs, so "
                "its memory cannot be planned; mark those dimensions static, or set device_budget to None."
            )
        self.symbols = tuple(sorted(used, key=str))
        self._readers = tuple(readers[symbol] for symbol in self.symbols)
        self.hints = tuple(byte_hint(size) for size in self.read(inputs))
        self.planned = self.hints if planned is None else self.unnamed(planned)

    def read(self, inputs: Sequence[Any]) -> Sizes:
        """Return the symbols' values in a region's inputs."""
        return tuple([each.read(inputs) for each in self._readers])

    def named(self, sizes: Sizes) -> dict[str, int]:
        """Return `sizes` by their symbols' names."""
        return {str(symbol): size for symbol, size in zip(self.symbols, sizes, strict=True)}

    def unnamed(self, sizes: NamedSizes) -> Sizes:
        """Return the sizes of these symbols from those of another compilation; as torch traced where it has none."""
        return tuple(sizes.get(str(symbol), hint) for symbol, hint in zip(self.symbols, self.hints, strict=True))

    def name(self, sizes: Sizes) -> str:
        """Return `sizes` as text."""
        return ", ".join(f"{symbol} = {size}" for symbol, size in zip(self.symbols, sizes, strict=True))

    def values(self, sizes: Sizes) -> _Integers:
        """Return the value of every formula by column, as the allocator rounds it; 1 for column 0."""
        by_symbol = dict(zip(self.symbols, sizes, strict=True))
        known = (allocated_bytes(evaluate(each, by_symbol), self._device) for each in self._expressions)
        return np.array((1, *known), dtype=np.int64)

    def growth(self, before: Sizes, after: Sizes) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """Return by column how many times larger its bytes are at `after` than at `before`."""
        return self.values(after) / np.maximum(self.values(before), 1)

    def users(self, problem: Problem) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """Return, by step and column, whether the step uses a storage of that size; column 0 if it uses none."""
        used = np.zeros((len(problem.ops), len(self.columns)), dtype=np.bool_)
        for storage in problem.storages:
            used[list(storage.uses), self.columns[storage.formula]] = True
        used[~used.any(axis=1), 0] = True
        return used

    def resize(self, problem: Problem, before: Sizes, after: Sizes) -> Problem:
        """Return `problem`, which is for the sizes `before`, for the sizes `after`.

        Storages have the bytes of their formulas. A step's time and scratch grow as what it uses, by the largest rate
        among that: rather too much, but for what takes time in a higher power of a size.
        """
        if before == after:
            return problem
        values = self.values(after)
        rates = np.where(self.users(problem), self.growth(before, after), 0).max(axis=1)
        storages = tuple(
            replace(s, nbytes=int(values[self.columns[s.formula]])) if s.formula else s for s in problem.storages
        )
        ops = tuple(
            replace(op, duration_ns=math.ceil(op.duration_ns * rate), scratch_bytes=math.ceil(op.scratch_bytes * rate))
            for op, rate in zip(problem.ops, rates.tolist(), strict=True)
        )
        nbytes = {old.name: (old.nbytes, new.nbytes) for old, new in zip(problem.storages, storages, strict=True)}
        collectives = tuple(_resized(each, nbytes) for each in problem.collectives)
        return replace(problem, ops=ops, storages=storages, collectives=collectives)


def _resized(collective: Collective, nbytes: Mapping[str, tuple[int, int]]) -> Collective:
    """Return a collective that moves more as what it reads and writes has grown: its bytes before, and after."""
    sizes = [nbytes[name] for name in (*collective.reads, *collective.writes)]
    before, after = (sum(each) for each in zip(*sizes, strict=True)) if sizes else (1, 1)
    return replace(collective, nbytes=math.ceil(collective.nbytes * after / max(1, before)))


def _size_of(item: StorageNodes) -> torch.SymInt | None:
    """Return the symbolic size that a storage's formula was written for.

    torch may have found since then that two symbols are equal: the formula names the one that it does not use any more.
    """
    renamed = None
    for made in (tensors_of(member) for member in item.members):
        for storage in map(storage_of, made):
            size = 0 if storage is None else storage.nbytes()
            if isinstance(size, torch.SymInt) and formula_of(size) == item.storage.formula:
                return size
            if isinstance(size, torch.SymInt) and formula_of(size) and len(made) == 1:
                renamed = size
    return renamed


def parts_of(inputs: Sequence[object]) -> Iterator[tuple[Reader, object]]:
    """Yield what finds each part of these values, and that part: tensors that wrap others are taken apart."""
    pending: list[tuple[Reader, Any]] = [(Reader(index), value) for index, value in enumerate(inputs)]
    while pending:
        reader, value = pending.pop()
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            pending += [(replace(reader, attributes=(*reader.attributes, n)), getattr(value, n)) for n in names]
        else:
            yield reader, value


def hints_of(inputs: Sequence[object]) -> tuple[str, ...]:
    """Return as text the sizes that torch traced with, of all that is symbolic in a region's inputs.

    Raises `TencacheError` for one that is known only when it runs, if nothing bounds it.
    """
    found: list[str] = []
    for _, part in parts_of(inputs):
        sizes = (part,)
        if isinstance(part, torch.Tensor) and (storage := storage_of(part)) is not None:
            sizes = (*part.shape, *part.stride(), storage.nbytes())
        symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
        found += (str(byte_hint(size) if size.node.hint is None else size.node.hint) for size in symbolic)
    return tuple(found)


def plan_at(problem: Problem, plan: Plan) -> Plan:
    """Return `plan` with its transfers, buffers and bytes at the sizes of `problem`; times are not changed."""
    nbytes = {storage.name: storage.nbytes for storage in problem.storages}
    transfers = tuple(replace(transfer, nbytes=nbytes[transfer.name]) for transfer in plan.transfers)
    pool, staging = host_buffers(transfers, problem.budgets.host_bytes)
    forecast = replace(
        plan.forecast,
        peak_bytes=int(live_bytes(problem, transfers).max(initial=problem.external_bytes)),
        host_bytes=total_bytes(pool) + total_bytes(staging),
        disk_bytes=total_bytes(pool_classes(transfers, Tier.NVME)),
    )
    return replace(plan, transfers=transfers, pool=pool, staging=staging, forecast=forecast)


def at_hints(formulas: SizeFormulas | None, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """Return both at the sizes torch traced with, which are those that the graphs show."""
    if formulas is None or formulas.planned == formulas.hints:
        return problem, plan
    hinted = formulas.resize(problem, formulas.planned, formulas.hints)
    return hinted, plan_at(hinted, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The device memory that a plan needs at some sizes; `peak_bytes` includes external memory when it was made."""

    peak_bytes: int
    input_bytes: int


class Footprint:
    """The memory that a plan, made for the sizes `formulas.planned`, needs at others.

    The bytes in use at a step are a sum of formulas: how many storages of each there are is counted once, and a new
    size costs one product of a matrix and a vector. `held_bytes` were held on the device when the plan was made,
    `input_bytes` of them by the region's own inputs.
    """

    def __init__(
        self,
        formulas: SizeFormulas,
        problem: Problem,
        plan: Plan,
        *,
        held_bytes: int,
        input_bytes: int,
    ) -> None:
        self.formulas = formulas
        self.problem = problem
        self.plan = plan
        self.held_bytes = held_bytes
        self.input_bytes = input_bytes
        self._reserved = {formulas.planned}
        self._needs: dict[Sizes, Need] = {}
        change = np.zeros((len(problem.ops) + 1, len(formulas.columns)), dtype=np.int64)
        self._inputs = np.zeros(len(formulas.columns), dtype=np.int64)
        count = {s.name: (formulas.columns[s.formula], 1 if s.formula else s.nbytes) for s in problem.storages}
        for storage in problem.storages:
            column, number = count[storage.name]
            change[storage.birth, column] += number
            change[storage.death, column] -= number
            self._inputs[column] += number * is_input(storage)
        storages = {storage.name: storage for storage in problem.storages}
        for transfer in plan.transfers:
            column, number = count[transfer.name]
            for step, sign in device_changes(transfer, storages[transfer.name]):
                change[step, column] += sign * number
        self._live = np.cumsum(change, axis=0)[:-1]
        self._users = formulas.users(problem)
        self._scratch = np.array([op.scratch_bytes for op in problem.ops], dtype=np.int64)

    def at(self, sizes: Sizes) -> Need:
        """Return what the plan needs at `sizes`; a lookup for those seen before."""
        if sizes not in self._needs:
            if len(self._needs) >= _REMEMBERED:
                self._needs.clear()
            values = self.formulas.values(sizes)
            rates = np.where(self._users, self.formulas.growth(self.formulas.planned, sizes), 0).max(axis=1)
            live = self._live @ values + np.ceil(self._scratch * rates).astype(np.int64)
            self._needs[sizes] = Need(
                peak_bytes=int(live.max(initial=0)) + self.problem.external_bytes,
                input_bytes=int(self._inputs @ values),
            )
        return self._needs[sizes]

    def is_reserved(self, sizes: Sizes) -> bool:
        """Return True if the buffers for `sizes` are there: smaller sizes use those of larger ones."""
        return not self.plan.transfers or any(
            all(size <= known for size, known in zip(sizes, most, strict=True)) for most in self._reserved
        )

    def plan_for(self, sizes: Sizes) -> Plan:
        """Return the plan with its transfers and buffers at `sizes`."""
        return plan_at(self.formulas.resize(self.problem, self.formulas.planned, sizes), self.plan)

    def note_reserved(self, sizes: Sizes) -> None:
        """Remember that the buffers for `sizes` are there."""
        self._reserved.add(sizes)

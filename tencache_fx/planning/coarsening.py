"""A smaller problem that is searched in place of a large one: neighbouring steps as one, and what they make together.

A search compares dozens of plans, and none of its questions (how far down the price list, what share of the parameters)
needs single steps for an answer. So steps between two scheduling barriers are merged, and where there are many barriers
the steps between several, until no more than some hundred *stretches* of about equal weight are left. In the forward a
stretch has one op for each set of recipes that share its steps, so that recomputing costs what it did. Storages of one
kind that begin, end and are read in the same ops become one, unless their recipes differ in price; so do offloaded
parameters that are read in the same places. What begins and ends within an op counts for its scratch bytes.

The plan itself is made for the problem as it is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log
from typing import NamedTuple

import numpy as np

from tencache_fx.planning.collectives import steps_under_way
from tencache_fx.planning.liveness import durations_ns, live_bytes
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Kind, Op, Problem, Recipe, Step, Storage
from tencache_fx.planning.tuning import TUNING, Tuning

_Key = tuple[object, ...]


class _Life(NamedTuple):
    """The life of a storage in coarse steps, and whether it may be offloaded."""

    birth: int
    death: int
    uses: tuple[int, ...]
    ready: int = 0
    caller_frees_at: int = 0
    spillable: bool = False
    gathered_at: int = 0


@dataclass(frozen=True, kw_only=True)
class Coarse:
    """A coarser `problem`; `members` are the storages with recipes that one of its recipes stands for."""

    problem: Problem
    members: Mapping[str, tuple[str, ...]]

    def fine(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the storages that `names` stand for, sorted."""
        return tuple(sorted(member for name in names for member in self.members[name]))


def coarsen(problem: Problem, stretches: int = TUNING.stretches) -> Coarse:
    """Return a problem with about `stretches` stretches in forward and backward; as it is, if that is hardly smaller.

    O(steps + uses + steps of the recipes).
    """
    merger = _Merger(problem, stretches)
    if len(merger.first_steps) * 2 > len(problem.ops):
        return Coarse(problem=problem, members={recipe.name: (recipe.name,) for recipe in problem.recipes})
    return merger.merge()


def coarsen_within(problem: Problem, tuning: Tuning = TUNING) -> Coarse:
    """Return a coarser problem of the size that `tuning` asks for, or of more steps if its floor is near the budget.

    Longer stretches hold more at once.
    """
    coarse, limit = coarsen(problem, tuning.stretches), problem.budgets.device_bytes
    if (ops := len(coarse.problem.ops)) > tuning.coarse_ops and coarse.problem is not problem:
        coarser = coarsen(problem, max(1, tuning.stretches * tuning.coarse_ops // ops))
        if limit is None or floor_bytes(coarser.problem) <= limit * tuning.coarse_floor_percent // 100:
            return coarser
    return coarse


def _stretches(problem: Problem, count: int) -> list[int]:
    """Return the stretch of each step; the boundary begins one."""
    steps, boundary = len(problem.ops), int(problem.boundary)
    durations = durations_ns(problem)
    weights = np.cumsum(durations / max(1.0, durations.sum()) + 1 / steps) * count / 2
    cuts = sorted({0, boundary, *problem.barriers, *(barrier + 1 for barrier in problem.barriers)})
    stretch_of = np.zeros(steps, dtype=np.int64)
    last = 0.0
    for cut in cuts if problem.barriers else range(steps):
        before = float(weights[cut - 1]) if cut else 0.0
        if 0 < cut < steps and (int(before) > int(last) or cut == boundary):
            stretch_of[cut:] += 1
            last = before
    return [int(each) for each in stretch_of]


class _Merger:
    """The op that each step belongs to, and what is left of storages and recipes then."""

    def __init__(self, problem: Problem, stretches: int) -> None:
        self.problem = problem
        self.storages = {storage.name: storage for storage in problem.storages}
        self.under_way = steps_under_way(problem)
        self.stretch_of = [*_stretches(problem, stretches), -1]
        self.stretch_of[-1] = self.stretch_of[-2] + 1 if problem.ops else 0
        self.priced = [r for r in problem.recipes if self.storages[r.name].nbytes >= problem.min_spill_bytes]
        self.classes = self._classes()
        self.op_of, self.first_steps = self._ops()

    def _classes(self) -> dict[str, int]:
        """Return a number for each recipe; those of storages alike, at about the same price, have the same."""
        numbers: dict[_Key, int] = {}
        found: dict[str, int] = {}
        for recipe in self.priced:
            storage = self.storages[recipe.name]
            cost_ns = sum(self.problem.ops[step].duration_ns for step in recipe.steps)
            price = round(log(1 + cost_ns * 10_000 / max(1, storage.nbytes)) * TUNING.prices_per_e)
            places = tuple(dict.fromkeys(self.stretch_of[use] for use in storage.uses))
            key = (price, storage.kind, self.stretch_of[storage.birth], places, storage.caller_frees_at > 0)
            found[recipe.name] = numbers.setdefault((*key, storage.spillable), len(numbers))
        return found

    def _ops(self) -> tuple[list[int], list[int]]:
        """Return the op of each step, and the first step of each op, in order."""
        runs: list[frozenset[int]] = [frozenset()] * len(self.problem.ops)
        for recipe in self.priced:
            here = frozenset({self.classes[recipe.name]})
            for step in recipe.steps:
                runs[step] |= here
        ops: dict[tuple[int, frozenset[int]], int] = {}
        first: list[int] = []
        op_of: list[int] = []
        for place, classes in enumerate(runs):
            key = (self.stretch_of[place], classes if place < self.problem.boundary else frozenset())
            if key not in ops:
                ops[key] = len(first)
                first.append(place)
            op_of.append(ops[key])
        op_of.append(len(first))
        return op_of, first

    def merge(self) -> Coarse:
        """Return the coarser problem."""
        problem, op_of = self.problem, self.op_of
        kept, names = self._storages()
        recipes: dict[str, set[int]] = {}
        members: dict[str, list[str]] = {}
        for recipe in self.priced:
            name = names[recipe.name]
            recipes.setdefault(name, set()).update(op_of[step] for step in recipe.steps)
            members.setdefault(name, []).append(recipe.name)
        boundary = Step(op_of[problem.boundary])
        return Coarse(
            problem=replace(
                problem,
                ops=self._merged_ops(kept, boundary),
                boundary=boundary,
                storages=tuple(kept),
                boundary_bytes=0,
                min_spill_bytes=0,
                barriers=(),
                collectives=(),
                recipes=tuple(Recipe(name=n, steps=tuple(map(Step, sorted(ops)))) for n, ops in recipes.items()),
            ),
            members={name: tuple(each) for name, each in members.items()},
        )

    def _merged_ops(self, kept: Sequence[Storage], boundary: Step) -> tuple[Op, ...]:
        """Return the ops, with scratch bytes that make up for what storages hold in fewer steps than ops.

        In the forward, which may run again, no less than what begins and ends within an op.
        """
        problem, op_of = self.problem, np.array(self.op_of[:-1])
        durations = np.bincount(op_of, durations_ns(problem), len(self.first_steps))  # collectives are in it
        most = np.zeros(len(self.first_steps), dtype=np.int64)
        np.maximum.at(most, op_of, live_bytes(problem) - problem.external_bytes)
        held = np.zeros(len(self.first_steps) + 1, dtype=np.int64)
        for storage in kept:
            held[storage.birth] += storage.nbytes
            held[storage.death] -= storage.nbytes
        more = most - np.cumsum(held[:-1])
        within = np.zeros(len(self.first_steps), dtype=np.int64)
        np.maximum.at(within, op_of, self._within())
        return tuple(
            Op(
                name=problem.ops[first].name,
                duration_ns=int(durations[op]),
                scratch_bytes=int(max(more[op], within[op]) if op < boundary else more[op]),
            )
            for op, first in enumerate(self.first_steps)
        )

    def _within(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return at each step the scratch bytes, and what begins and ends in its op."""
        delta = [0] * (len(self.problem.ops) + 1)
        for storage in self.problem.storages:
            if self._is_within(storage):
                delta[storage.birth] += storage.nbytes
                delta[storage.death] -= storage.nbytes
        scratch = np.array([op.scratch_bytes for op in self.problem.ops], dtype=np.int64)
        return np.cumsum(delta[:-1], dtype=np.int64) + scratch

    def _is_within(self, storage: Storage) -> bool:
        if storage.kind in (Kind.FETCHED, Kind.STORED) or storage.name in self.classes:
            return False
        return storage.death == storage.birth or self.op_of[storage.birth] == self.op_of[storage.death - 1]

    def _is_background(self, storage: Storage) -> bool:
        """Whether nothing is ever decided about `storage`, so that its bytes may count for the ops it lives in.

        It is within an op, too small to be offloaded, or made by the backward and never unread for long.
        """
        if storage.kind in (Kind.FETCHED, Kind.STORED) or storage.name in self.classes:
            return False
        if self._is_within(storage) or storage.nbytes < self.problem.min_spill_bytes:
            return True
        uses = [self.op_of[use] for use in storage.uses]
        unread = storage.spillable and any(after - before > 1 for before, after in pairwise(uses))
        return storage.birth >= self.problem.boundary and not unread

    def _storages(self) -> tuple[list[Storage], dict[str, str]]:
        """Return the merged storages, and by the name of each of ours the name of the one that it is now part of."""
        groups: dict[tuple[Kind, _Life, str, int], list[Storage]] = {}
        lives = {s.name: self._life(s) for s in self.problem.storages if not self._is_background(s)}
        parameters: dict[str, list[object]] = {}
        for storage in self.problem.storages:
            if storage.kind in (Kind.FETCHED, Kind.STORED):
                parameters.setdefault(storage.parameter, []).append((storage.kind, lives[storage.name], storage.tier))
        first_like: dict[_Key, str] = {}
        alike = {name: first_like.setdefault(tuple(places), name) for name, places in parameters.items()}
        for storage in self.problem.storages:
            if storage.name in lives:
                parameter = alike.get(storage.parameter, storage.parameter)
                key = (storage.kind, lives[storage.name], parameter, self.classes.get(storage.name, -1))
                groups.setdefault(key, []).append(storage)
        kept: list[Storage] = []
        names: dict[str, str] = {}
        for (_, life, parameter, _), each in groups.items():
            first = each[0]
            names.update((storage.name, first.name) for storage in each)
            kept.append(
                replace(
                    first,
                    nbytes=sum(storage.nbytes for storage in each),
                    birth=Step(life.birth),
                    death=Step(life.death),
                    uses=tuple(map(Step, life.uses)),
                    spillable=life.spillable,
                    ready=Step(life.ready),
                    caller_frees_at=Step(life.caller_frees_at),
                    gathered_at=Step(life.gathered_at),
                    formula="",
                    parameter=parameter,
                    state_bytes=sum(storage.state_bytes for storage in each),
                    state_saved_bytes=sum(storage.state_saved_bytes for storage in each),
                )
            )
        return kept, names

    def _life(self, storage: Storage) -> _Life:
        op_of, end = self.op_of, len(self.problem.ops)
        birth = op_of[storage.birth]
        spillable = storage.spillable and storage.nbytes >= max(1, self.problem.min_spill_bytes)
        given = storage.kind in (Kind.PARAMETER, Kind.INPUT) and storage.name not in self.classes
        if given and not spillable and (storage.birth, storage.death) == (0, end):
            return _Life(0, op_of[end], ())  # there all the time, whoever reads it
        held = self.under_way.get(storage.name, ())  # by collectives, which the coarser problem has not
        uses = tuple(sorted({max(birth, op_of[use]) for use in storage.uses if use not in held}))
        death = max([birth, *(use + 1 for use in uses), op_of[storage.death - 1] + 1 if storage.death else 0])
        ready, freed = max(birth, op_of[storage.ready]), op_of[storage.caller_frees_at]
        return _Life(birth, death, uses, ready, freed, spillable, op_of[storage.gathered_at])

"""Records in which order a device's regions run in a step, and has the schedule of that order followed.

A *round* is the time in which forwards wait for their backwards: it begins with the first forward and ends before the
first forward that finds none waiting, or one that was dropped long ago. Of a step with several micro-batches each is a
round, or all are one, as the loop runs them. Rounds of one order (regions, calls, sizes) are a *program*. An order that
is not known runs on the frugal schedule, which holds the least; when it is over, it is planned.

A program is expected to be followed by the one that followed it the last time. Where another region runs than was
expected, the round goes on with the schedule of a program that has begun the same way, or else of one that makes the
same calls (`step_variants.py`), or else frugally. An order that ran so to its end is planned if it recurs, or if its
sizes are others.
"""

import logging
import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from torch.multiprocessing.reductions import StorageWeakRef

from tencache_fx import compat
from tencache_fx.model_state.parameter_store import evict_residents
from tencache_fx.options import Options
from tencache_fx.planning.step import FRUGAL, SwapKey, Visit
from tencache_fx.planning.swap_region import SwapRegion
from tencache_fx.records import StepRecord
from tencache_fx.region.external_memory import ExternalMemory
from tencache_fx.region.misfits import Misfits
from tencache_fx.region.registry import compilations
from tencache_fx.region.step_calls import TURNS, Call
from tencache_fx.region.step_planner import Program, StepPlanner, forget_programs, place_of, record_of
from tencache_fx.region.step_residency import Order
from tencache_fx.region.step_room import RoomCheck, recomputed_for_room
from tencache_fx.region.step_variants import find_nearest, is_like, most_bytes
from tencache_fx.runtime.swap_points import SwapPoints
from tencache_fx.tensors import storage_key, storage_of, tensors_in

log = logging.getLogger("tencache_fx")

_PROGRAMS = 64  # remembered
_ALONE = 2  # steps with one call of a region and no other show that it runs alone


class StepRecorder:
    """The recorder of one device. Thread-safe; rounds of several threads at once run frugally."""

    def __init__(self, points: SwapPoints) -> None:
        self.points = points
        points.on_stranded = self._note_stranded
        self.planner = StepPlanner(points)
        self.programs: dict[Order, Program] = {}
        self.has_new_code = False  # in this round: kernels are tuned in their first run, beside what the plan knows of
        self.external = ExternalMemory(points)
        self.misfits = Misfits()
        self._lock = threading.RLock()
        self._calls: list[Call] = []
        self._counts: Counter[int] = Counter()
        self._alone: Counter[int] = Counter()  # by region, the last steps in a row in which it was alone
        self._visits: list[Visit] = []
        self._expected: Program | None = None
        self._beside_bytes = 0  # of parameters that stay, and that the program expected does not read
        self._last: Program | None = None
        self._first: Options | None = None  # of the round's first forward
        self._options: Options | None = None  # of the forward that has the least budget
        self._mark = points.gauge.mark()
        self._shared: frozenset[tuple[int, str]] = frozenset()  # what was known of when the last round was over
        self._room = RoomCheck(points, self.planner, self.external, self.misfits)
        self._clean_for: tuple[int, int] | None = None  # budget and compilations when a peak over it was forgotten
        self._left: deque[int] = deque()  # by regions of which no code is left, in whatever thread that was noticed
        self._gone: set[int] = set()  # those that are yet to be forgotten

    def watch(self, code: object, index: int) -> None:
        """Forget all about a region when nothing is left of its `code`."""
        weakref.finalize(code, self._left.append, index).atexit = False

    def settle(self, options: Options | None = None) -> None:
        """Plan the round that is over, if one is: what regions are to recompute is known before they run again.

        What runs next is planned, too, if its first forward, of these `options`, has other budgets.
        """
        with self._lock:
            self._forget_gone()
            if self._is_over():
                self._finish()
            if options is not None and not self._visits and self._last is not None:
                expected = self._last.successor or self._last
                known = expected.options if expected.first == options else None
                self.planner.consider(expected, known or options)

    def begin_forward(self, index: int, region: SwapRegion, options: Options, values: Sequence[object]) -> Call:
        """Note that a forward begins in this thread; raises `BudgetError` if it cannot run within the budget."""
        tensors = tensors_in(values)
        inputs = self.points.see(tensors)
        with self._lock:
            if self._visits and self._visits[-1].backward and not compat.in_backward():  # else of a checkpoint
                for each in self._calls:
                    each.turns += 1
                if any(each.turns > TURNS and not self._lives(each) for each in self._calls):
                    self._finish()  # one was dropped, and others always wait: the round would never be over
            self.settle()
            self._heed(options)
            given = frozenset(map(storage_key, tensors))
            call = Call(index, self._counts[index], region, compat.saves_by_hooks(), given, inputs)
            self._counts[index] += 1
            self.external.note(index, inputs)
            self._arrive(call, backward=False)
            self._calls.append(call)
        self.points.begin(index, call.number, backward=False)
        return call

    def begin_backward(self, index: int, values: Sequence[object]) -> None:
        """Note that the backward of a call begins in this thread: the one that the handles among `values` are of."""
        tensors = tensors_in(values)
        inputs = self.points.see(tensors)
        found = self.points.call_of(tensors)
        with self._lock:
            own = [call for call in self._calls if call.index == index]
            call = next((each for each in own if (each.index, each.number) == found), None)
            if call is None and own:  # of a region that offloads nothing
                call = next((each for each in reversed(own) if self._waits(each)), own[-1])
            self.external.note(index, inputs if call is None else inputs | call.inputs)
            if call is None:  # a second backward, or one of a round that was abandoned
                self._expect(None)
                number = found[1] if found else -1
            else:
                self._calls.remove(call)
                number = call.number
                self._arrive(call, backward=True)
        self.points.begin(index, number, backward=True)

    def end(self, call: Call | None, results: Sequence[object]) -> None:
        """Note that the graph of this thread is over; `call` is that of a forward."""
        self.points.end()
        left = tensors_in(results)
        self.points.see(left)
        with self._lock:
            self._mark = self.points.gauge.mark()
            if call is not None:
                made = next((each for each in reversed(left) if storage_key(each) not in call.given), None)
                if (storage := storage_of(left[-1] if made is None else made) if left else None) is not None:
                    call.residual = StorageWeakRef(storage)
                call.most_turns, call.given = 0 if made is None else TURNS, frozenset()

    def fail(self) -> None:
        """Note that the graph of this thread has raised: the round is abandoned, and goes with its handles."""
        self.points.abandon()
        with self._lock:
            self._forget_round()
            self._expected, self.points.schedule = None, FRUGAL  # what stays leaves when the next graph begins

    def recomputed_next(
        self, index: int, region: SwapRegion | None, options: Options, *, checkpointed: bool
    ) -> frozenset[str] | None:
        """Return what the next call of a region is to recompute, as it was decided, or for lack of room; else None.

        It runs as this `region` does if nobody says otherwise, and has these `options`.
        """
        with self._lock:
            if (decided := self.planner.choices.decided.get(index)) is not None:
                return decided.names(self._counts[index], checkpointed=checkpointed)
            # Checkpointed calls run again later, when there may be room: they have to save the same.
            return None if region is None or checkpointed else recomputed_for_room(region, options, self.points)

    def check_choice(self, index: int, compiled: SwapRegion) -> None:
        """Have it chosen again what regions recompute, if one needs more than expected now that it is compiled."""
        with self._lock:
            self.planner.choices.check(index, compiled)

    def recomputed_ever(self, index: int) -> tuple[frozenset[str], ...]:
        """Return what calls of a region are to recompute: one set of storages for all of them, or two."""
        decided = self.planner.choices.decided.get(index)
        if decided is None:
            return ()
        return tuple(decided.names(call, checkpointed=False) for call in (0, decided.first_calls))

    def is_over(self, index: int, region: SwapRegion, options: Options) -> bool:
        """Return whether a call that has no plan would be over the budget, with all away that can be."""
        if (limit := options.device_budget) is None or self.misfits.has(index, limit):
            return limit is not None
        if self.points.schedule is not FRUGAL:
            return False
        held_bytes = self.points.gauge.held_bytes() - self.points.extra_bytes
        visits = (
            Visit(index=index, call=0, backward=backward, region=region, held_bytes=held_bytes)
            for backward in (False, True)
        )
        return any(visit.peak_bytes > limit and not self.planner.may_fit(visit, options) for visit in visits)

    def is_alone(self, index: int) -> bool:
        """Return whether the last steps with this region were one call of it, and storages left or were recomputed."""
        with self._lock:
            return self._alone[index] >= _ALONE

    def records(self) -> tuple[StepRecord, ...]:
        """Return the records of the plans of all programs, the one that ran last at the end."""
        with self._lock:
            self._forget_gone()
            found = (record_of(program, str(self.points.engine.device)) for program in self.programs.values())
            return tuple(record for record in found if record is not None)

    def _is_over(self) -> bool:
        """Return whether no forward waits for its backward; those that have waited for long are abandoned."""
        while self._calls and not self._waits(self._calls[-1]):  # mostly the last one waits, and that is all to know
            self._calls.pop()
        return bool(self._visits) and not self._calls

    def _waits(self, call: Call) -> bool:
        return call.turns <= call.most_turns and self._lives(call)

    def _lives(self, call: Call) -> bool:
        if call.residual is not None and not call.residual.expired():
            return True
        return self.points.holds(SwapKey(call.index, call.number, swap.name) for swap in call.region.swaps)

    def _heed(self, options: Options) -> None:
        """Note a forward's options: the least budget of a round counts, and those that recur are known beforehand."""
        if not self._visits:
            self._first = self._options = options
            if self._last is not None and (expected := self._last.successor or self._last).first == options:
                self._options = expected.options
        elif self._options is not None and _limit(options) < _limit(self._options):
            self._options = options

    def _arrive(self, call: Call, *, backward: bool) -> None:
        """Add a run to the round: compare it with what is expected, and what is held with what is planned for."""
        if not self._visits:
            self.points.forget_gradients()
            self._forget_peak()
        held_bytes, gap_bytes = self._measure()
        if not self._visits:  # an optimizer may have held more before; no storage of this round was there
            gap_bytes = held_bytes
        visit = Visit(
            index=call.index,
            call=call.number,
            backward=backward,
            region=call.region,
            held_bytes=held_bytes,
            gap_bytes=gap_bytes,
            checkpointed=call.checkpointed,
        )
        assert self._options is not None
        if not self._visits and self._last is not None:
            expected = self._last.successor or self._last
            self.planner.renew(expected, self._options)
            self._expect(expected)
        self._visits.append(visit)
        limit = self._options.device_budget
        self._compare(visit)
        if self.has_new_code:
            self._expect(None)
        if (more := self._excess_bytes(visit, limit)) > 0 and not self.points.in_known_order:
            more -= self.points.make_room(more, (visit.index, visit.call))
        if more > 0:
            log.info("the device would be %d bytes over its budget; the rest of the step offloads all it may", more)
            self._expect(None)
        if self.points.schedule is FRUGAL and limit is not None:
            if visit.peak_bytes + self.points.resident_bytes > limit:
                evict_residents(self.points.engine.device)
            self._visits[-1] = self._room.check(visit, self._options, lambda: self._measure()[0])

    def _compare(self, visit: Visit) -> None:
        """Find another schedule if the last run is not the one expected."""
        now, expected, count = place_of(visit), self._expected, len(self._visits)
        if expected is None or (
            expected.order[count - 1 : count] == (now,) if self.points.in_known_order else now.run in expected.sizes
        ):
            return
        begun = tuple(map(place_of, self._visits))
        same = (each for each in self.programs.values() if each.planned is not None and each.order[:count] == begun)
        other = next(same, None) if self.points.in_known_order else None
        if other is None:
            self.points.in_known_order = False
            other = expected if count > 1 and expected.has_plan else None
            if other is None or now.run not in other.sizes:
                other = find_nearest(self.programs.values(), now) or other
        if other is not expected:
            self._expect(other)

    def _excess_bytes(self, visit: Visit, limit: int | None) -> int:
        """Return by how much the device may be over the budget in the last run."""
        if self._expected is None or limit is None:
            return 0
        if not self.points.in_known_order:
            return most_bytes(visit, self._expected, self.points) - limit
        return self._expected.excess_bytes(visit, len(self._visits) - 1, limit, self._beside_bytes)

    def _measure(self) -> tuple[int, int]:
        """Return what is held now, and was held since the last run, without what stays on the device by a schedule."""
        gauge = self.points.gauge
        extra_bytes, (held_bytes, gap_bytes) = self.points.extra_bytes, gauge.bytes_since(self._mark)
        if new_bytes := gauge.take_parameter_bytes():
            self._visits = [replace(visit, held_bytes=visit.held_bytes + new_bytes) for visit in self._visits]
        return held_bytes - extra_bytes, gap_bytes - extra_bytes

    def _forget_peak(self) -> None:
        """Have it measured exactly what is held between runs, where a peak of earlier work would hide that."""
        limit, compiled = None if self._options is None else self._options.device_budget, compilations()
        if limit is not None and self._clean_for != (limit, compiled):
            self._clean_for = limit, compiled
            self.points.gauge.forget_peak_over(limit)

    def _note_stranded(self, index: int, number: int) -> None:
        """Raise `BudgetError` if a forward that runs has no room for a storage of it that has to stay."""
        with self._lock:
            own = (each for each in reversed(self._visits) if (each.index, each.call) == (index, number))
            visit = next(own, None)
            if visit is not None and not visit.backward and self._options is not None:
                self._room.refuse_stranded(visit, self._options)

    def _expect(self, program: Program | None) -> None:
        self._expected = program
        self._beside_bytes = 0 if program is None else self.planner.bytes_beside(program)
        self.points.follow(FRUGAL if program is None else program.schedule)

    def _finish(self) -> None:
        """End the round: remember its program, and have it planned."""
        visits, followed = tuple(self._visits), None if self.points.in_known_order else self._expected
        self._forget_round()
        if not any(visit.backward for visit in visits):
            return
        self.has_new_code = False
        shared, self._shared = self._shared, frozenset(self.points.shared)
        if found := self._shared - shared:  # what was measured counts these as bytes that could leave
            self._forget_programs({index for index, _ in found})
            return
        order = tuple(map(place_of, visits))
        recurs = order in self.programs
        program = self.programs.pop(order, None) or Program(order=order, visits=visits)
        program.visits, program.first, program.options = visits, self._first, self._options
        program.rounds.note()
        self.programs[order] = program  # the last one used is the last to be forgotten
        if followed is not None and (recurs or not is_like(program, followed)):
            followed = None
        if followed is not None and followed.order in self.programs:
            self.programs[followed.order] = self.programs.pop(followed.order)
        while len(self.programs) > _PROGRAMS:
            del self.programs[next(iter(self.programs))]
        if followed is not None:
            return
        if self._last is not None:
            self._last.successor = program
        self._last = program
        assert self._options is not None
        self.planner.consider(program, self._options)
        for index in {visit.index for visit in visits}:
            self._alone[index] = self._alone[index] + 1 if len(visits) == 2 and program.moves else 0

    def _forget_gone(self) -> None:
        """Forget the steps of regions of which no code is left, as after `torch.compiler.reset()`: none will recur.

        A round under way in which one of them ran goes on before that.
        """
        while self._left:
            self._gone.add(self._left.popleft())
        if not self._gone:
            return
        if any(visit.index in self._gone for visit in self._visits):
            if not self._is_over():
                return
            self._forget_round()
        gone, self._gone = self._gone, set()
        self._forget_programs(gone)
        self._alone = Counter({index: count for index, count in self._alone.items() if index not in gone})
        self.misfits.forget(gone)
        self.external.forget(gone)
        self.points.forget(gone)
        self.planner.forget(gone)

    def _forget_programs(self, regions: set[int]) -> None:
        ended = forget_programs(self.programs, regions)
        self._last = None if self._last in ended else self._last
        if self._expected in ended:
            self._expect(None)

    def _forget_round(self) -> None:
        self.points.settle()
        self._calls, self._visits, self.points.in_known_order = [], [], True
        self._counts.clear()
        self._room.begin_round()
        self.external.begin_round()


def recorder_of(points: SwapPoints) -> StepRecorder:
    """Return the recorder of a device's swap points, made when it is first asked for."""
    if points.observer is None:
        points.observer = StepRecorder(points)
    assert isinstance(points.observer, StepRecorder)
    return points.observer


def _limit(options: Options) -> float:
    return math.inf if options.device_budget is None else options.device_budget

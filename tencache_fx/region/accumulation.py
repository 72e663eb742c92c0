"""How many backwards come before an update: a region is planned again where another plan is faster for that many.

An update in host memory takes long, and of one backward it may be most of the step: such a plan had rather keep
optimizer state on the device than parameters. Of many backwards that are added up the copies count most.

A backward that adds to earlier ones has its gradients in host memory beside the sums, up to its end. A plan for one
backward may have no room for that. Then the region is planned again before the second one. Room for both is sought in
later plans, too, as a larger batch needs them, until 16 updates in a row came after one backward each. Nothing is
compiled for that. Each time after that it takes twice as many updates, for loops that alternate.
"""

from typing import Any

from tencache_fx.kept_code import Phase
from tencache_fx.planning.parameter_schedule import stored_bytes
from tencache_fx.planning.recalibration import pays_accumulated
from tencache_fx.records import RegionRecord
from tencache_fx.region.backward_counter import BackwardCounter
from tencache_fx.region.compiled_region import Compiled, CompiledRegion, Request, WrittenPlan, keep_boxed
from tencache_fx.region.dynamic_shapes import Sizes

_PLAIN_UPDATES = 16  # in a row, that end the search for room for sums


class AccumulationMonitor:
    """The monitor of how often one region's backward runs before an update of the parameters it offloads."""

    optional = True

    def __init__(self) -> None:
        self.expected: int | None = None  # what the region is to be planned for; None before anything was seen
        self._counter = BackwardCounter()
        self._considered: set[int] = set()
        self.adds = False  # the region is to be planned with room for gradients beside those that they are added to
        self._sought_room = False  # since the region was compiled
        self._has_room = False  # the plan that there is was made with that room
        self._patience = _PLAIN_UPDATES

    def instrument(self, phase: Phase, run: Compiled, written: WrittenPlan) -> Compiled:
        """Return `run`, counted if it is the backward; boxed if `run` is."""
        if phase != "backward":
            return run

        def counted_run(*args: Any) -> Any:
            self._counter.note()
            return run(*args)

        return keep_boxed(run, counted_run)

    def review(self, current: CompiledRegion, sizes: Sizes) -> CompiledRegion | str:
        """Return the reason to plan again, if there is one.

        Host memory may have no room for gradients beside their sums. A plan for another number of backwards before an
        update may be faster.
        """
        self._counter.look()
        seen, record = self._counter.per_update, current.record
        if record is not None and self._counter.adds:
            if self._lacks_room(record):
                self._sought_room = self.adds = True
                return "host memory has no room for its gradients beside the sums that they are added to"
            self.adds |= self._has_room
        elif self.adds and self._counter.plain_updates >= self._patience:
            self.adds, self._patience = False, 2 * self._patience
        if seen is None or record is None or record.problem.accumulation == seen or seen in self._considered:
            return current
        self._considered.add(seen)
        if not pays_accumulated(record.captured, record.problem, record.plan, seen):
            return current
        self.expected = seen
        return f"{seen} backwards come before an update, and it was planned for {record.problem.accumulation}"

    def on_compiled(self, request: Request, compiled: CompiledRegion) -> None:
        """Watch the first parameter that is trained."""
        self._sought_room, self._has_room = False, request.adds
        trained = (each for each in request.offloaded.values() if not each.is_dead and each.parameter.requires_grad)
        self._counter.watch(next(trained, None))

    def on_refusal(self, current: CompiledRegion) -> CompiledRegion:
        """Go on with the plan that there is."""
        assert current.record is not None
        self.expected = current.record.problem.accumulation
        self.adds &= not self._sought_room
        return current

    def _lacks_room(self, record: RegionRecord) -> bool:
        """Return whether the plan takes host memory that is needed beside sums, and that was not sought yet."""
        problem, host_bytes = record.problem, record.plan.forecast.host_bytes
        lacks = host_bytes > 0 and host_bytes + stored_bytes(problem) > problem.budgets.host_bytes
        return lacks and not (self._has_room or self._sought_room)

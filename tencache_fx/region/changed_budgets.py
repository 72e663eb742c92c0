"""Budgets of host memory and disk that change while a region runs: it is planned again where that is of use."""

from dataclasses import replace

from tencache_fx.kept_code import Phase
from tencache_fx.planning.problem import Budgets, host_shares
from tencache_fx.planning.recalibration import pays_within
from tencache_fx.region.compiled_region import Compiled, CompiledRegion, Request, WrittenPlan
from tencache_fx.region.current_options import CurrentOptions
from tencache_fx.region.dynamic_shapes import Sizes


class ChangedBudgets:
    """The monitor of the budgets that one region was planned for.

    It has the region planned again for larger ones, if that pays. Whether its plan fits smaller ones `fits` says.
    """

    optional = True

    def __init__(self, current_options: CurrentOptions) -> None:
        self._current_options = current_options
        self._planned_for = self._considered = current_options.options

    def instrument(self, phase: Phase, run: Compiled, written: WrittenPlan) -> Compiled:
        """Return `run` as it is."""
        return run

    def review(self, current: CompiledRegion, sizes: Sizes) -> CompiledRegion | str:
        """Return the reason to plan for other budgets, if another plan is faster within them."""
        now, record = self._current_options.options, current.record
        if now == self._considered or record is None or not self.fits(current):
            return current
        self._considered, budgets = now, self._budgets(record.problem.budgets)
        if not pays_within(budgets, record.captured, record.problem, record.plan):
            return current
        return "another plan is faster within the budgets of host memory and disk that were configured"

    def fits(self, current: CompiledRegion) -> bool:
        """Return whether the plan fits the budgets of host memory and disk that there are now."""
        record = current.record
        if record is None or self._current_options.options == self._planned_for:
            return True
        budgets, forecast = self._budgets(record.problem.budgets), record.plan.forecast
        return forecast.host_bytes <= budgets.host_bytes and forecast.disk_bytes <= budgets.disk_bytes

    def on_compiled(self, request: Request, compiled: CompiledRegion) -> None:
        """Note the budgets that it was planned for."""
        self._planned_for = self._considered = self._current_options.options

    def on_refusal(self, current: CompiledRegion) -> CompiledRegion:
        """Go on with the plan that there is."""
        return current

    def _budgets(self, planned: Budgets) -> Budgets:
        """Return the budgets of a plan as they are now, beside what was taken when it was made."""
        now = self._current_options.options
        more_bytes = now.spill_budget - self._planned_for.spill_budget
        return replace(
            planned,
            **host_shares(now.host_budget, planned.host_taken_bytes),
            disk_bytes=max(0, planned.disk_bytes + more_bytes),
        )

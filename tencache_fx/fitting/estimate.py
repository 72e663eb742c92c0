"""What the plans of a model's regions come to: whether it fits, in which tiers, how fast, and what keeps it busy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tencache_fx.fitting.model_figures import ModelFigures
from tencache_fx.fitting.target import Target
from tencache_fx.options import Options
from tencache_fx.planning.external import least_spill_bytes
from tencache_fx.planning.host_work import HostWork
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.loads import Load, loads_of
from tencache_fx.planning.parameter_schedule import early_step_ns, keep_resident, step_ns
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Kind, Problem, Step
from tencache_fx.planning.search import policy_floor_bytes
from tencache_fx.reporting.fit_report import Fit, RegionFit
from tencache_fx.units import PAGE_BYTES, round_up

_PROBES = 5  # device budgets that are tried between one that is too small and one that suffices


@dataclass(frozen=True, kw_only=True)
class RegionPlan:
    """A region's problem as it was captured, and its plan with the problem that it is for, or why there is none.

    A step has so many `calls` of it, with other parameters each.
    """

    captured: Problem
    planned: tuple[Problem, Plan] | None
    refusal: str = ""
    calls: int = 1


def estimate_of(plans: Sequence[RegionPlan], figures: ModelFigures, target: Target) -> Fit:
    """Return what the plans come to, for a step of as many forwards and backwards as their problems say."""
    options, made = target.options, [(each.calls, *each.planned) for each in plans if each.planned]
    resident = {name: calls for calls, _, plan in made for name in plan.resident}
    here = {name: calls for calls, _, plan in made for name in plan.updated_here}
    here_bytes = sum(figures.by_name[name].state_bytes * calls for name, calls in here.items())
    not_there_bytes = sum(figures.by_name[name].host_state_bytes * calls for name, calls in here.items())
    staying_bytes = sum(figures.by_name[name].nbytes * calls for name, calls in resident.items())
    loads = [(load, calls) for calls, problem, plan in made for load in loads_of(problem, plan)]
    host = HostWork(costs=target.host, trained=figures.trained_count).load(made)
    late_ns, early_ns = (
        max(host.busy_ns, sum(calls * takes_ns(problem, plan.forecast) for calls, problem, plan in made))
        for takes_ns in (step_ns, early_step_ns)
    )
    return Fit(
        device=target.name,
        device_budget_bytes=options.device_budget,
        host_budget_bytes=options.host_budget,
        spill_budget_bytes=options.spill_budget,
        parameters=figures.count,
        parameter_bytes=figures.nbytes,
        device_parameter_bytes=staying_bytes + figures.kept_bytes,
        offloaded_bytes=figures.offloaded_bytes,
        gradient_bytes=sum(
            s.nbytes * each.calls
            for each in plans
            for s in each.captured.storages
            if s.kind is Kind.STORED and s.parameter not in here
        ),
        state_bytes=figures.offloaded_state_bytes - not_there_bytes,
        device_state_bytes=here_bytes + figures.kept_state_bytes,
        all_on_device_bytes=all_on_device_bytes([each.captured for each in plans], figures),
        least_device_bytes=None,
        measured=target.rates.measured,
        rates_source=target.source,
        regions=tuple(_region_fit(index, each, options.policy) for index, each in enumerate(plans)),
        loads=tuple(
            Load(
                name=name,
                busy_ns=sum(load.busy_ns * calls for load, calls in loads if load.name == name),
                nbytes=sum(load.nbytes * calls for load, calls in loads if load.name == name),
            )
            for name in dict.fromkeys(load.name for load, _ in loads)
        )
        + ((host,) if made else ()),
        accumulation=plans[0].captured.accumulation,
        whole_step_ns=late_ns if made else 0,
        early_step_ns=early_ns if made else 0,
    )


def least_device_bytes(
    has_plan: Callable[[int], bool], captured: Sequence[Problem], options: Options, offloaded_bytes: int
) -> int | None:
    """Return a device budget in which every region has a plan, as small as a few tries find; None if none has."""
    budget = options.device_budget
    assert budget is not None
    floor = 0
    for _ in range(2):  # the larger a budget, the larger is what is worth a transfer
        spilled = [replace(each, min_spill_bytes=least_spill_bytes(floor)) for each in captured]
        floor = round_up(max(policy_floor_bytes(each, options.policy) for each in spilled), PAGE_BYTES)
    if floor > budget and has_plan(floor):
        return floor
    low, high = max(floor, budget), round_up(max(int(live_bytes(each).max()) for each in captured), PAGE_BYTES)
    high = max(high + offloaded_bytes, low)  # with all parameters there
    if not has_plan(high):
        return None
    for _ in range(_PROBES):
        middle = round_up((low + high) // 2, PAGE_BYTES)
        if high - low < high // 50 or middle >= high:
            break
        low, high = (low, middle) if has_plan(middle) else (middle, high)
    return high


def _region_fit(index: int, region: RegionPlan, policy: str) -> RegionFit:
    bare = RegionFit(
        name=f"region {index}",
        steps=len(region.captured.ops),
        floor_bytes=policy_floor_bytes(region.captured, policy),
        refusal=region.refusal,
        calls=region.calls,
    )
    if region.planned is None:
        return bare
    problem, plan = region.planned
    forecast = plan.forecast
    return replace(
        bare,
        steps=len(problem.ops),
        peak_bytes=forecast.peak_bytes,
        step_ns=step_ns(problem, forecast) // problem.accumulation,
        ideal_ns=forecast.ideal_ns,
        buffer_bytes=forecast.host_bytes,
        disk_bytes=forecast.disk_bytes,
        out_bytes=forecast.d2h_bytes,
        in_bytes=forecast.h2d_bytes,
        disk_write_bytes=forecast.disk_write_bytes,
        disk_read_bytes=forecast.disk_read_bytes,
    )


def all_on_device_bytes(captured: Sequence[Problem], figures: ModelFigures) -> int:
    """Return the bytes on the device if nothing were offloaded: at the peak, with all gradients."""
    most = []
    for problem in captured:
        read = {s.parameter for s in problem.storages if s.parameter}
        kept = keep_resident(problem, read)
        end = Step(len(kept.ops))
        storages = tuple(replace(s, death=end) if s.kind is Kind.STORED else s for s in kept.storages)
        others = [figures.by_name[name] for name in figures.offloaded - read]
        others_bytes = sum(each.nbytes * (2 if each.trained else 1) for each in others)
        most.append(int(live_bytes(replace(kept, storages=storages)).max(initial=0)) + others_bytes)
    return max(most) + figures.plain_state_bytes

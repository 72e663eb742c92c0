"""Break each rule of a valid plan once; the checker must name that rule."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from problems import links, make_swap

from tencache_fx.errors import InvariantError
from tencache_fx.planning.plan import CopyIn, Plan, PoolClass, Transfer
from tencache_fx.planning.planner import build_plan
from tencache_fx.planning.problem import Budgets, Kind, Op, Problem, Step, Storage, Tier
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.swap_region import frugal_transfers
from tencache_fx.planning.verify import verify_plan

PAGE = 4096


def storage(name: str, uses: tuple[int, ...], *, spillable: bool = True, nbytes: int = PAGE) -> Storage:
    return Storage(
        name=name,
        nbytes=nbytes,
        kind=Kind.ACTIVATION,
        birth=Step(uses[0]),
        death=Step(uses[-1] + 1),
        uses=tuple(Step(use) for use in uses),
        spillable=spillable,
    )


def region() -> Problem:
    """Ten steps, backward from 5; x and y are offloaded between the graphs, z inside backward, the others stay."""
    return Problem(
        ops=tuple(Op(name=f"op_{k}", duration_ns=PAGE) for k in range(10)),
        boundary=Step(5),
        storages=(
            storage("x", (0, 1, 9)),
            storage("y", (1, 2, 8)),
            storage("z", (1, 5, 9)),
            storage("w", (0, 9), spillable=False),
            storage("small", (0, 9), nbytes=8),
            replace(storage("given", (3, 4)), birth=Step(0)),
        ),
        links=links(),
        budgets=Budgets(device_bytes=10 * PAGE, host_bytes=3 * PAGE, disk_bytes=PAGE),
        min_spill_bytes=PAGE,
    )


def transfer(name: str, offload: int, gone: int, fetch: int, back: int, tier: Tier = Tier.HOST) -> Transfer:
    times = {
        "copy_out_after": Step(offload),
        "freed_at": Step(gone),
        "prefetch_at": Step(fetch),
        "needed_at": Step(back),
    }
    return make_swap(name=name, nbytes=PAGE, tier=tier, **times)


def valid() -> Plan:
    problem = region()
    plan = make_plan(problem.within(device_bytes=None), "none")
    forecast = replace(
        plan.forecast,
        peak_bytes=5 * PAGE + 8,
        host_bytes=3 * PAGE,
        disk_bytes=PAGE,
        d2h_bytes=3 * PAGE,
        h2d_bytes=3 * PAGE,
        disk_write_bytes=PAGE,
        disk_read_bytes=PAGE,
    )
    transfers = (transfer("x", 0, 2, 9, 9), transfer("y", 1, 3, 7, 8, Tier.NVME), transfer("z", 5, 6, 8, 9))
    buffers = (PoolClass(nbytes=PAGE, count=2),)
    return replace(
        plan, transfers=transfers, pool=buffers, staging=(PoolClass(nbytes=PAGE, count=1),), forecast=forecast
    )


def at(index: int, **changes: Any) -> Callable[[Plan], Plan]:
    """Change one swap."""

    def change(plan: Plan) -> Plan:
        transfers = list(plan.transfers)
        victim = transfers[index]
        names = ("name", "nbytes", "tier", "copy_out_after", "freed_at", "prefetch_at", "needed_at")
        transfers[index] = make_swap(**({name: getattr(victim, name) for name in names} | changes))
        return replace(plan, transfers=tuple(transfers))

    return change


def foretell(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, forecast=replace(plan.forecast, **changes))


BREAKS: list[tuple[str, Callable[[Plan], Plan]]] = [
    ("known-storage", at(0, name="nobody")),
    ("one-transfer", lambda plan: replace(plan, transfers=(*plan.transfers, plan.transfers[0]))),
    ("same-bytes", at(0, nbytes=PAGE - 1)),
    ("spillable", lambda plan: replace(plan, transfers=(transfer("w", 0, 2, 9, 9),))),
    ("worth-an-op", lambda plan: replace(plan, transfers=(replace(transfer("small", 0, 2, 9, 9), nbytes=8),))),
    ("tier", at(0, tier=Tier.DEVICE)),
    ("offload-after-birth", at(1, copy_out_after=Step(0))),
    ("offload-before-freed", at(0, copy_out_after=Step(2))),
    ("freed-before-prefetch", at(2, freed_at=Step(9))),
    ("prefetch-before-needed", at(1, prefetch_at=Step(9))),
    ("needed-at-a-use", at(1, needed_at=Step(9))),
    ("used-before", lambda plan: replace(plan, transfers=(transfer("given", 0, 1, 3, 3),))),
    ("freed-after-last-use", at(0, freed_at=Step(1))),
    ("boundary", at(0, freed_at=Step(6))),
    ("boundary", at(1, prefetch_at=Step(4))),
    ("boundary", at(2, copy_out_after=Step(4))),
    ("pool", lambda plan: replace(plan, pool=(PoolClass(nbytes=PAGE, count=1),))),
    ("pool", lambda plan: replace(plan, pool=(PoolClass(nbytes=PAGE - 1, count=9),))),
    ("staging", lambda plan: replace(plan, staging=())),
    ("staging", lambda plan: replace(plan, staging=(PoolClass(nbytes=PAGE - 1, count=1),))),
    ("host-budget", lambda plan: replace(plan, pool=(PoolClass(nbytes=PAGE, count=3),))),
    ("forecast-host", foretell(host_bytes=2 * PAGE)),
    ("disk-budget", foretell(disk_bytes=2 * PAGE)),
    ("forecast-disk", foretell(disk_bytes=PAGE - 1)),
    ("forecast-peak", foretell(peak_bytes=1)),
    ("forecast-traffic", foretell(d2h_bytes=1)),
    ("forecast-traffic", foretell(h2d_bytes=1)),
    ("forecast-traffic", foretell(disk_write_bytes=1)),
    ("forecast-traffic", foretell(disk_read_bytes=1)),
]


def test_the_valid_plan_is_valid() -> None:
    verify_plan(region(), valid())


@pytest.mark.parametrize(("rule", "change"), BREAKS, ids=[f"{i}-{rule}" for i, (rule, _) in enumerate(BREAKS)])
def test_a_broken_rule_is_named(rule: str, change: Callable[[Plan], Plan]) -> None:
    with pytest.raises(InvariantError, match=rf"breaks the rule {rule}[ :]"):
        verify_plan(region(), change(valid()))


def test_what_the_caller_holds_is_gone_no_sooner_than_that_lets_go() -> None:
    problem = replace(region(), storages=(replace(storage("x", (0, 1, 6, 9)), caller_frees_at=Step(5)),))
    found = make_plan(problem.within(device_bytes=None), "none")
    ops = replace(found.forecast, peak_bytes=PAGE, host_bytes=PAGE, d2h_bytes=PAGE, h2d_bytes=PAGE)
    plan = replace(found, pool=(PoolClass(nbytes=PAGE, count=1),), forecast=ops)
    verify_plan(problem, replace(plan, transfers=(transfer("x", 0, 5, 5, 6),)))
    for early_or_late in (transfer("x", 0, 4, 5, 6), transfer("x", 6, 7, 8, 9)):
        with pytest.raises(InvariantError, match="breaks the rule held-by-the-caller "):
            verify_plan(problem, replace(plan, transfers=(early_or_late,)))


def test_a_region_over_its_budget_is_named_with_the_step() -> None:
    problem = region()
    tight = problem.within(device_bytes=4 * PAGE)
    with pytest.raises(
        InvariantError, match=r"device-budget: step \d \(op_\d\) holds 20488 bytes, the budget is 16384"
    ):
        verify_plan(tight, valid())


def test_a_parameter_is_fetched_no_later_than_by_the_op_of_its_graph() -> None:
    """Swap points before that may fetch it; at that op it is fetched at the latest, whatever a plan says."""
    fetched = replace(storage("w", (3, 4)), kind=Kind.FETCHED, birth=Step(3), ready=Step(2), parameter="w")
    problem = replace(region(), storages=(fetched,), copies_parameters=True)
    for prefetch_at in (1, 2, 3):
        load = Transfer(
            name="w", nbytes=PAGE, tier=Tier.HOST, back=CopyIn(prefetch_at=Step(prefetch_at), needed_at=Step(3))
        )
        plan = build_plan(problem, "none", (load,), floor=0)
        verify_plan(replace(problem, copies_parameters=False), plan)
        if prefetch_at <= 2:
            verify_plan(problem, plan)
        else:
            with pytest.raises(InvariantError, match="breaks the rule load-by-its-op "):
                verify_plan(problem, plan)
    (load,) = frugal_transfers(problem)
    assert load.prefetch_at == 2, "as late as can be"

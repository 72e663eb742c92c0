"""The time of the thread that runs a step, by hand."""

from dataclasses import replace

import pytest

from tencache_fx.planning.host_work import HostCosts, HostWork
from tencache_fx.planning.problem import Budgets, Kind, Links, Op, Problem, Step, Storage
from tencache_fx.planning.search import plan_region

MIB = 1 << 20
COSTS = HostCosts(launch_ns=1, transfer_op_ns=100, device_update_ns=10_000, host_update_ns=1_000_000)
LINK = 10**10


def storage(name: str, kind: Kind, birth: int, death: int, uses: tuple[int, ...], **more: object) -> Storage:
    steps = {"birth": Step(birth), "death": Step(death), "uses": tuple(map(Step, uses))}
    return Storage(name=name, nbytes=MIB, kind=kind, spillable=False, **steps, **more)


def of_one_parameter(device_bytes: int | None) -> Problem:
    """Return a region that reads one offloaded parameter in its forward, and makes its gradient in its backward."""
    return Problem(
        ops=tuple(Op(name=f"op{n}", duration_ns=0 if n == 2 else 1_000_000) for n in range(5)),
        boundary=Step(3),
        storages=(
            storage("load", Kind.FETCHED, 1, 2, (1,), parameter="weight"),
            storage("store", Kind.STORED, 3, 4, (3,), parameter="weight", state_bytes=3 * MIB),
        ),
        links=Links(
            d2h_bytes_per_s=LINK, h2d_bytes_per_s=LINK, d2h_duplex_bytes_per_s=LINK, h2d_duplex_bytes_per_s=LINK
        ),
        budgets=Budgets(device_bytes=device_bytes, host_bytes=64 * MIB),
        min_spill_bytes=1,
    )


def busy_ns(problem: Problem, trained: int = 3, calls: int = 1) -> int:
    work = HostWork(costs=COSTS, trained=trained)
    return work.load([(calls, *plan_region(problem, "joint"))]).busy_ns


def test_kernels_runtime_ops_and_updates_are_counted() -> None:
    """Four ops launch a kernel; a fetch and its wait, then an offload, a release and a take; three updates."""
    assert busy_ns(of_one_parameter(MIB)) == 4 + 500 + 2 * 10_000 + 1_000_000


def test_a_parameter_that_stays_on_the_device_is_not_fetched() -> None:
    assert busy_ns(of_one_parameter(None)) == 4 + 300 + 2 * 10_000 + 1_000_000


def test_without_a_gradient_in_host_memory_all_updates_are_on_the_device() -> None:
    problem = of_one_parameter(MIB)
    assert busy_ns(replace(problem, storages=problem.storages[:1])) == 4 + 3 * 10_000


def test_accumulated_backwards_have_one_update() -> None:
    problem = replace(of_one_parameter(MIB), accumulation=7)
    assert busy_ns(problem) == 7 * (4 + 500) + 2 * 10_000 + 1_000_000


def test_each_call_of_a_region_has_parameters_of_its_own() -> None:
    assert busy_ns(of_one_parameter(MIB), calls=2) == 2 * (4 + 500) + 10_000 + 2 * 1_000_000


def test_before_there_is_a_plan_nothing_moves() -> None:
    assert HostWork(costs=COSTS, trained=3).load([(1, of_one_parameter(MIB), None)]).busy_ns == 4 + 3 * 10_000


@pytest.mark.parametrize("calls", [0, 2])
def test_a_cpu_has_no_such_thread(calls: int) -> None:
    parts = [(calls, *plan_region(of_one_parameter(MIB), "joint"))]
    assert HostWork(costs=None, trained=3).load(parts).busy_ns == 0

"""Rates of process groups: what is measured is what was planted, and what is agreed on is in the facts of a plan."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_fx.hardware import collective_rates
from tencache_fx.hardware.collective_rates import FIXED_RATES, GroupRates, agree_on_rates, group_facts, group_rates
from tencache_fx.planning.problem import CollectiveKind

CPU = torch.device("cpu")
RANKS = 4
pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.fixture(autouse=True, scope="module")
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def seconds_over(latency_ns: int, bytes_per_s: int):
    """Return what a gather of parts takes over such a link, in seconds."""

    def seconds(group: dist.ProcessGroup, device: torch.device, part_bytes: int) -> float:
        sent = CollectiveKind.ALL_GATHER.traffic(part_bytes * group.size(), group.size())
        return latency_ns / 1e9 + sent / bytes_per_s

    return seconds


@settings(max_examples=100)
@given(latency_ns=st.integers(0, 10**6), bytes_per_s=st.integers(10**8, 10**11))
def test_what_is_measured_is_what_the_link_does(latency_ns: int, bytes_per_s: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_rates, "_gather_seconds", seconds_over(latency_ns, bytes_per_s))
        found = collective_rates._measure(dist.group.WORLD, CPU)
    sent = CollectiveKind.ALL_GATHER.traffic(8 << 20, RANKS)
    took_ns = found.latency_ns + sent * 1e9 / found.bytes_per_s
    assert took_ns == pytest.approx(latency_ns + sent * 1e9 / bytes_per_s, rel=0.01)
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert found.latency_ns == pytest.approx(latency_ns, rel=0.01, abs=1000)


@pytest.mark.parametrize("late", range(3))
def test_one_gather_that_is_held_up_does_not_make_the_rest_of_the_step_look_long(late: int):
    """A millisecond where the others take a tenth, and eight: no rate is taken for less than half of what it is."""
    link = seconds_over(100_000, 10**9)
    asked = []

    def seconds(*given: object) -> float:
        asked.append(given)
        return link(*given) + (0.001 if len(asked) == late + 1 else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_rates, "_gather_seconds", seconds)
        found = collective_rates._measure(dist.group.WORLD, CPU)
    assert 5 * 10**8 < found.bytes_per_s < 2 * 10**9
    assert found.latency_ns < 1_200_000


def test_ranks_measure_once_and_keep_it(monkeypatch: pytest.MonkeyPatch):
    """A group of another process that has the same ranks finds what was kept."""
    monkeypatch.setattr(collective_rates, "backend_of", lambda *_: "planted")
    asked = []

    def seconds(*given: object) -> float:
        asked.append(given)
        return seconds_over(5000, 10**9)(*given)

    monkeypatch.setattr(collective_rates, "_gather_seconds", seconds)
    first, second = dist.new_group(), dist.new_group()
    found = agree_on_rates(first, CPU, calibrate=True)
    assert found != FIXED_RATES["cpu"]
    count = len(asked)
    assert count > 0
    assert agree_on_rates(first, CPU, calibrate=True) == agree_on_rates(second, CPU, calibrate=True) == found
    assert len(asked) == count
    assert group_rates(second, "cpu") == found


def test_without_memory_to_measure_the_fixed_rates_are_taken(monkeypatch: pytest.MonkeyPatch):
    def full(*sizes: object, **more: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(collective_rates, "backend_of", lambda *_: "full")
    monkeypatch.setattr(torch, "empty", full)
    assert agree_on_rates(dist.new_group(), CPU, calibrate=True) == FIXED_RATES["cpu"]
    monkeypatch.undo()
    assert agree_on_rates(dist.new_group(), CPU, calibrate=False) == FIXED_RATES["cpu"]


def test_what_a_group_agreed_on_is_a_fact_of_plans():
    before = group_facts()
    group = dist.new_group(backend="fake")
    name = group.group_name
    assert {each: rest for each, *rest in group_facts()}[name] == [RANKS, []]
    assert len(group_facts()) == len(before) + 1
    rates = GroupRates(latency_ns=1, bytes_per_s=2)
    collective_rates._AGREED[group] = {"cpu": rates}
    assert (name, RANKS, [("cpu", rates)]) in group_facts()
    dist.destroy_process_group(group)
    assert group_facts() == before

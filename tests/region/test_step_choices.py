"""What the regions of a step recompute: how much of it, in which calls, and when that is chosen again."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import Block, faulty_engine
from hypothesis import given
from hypothesis import strategies as st
from meter import Meter
from problems import links as slow_links
from test_step import LINKS, TWO_CALLS, budgets, recomputing_region, visit_of
from test_step_plans import (
    BUDGETS,
    DEPTH,
    WIDTH,
    blocks,
    current,
    equal,
    gradients,
    inputs,
    meter,
    one_by_one,
    recorder,
    wanted,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tencache_fx
from tencache_fx.hardware import rates
from tencache_fx.planning.problem import Kind, Problem
from tencache_fx.planning.step import FRUGAL, Visit
from tencache_fx.planning.step_recompute import Recomputed, _model
from tencache_fx.region import step_choices
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.step_choices import StepChoices
from tencache_fx.runtime.engine import Engine

__all__ = ["meter"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with faulty_engine(host_budget_bytes=1 << 28) as found:
        yield found


@pytest.mark.parametrize("rows", [(512, 96), (96, 512)], ids=["longest first", "longest last"])
def test_calls_of_other_lengths_are_modelled_at_their_own(
    engine: Engine, meter: Meter, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, int]
) -> None:
    """Two lengths in one step, which recomputes: what it was chosen to hold is what it holds then."""
    monkeypatch.setattr(rates, "links", lambda *_, **__: slow_links(10**8))
    plain, model = one_by_one(blocks(), "aot_eager_decomp_partition"), one_by_one(blocks(), device_budget=6_600_000)

    def run(layers: nn.Sequential, step: int) -> list[Tensor]:
        layers.zero_grad(set_to_none=True)
        longer, shorter = (layers(inputs(step, each)).square().mean() for each in rows)
        (longer + shorter).backward()
        return [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]

    for step in range(5):
        expected = run(plain, step)
        meter.peak = meter.held
        assert equal(run(model, step), expected), f"step {step}"
        assert meter.peak <= 6_600_000
    program = list(recorder(engine).programs.values())[-1]
    lengths: dict[int, set[int]] = {}
    for region, index in ((visit.region, visit.index) for visit in program.visits if visit.region.recomputed):
        sizes = {storage.name: storage.nbytes for storage in region.original.storages}
        assert all(sizes[each.name] == each.nbytes for each in region.problem.storages if each.name in sizes)
        lengths.setdefault(index, set()).add(max(sizes.values()))
    assert any(len(each) == 2 for each in lengths.values())
    assert program.planned is not None
    assert program.planned.plan is not None


def test_slow_links_make_regions_recompute(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The regions are compiled once more for it, and never again."""
    monkeypatch.setattr(rates, "links", lambda *_, **__: slow_links(10**8))
    expected, model, compiled, follows = wanted(6), one_by_one(blocks(), device_budget=BUDGETS["some"]), [], []

    def run(x: Tensor) -> Tensor:
        result: Tensor = model(x)
        follows.append(recorder(engine).points.schedule is not FRUGAL)
        return result

    for step, each in enumerate(expected):
        assert equal(gradients(model, run, inputs(step)), each), f"step {step}"
        compiled.append(REGIONS.compilations)
    assert follows == [False, False, True, True, True, True], "kernels are tuned where they run first"
    chosen = [region.swap_region.recomputed for region in map(current, REGIONS.live()) if region.swap_region]
    assert any(chosen)
    assert compiled[0] < compiled[1] == compiled[-1]


@pytest.mark.parametrize("budget", [5_000_000, 5_100_000, 5_200_000])
def test_what_needs_more_than_it_was_chosen_for_is_chosen_again(
    engine: Engine, meter: Meter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, budget: int
) -> None:
    """Compiled, a backward that recomputes holds more than the model of it: it would not fit, and the first did."""
    monkeypatch.setattr(rates, "links", lambda *_, **__: slow_links(10**8))
    expected, model, compiled = wanted(6), one_by_one(blocks(), device_budget=budget), []
    for step, each in enumerate(expected):
        meter.peak = meter.held
        assert equal(gradients(model, model, inputs(step)), each), f"step {step}"
        assert meter.peak <= budget
        compiled.append(REGIONS.compilations)
    assert compiled[2] == compiled[-1]
    assert "stays as it was" not in caplog.text
    assert tencache_fx.steps()


def test_a_choice_is_made_again_with_what_its_model_lacked() -> None:
    """Until it fits, or the last time for all to do as they did."""
    region, choices = recomputing_region(), StepChoices()
    visits = [visit_of(region, 0, call, backward=back, held_bytes=100) for call, back in TWO_CALLS]
    choices.choose(visits, LINKS, budgets(1500), ())
    decided = choices.decided[0]
    assert decided == Recomputed(first=("large",), first_calls=1)
    as_modelled = _model(region, frozenset({"large"}))
    choices.check(0, as_modelled)
    assert choices.decided[0] == decided, "it is as expected"
    choices.check(0, replace(as_modelled, margins=((300,), (300,))))
    assert choices.decided[0] == decided, "there is room for that"
    choices.check(0, replace(as_modelled, margins=((600,), (600,))))
    assert choices.decided[0] == Recomputed(), "with 600 bytes less, no choice holds less than what ran"


def test_what_was_recomputed_still_is_where_other_storages_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    region, choices, found = recomputing_region(), StepChoices(), [("a",), ("b", "c"), ("b",)]
    monkeypatch.setattr(step_choices, "kept_step_choice", lambda *_: {0: Recomputed(always=found.pop(0))})
    expected = (("a",), ("a", "b", "c"), ("a", "b", "c"), ("a", "b", "c"))
    for factor, names in zip((1.0, 1.5, 2.0, 2.5), expected, strict=True):

        def resize(problem: Problem, factor: float = factor) -> Problem:
            grown = (replace(each, nbytes=int(each.nbytes * factor)) for each in problem.storages)
            return replace(problem, storages=tuple(grown))

        visits = [visit_of(region.resized(resize), 0, 0, backward=back, held_bytes=0) for back in (False, True)]
        choices.choose(visits, LINKS, budgets(1500), ())
        assert choices.decided[0].always == names, factor
    assert not found, "it has grown by half twice"


NAMES = st.lists(st.sampled_from("abcd"), unique=True, max_size=3)
CHOICES = st.builds(
    lambda always, first, calls: Recomputed(always=tuple(always), first=tuple(first[:1]), first_calls=calls),
    NAMES,
    NAMES,
    st.integers(0, 3),
)


@given(before=CHOICES, choice=CHOICES)
def test_no_call_recomputes_less_by_another_choice(before: Recomputed, choice: Recomputed) -> None:
    found = step_choices._no_less(choice, before)
    for call in range(4):
        less = before.names(call, checkpointed=False)
        assert less <= found.names(call, checkpointed=False)
    if before == choice:
        assert found.extent == choice.extent


def test_a_region_without_activations_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    monkeypatch.setattr(step_choices, "kept_step_choice", lambda visits, *_: searches.append(len(visits)))
    region, choices = recomputing_region(), StepChoices()
    storages = tuple(replace(each, kind=Kind.INPUT) for each in region.original.storages)
    empty = replace(region, original=replace(region.original, storages=storages))
    for _ in range(3):
        choices.choose(
            [visit_of(empty, 0, 0, backward=back, held_bytes=0) for back in (False, True)], LINKS, budgets(1500), ()
        )
    assert searches == [2]


def test_some_calls_recompute_more_than_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The region is compiled for two sets of storages, and its calls take turns with them."""
    monkeypatch.setattr(rates, "links", lambda *_, **__: slow_links(10**8))
    expected, model, compiled = wanted(6), one_by_one(blocks(), device_budget=6_200_000), []
    for step, each in enumerate(expected):
        assert equal(gradients(model, model, inputs(step)), each), f"step {step}"
        compiled.append(REGIONS.compilations)
    decided = recorder(engine).planner.choices.decided
    assert any(each.first and 0 < each.first_calls < DEPTH for each in decided.values())
    visits = list(recorder(engine).programs.values())[-1].visits
    assert len({visit.region.recomputed for visit in visits}) == 2
    assert compiled[1] == compiled[-1]


def test_what_is_recomputed_is_decided_again_when_a_region_joins(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, the blocks of the first kind fit; beside those of the second they have to recompute, too."""
    monkeypatch.setattr(rates, "links", lambda *_, **__: slow_links(10**8))
    torch.manual_seed(0)
    narrow, wide = blocks(4), nn.Sequential(*(Block(WIDTH, 8) for _ in range(4)))
    for part in (narrow, wide):
        one_by_one(part, device_budget=9_000_000)
    decided = recorder(engine).planner.choices.decided
    for model in (narrow, nn.Sequential(*narrow, *wide)):
        for step in range(3):
            gradients(model, model, inputs(step))
        recomputes = any(each.always or each.first for each in decided.values())
        assert recomputes == (model is not narrow)
    last = list(recorder(engine).programs.values())[-1]
    assert last.planned is not None
    assert last.planned.plan is not None


def test_a_region_that_joins_takes_nothing_from_other_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short step with a head of its own would fit with less recomputed, but the long one would not."""
    monkeypatch.setattr(rates, "links", lambda *_, **__: slow_links(10**8))
    body, head = blocks(), nn.Sequential(Block(WIDTH, 2))
    for part in (body, head):
        one_by_one(part, device_budget=5_800_000)
    for step in range(3):
        gradients(body, body, inputs(step))
    decided = dict(recorder(engine).planner.choices.decided)
    assert any(each.always for each in decided.values())
    short = nn.Sequential(*body[:2], *head)
    for step in range(2):
        gradients(short, short, inputs(step))
    after = recorder(engine).planner.choices.decided
    assert len(after) > len(decided)
    assert all(after[index].extent >= each.extent for index, each in decided.items())


def test_a_region_that_joins_changes_nothing_if_all_is_best_as_it_is(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "links", lambda *_, **__: slow_links(10**8))
    body, head = blocks(), nn.Sequential(Block(WIDTH, 2))
    for part in (body, head):
        one_by_one(part, device_budget=6_800_000)
    for step in range(3):
        gradients(body, body, inputs(step))
    decided = dict(recorder(engine).planner.choices.decided)
    assert any(each.first_calls for each in decided.values())
    monkeypatch.setattr(step_choices, "kept_step_choice", lambda *_: None)
    longer = nn.Sequential(*body, *head)
    for step in range(2):
        gradients(longer, longer, inputs(step))
    after = recorder(engine).planner.choices.decided
    assert len(after) > len(decided)
    assert {index: after[index] for index in decided} == decided


def test_what_is_recomputed_is_decided_again_when_texts_have_grown(
    engine: Engine, meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short texts fit as they are. Long ones recompute as if they had come first, and short ones then take no less."""
    monkeypatch.setattr(rates, "links", lambda *_, **__: slow_links(10**8))
    searches: list[int] = []
    search = step_choices.kept_step_choice

    def counted(visits: Sequence[Visit], *args: Any) -> object:
        searches.append(len(visits))
        return search(visits, *args)

    monkeypatch.setattr(step_choices, "kept_step_choice", counted)
    model, plain = one_by_one(blocks(), device_budget=6_200_000), one_by_one(blocks(), "aot_eager_decomp_partition")
    decided, grown, compiled = recorder(engine).planner.choices.decided, [], []
    for step, rows in enumerate((96, 96, 110, 120, 512, 512, 512, 96, 510, 505)):
        expected = gradients(plain, plain, inputs(step, rows))
        meter.peak = meter.held
        assert equal(gradients(model, model, inputs(step, rows)), expected), f"step {step}"
        assert meter.peak <= 6_200_000
        recorder(engine).settle()
        grown.append(any(each.always or each.first for each in decided.values()))
        compiled.append(REGIONS.compilations)
    assert grown == [False] * 4 + [True] * 6
    assert compiled[5] == compiled[-1]
    assert len(searches) <= 3, "the first two lengths, which are compiled one after another, and the long one"


def test_checkpointed_calls_recompute_the_same(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks in one checkpoint run again in their order, and have to save what they saved."""
    monkeypatch.setattr(rates, "links", lambda *_, **__: slow_links(10**8))
    model, plain = one_by_one(blocks(), device_budget=6_800_000), blocks()

    def run(layers: nn.Sequential, x: Tensor) -> Tensor:
        x = layers[:4](x)
        for first in (4, 6):
            x = checkpoint(layers[first : first + 2], x, use_reentrant=False)
        return x

    for step in range(4):
        found = gradients(model, lambda x: run(model, x), inputs(step).requires_grad_())
        for mine, other in zip(found, gradients(plain, lambda x: run(plain, x), inputs(step)), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
        decided = recorder(engine).planner.choices.decided
        for index in decided:  # in the middle of a checkpoint
            decided[index] = Recomputed(first=("addmm",), first_calls=5)
    assert decided


def test_checkpointed_calls_are_planned_as_they_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the first calls recompute something, all that are checkpointed do, and that was planned."""
    monkeypatch.setattr(rates, "links", lambda *_, **__: slow_links(10**8))
    model, plain = one_by_one(blocks(), device_budget=5_800_000), one_by_one(blocks(), "aot_eager_decomp_partition")

    def run(layers: nn.Sequential, x: Tensor) -> Tensor:
        x = layers[:6](x)
        for layer in layers[6:]:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    for step in range(5):
        x = inputs(step)
        assert equal(gradients(model, lambda x: run(model, x), x), gradients(plain, lambda x: run(plain, x), x))
    decided = recorder(engine).planner.choices.decided
    assert any(0 < each.first_calls < 6 for each in decided.values())
    program = list(recorder(engine).programs.values())[-1]
    assert sum(visit.checkpointed for visit in program.visits) == 3 * 2  # forward, forward again, backward
    assert all(visit.region.recomputed == decided[visit.index].names_of(visit) for visit in program.visits)
    assert program.planned is not None
    assert program.planned.plan is not None

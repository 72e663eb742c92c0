"""What recomputing does to a problem, against the instruction list written out and counted anew."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from outcomes import Outcomes
from problems import transformer
from programs import Program, measure, op_of, programs_and_choices, rewrite, transformer_recipes

from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.problem import Kind, Problem, Step, Storage
from tencache_fx.planning.recompute import recompute

SEEN = Outcomes()


def facts(storage: Storage) -> tuple[object, ...]:
    """What has to be right of a storage; only what is made here can be offloaded, and so has to be complete first."""
    made = storage.kind not in (Kind.PARAMETER, Kind.INPUT)
    ready = max(storage.ready, storage.birth) if made else 0
    return storage.name, storage.nbytes, storage.kind, storage.birth, storage.death, storage.uses, ready


def held_at_each_step(storages: list[Storage], problem: Problem) -> list[int]:
    return [
        sum(s.nbytes for s in storages if s.birth <= step < s.death) + op.scratch_bytes + problem.external_bytes
        for step, op in enumerate(problem.ops)
    ]


@SEEN.reaching(0.3, "run again")
@settings(max_examples=250)
@given(drawn=programs_and_choices())
def test_recomputing_is_what_the_written_out_list_says(drawn: tuple[Program, tuple[str, ...]]) -> None:
    program, chosen = drawn
    before = program.problem()
    after = recompute(before, chosen)
    line = rewrite(program, chosen)
    SEEN.note("run again" if any(again for _, again in line) else "nothing chosen")

    assert list(after.ops) == [op_of(instruction, again=again) for instruction, again in line]
    boundary = next(k for k, (_, again) in enumerate(line) if k >= len(program.forward) and not again)
    lives = measure(program, line, chosen=chosen, boundary=boundary)
    assert list(live_bytes(after)) == held_at_each_step(lives, after)
    assert Counter(map(facts, after.storages)) == Counter(map(facts, lives))

    again = [instruction for instruction, again in line if again]
    assert sum(op.duration_ns for op in after.ops) - sum(op.duration_ns for op in before.ops) == after.recompute_ns
    assert after.recompute_ns == sum(instruction.duration_ns for instruction in again)
    assert len({instruction.name for instruction in again}) == len(again), "an instruction runs twice again"
    assert after.barriers == tuple(k for k, (instruction, _) in enumerate(line) if instruction.barrier)
    assert (after.boundary, after.budgets) == (before.boundary, before.budgets)
    assert not (after.recipes and chosen)


@settings(max_examples=120)
@given(drawn=programs_and_choices())
def test_every_life_is_one(drawn: tuple[Program, tuple[str, ...]]) -> None:
    """What a policy relies on, whatever was recomputed."""
    program, chosen = drawn
    after = recompute(program.problem(), chosen)
    assert len({storage.name for storage in after.storages}) == len(after.storages)
    for storage in after.storages:
        assert 0 <= storage.birth < storage.death <= len(after.ops), storage
        assert list(storage.uses) == sorted(set(storage.uses))
        assert all(type(step) is int for step in (storage.birth, storage.death, *storage.uses))
        if storage.uses:
            assert storage.birth <= storage.uses[0]
            assert storage.uses[-1] < storage.death or storage.uses[-1] == storage.death
    for name in chosen:
        first = next(storage for storage in after.storages if storage.name == name)
        assert first.death <= after.boundary, "a recomputed value outlives the forward"
        assert not first.spillable
    assert min(live_bytes(after)) >= 0


@settings(max_examples=30)
@given(drawn=programs_and_choices())
def test_nothing_recomputed_is_the_problem_itself(drawn: tuple[Program, tuple[str, ...]]) -> None:
    problem = drawn[0].problem()
    assert recompute(problem, ()) is problem


def test_names_without_a_recipe_are_refused() -> None:
    problem = transformer(layers=1)
    with pytest.raises(KeyError):
        recompute(problem, ["x_0"])


def test_a_layer_of_a_transformer() -> None:
    """Gate and up again: two matmuls and what they cost, and their bytes gone over the boundary."""
    problem = transformer_recipes(transformer(layers=2))
    assert {recipe.name for recipe in problem.recipes} >= {"gate_0", "up_0", "n2_0", "qkv_0", "x1_0"}
    after = recompute(problem, ["gate_0", "up_0"])
    names = [op.name for op in after.ops]
    where = names.index("swiglu_again_0")
    assert names[where - 2 : where] == ["gate_mm_0#again", "up_mm_0#again"]
    sizes = {storage.name: storage.nbytes for storage in problem.storages}
    boundary = problem.boundary
    assert live_bytes(problem)[boundary] - live_bytes(after)[boundary] == sizes["gate_0"] + sizes["up_0"]
    twice = recompute(replace(problem, recompute_ns=5), ["gate_0"])
    assert twice.recompute_ns == 5 + problem.ops[names.index("gate_mm_0")].duration_ns


def test_a_recipe_brings_what_it_reads_and_is_recomputed_too() -> None:
    problem = transformer_recipes(transformer(layers=1))
    names = [op.name for op in recompute(problem, ["n2_0", "gate_0", "x1_0"]).ops]
    where = names.index("swiglu_again_0")
    assert names[where - 3 : where] == ["o_mm_0#again", "norm2_0#again", "gate_mm_0#again"]
    assert Counter(names)["norm2_0#again"] == 1


def test_step_types_stay_plain() -> None:
    after = recompute(transformer_recipes(transformer(layers=1)), ["gate_0"])
    assert all(type(step) is int for storage in after.storages for step in (storage.ready, storage.birth))
    assert isinstance(Step(0), int)

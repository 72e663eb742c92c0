"""Recomputing layer by layer: what is kept between segments, and what no choice of recomputation can beat."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from drawn import drawn_cases
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from problems import PLENTY, choose_recomputed, links
from programs import tight_problems

from tencache_fx.errors import BudgetError
from tencache_fx.planning.evaluation import Candidate, Evaluator
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.problem import Budgets, Kind, Op, Problem, Recipe, Step, Storage
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.recompute_search import RecomputeSearch, Score
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.segments import kept_between_segments
from tencache_fx.planning.tuning import TUNING
from tencache_fx.planning.verify import verify_plan

LAYERS, FAT, NARROW = 8, 100, 10


def chain(budget: int) -> Problem:
    """Layers of two fat values and a narrow one, which is nearly free to make again, but only from the fat ones.

    Nothing may be offloaded. Step 3i makes `a`, 3i + 1 `b`, 3i + 2 `x` of layer i; the backward reads all three.
    """
    forward = 3 * LAYERS
    early = (Op(name=f"{'abx'[k % 3]}_{k // 3}", duration_ns=1 if k % 3 == 2 else 50) for k in range(forward))
    ops = (*early, *(Op(name=f"back_{k}", duration_ns=100) for k in range(LAYERS)))
    storages, recipes = [], []
    for layer in range(LAYERS):
        back = forward + LAYERS - 1 - layer
        for kind, name in enumerate("abx"):
            birth = 3 * layer + kind
            reads = [Step(birth), Step(birth + 1)] if birth + 1 < forward else [Step(birth)]
            uses = (*reads, Step(back))
            nbytes = NARROW if name == "x" else FAT
            storages.append(
                Storage(
                    name=f"{name}_{layer}",
                    nbytes=nbytes,
                    kind=Kind.ACTIVATION,
                    birth=Step(birth),
                    death=Step(back + 1),
                    uses=uses,
                    spillable=False,
                )
            )
            recipes.append(Recipe(name=f"{name}_{layer}", steps=(Step(birth),)))
    return Problem(
        ops=ops,
        boundary=Step(forward),
        storages=tuple(storages),
        links=links(),
        budgets=Budgets(device_bytes=budget, host_bytes=PLENTY),
        recipes=tuple(recipes),
    )


@pytest.mark.parametrize(("segment", "every"), [(2 * (2 * FAT + NARROW), 1), (FAT * 8, 2)])
def test_what_is_kept_is_narrow_and_local(segment: int, every: int) -> None:
    kept = kept_between_segments(chain(10**6), segment)
    assert {name[0] for name in kept} == {"x"}
    assert LAYERS // every // 2 <= len(kept) <= LAYERS // every


def test_a_chain_is_recomputed_layer_by_layer() -> None:
    """All narrow values and about a layer's fat ones: gone down its price list alone, a chain needs all at once."""
    problem = chain(LAYERS * NARROW + 4 * FAT)
    assert live_bytes(problem).max() > 2 * (problem.budgets.device_bytes or 0)
    names = choose_recomputed(problem)
    chosen = recompute(problem, names)
    verify_plan(chosen, make_plan(chosen, "teraio"))
    assert not {name for name in names if name.startswith("x")} >= {f"x_{layer}" for layer in range(LAYERS - 1)}

    search = RecomputeSearch(Evaluator(problem, replace(TUNING, segment_halvings=0)), Candidate(policy="teraio"))
    search.climb()
    assert search.best_score.over_bytes > 0


@drawn_cases(60, suppress_health_check=[HealthCheck.too_slow])
@given(problem=tight_problems(most_forward=12, most_backward=12), data=st.data())
def test_no_plan_beats_what_is_passed_over_for(problem: Problem, data: st.DataObject) -> None:
    limit = problem.budgets.device_bytes
    assume(limit is not None)
    assert limit is not None
    names = _some(data, [recipe.name for recipe in problem.recipes])
    bound = RecomputeSearch(Evaluator(problem), Candidate(policy="teraio")).bound(names)
    chosen = recompute(problem, names)
    for policy in ("teraio", "10cache", "joint"):
        try:
            plan = make_plan(chosen, policy)
        except BudgetError:
            continue
        assert bound <= Score(0, plan.forecast.makespan_ns)


def _some(data: st.DataObject, names: Sequence[str]) -> frozenset[str]:
    return frozenset(name for name in names if data.draw(st.booleans()))


def test_segments_of_nothing() -> None:
    problem = chain(10**6)
    assert kept_between_segments(replace(problem, recipes=()), 0) <= {storage.name for storage in problem.storages}
    assert kept_between_segments(replace(problem, storages=(), recipes=()), 100) == frozenset()

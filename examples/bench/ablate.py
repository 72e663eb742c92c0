"""What each part of the `joint` policy is worth: regions planned with all of it, and without one part at a time.

    python examples/bench/ablate.py DUMP/region-000/record.json           # of a run with the option dump_dir=DUMP
    python examples/bench/ablate.py */record.json --divisors 1.3 2 3      # budgets: the unlimited peak / 1.3, / 2, / 3

Prints a table for each region (a record's, or a `Problem`'s JSON): the forecast time of a step over the time without
limits, "none" where no plan was found, and in brackets the seconds of one core that planning took. Behind them all one
table of what is lost by taking a part away, as a share of the unlimited time; where that is 0, plans are as good
without it. What a search saves by missing one part it may spend on the others. Nothing runs on a device.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from tencache_fx.planning.bounds import joint_lower_bound_ns
from tencache_fx.planning.evaluation import Candidate, Evaluator
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.planner import POLICIES, Policy, fastest_variant, floor_bytes, over_tiers
from tencache_fx.planning.policies.ten_cache import choose_10cache
from tencache_fx.planning.policies.teraio import choose_teraio
from tencache_fx.planning.problem import Problem, Recipe
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.recompute_search import RecomputeSearch
from tencache_fx.planning.tuning import TUNING, Tuning
from tencache_fx.reporting.dump import read_problem


class _NoRefinement(RecomputeSearch):
    def close_in(self, line: Sequence[str], best: int, stride: int, least_left: int) -> None:
        pass


class _NoTurningOver(RecomputeSearch):
    def turn_over(self) -> None:
        pass


class _LargestFirst(RecomputeSearch):
    @staticmethod
    def order(problem: Problem) -> Sequence[Recipe]:
        storages = {storage.name: storage for storage in problem.storages}
        found = RecomputeSearch.order(problem)
        return sorted(found, key=lambda each: (-storages[each.name].nbytes, -storages[each.name].birth, each.name))


WHOLE = "nothing taken away"
_VARIANTS = POLICIES["joint"]
_NO_SEGMENTS = replace(TUNING, segment_halvings=0)
PARTS: Mapping[str, tuple[type[RecomputeSearch] | None, Tuning, Sequence[Policy]]] = {
    WHOLE: (RecomputeSearch, TUNING, _VARIANTS),
    "headrooms": (RecomputeSearch, TUNING, (choose_teraio, choose_10cache)),
    "10cache": (RecomputeSearch, TUNING, [variant for variant in _VARIANTS if variant is not choose_10cache]),
    "headrooms and 10cache": (RecomputeSearch, TUNING, (choose_teraio,)),
    "recomputation": (None, TUNING, _VARIANTS),
    "segments": (RecomputeSearch, _NO_SEGMENTS, _VARIANTS),
    "refinement": (_NoRefinement, TUNING, _VARIANTS),
    "turning over": (_NoTurningOver, TUNING, _VARIANTS),
    "price (largest first)": (_LargestFirst, TUNING, _VARIANTS),
}
"""By what is taken away: how to choose what to recompute, and the variants of the policy that plan the rest then."""


def choose(kind: type[RecomputeSearch] | None, tuning: Tuning, problem: Problem) -> tuple[tuple[str, ...], float]:
    """Return what is recomputed with this kind of search, and the seconds that took; None finds nothing."""
    start = time.process_time()
    base = Candidate(policy="teraio", lead=tuning.compared_lead)
    return kind(Evaluator(problem, tuning), base).run() if kind else (), time.process_time() - start


def makespan_ns(problem: Problem, variants: Sequence[Policy]) -> int | None:
    """Return the time of the fastest plan, as `make_plan` finds it with these variants; None if none fits."""
    floor = floor_bytes(problem)
    if floor > (problem.budgets.device_bytes or 0):
        return None
    plan = fastest_variant(problem, "joint", variants, floor)
    return None if over_tiers(problem, plan.forecast) else plan.forecast.makespan_ns


def plan_without_each(problem: Problem) -> dict[str, tuple[int | None, float]]:
    """Return the time of the plan, as `plan_region` makes it, by what is taken away, and the seconds planning took."""
    chosen = {(kind, tuning): choose(kind, tuning, problem) for kind, tuning, _ in PARTS.values()}
    planned: dict[str, tuple[int | None, float]] = {}
    for part, (kind, tuning, variants) in PARTS.items():
        names, seconds = chosen[kind, tuning]
        start = time.process_time()
        candidates = [problem, recompute(problem, names)] if names else [problem]
        times = [found for candidate in candidates if (found := makespan_ns(candidate, variants)) is not None]
        planned[part] = min(times, default=None), seconds + time.process_time() - start
    return planned


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="record.json of a dumped region, or a Problem's JSON")
    parser.add_argument("--divisors", type=float, nargs="+", default=[1.5, 1.9, 2.5], help="budgets: peak / each")
    arguments = parser.parse_args()
    losses: dict[str, list[float | None]] = {part: [] for part in PARTS}
    for path in arguments.records:
        captured = read_problem(path)
        peak_bytes, ideal_ns = int(live_bytes(captured).max()), sum(op.duration_ns for op in captured.ops)
        problems = [captured.within(device_bytes=int(peak_bytes / divisor)) for divisor in arguments.divisors]
        rows = {part: [part] for part in PARTS}
        for problem in problems:
            planned = plan_without_each(problem)
            whole, _ = planned[WHOLE]
            for part, (found, seconds) in planned.items():
                rows[part].append(f"{'none' if found is None else f'{found / ideal_ns:.4f}'} ({seconds:.1f})")
                if whole is not None:
                    losses[part].append(None if found is None else (found - whole) / ideal_ns)
        bounds = ["no plan is below", *(f"{joint_lower_bound_ns(problem) / ideal_ns:.4f}" for problem in problems)]
        headers = ["without", *(f"peak / {divisor:g}" for divisor in arguments.divisors)]
        print(f"{path}: {len(captured.ops)} steps, {len(captured.recipes)} recipes, {peak_bytes / 2**30:.1f} GiB")
        print(tabulate([*rows.values(), bounds], headers, disable_numparse=True), end="\n\n", flush=True)
    summary = [_summed_up(part, lost) for part, lost in losses.items()]
    print(tabulate(summary, ["without", "most lost", "mean", "no plan"], disable_numparse=True))


def _summed_up(part: str, lost: Sequence[float | None]) -> tuple[str, str, str, int]:
    """Return a part's row: the most it lost and the mean, where there was a plan without it, and how often was none."""
    known = [loss for loss in lost if loss is not None]
    most, mean = max(known, default=0.0), sum(known) / max(1, len(known))
    return part, f"{most:+.4f}", f"{mean:+.4f}", len(lost) - len(known)


if __name__ == "__main__":
    main()

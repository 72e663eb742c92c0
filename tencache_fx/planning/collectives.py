"""Collectives on the axis of time: compute runs the steps in order, the link the collectives as they begin. No torch.

A collective begins behind its step, once the one before has ended. The step that waits for it begins no sooner than it
ends; between the two, compute goes on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tencache_fx.planning.problem import Collective, Problem, Step


def paced_ns(problem: Problem) -> Sequence[int]:
    """Return how long each step takes if nothing is transferred, with what it waits for collectives.

    What is under way behind the last step counts for that. Times of copies, and of plans without stalls, follow from
    these. O(steps + collectives), and nothing from then on.
    """
    known: Sequence[int] | None = problem.derived.get("paced")
    if known is None:
        known = problem.derived["paced"] = _paced(problem)
    return known


def ideal_ns(problem: Problem) -> int:
    """Return how long the region takes if nothing is transferred."""
    return sum(paced_ns(problem))


def exposed_ns(problem: Problem) -> int:
    """Return how long compute waits for collectives if nothing is transferred."""
    return ideal_ns(problem) - sum(op.duration_ns for op in problem.ops)


def busy_ns(problem: Problem) -> int:
    """Return how long collectives keep their link busy."""
    return sum(each.duration_ns for each in problem.collectives)


def in_between(problem: Problem) -> frozenset[str]:
    """Return the storages that a collective uses which the forward begins, and only the backward, or nobody, waits for.

    Such a collective keeps what it reads, so its bytes are not free between the graphs: it cannot be recomputed.
    """
    across = (each for each in problem.collectives if each.begin < problem.boundary <= each.needed_at)
    return frozenset(name for each in across for name in (*each.reads, *each.writes))


def steps_under_way(problem: Problem) -> Mapping[str, frozenset[int]]:
    """Return by storage the steps that count as uses because a collective is under way that reads or writes it.

    The ops of these steps do not read it: what runs them again does without it.
    """
    known: Mapping[str, frozenset[int]] | None = problem.derived.get("steps under way")
    if known is None:
        found: dict[str, set[int]] = {}
        for each in problem.collectives:
            for name in (*each.reads, *each.writes):
                found.setdefault(name, set()).update(range(each.begin + 1, each.needed_at))
        known = problem.derived["steps under way"] = {name: frozenset(steps) for name, steps in found.items()}
    return known


def one_by_one(problem: Problem) -> Problem:
    """Return `problem` with each collective waited for right behind the step that begins it."""
    return replace(
        problem, collectives=tuple(each.moved(each.begin, Step(each.begin + 1)) for each in problem.collectives)
    )


def scaled(problem: Problem, *, faster_percent: int = 0, **changes: int) -> Problem:
    """Return `problem` with collectives over another link: so much faster, or with other fields of `Collective`."""
    found = (replace(each, **changes) for each in problem.collectives)  # type: ignore[arg-type]
    rate = 100 + faster_percent
    return replace(
        problem, collectives=tuple(replace(each, bytes_per_s=each.bytes_per_s * rate // 100) for each in found)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTimes:
    """When one collective was under way, in ns from the start of the region, and how long compute waited for it."""

    name: str
    start_ns: int
    end_ns: int
    stall_ns: int


class CollectiveLink:
    """The link of collectives in a replay: they run one after the other, in the order in which they begin."""

    def __init__(self, collectives: Sequence[Collective]) -> None:
        self.stall = 0.0
        self._free = 0.0
        self._durations_ns = {each.name: each.duration_ns for each in collectives}
        self._spans: dict[str, tuple[float, float]] = {}
        self._stalls: dict[str, float] = {}

    def begin(self, name: str, now: float) -> float:
        """Begin a collective as soon as the link is free; return `now`: nobody waits."""
        start = max(now, self._free)
        self._free = start + self._durations_ns[name]
        self._spans[name] = start, self._free
        return now

    def wait(self, name: str, now: float) -> float:
        """Wait for the end of a collective that has begun; return when it has ended, or `now` if it has already."""
        end = self._spans[name][1]
        self._stalls[name] = waited = max(0.0, end - now)
        self.stall += waited
        return now + waited

    def times(self) -> tuple[CollectiveTimes, ...]:
        """Return the times of each, in the order in which they ran; all have been waited for."""
        return tuple(
            CollectiveTimes(name=name, start_ns=round(start), end_ns=round(end), stall_ns=round(self._stalls[name]))
            for name, (start, end) in self._spans.items()
        )


def _paced(problem: Problem) -> Sequence[int]:
    begins: dict[int, list[Collective]] = {}
    for each in problem.collectives:
        begins.setdefault(each.begin, []).append(each)
    awaited: dict[int, int] = {}  # by step, when all that it waits for has ended
    paced: list[int] = []
    now = link_free = 0
    for step, op in enumerate(problem.ops):
        before = now
        now = max(now, awaited.get(step, 0)) + op.duration_ns
        for each in begins.get(step, ()):
            link_free = max(now, link_free) + each.duration_ns
            awaited[each.needed_at] = max(link_free, awaited.get(each.needed_at, 0))
        paced.append(now - before)
    if paced:
        paced[-1] += max(0, awaited.get(len(paced), 0) - now)
    return paced

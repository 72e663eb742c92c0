"""The same region for other numbers of ranks: what a step would take on a cluster that is not there. No torch here.

All ranks run the same program on batches of their own (weak scaling), and each keeps one part of every parameter, of
its gradient and of its optimizer's state. A region that was captured on several ranks has the collectives for that.
One captured on a single rank gets them: a gather begins when the one before is waited for, and a gradient is scattered
as soon as it is there, as in the code of several ranks (`passes/collective_overlap.py`).

A node's host memory and disks, and their rates, are shared by its ranks. Between nodes, all ranks of a node send at
once, each over a network link of its own.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tencache_fx.errors import BudgetError, OptionError
from tencache_fx.planning.parameter_schedule import step_ns
from tencache_fx.planning.problem import (
    Budgets,
    Collective,
    CollectiveKind,
    Kind,
    Links,
    Op,
    Problem,
    Step,
    Storage,
    host_shares,
)
from tencache_fx.planning.search import plan_region

_LEAST_PART_BYTES = 64 << 10  # a parameter whose part would be less stays whole on every rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """So many ranks, and how fast they exchange bytes.

    `per_node` are the ranks of a node. A rank sends `bytes_per_s` within its node and `network_bytes_per_s` between
    nodes, and a collective takes `latency_ns` beside that, and as much again for each doubling of the nodes.

    Raises `OptionError` for ranks that do not fill their nodes.
    """

    ranks: int
    per_node: int
    latency_ns: int
    bytes_per_s: int
    network_bytes_per_s: int

    def __post_init__(self) -> None:
        if min(self.ranks, self.per_node) < 1 or self.ranks % min(self.ranks, self.per_node):
            raise OptionError(
                f"{self.ranks} ranks do not fill nodes of {self.per_node}; give a number of ranks below that, or a "
                "multiple of it."
            )
        if min(self.bytes_per_s, self.network_bytes_per_s) < 1:
            raise OptionError(f"a rank sends {min(self.bytes_per_s, self.network_bytes_per_s)} bytes per second.")

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return -(-self.ranks // self.per_node)

    @property
    def here(self) -> int:
        """How many ranks share a node."""
        return min(self.ranks, self.per_node)

    def applied(self, each: Collective) -> Collective:
        """Return a collective as it is among these ranks.

        Every rank sends all but its own part within the node; the ranks of a node together receive what other nodes
        have. The two go on at once, and the slower one counts.
        """
        rate = self.bytes_per_s
        if self.nodes > 1:
            between = self.here * self.network_bytes_per_s
            share = self.nodes * (self.ranks - 1) / (self.ranks * (self.nodes - 1))
            rate = min(rate, max(1, int(between * share)))
        latency_ns = self.latency_ns * (1 + math.ceil(math.log2(self.nodes)))
        return replace(each, ranks=self.ranks, latency_ns=latency_ns, bytes_per_s=rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPoint:
    """A training step of one of `ranks` on so many `nodes`; `refusal` says why there is no plan, and all else is 0.

    Collectives are under way for `collective_ns`, and compute waits for them for `stall_collective_ns` of that. The
    ranks of a node keep `host_bytes` in its host memory. Of `parameters`, `updated_here` are on the device with their
    state.
    """

    ranks: int
    nodes: int
    step_ns: int = 0
    makespan_ns: int = 0
    collective_ns: int = 0
    stall_collective_ns: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    parameters: int = 0
    updated_here: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A region's step on several clusters, in the order asked for."""

    points: tuple[RankPoint, ...]


def find_scaling(captured: Problem, clusters: Iterable[Cluster], policy: str = "joint") -> Scaling:
    """Return the step of a region on each of these clusters: a plan for each.

    Raises `OptionError` for a region that cannot be spread, and for an unknown policy.
    """
    return Scaling(points=tuple(_point(captured, cluster, policy) for cluster in clusters))


def _point(captured: Problem, cluster: Cluster, policy: str) -> RankPoint:
    wanted = spread(captured, cluster)
    try:
        problem, plan = plan_region(wanted, policy)
    except BudgetError as refusal:
        return RankPoint(ranks=cluster.ranks, nodes=cluster.nodes, refusal=str(refusal))
    forecast = plan.forecast
    stored = {s.parameter: s for s in wanted.storages if s.kind is Kind.STORED}
    here_bytes = sum(stored[each].nbytes + stored[each].state_bytes for each in plan.updated_here)
    return RankPoint(
        ranks=cluster.ranks,
        nodes=cluster.nodes,
        step_ns=step_ns(problem, forecast),
        makespan_ns=forecast.makespan_ns,
        collective_ns=forecast.collective_ns,
        stall_collective_ns=forecast.stall_collective_ns,
        peak_bytes=forecast.peak_bytes,
        host_bytes=cluster.here * max(0, forecast.host_bytes + wanted.budgets.host_taken_bytes - here_bytes),
        parameters=len(stored),
        updated_here=len(plan.updated_here),
    )


def ranks_of(problem: Problem) -> int:
    """Return over how many ranks the parameters of a captured region are spread.

    Raises `OptionError` if they are spread over groups of several sizes.
    """
    found = {each.ranks for each in problem.collectives if _moves_parts(problem, each)}
    if len(found) > 1:
        sizes = ", ".join(map(str, sorted(found)))
        raise OptionError(f"its parameters are spread over groups of {sizes} ranks; only one size can be scaled.")
    return found.pop() if found else 1


def spread(problem: Problem, cluster: Cluster) -> Problem:
    """Return a captured region as it would be among other ranks; they were on one node when it was captured.

    Raises `OptionError` if its parameters are not offloaded, or spread over groups of several sizes.
    """
    before = ranks_of(problem)
    parameters = _spread_parameters(problem, before, cluster.ranks)
    if not parameters:
        raise OptionError(
            "none of its parameters are in host memory; record a run whose model is offloaded: "
            "tencache_fx.offload(model, device)."
        )
    parts = replace(
        problem,
        links=_shared_links(problem.links, before, cluster.here),
        budgets=_shared_budgets(problem.budgets, before, cluster),
        sums_stay=problem.sums_stay and cluster.ranks == 1,
    )
    if before == cluster.ranks == 1:
        return parts
    if before == 1:
        return _with_collectives(parts, parameters, cluster)
    moving = {s.name for s in problem.storages if s.parameter in parameters and s.kind in (Kind.FETCHED, Kind.STORED)}
    storages = tuple(_part_of(s, before, cluster.ranks) if s.name in moving else s for s in problem.storages)
    collectives = tuple(cluster.applied(each) if each.ranks == before else each for each in problem.collectives)
    return replace(parts, storages=storages, collectives=collectives)


def _spread_parameters(problem: Problem, before: int, ranks: int) -> frozenset[str]:
    """Return the parameters that are, or would be, spread."""
    if before == 1:
        least_bytes = _LEAST_PART_BYTES * ranks
        return frozenset(s.parameter for s in problem.storages if s.kind is Kind.FETCHED and s.nbytes >= least_bytes)
    used = {name for each in problem.collectives if each.ranks == before for name in (*each.reads, *each.writes)}
    return frozenset(s.parameter for s in problem.storages if s.name in used and s.parameter)


def _moves_parts(problem: Problem, each: Collective) -> bool:
    used = {*each.reads, *each.writes}
    return any(s.name in used for s in problem.storages if s.kind in (Kind.FETCHED, Kind.STORED))


def _part(nbytes: int, ranks: int) -> int:
    return -(-nbytes // ranks)


def _part_of(storage: Storage, before: int, ranks: int) -> Storage:
    """Return a part of a parameter or gradient, of which there were so many, as one of `ranks`."""
    of_all = storage.nbytes, storage.state_bytes, storage.state_saved_bytes
    nbytes, state_bytes, saved_bytes = (_part(n * before, ranks) for n in of_all)
    return replace(storage, nbytes=nbytes, state_bytes=state_bytes, state_saved_bytes=saved_bytes)


def _shared_links(links: Links, before: int, here: int) -> Links:
    """Return the links of one of `here` ranks on a node, of which one of `before` had these."""
    shared = ("host_bytes_per_s", "host_peak_bytes_per_s", "disk_write_bytes_per_s", "disk_read_bytes_per_s")
    return replace(links, **{name: getattr(links, name) * before // here for name in shared})


def _shared_budgets(budgets: Budgets, before: int, cluster: Cluster) -> Budgets:
    """Return a rank's part of a node's memory: that, and a part of what all ranks have to keep there."""
    node_bytes = budgets.whole_host_bytes * before
    taken_bytes = _part(budgets.host_taken_bytes * before, cluster.ranks)
    return replace(
        budgets,
        **host_shares(node_bytes // cluster.here, taken_bytes),
        disk_bytes=budgets.disk_bytes * before // cluster.here,
    )


# ---------------------------------------------------------------- collectives for a region that has none


def _with_collectives(problem: Problem, parameters: frozenset[str], cluster: Cluster) -> Problem:
    """Return the region of one rank with each of these parameters gathered to be read, and each gradient scattered."""
    problem = _with_end(problem)
    moving = [s for s in problem.storages if s.parameter in parameters and s.kind in (Kind.FETCHED, Kind.STORED)]
    gathered = sorted((s for s in moving if s.kind is Kind.FETCHED), key=lambda s: (s.birth, s.name))
    scattered = sorted((s for s in moving if s.kind is Kind.STORED), key=lambda s: (s.uses[-1], s.name))
    made = [*_gathered_again(problem, _gathers(problem, gathered, cluster)), *_scatters(problem, scattered, cluster)]
    names = {storage.name for storage in moving}
    whole = [storage for storage in problem.storages if storage.name not in names]
    late = {storage.parameter for storage in gathered if storage.birth >= problem.boundary}
    read_at = {use for storage in gathered if storage.parameter not in late for use in storage.uses}
    return replace(
        problem,
        storages=(*whole, *(storage for _, storages in made for storage in storages)),
        collectives=tuple(sorted((each for each, _ in made), key=lambda each: each.begin)),
        recipes=tuple(each for each in problem.recipes if read_at.isdisjoint(each.steps)),  # no more gathers
    )


def _with_end(problem: Problem) -> Problem:
    """Return the region with one step more, which takes no time: it waits for the last scatter."""
    end = Step(len(problem.ops))
    storages = tuple(
        replace(s, death=Step(end + 1)) if s.death == end and s.kind is not Kind.STORED else s for s in problem.storages
    )
    return replace(problem, ops=(*problem.ops, Op(name="end", duration_ns=0)), storages=storages)


_Made = tuple[Collective, tuple[Storage, Storage]]


def _gathers(problem: Problem, gathered: Sequence[Storage], cluster: Cluster) -> Iterator[_Made]:
    """Yield the gather of each copy of a parameter, with the part that it reads and the whole that it writes."""
    before = Step(0)
    for storage in gathered:
        first = Step(0) if storage.birth < problem.boundary else problem.boundary
        reader = storage.uses[1] if len(storage.uses) > 1 else Step(storage.birth + 1)
        begin = Step(max(first, min(before, reader - 1)))
        before = reader
        steps = _steps(begin, reader)
        part = storage.living(begin, Step(reader + 1), steps, storage.ready)
        later = (use for use in storage.uses if use > reader)
        whole = _whole(storage, begin, max(Step(reader + 1), storage.death), (*steps, *later))
        each = _collective(CollectiveKind.ALL_GATHER, storage.nbytes, steps, part, whole)
        yield cluster.applied(each), (_part_of(part, 1, cluster.ranks), whole)


def _gathered_again(problem: Problem, made: Iterable[_Made]) -> list[_Made]:
    """Return these gathers, where those of the forward tell when the backward gathers the same parameter."""
    found = list(made)
    late = {part.parameter: each.begin for each, (part, _) in found if each.begin >= problem.boundary}
    return [
        (each, (part, replace(whole, gathered_at=late.get(part.parameter, Step(0)))))
        if each.begin < problem.boundary
        else (each, (part, whole))
        for each, (part, whole) in found
    ]


def _scatters(problem: Problem, scattered: Sequence[Storage], cluster: Cluster) -> Iterator[_Made]:
    """Yield the scatter of each gradient, with the part that it writes and the whole that it reads."""
    last = Step(len(problem.ops) - 1)
    begins = [*(storage.uses[-1] for storage in scattered), last]
    for storage, (begin, following) in zip(scattered, pairwise(begins), strict=True):
        steps = _steps(begin, max(Step(begin + 1), following))
        end = Step(steps[-1] + 1)
        part = storage.living(begin, end, steps, begin)
        whole = _whole(storage, storage.birth, end, (*storage.uses, *steps))
        each = _collective(CollectiveKind.REDUCE_SCATTER, storage.nbytes, steps, whole, part)
        yield cluster.applied(each), (_part_of(part, 1, cluster.ranks), whole)


def _whole(storage: Storage, birth: Step, death: Step, uses: Iterable[Step]) -> Storage:
    """Return the whole parameter or gradient, which a rank has for a while beside its part."""
    used = tuple(sorted(set(uses)))
    name, kind = f"{storage.name} whole", Kind.ACTIVATION
    return Storage(name=name, nbytes=storage.nbytes, kind=kind, birth=birth, death=death, uses=used, spillable=False)


def _collective(
    kind: CollectiveKind, nbytes: int, steps: Sequence[Step], source: Storage, target: Storage
) -> Collective:
    """Return a collective that begins with the first of these steps, and is waited for at the last.

    Its ranks and their rates are a cluster's (`Cluster.applied`).
    """
    return Collective(
        name=f"{kind} of {source.name if kind is CollectiveKind.ALL_GATHER else target.name}",
        kind=kind,
        nbytes=nbytes,
        ranks=1,
        begin=steps[0],
        needed_at=steps[-1],
        latency_ns=0,
        bytes_per_s=1,
        reads=(source.name,),
        writes=(target.name,),
    )


def _steps(begin: Step, last: Step) -> tuple[Step, ...]:
    """Return the steps from `begin` to `last`, both included."""
    return tuple(Step(at) for at in range(begin, last + 1))

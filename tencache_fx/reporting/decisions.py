"""What each decision of a plan costs the step: the most expensive ones first. No torch here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tencache_fx.planning.plan import Transfer, TransferKind
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.simulator import simulate
from tencache_fx.records import StepRun
from tencache_fx.reporting.timeline import Bar, Lane, Timeline

_LOOKED_AT = 3
"""So many times the decisions asked for are priced, of those that look the most expensive."""

_NAMES = 6  # of ops that are told


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision, and what it costs.

    `price_ns` is how much shorter the step would be without it: for a transfer the replay of all others, for what is
    recomputed the ops that only it needs. `stall_ns` is how long compute stands still for its copies, `copying_ns` how
    long these take, hidden or not.
    """

    name: str
    deed: str
    nbytes: int
    note: str
    price_ns: int
    stall_ns: int = 0
    copying_ns: int = 0

    @property
    def price_per_gb_ns(self) -> int | None:
        """The price of each 10^9 bytes that the device does not hold for it; None where no bytes are known."""
        return self.price_ns * 10**9 // self.nbytes if self.nbytes else None


def dearest_decisions(
    timeline: Timeline, captured: Problem, runs: Sequence[StepRun] = (), most: int = 10
) -> tuple[Decision, ...]:
    """Return the `most` expensive decisions of the plan, by price, then by the time of their copies.

    `captured` has the recipes of what the plan recomputes; `runs` are those of a step, of which each region recomputes
    the same in all calls. One replay for each of a few candidates: O(steps) each.
    """
    found = [*_transfers(timeline, most), *_recomputed(timeline, captured, most), *_run_again(timeline, runs)]
    return tuple(sorted(found, key=lambda each: (-each.price_ns, -each.copying_ns, each.name))[:most])


def _transfers(timeline: Timeline, most: int) -> Iterator[Decision]:
    plan, replay = timeline.plan, timeline.replay
    times = {each.name: each for each in replay.transfers}
    notes = {bar.storage: bar.note for bar in timeline.bars if bar.storage}

    def cost(transfer: Transfer) -> tuple[int, int]:
        each = times[transfer.name]
        out_ns, in_ns = each.out_end_ns - each.out_start_ns, each.in_end_ns - each.in_start_ns
        return each.stall_out_ns + each.stall_in_ns, out_ns + in_ns

    for transfer in sorted(plan.transfers, key=cost, reverse=True)[: most * _LOOKED_AT]:
        stall_ns, copying_ns = cost(transfer)
        others = [each for each in plan.transfers if each is not transfer]
        without = simulate(timeline.problem, others, plan.staging)
        deed = f"leaves for {transfer.tier}" if transfer.kind is TransferKind.SWAP else str(transfer.kind)
        yield Decision(
            name=transfer.name,
            deed=deed,
            nbytes=transfer.nbytes,
            note=notes.get(transfer.name, ""),
            price_ns=replay.makespan_ns - without.makespan_ns,
            stall_ns=stall_ns,
            copying_ns=copying_ns,
        )


def _recomputed(timeline: Timeline, captured: Problem, most: int) -> Iterator[Decision]:
    """Yield what is recomputed by recipes of `captured`."""
    names = frozenset(timeline.plan.recomputed) & {recipe.name for recipe in captured.recipes}
    storages = {storage.name: storage for storage in captured.storages}
    alone = {each.name: sum(captured.ops[step].duration_ns for step in each.steps) for each in captured.recipes}
    layers = {bar.name: bar.note for bar in timeline.lane(Lane.COMPUTE) if bar.note}
    all_ns = recompute(captured, names).recompute_ns
    for name in sorted(names, key=lambda name: (-alone[name], name))[: most * _LOOKED_AT]:
        maker = captured.ops[storages[name].birth].name
        told = (str(storages[name].kind), layers.get(maker, ""), f"made by {maker}")
        yield Decision(
            name=name,
            deed="recomputed",
            nbytes=storages[name].nbytes,
            note=", ".join(filter(None, told)),
            price_ns=all_ns - recompute(captured, names - {name}).recompute_ns,
        )


def _run_again(timeline: Timeline, runs: Sequence[StepRun]) -> Iterator[Decision]:
    """Yield for each region of a step the ops that its backwards run again."""
    starts = (*timeline.replay.starts_ns, timeline.replay.makespan_ns)
    again = [bar for bar in timeline.lane(Lane.COMPUTE) if bar.sort == "recompute"]
    found: dict[int, list[Bar]] = {}
    for run in runs:
        begin_ns, end_ns = starts[run.begin], starts[run.end]
        found.setdefault(run.region, []).extend(bar for bar in again if begin_ns <= bar.start_ns < end_ns)
    for region, bars in found.items():
        if bars:
            names = list(dict.fromkeys(bar.name for bar in bars))
            told = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
            price_ns = sum(bar.duration_ns for bar in bars)
            yield Decision(name=f"region {region}", deed="recomputes", nbytes=0, note=told, price_ns=price_ns)

"""Where in a model the ops and storages of a plan are: their layers, and the calls of a step. No torch here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tencache_fx.planning.problem import Kind, Problem, Step, Storage, Tier
from tencache_fx.records import Listing, RegionRecord, StepRecord


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """For each op where it is, as text to read after its name; for storages the same by name.

    `again` are the ops that run for the second time.
    """

    ops: tuple[str, ...]
    storages: Mapping[str, str]
    again: frozenset[Step]

    @classmethod
    def of_region(cls, record: RegionRecord) -> "Whereabouts":
        """Return those of a region that is planned by itself."""
        layers, problem = _layers(record.listings), record.problem
        ops = tuple(layers.get(_plain(op.name), "") for op in problem.ops)
        return cls(
            ops=ops,
            storages={s.name: _of(s, problem, ops, layers.get(_plain(s.name), "")) for s in problem.storages},
            again=_again(problem, range(problem.boundary), range(problem.boundary, len(problem.ops))),
        )

    @classmethod
    def of_step(cls, record: StepRecord, regions: Mapping[int, RegionRecord]) -> "Whereabouts":
        """Return those of a step; `regions` has the records of those that are known."""
        layers = {index: _layers(region.listings) for index, region in regions.items()}
        ops = ["between runs"] * len(record.problem.ops)
        again: frozenset[Step] = frozenset()
        forwards = {(run.region, run.call): range(run.begin, run.end) for run in record.runs if not run.backward}
        for run in record.runs:
            known, steps = layers.get(run.region, {}), range(run.begin, run.end)
            for step in steps:
                layer = known.get(_plain(record.problem.ops[step].name), "")
                ops[step] = f"{layer}, {run}" if layer else f"{run}, {run.name}"
            if run.backward and (run.region, run.call) in forwards:
                again |= _again(record.problem, forwards[run.region, run.call], steps)
        storages = {}
        for storage in record.problem.storages:
            place, _, name = storage.name.rpartition(":")
            index = place.partition(".")[0]
            layer = layers.get(int(index), {}).get(_plain(name), "") if index.isdecimal() else ""
            call = f"call {place}" if place else ""
            found = ", ".join(part for part in (layer, call) if part)
            storages[storage.name] = _of(storage, record.problem, ops, found)
        return cls(ops=tuple(ops), storages=storages, again=again)

    def op(self, step: Step) -> str:
        """Return where an op is."""
        return self.ops[step]

    def storage(self, storage: Storage) -> str:
        """Return where a storage is from, to be read after its size."""
        found = self.storages[storage.name]
        return f"<br>{found}" if found else ""


def _layers(listings: Iterable[Listing]) -> dict[str, str]:
    """Return the layer of each node, by its name; a name that both graphs have is the forward's."""
    found: dict[str, str] = {}
    for listing in listings:
        for row in listing.nodes:
            if row.layer:
                found.setdefault(row.name, row.layer)
    return found


def _plain(name: str) -> str:
    """Return the name of a node, for an op or a storage that is there for the second time, too."""
    return name.partition("#")[0]


def _of(storage: Storage, problem: Problem, ops: Sequence[str], layer: str) -> str:
    """Return where a storage is from: its layer, or of a parameter its name, or else what reads it first."""
    if storage.parameter:
        on_disk = storage.kind is Kind.FETCHED and storage.tier is Tier.NVME
        return f"{storage.parameter}, on disk" if on_disk else storage.parameter
    if layer or not storage.uses:
        return layer
    first = storage.uses[0]
    name = problem.ops[first].name
    return f"first used by {name}" + (f", {ops[first]}" if ops[first] else "")


def _again(problem: Problem, forward: range, backward: range) -> frozenset[Step]:
    """Return the steps of a backward that its forward has, too: a node that runs again keeps its name."""
    names = {problem.ops[step].name for step in forward}
    return frozenset(Step(step) for step in backward if _plain(problem.ops[step].name) in names)

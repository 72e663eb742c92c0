"""How long planning takes for models of more and more layers, and what the plans come to.

    python examples/bench/planner.py                                   # 4, 16, 43 and 330 layers of 4096 in 16 GiB
    python examples/bench/planner.py --layers 43 --gib 8 16 32
    python examples/bench/planner.py --problems tests/planning/problems/*.json --shares 0.1 0.5

A decoder of four layers whose parameters are offloaded is captured from fakes, with the rates of one large GPU, and its
second layer is repeated; `--problems` are planned as they are. Prints a line for each: steps and storages, the seconds
of one core for choosing what to recompute and for the plan, and the forecast time of a step over the time without
limits. Nothing runs on a device.
"""

import argparse
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tabulate import tabulate

from tencache_fx.errors import BudgetError
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import first_parameters, keep_resident, step_ns
from tencache_fx.planning.problem import Budgets, Links, Op, Problem, Recipe, Step, Storage
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.search import choose_for_region, make_plan, policy_floor_bytes
from tencache_fx.reporting.dump import read_problem, read_regions

GIB = 1 << 30
CAPTURED_LAYERS, REPEATED_LAYER = 4, 1
LINKS = Links(
    d2h_bytes_per_s=48 * 10**9,
    h2d_bytes_per_s=48 * 10**9,
    d2h_duplex_bytes_per_s=40 * 10**9,
    h2d_duplex_bytes_per_s=40 * 10**9,
    host_bytes_per_s=150 * 10**9,
)


def capture(compiler: str, batch: int) -> Problem:
    """Return the problem of a training step of a few layers, with offloaded parameters and no budget."""
    import torch  # here: problems in files need none of this

    import tencache_fx
    from examples.bench.models import Decoder
    from tencache_fx.hardware.cache import cached
    from tencache_fx.hardware.rates import device_key
    from tencache_fx.hardware.roofline import Roofline

    cpu = torch.device("cpu")
    roofline = Roofline(
        flops_per_s=(("bfloat16", 600 * 10**12), ("float32", 50 * 10**12)),
        memory_bytes_per_s=3 * 10**12,
        launch_ns=3_000,
        issue_ns=4_000,
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # what this machine has measured is not to be found
        cached(device_key("links", cpu), Links, lambda: LINKS)
        cached(device_key("roofline", cpu), Roofline, lambda: roofline)
        with torch.device("meta"):
            model = Decoder(layers=CAPTURED_LAYERS, hidden=4096, vocabulary=32000).bfloat16()
            tokens = torch.zeros(batch, 4096, dtype=torch.long)
        budgets = {"device_budget": 1 << 40, "host_budget": 1 << 40}
        tencache_fx.fit(model, tokens, tokens, device=cpu, compiler=compiler, dump_dir=folder, **budgets)
        (record,) = read_regions(Path(folder))
    problem = record.captured
    return replace(
        problem, budgets=Budgets(device_bytes=None, host_bytes=1 << 50), links=LINKS, min_spill_bytes=1 << 20
    )


@dataclass(frozen=True, kw_only=True)
class Period:
    """Where the layers of one graph begin, and how many steps each has."""

    first: int
    steps: int

    @staticmethod
    def of(ops: tuple[Op, ...], start: int, stop: int) -> "Period":
        """Return the distance at which the ops of `[start, stop)` are alike for longest."""
        kinds = [re.sub(r"(_\d+)?([#.].*)?$", "", op.name) for op in ops[start:stop]]
        longest = (0, 0, 1)
        for steps in range(1, len(kinds)):
            alike = 0
            for k in range(len(kinds) - steps):
                alike = alike + 1 if kinds[k] == kinds[k + steps] else 0
                longest = max(longest, (alike, start + k + 1 - alike, steps))
        return Period(first=longest[1], steps=longest[2])


class Stamp:
    """The captured problem with one of its layers repeated `copies` times."""

    def __init__(self, problem: Problem, copies: int) -> None:
        self.problem, self.copies, self.count = problem, copies, len(problem.ops)
        self.forward = Period.of(problem.ops, 0, problem.boundary)
        self.backward = Period.of(problem.ops, problem.boundary, self.count)
        self.early_end = self.forward.first + (REPEATED_LAYER + 1) * self.forward.steps
        self.late_start = self.backward.first + (CAPTURED_LAYERS - 1 - REPEATED_LAYER) * self.backward.steps

    def layer(self, step: int) -> int:
        """Return the layer that a step belongs to, -1 for none of them."""
        if step < self.problem.boundary:
            layer = (step - self.forward.first) // self.forward.steps
        else:
            layer = CAPTURED_LAYERS - 1 - (step - self.backward.first) // self.backward.steps
        return layer if 0 <= layer < CAPTURED_LAYERS else -1

    def moved(self, step: int, layer: int, copy: int) -> Step:
        """Return where a step is of what belongs to `layer`, and to which copy of the repeated one."""
        early, late = self.copies * self.forward.steps, self.copies * self.backward.steps
        if step >= self.count:
            return Step(step + early + late)
        if layer == REPEATED_LAYER:
            if step < self.problem.boundary:
                return Step(step + copy * self.forward.steps)
            return Step(step + early + (self.copies - copy) * self.backward.steps)
        if step < self.problem.boundary:
            return Step(step + early if layer > REPEATED_LAYER or step >= self.early_end else step)
        below = 0 <= layer < REPEATED_LAYER or (layer < 0 and step >= self.late_start)
        return Step(step + early + late if below else step + early)

    def storage(self, storage: Storage) -> Iterator[Storage]:
        """Yield a storage, and its copies if it belongs to the repeated layer."""
        layer = self.layer(next((use for use in storage.uses if use > 0), storage.birth))
        for copy in self.copies_of(layer):
            suffix = f".{copy}" if copy else ""

            def moved(step: int, layer: int = layer, copy: int = copy) -> Step:
                return self.moved(step, layer, copy)

            yield replace(
                storage,
                name=storage.name + suffix,
                parameter=storage.parameter and storage.parameter + suffix,
                birth=moved(storage.birth) if storage.birth else Step(0),
                death=Step(moved(storage.death - 1) + 1) if storage.death < self.count else moved(storage.death),
                uses=tuple(map(moved, storage.uses)),
                ready=moved(storage.ready) if storage.ready else Step(0),
                caller_frees_at=moved(storage.caller_frees_at) if storage.caller_frees_at else Step(0),
            )

    def copies_of(self, layer: int) -> range:
        """Return the numbers of the copies of a layer."""
        return range(self.copies + 1 if layer == REPEATED_LAYER else 1)

    def steps(self) -> Iterator[tuple[Step, int]]:
        """Yield every step of the larger problem, and the captured one that it is like, in order."""
        places = [
            (self.moved(step, self.layer(step), copy), step)
            for step in range(self.count)
            for copy in self.copies_of(self.layer(step))
        ]
        yield from sorted(places)

    def make(self) -> Problem:
        """Return the larger problem."""
        problem, steps = self.problem, list(self.steps())
        barriers = set(problem.barriers)
        layers = {s.name: self.layer(next((use for use in s.uses if use > 0), s.birth)) for s in problem.storages}
        recipes = (
            Recipe(
                name=recipe.name + (f".{copy}" if copy else ""),
                steps=tuple(sorted(self.moved(step, layers[recipe.name], copy) for step in recipe.steps)),
            )
            for recipe in problem.recipes
            for copy in self.copies_of(layers[recipe.name])
        )
        larger = replace(
            problem,
            ops=tuple(replace(problem.ops[step], name=f"{problem.ops[step].name}@{place}") for place, step in steps),
            boundary=Step(problem.boundary + self.copies * self.forward.steps),
            storages=tuple(copy for storage in problem.storages for copy in self.storage(storage)),
            barriers=tuple(place for place, step in steps if step in barriers),
            recipes=tuple(recipes),
        )
        larger.check()
        for storage in larger.storages:
            storage.check()
        return larger


def plan(name: str, captured: Problem) -> list[object]:
    """Return a row of the table."""
    budget = captured.budgets.device_bytes or 0
    begin = time.process_time()
    names = choose_for_region(captured)
    chosen = time.process_time()
    problem, result = recompute(captured, names), "none"
    ideal_ns = sum(op.duration_ns for op in captured.ops) - captured.recompute_ns
    try:
        found = make_plan(problem, "joint")
    except BudgetError:
        pass
    else:
        took_ns = step_ns(keep_resident(problem, found.resident, found.updated_here), found.forecast)
        result = f"{took_ns / max(1, ideal_ns):.4f}"
    done = time.process_time()
    sizes = len(captured.ops), len(captured.storages), f"{budget / GIB:.2f}", len(names)
    return [name, *sizes, f"{chosen - begin:.2f}", f"{done - chosen:.2f}", f"{done - begin:.2f}", result]


def problems(arguments: argparse.Namespace) -> Iterator[tuple[str, Problem]]:
    """Yield each problem at each of its budgets."""
    for path in map(Path, arguments.problems):
        problem = read_problem(path)
        every = first_parameters(problem, 1.0)
        peak, floor = int(live_bytes(keep_resident(problem, every, every)).max()), policy_floor_bytes(problem, "joint")
        for share in arguments.shares:
            yield path.stem, problem.within(device_bytes=int(floor + share * (peak - floor)))
    if arguments.problems:
        return
    captured = capture(arguments.compiler, arguments.batch)
    for layers in arguments.layers:
        larger = Stamp(captured, layers - CAPTURED_LAYERS).make()
        for gib in arguments.gib:
            yield f"{layers} layers", larger.within(device_bytes=int(gib * GIB))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 43, 330])
    parser.add_argument("--gib", type=float, nargs="+", default=[16.0], help="device budgets")
    parser.add_argument("--batch", type=int, default=4, help="of sequences of 4096 tokens")
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--problems", nargs="*", default=[], help="plan these records or problems instead")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.5], help="budgets, from floor to peak")
    columns = "problem", "steps", "storages", "GiB", "recomputed", "choose s", "plan s", "all s", "step over ideal"
    rows = []
    for name, problem in problems(parser.parse_args()):
        rows.append(plan(name, problem))
        print(*rows[-1], flush=True)
    print(tabulate(rows, headers=columns))


if __name__ == "__main__":
    main()

"""Random training steps written down instruction by instruction, what they come to as problems, and recomputing done
by hand: the instruction list that results, and everything that lives in it, counted anew.

A *value* is what one instruction returns. It lives in a storage, which views share; an instruction with several
results returns a tuple, and others name its parts. What the backward reads is saved.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from problems import PLENTY, links

from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Budgets, Kind, Op, Problem, Recipe, Step, Storage
from tencache_fx.planning.recompute import recompute


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """What it reads, the value it returns, and the storages it makes; `taken` gives its bytes to the result."""

    name: str
    reads: tuple[str, ...]
    makes: tuple[str, ...] = ()
    duration_ns: int = 0
    scratch_bytes: int = 0
    taken: str = ""
    barrier: bool = False


@dataclass(kw_only=True)
class Program:
    """A training step. `homes` says in which storages each value lives, `sizes` and `kinds` are by storage."""

    forward: list[Instruction] = field(default_factory=list)
    backward: list[Instruction] = field(default_factory=list)
    homes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    tangents: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)

    def touched(self, instruction: Instruction) -> set[str]:
        """The storages an instruction reads, makes or names."""
        return {home for value in (*instruction.reads, instruction.name) for home in self.homes[value]}

    def saved(self) -> set[str]:
        """The storages that the forward hands to the backward."""
        made = {home for instruction in self.forward for home in instruction.makes}
        return made & {home for instruction in self.backward for home in self.touched(instruction)}

    def closures(self) -> dict[str, set[int]]:
        """By saved activation, the forward instructions that make it from what is there anyway."""
        at = {instruction.name: k for k, instruction in enumerate(self.forward)}
        there = self.saved() | {home for home, kind in self.kinds.items() if kind in (Kind.PARAMETER, Kind.INPUT)}
        found = {}
        for storage in self.saved():
            if self.kinds[storage] is not Kind.ACTIVATION:
                continue
            late = [value for instruction in self.backward for value in instruction.reads]
            pending = [value for value in late if value in at and self.homes[value] == (storage,)]
            steps: set[int] = set()
            while pending:
                value = pending.pop()
                homes = self.homes[value]
                if value not in at or at[value] in steps or (len(homes) == 1 and set(homes) <= there - {storage}):
                    continue
                steps.add(at[value])
                pending += self.forward[at[value]].reads
            found[storage] = steps
        return found

    def problem(self) -> Problem:
        """The problem, by the lives of the storages in the plain list."""
        line = [(instruction, False) for instruction in (*self.forward, *self.backward)]
        ops = tuple(op_of(instruction, again=False) for instruction, _ in line)
        boundary = Step(len(self.forward))
        lives = measure(self, line, chosen=(), boundary=boundary)
        return Problem(
            ops=ops,
            boundary=boundary,
            storages=tuple(sorted(lives, key=lambda storage: (storage.birth, storage.name))),
            links=links(),
            budgets=Budgets(device_bytes=None, host_bytes=PLENTY),
            barriers=tuple(Step(k) for k, (instruction, _) in enumerate(line) if instruction.barrier),
            recipes=tuple(
                Recipe(name=name, steps=tuple(map(Step, sorted(steps))))
                for name, steps in sorted(self.closures().items())
            ),
        )


FORWARD = ("op", "op", "op", "view", "pair", "take")
BACKWARD = ("op", "op", "op", "view", "take")

Line = Sequence[tuple[Instruction, bool]]  # the second says whether it runs again


def op_of(instruction: Instruction, *, again: bool) -> Op:
    name = f"{instruction.name}#again" if again else instruction.name
    return Op(name=name, duration_ns=instruction.duration_ns, scratch_bytes=instruction.scratch_bytes)


def rewrite(program: Program, chosen: Collection[str]) -> Line:
    """Return the instructions that run when the storages `chosen` are recomputed, on demand, as an interpreter would.

    Before the first backward instruction that wants one, its recipe runs, and first the recipes of what that reads and
    is recomputed too. Results are named as soon as they are there.
    """
    closures = program.closures()
    made: set[str] = set()
    done: set[int] = set()

    def demand(storage: str) -> set[int]:
        if storage in made:
            return set()
        made.add(storage)
        steps = set(closures[storage])
        for step in closures[storage]:
            for value in program.forward[step].reads:
                for home in program.homes[value]:
                    if home in chosen and len(program.homes[value]) == 1:
                        steps |= demand(home)
        return steps

    named = {k: i.reads[0] for k, i in enumerate(program.forward) if i.reads and len(program.homes[i.reads[0]]) > 1}
    wanted_ever = set().union(*map(demand, chosen))
    made.clear()
    backward: list[tuple[Instruction, bool]] = []
    for instruction in program.backward:
        wanted = [home for home in sorted(program.touched(instruction)) if home in chosen]
        steps = set().union(*(demand(storage) for storage in wanted))
        running = {program.forward[step].name for step in steps}
        steps |= {k for k, pair in named.items() if pair in running} & wanted_ever
        backward += [(program.forward[step], True) for step in sorted(steps - done)]
        backward.append((instruction, False))
        done |= steps
    return [*((instruction, False) for instruction in program.forward), *backward]


def measure(program: Program, line: Line, *, chosen: Collection[str], boundary: int) -> list[Storage]:
    """Return every storage's life in a list of instructions, each made again as a storage of its own.

    `boundary` is the first backward instruction that does not run again. Fails if something is read that is not there.
    """
    saved, enters = program.saved() - set(chosen), set(program.homes) - {i.name for i, _ in line}
    first = {value: program.homes[value] for value in enters}  # where each value is; then, where it is again
    second: dict[str, tuple[str, ...]] = {}
    touches: dict[str, list[int]] = {home: [] for value in enters for home in first[value]}
    births = {home: len(program.forward) if home in program.tangents else 0 for home in touches}
    ready = dict(births)
    held = {home for value in enters for home in first[value]} | saved

    def find(value: str, *, again: bool, late: bool) -> tuple[str, ...]:
        homes = program.homes[value]
        if again:
            return first[value] if len(homes) == 1 and set(homes) <= held else once_more(value)
        return once_more(value) if late and set(homes) & set(chosen) and value in forward else first[value]

    def once_more(value: str) -> tuple[str, ...]:
        """A view that was not asked for is free to make; its storage has to be there."""
        found = second.get(value, tuple(f"{home}#again" for home in program.homes[value]))
        assert set(found) <= births.keys(), f"{value} is read again and is not there"
        return found

    forward = {instruction.name for instruction in program.forward}
    for place, (instruction, again) in enumerate(line):
        read = [find(value, again=again, late=place >= len(program.forward)) for value in instruction.reads]
        if instruction.makes:
            found = tuple(f"{home}#again" if again else home for home in instruction.makes)
            births |= dict.fromkeys(found, place)
        else:  # a view, or a name for one of several results
            found = tuple(name for name in read[0] if name.removesuffix("#again") in program.homes[instruction.name])
        (second if again else first)[instruction.name] = found
        if len(found) == 1:
            ready.setdefault(found[0], place)
        for name in {name for names in (*read, found) for name in names}:
            touches.setdefault(name, []).append(place)
    return [
        life(program, name, births[name], places, ready.get(name, births[name]), line, saved=saved, boundary=boundary)
        for name, places in touches.items()
    ]


def life(
    program: Program,
    name: str,
    birth: int,
    places: list[int],
    ready: int,
    line: Line,
    *,
    saved: set[str],
    boundary: int,
) -> Storage:
    """One storage from when it is made until it is last touched, or as long as somebody outside holds it."""
    home = name.removesuffix("#again")
    kind, is_second = program.kinds[home], name != home
    death = max(places, default=birth) + 1
    if home in saved and not is_second:
        death = max(death, boundary + 1)
    instruction, again = line[death - 1]
    if instruction.taken == home and not again:
        death -= 1
    stays = kind is not Kind.ACTIVATION and not is_second
    return Storage(
        name=name,
        nbytes=program.sizes[home],
        kind=kind,
        birth=Step(birth),
        death=Step(len(line) if stays else death),
        uses=tuple(map(Step, places)),
        spillable=kind is Kind.ACTIVATION,
        ready=Step(ready),
    )


@st.composite
def programs(draw: st.DrawFn, *, most_forward: int = 9, most_backward: int = 8, most_bytes: int = 12) -> Program:
    """Training steps of a few instructions: views, several results, results in place, parameters, tangents, outputs."""
    maker = _Maker(draw, most_bytes)
    for index in range(draw(st.integers(1, 3))):
        maker.enter(f"p{index}", draw(st.sampled_from((Kind.PARAMETER, Kind.INPUT))))
    for index in range(draw(st.integers(3, most_forward))):
        maker.run(maker.program.forward, f"f{index}", maker.readable(), draw(st.sampled_from(FORWARD)))
    maker.turn()
    for index in range(draw(st.integers(2, most_backward))):
        maker.run(maker.program.backward, f"b{index}", maker.readable(), draw(st.sampled_from(BACKWARD)))
    maker.finish()
    return maker.program


class _Maker:
    """Draws a program instruction by instruction."""

    def __init__(self, draw: st.DrawFn, most_bytes: int) -> None:
        self.draw, self.most_bytes, self.program = draw, most_bytes, Program()
        self.values: list[str] = []
        self.late = False

    def readable(self) -> tuple[str, ...]:
        recent = self.values[-3:]
        return tuple(self.draw(st.lists(st.sampled_from((*self.values, *recent)), min_size=1, max_size=3, unique=True)))

    def enter(self, name: str, kind: Kind) -> None:
        program = self.program
        program.homes[name], program.sizes[name], program.kinds[name] = (
            (name,),
            self.draw(st.integers(1, self.most_bytes)),
            kind,
        )
        self.values.append(name)

    def store(self, name: str) -> str:
        self.program.sizes[name] = self.draw(st.integers(1, self.most_bytes))
        self.program.kinds[name] = Kind.ACTIVATION
        return name

    def run(self, line: list[Instruction], name: str, reads: tuple[str, ...], sort: str) -> None:
        """Append an instruction; one with two results is followed by those that name them, one or both."""
        costs = {
            "duration_ns": self.draw(st.integers(0, 9)),
            "scratch_bytes": self.draw(st.sampled_from((0, 0, 2))),
            "barrier": self.draw(st.booleans()),
        }
        homes = self.program.homes
        if sort == "view":
            homes[name] = homes[reads[0]]
            line.append(Instruction(name=name, reads=reads[:1]))
            self.values.append(name)
        elif sort == "pair":
            makes = (self.store(f"s_{name}_a"), self.store(f"s_{name}_b"))
            homes[name] = makes
            line.append(Instruction(name=name, reads=reads, makes=makes, **costs))
            for part in makes if self.draw(st.booleans()) else makes[:1]:
                homes[f"v{part}"] = (part,)
                line.append(Instruction(name=f"v{part}", reads=(name,)))
                self.values.append(f"v{part}")
        else:
            homes[name] = (self.store(f"s_{name}"),)
            taken = next((home for value in reads for home in homes[value] if self.may_take(home)), "")
            line.append(
                Instruction(name=name, reads=reads, makes=homes[name], taken=taken if sort == "take" else "", **costs)
            )
            if sort == "take" and taken:  # whoever held it has it no longer
                self.values = [value for value in self.values if taken not in homes[value]]
            self.values.append(name)

    def may_take(self, home: str) -> bool:
        return self.program.kinds[home] is Kind.ACTIVATION and home not in self.program.outputs

    def turn(self) -> None:
        """End the forward: some results go to the caller, a gradient of each comes back."""
        for value in self.draw(st.lists(st.sampled_from(self.values), max_size=2, unique=True)):
            for home in self.program.homes[value]:
                if self.program.kinds[home] is Kind.ACTIVATION:
                    self.program.kinds[home] = Kind.OUTPUT
                    self.program.outputs.add(home)
        self.enter("tangent", Kind.INPUT)
        self.program.tangents.add("tangent")

    def finish(self) -> None:
        """End the backward: the last results are gradients."""
        made = [home for instruction in self.program.backward for home in instruction.makes]
        taken = {instruction.taken for instruction in self.program.backward}
        for home in made[-2:]:
            if home not in taken:
                self.program.kinds[home] = Kind.GRADIENT


def some_recipes(draw: st.DrawFn, problem: Problem) -> tuple[str, ...]:
    """Draw some of the names that have a recipe."""
    names = [recipe.name for recipe in problem.recipes]
    return tuple(draw(st.sets(st.sampled_from(names)))) if names else ()


@st.composite
def programs_and_choices(draw: st.DrawFn) -> tuple[Program, tuple[str, ...]]:
    """A program, and some of what it could recompute."""
    program = draw(programs())
    return program, some_recipes(draw, program.problem())


@st.composite
def tight_problems(draw: st.DrawFn, **limits: int) -> Problem:
    """Problems with recipes, over their device budget; mostly some choice fits."""
    problem = replace(draw(programs(**limits)).problem(), barriers=())
    everything = [recipe.name for recipe in problem.recipes]
    most = int(live_bytes(problem).max())
    least = min(floor_bytes(problem), floor_bytes(recompute(problem, everything)))
    device_bytes = draw(st.integers(least, max(least, most - 1)))
    rate = draw(st.sampled_from((10**8, 3 * 10**8, 10**9, 3 * 10**9)))
    return replace(problem.within(device_bytes=device_bytes), links=links(rate))


def transformer_recipes(problem: Problem) -> Problem:
    """Return a transformer's problem with a recipe for every saved activation, by steps of one name as one op."""
    groups: dict[str, list[int]] = {}
    for step, op in enumerate(problem.ops[: problem.boundary]):
        groups.setdefault(op.name, []).append(step)
    read_at: dict[int, list[Storage]] = {}
    for storage in problem.storages:
        for use in storage.uses:
            read_at.setdefault(use, []).append(storage)
    activations = [s for s in problem.storages if s.kind is Kind.ACTIVATION and s.birth < problem.boundary]
    saved = {storage.name for storage in activations if storage.uses[-1] >= problem.boundary}
    recipes = []
    for storage in activations:
        steps: set[int] = set()
        pending = [storage] if storage.name in saved else []
        while pending:
            made = pending.pop()
            group = groups[problem.ops[made.birth].name]
            if not steps.issuperset(group):
                steps.update(group)
                read = [other for step in group for other in read_at.get(step, ()) if other.birth != group[0]]
                pending += [other for other in read if other.kind is Kind.ACTIVATION and other.name not in saved]
        if steps and storage.name != "x_0":  # an embedding's gradient wants no activation, and x_0 is cheap to keep
            recipes.append(Recipe(name=storage.name, steps=tuple(map(Step, sorted(steps)))))
    return replace(problem, recipes=tuple(recipes))

"""What recomputing does to a problem: forward steps run again in the backward, and lives change with them. No torch.

A storage that is recomputed dies after its last use in the forward. In the backward its recipe's steps run just before
its first use, each step once for all recipes that need it, as torch's partitioner places them (torch:
`_functorch/partitioners.py: reordering_to_mimic_autograd_engine`). What those steps read stays until they have run.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from tencache_fx.planning.collectives import steps_under_way
from tencache_fx.planning.problem import Collective, Kind, Op, Problem, Step, Storage

_AGAIN = "#again"  # after the name of a step, or a storage, that is there for the second time


def recompute(problem: Problem, names: Collection[str]) -> Problem:
    """Return `problem` with the storages `names` recomputed; without further recipes.

    Raises `KeyError` for a name without a recipe. O(steps + uses + steps of the recipes, with what those need).
    """
    if not names:
        return problem
    naming: dict[Step, set[Step]] | None = problem.derived.get("naming steps")
    if naming is None:  # many choices are tried for one problem
        naming = problem.derived["naming steps"] = _naming_steps(problem)
    read_at: dict[int, list[Storage]] | None = problem.derived.get("storages by use")
    if read_at is None:
        read_at = problem.derived["storages by use"] = _storages_by_use(problem)
    line = _Line(problem, _placed(problem, names, naming, read_at), naming)
    storages: list[Storage] = []
    chosen = frozenset(names)
    for storage in problem.storages:
        if storage.kind is not Kind.FETCHED:
            storages.extend(line.live(storage, again=storage.name in chosen))
    storages.extend(line.fetched())
    return replace(
        problem,
        ops=line.ops,
        storages=tuple(storages),
        barriers=line.barriers(),
        recipes=(),
        collectives=line.collectives(storages),
        recompute_ns=problem.recompute_ns + sum(problem.ops[step].duration_ns for step in line.again),
    )


def _storages_by_use(problem: Problem) -> dict[int, list[Storage]]:
    read_at: dict[int, list[Storage]] = {}
    under_way = steps_under_way(problem)
    for storage in problem.storages:
        for use in storage.uses:
            if use not in under_way.get(storage.name, ()):
                read_at.setdefault(use, []).append(storage)
    return read_at


def _placed(
    problem: Problem,
    names: Collection[str],
    naming: Mapping[Step, Collection[Step]],
    read_at: Mapping[int, Sequence[Storage]],
) -> dict[int, list[Step]]:
    """Return which forward steps run again before which backward step."""
    recipes = {recipe.name: recipe for recipe in problem.recipes}
    storages = {storage.name: storage for storage in problem.storages}
    whole: dict[str, set[Step]] = {}
    for name in sorted(names, key=lambda name: storages[name].birth):  # what one recipe reads was made before it
        steps = set(recipes[name].steps)
        for step in recipes[name].steps:
            for source in read_at.get(step, ()):
                if source.name in whole and step not in {source.birth, *naming.get(source.birth, ())}:
                    steps |= whole[source.name]
        whole[name] = steps

    everything = set().union(*whole.values())
    wanted: dict[int, set[Step]] = {}
    for name in names:
        wanted.setdefault(problem.first_late_use(storages[name]), set()).update(whole[name])
    for steps in wanted.values():  # named as soon as they are there (torch: `raise_getitems`)
        steps |= {result for step in steps for result in naming.get(step, ())} & everything
    done: set[Step] = set()
    placed: dict[int, list[Step]] = {}
    for need in sorted(wanted):
        placed[need] = sorted(wanted[need] - done)
        done |= wanted[need]
    return placed


def _naming_steps(problem: Problem) -> dict[Step, set[Step]]:
    """Return for every step with several results the steps that name them: right behind it, and making nothing."""
    used: dict[Step, list[set[Step]]] = {}
    for storage in filter(_is_made_here, problem.storages):
        used.setdefault(storage.birth, []).append(set(storage.uses))
    naming: dict[Step, set[Step]] = {}
    for birth, uses in used.items():
        step = Step(birth + 1)
        while len(uses) > 1 and step not in used and all(step in each for each in uses):
            naming.setdefault(birth, set()).add(step)
            step = Step(step + 1)
    return naming


def _is_made_here(storage: Storage) -> bool:
    return storage.kind not in (Kind.PARAMETER, Kind.INPUT)


class _Line:
    """The new line of steps: where each old step is now, and where each step that runs again does so."""

    def __init__(
        self, problem: Problem, placed: Mapping[int, list[Step]], naming: Mapping[Step, Collection[Step]]
    ) -> None:
        self.problem, self.naming, self.under_way = problem, naming, steps_under_way(problem)
        self.at: list[Step] = []
        self.again: dict[Step, Step] = {}
        ops: list[Op] = []
        for step in range(len(problem.ops) + 1):
            for source in placed.get(step, ()):
                self.again[source] = Step(len(ops))
                op = problem.ops[source]
                ops.append(Op(name=op.name + _AGAIN, duration_ns=op.duration_ns, scratch_bytes=op.scratch_bytes))
            self.at.append(Step(len(ops)))
            if step < len(problem.ops):
                ops.append(problem.ops[step])
        self.ops = tuple(ops)

    def barriers(self) -> tuple[Step, ...]:
        """Return the steps that keep their place among runtime ops: the old ones, and those that run again."""
        old = self.problem.barriers
        return tuple(sorted({*(self.at[step] for step in old), *(self.again[s] for s in old if s in self.again)}))

    def collectives(self, storages: Collection[Storage]) -> tuple[Collective, ...]:
        """Return the collectives, which never run again, with the names that what they read and write has now.

        What is made a second time may be read by nobody then, and be gone before the collective begins.
        """
        again = {s.name.removesuffix(_AGAIN): s for s in storages if s.name.endswith(_AGAIN)}
        found = []
        for each in self.problem.collectives:
            moved = each.moved(self.at[each.begin], self.at[each.needed_at])
            second = {name: again[name] for name in (*each.reads, *each.writes) if name in again}
            lasting = {name: s.name for name, s in second.items() if s.birth <= moved.begin < s.death}
            found.append(moved.renamed(lasting))
        return tuple(found)

    def live(self, storage: Storage, *, again: bool) -> tuple[Storage, ...]:
        """Return what becomes of `storage`: itself with a new life, and a second one if it is made `again`.

        What is saved all the same may be made a second time too, by an op that also makes something else; that second
        one is then read by nobody.
        """
        boundary, at = self.problem.boundary, self.at
        if storage.gathered_at:
            return self._gathered(storage)
        ends = max(storage.death, storage.ready)
        if ends < boundary and storage.birth not in self.again and self.again.keys().isdisjoint(storage.uses):
            return (storage,)
        made = _is_made_here(storage)
        if made and storage.birth >= boundary:
            return (self._stretched(storage, at[storage.birth], [at[use] for use in storage.uses]),)
        early = [use for use in storage.uses if use < boundary]
        late = [at[use] for use in storage.uses if use >= boundary]
        repeated = self._repeated(storage)
        if not (made and storage.birth in self.again):
            birth = at[storage.birth] if made else storage.birth  # tangents are there when the backward begins
            return (self._stretched(storage, birth, [*early, *late, *repeated]),)
        remade = self.again[storage.birth]
        if again:
            first = storage.living(storage.birth, Step(early[-1] + 1), tuple(early), storage.ready, spillable=False)
            second = self._stretched(storage, remade, [*repeated, *late])
        elif late:
            naming = self.naming.get(storage.birth, ())
            unread = {remade, *(self.again[step] for step in naming if step in self.again)}
            first = self._stretched(storage, storage.birth, [*early, *late, *(k for k in repeated if k not in unread)])
            second = storage.living(remade, Step(max(unread) + 1), tuple(sorted(unread)), storage.ready)
        else:
            first = self._stretched(storage, storage.birth, early)
            second = storage.living(remade, Step(max(repeated) + 1), tuple(sorted(repeated)), storage.ready)
        ready = self.again.get(storage.ready, remade)
        # What is made again is needed soon after: it is not swapped.
        return first, replace(second, name=storage.name + _AGAIN, ready=ready, spillable=False)

    def _gathered(self, storage: Storage) -> tuple[Storage, ...]:
        """Return what the forward has gathered, and the bytes that hold it earlier in the backward for steps run again.

        The backward gathers it once, so these bytes become those that it would have gathered later. The collective, and
        the load of what it reads, stay where they are: the plan for the graphs that torch's partitioner makes has them
        earlier.
        """
        repeated = self._repeated(storage)
        if not repeated:
            return (storage,)
        first, until = min(repeated), max(self.at[storage.gathered_at], Step(max(repeated) + 1))
        second = storage.living(first, until, tuple(sorted(set(repeated))), first, spillable=False)
        return storage, replace(second, name=storage.name + _AGAIN, gathered_at=Step(0))

    def fetched(self) -> Iterator[Storage]:
        """Yield the lives of offloaded parameters: each graph prefetches them for itself.

        A step that runs again reads what the backward has fetched, which it then does earlier, or at all.
        """
        boundary = self.problem.boundary
        lives = [storage for storage in self.problem.storages if storage.kind is Kind.FETCHED]
        repeated: dict[str, list[Step]] = {}
        for early in (storage for storage in lives if storage.birth < boundary):
            repeated.setdefault(early.parameter, []).extend(self._repeated(early))
            yield early
        late = {storage.parameter: storage for storage in lives if storage.birth >= boundary}
        by_parameter = {storage.parameter: storage for storage in lives}
        for parameter in {**late, **{parameter: None for parameter, steps in repeated.items() if steps}}:
            model = late.get(parameter)
            uses = [*repeated.get(parameter, ()), *(self.at[use] for use in (model.uses if model else ()))]
            name = model.name if model else by_parameter[parameter].name + _AGAIN
            birth = min(uses)
            yield replace(
                by_parameter[parameter],
                name=name,
                birth=birth,
                ready=birth,
                death=Step(max(uses) + 1),
                uses=tuple(sorted(set(uses))),
            )

    def _repeated(self, storage: Storage) -> list[Step]:
        """Return where steps that use `storage` run again; not those that only run while a collective uses it."""
        held = self.under_way.get(storage.name, ())
        return [self.again[use] for use in storage.uses if use in self.again and use not in held]

    def _stretched(self, storage: Storage, birth: Step, uses: Collection[Step]) -> Storage:
        """Return `storage` with these uses: it ends right behind the step it did, or behind the last use if later.

        Where another storage took its bytes, that still does, if nothing reads them afterwards.
        """
        last = max(uses, default=birth)
        taken = bool(storage.uses) and storage.death == storage.uses[-1] and last == self.at[storage.death]
        death = last if taken else max(Step(self.at[storage.death - 1] + 1), Step(last + 1))
        ready, used = self.at[storage.ready], tuple(sorted(set(uses)))
        if (birth, death, used, ready) == (storage.birth, storage.death, storage.uses, storage.ready):
            return storage  # as most of the forward; a copy takes longer than all the rest here
        return storage.living(birth, death, used, ready)

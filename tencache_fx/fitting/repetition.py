"""A problem with more layers than were captured: what two neighbouring layers do, repeated. No torch here.

Layers of one kind are captured as the same ops, and differ only in where they are. So it is enough to capture a few of
them: the first and the last meet other neighbours, and of the two between, one is what the other is, `lag` steps later
in the forward, and as many earlier in the backward as its backward has steps. Copies go between these two:

    forward    0 1 2 3              0 1 + + 2 3
    backward         3 2 1 0   ->               3 2 + + 1 0

At its end the forward may have what only the backward reads, last layer first.

A storage of layer 1 has a *mate* in layer 2. Their uses are fixed, as those in the shared preparation of a mask, or lag
by one layer; copies have theirs in between, evenly. A storage that all layers read gets a use for each copy.
"""

import bisect
import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tencache_fx.planning.problem import Kind, Op, Problem, Recipe, Step, Storage

ENDS = (1, 2)
"""How many layers may be at each end of the two units that stand for all: more, where ends are felt further in."""

_Layer = tuple[str, int]
_MOST_PLACES = 5_000  # where copies may go in that are looked at
_NUMBERED = re.compile(r"(?:_\d+)?(?:#\d+)?$")


class NotRepeatedError(ValueError):
    """The layers of a problem are not the same, or too few: it has to be captured with all of them."""


def layer_of(parameter: str) -> _Layer | None:
    """Return the list of layers that a parameter is in, and the place of its layer there; None outside of any.

    >>> layer_of("model.layers.12.mlp.up_proj.weight")
    ('model.layers', 12)
    """
    found = re.match(r"(?:(.*?)\.)?(\d+)\.", parameter)
    return (found[1] or "", int(found[2])) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """Layers of one list: so many are a unit, and so many units are added."""

    stack: str
    unit: int
    copies: int

    def shifted(self, parameter: str, units: int) -> str:
        """Return the name of the parameter that is in the same place of a later layer; as it is outside of the list."""
        layer = layer_of(parameter)
        if layer is None or layer[0] != self.stack:
            return parameter
        head = f"{self.stack}." if self.stack else ""
        tail = parameter[len(head) :].partition(".")[2]
        return f"{head}{layer[1] + units * self.unit}.{tail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Steps `[low, high)`, where two units of layers are alike: `[begin, begin + lag)` and the `lag` steps behind.

    `turned` where the last layer comes first.
    """

    low: int
    high: int
    begin: int
    lag: int
    turned: bool

    @property
    def middle(self) -> int:
        """Where copies go in."""
        return self.begin + self.lag

    @property
    def delta(self) -> int:
        """How many steps behind a layer the next one is."""
        return -self.lag if self.turned else self.lag


def repeat_layers(problem: Problem, stack: str, unit: int, copies: int) -> Problem:
    """Return `problem` with `copies` more units of `unit` layers of the list `stack`, where two are between others.

    Names of copies end in "~" and their number; parameters have the names that they have with so many layers. Raises
    `NotRepeatedError` if two units between the first and the last are not alike.
    """
    if copies == 0:
        return problem
    if problem.collectives:
        raise NotRepeatedError(f"its graphs run {len(problem.collectives)} collectives.")
    layers = _Layers(stack=stack, unit=unit, copies=copies)
    lags = _lags(problem, layers)
    boundary, count = int(problem.boundary), len(problem.ops)
    spliced = _Splice(problem, layers)
    tail, tail_lag = spliced.tail(spliced.places(0, boundary, lags[0], turned=False))
    options = [spliced.places(0, tail, lags[0], turned=False)]
    if tail_lag:
        options.append(spliced.places(tail, boundary, tail_lag, turned=True))
    if lags[1]:
        options.append(spliced.places(boundary, count, lags[1], turned=True))
    spliced.stretches = tuple(places[0] for places in options if places)  # wherever in them, by these lags
    for stretches in itertools.islice(itertools.product(*map(spliced.lagging, options)), _MOST_PLACES):
        if spliced.is_sound(stretches):
            return spliced.repeated()
    raise NotRepeatedError(f"layers of {stack} do not repeat.")


def _lags(problem: Problem, layers: _Layers) -> tuple[int, int]:
    """Return how many steps the forward of a unit of layers takes, and its backward."""
    seen: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for storage in problem.storages:
        if storage.kind is Kind.FETCHED:
            seen[storage.parameter, storage.birth >= problem.boundary].append(int(storage.birth))
    votes: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    for (parameter, late), births in seen.items():
        layer = layer_of(parameter)
        if layer is None or layer[0] != layers.stack:
            continue
        mates = seen.get((layers.shifted(parameter, 1), late), [])
        if len(mates) == len(births):
            votes[late].update((b - a if not late else a - b) for a, b in zip(births, mates, strict=True))
    if not votes[0] or (problem.boundary < len(problem.ops) and not votes[1]):
        raise NotRepeatedError(f"no offloaded parameters of {layers.stack} show where its layers are.")
    found = tuple(vote.most_common(1)[0][0] if vote else 0 for vote in votes)
    if min(found) < 0:
        raise NotRepeatedError(f"layers of {layers.stack} run in another order.")
    return found[0], found[1]


def _repeats(ops: Sequence[Op], lag: int, begin: int, end: int) -> list[int]:
    """Return the steps from which on two times `lag` ops are the same, by their names and what they need."""
    same = [_looks(ops[step]) == _looks(ops[step + lag]) for step in range(begin, max(begin, end - lag))]
    found, run = [], 0
    for index in reversed(range(len(same))):
        run = run + 1 if same[index] else 0
        if run >= lag:
            found.append(begin + index)
    return found[::-1]


def _looks(op: Op) -> tuple[str, int]:
    return _NUMBERED.sub("", op.name), op.scratch_bytes


class _Splice:
    """Copies that go in between two units of layers, in each stretch in which these are alike."""

    def __init__(self, problem: Problem, layers: _Layers) -> None:
        self.problem, self.layers, self.copies = problem, layers, layers.copies
        self.boundary, self.end = int(problem.boundary), len(problem.ops)
        self.recipes = {recipe.name: tuple(map(int, recipe.steps)) for recipe in problem.recipes}
        self.stretches: tuple[_Stretch, ...] = ()
        self.mates: dict[str, Storage] = {}
        self.seconds: set[str] = set()
        self._anchored = sorted(((self._anchor(s), _about(s), i) for i, s in enumerate(problem.storages)))
        self._barriers = set(map(int, problem.barriers))

    def places(self, low: int, high: int, lag: int, *, turned: bool) -> list[_Stretch]:
        """Return where two units of `lag` steps are alike in these steps; the best place first.

        In the forward that is the last one: the more of what layers share is before it.
        """
        found = [
            _Stretch(low=low, high=high, begin=begin, lag=lag, turned=turned)
            for begin in _repeats(self.problem.ops, lag, low, high)
            if all((x in self._barriers) == (x + lag in self._barriers) for x in range(begin, begin + lag))
        ]
        found = [each for each in found if self._pairs(each) is not None]
        return found if turned else found[::-1]

    def tail(self, places: Sequence[_Stretch]) -> tuple[int, int]:
        """Return where the forward's end begins that has the last layer first, and by how many steps; 0 without one."""
        votes, first = Counter[int](), self.boundary
        for place in places:
            for outer, inner in (self._pairs(place) or {}).values():
                for a, b in zip(outer.uses, inner.uses, strict=True):
                    if b < a < self.boundary:
                        votes[a - b] += 1
                        first = min(first, int(b))
        return (first, votes.most_common(1)[0][0]) if votes else (self.boundary, 0)

    def lagging(self, places: Sequence[_Stretch]) -> list[_Stretch]:
        """Return the places where all that begins in the one unit lags behind its mate in the same way."""
        return [each for each in places if all(self._lags_behind(*pair) for pair in (self._pairs(each) or {}).values())]

    def is_sound(self, stretches: Sequence[_Stretch]) -> bool:
        """Return True if all that begins in one unit has a mate in the next, and nothing else changes by copies."""
        self.stretches = tuple(stretches)
        found = [each for stretch in stretches for each in (self._pairs(stretch) or {}).values()]
        self.mates = {outer.name: inner for outer, inner in found}
        self.seconds = {inner.name for _, inner in found}
        return all(map(self._is_apart, self.problem.storages))

    def repeated(self) -> Problem:
        """Return the problem with the copies."""
        problem, storages, recipes = self.problem, [], []
        for storage in problem.storages:
            mate = self.mates.get(storage.name)
            if mate is None and storage.name not in self.seconds:
                storages.append(self._shared(storage))
                if storage.name in self.recipes:
                    steps = tuple(sorted({self._moved(x) for x in self.recipes[storage.name]}))
                    recipes.append(Recipe(name=storage.name, steps=tuple(map(Step, steps))))
            elif mate is not None:
                for number in range(self.copies + 2):
                    storages.append(copy := self._copy(storage, mate, number))
                    if storage.name in self.recipes:
                        pairs = zip(self.recipes[storage.name], self.recipes[mate.name], strict=True)
                        steps = tuple(sorted({self._between(a, b, number) for a, b in pairs}))
                        recipes.append(Recipe(name=copy.name, steps=tuple(map(Step, steps))))
        result = replace(
            problem,
            ops=tuple(self._ops()),
            boundary=Step(self._moved(self.boundary)),
            storages=tuple(sorted(storages, key=lambda s: s.birth)),
            barriers=tuple(Step(x) for x in self._spread(map(int, problem.barriers))),
            recipes=tuple(recipes),
        )
        result.check()
        return result

    @functools.cache  # noqa: B019 - lives as long as one problem is repeated
    def _pairs(self, stretch: _Stretch) -> dict[str, tuple[Storage, Storage]] | None:
        """Return all that begins in the one unit with its mate, by name; None if one has no mate."""
        begin, middle, lag = stretch.begin, stretch.middle, stretch.lag
        firsts, seconds = self._beginning(begin, middle), self._beginning(middle, middle + lag)
        if len(firsts) != len(seconds):
            return None
        found = {}
        for first, second in zip(firsts, seconds, strict=True):
            outer, inner = (second, first) if stretch.turned else (first, second)
            follows = self.layers.shifted(outer.parameter, 1) == inner.parameter
            if _about(first) != _about(second) or not follows or len(outer.uses) != len(inner.uses):
                return None
            found[outer.name] = outer, inner
        return found

    def _beginning(self, begin: int, end: int) -> list[Storage]:
        """Return what is made in these steps, or of what was there before, is read in them first."""
        first, last = (bisect.bisect_left(self._anchored, (step,)) for step in (begin, end))
        return [self.problem.storages[index] for _, _, index in self._anchored[first:last]]

    def _anchor(self, storage: Storage) -> int:
        return int(storage.birth or (storage.uses[0] if storage.uses else self.end))

    def _lags_behind(self, outer: Storage, inner: Storage) -> bool:
        """Return True if every step of a storage's life is a fixed one, or its mate's differs by one unit."""
        recipes = self.recipes.get(outer.name, ()), self.recipes.get(inner.name, ())
        if len(recipes[0]) != len(recipes[1]):
            return False
        pairs = (*zip(_life(outer), _life(inner), strict=True), *zip(*recipes, strict=True))
        return all(a == b or b - a == self._stretch_of(a).delta for a, b in pairs)

    def _stretch_of(self, step: int) -> _Stretch:
        return next((each for each in self.stretches if each.low <= step < each.high), self.stretches[-1])

    def _is_late(self, storage: Storage) -> bool:
        """Return True for what is of a later layer than the two units: copies go in before it in the model."""
        anchor = self._anchor(storage)
        stretch = self._stretch_of(anchor)
        return anchor < stretch.middle if stretch.turned else anchor >= stretch.middle

    def _is_apart(self, storage: Storage) -> bool:
        """Return True if `storage` has a mate, or is read by both units alike, or by the one that it is next to."""
        if storage.name in self.mates or storage.name in self.seconds:
            return True
        uses, late = set(map(int, storage.uses)), self._is_late(storage)
        for each in self.stretches:
            first = {x for x in uses if each.begin <= x < each.middle}
            second = {x - each.lag for x in uses if each.middle <= x < each.middle + each.lag}
            far = first if late != each.turned else second
            if far - (first & second):
                return False
        return True

    def _moved(self, step: int) -> int:
        """Return where a step of the problem is once the copies are in."""
        return step + sum(self.copies * each.lag for each in self.stretches if step >= each.middle)

    def _between(self, outer: int, inner: int, number: int) -> int:
        """Return the step of copy `number` where the outer mate has one of `outer`, and the inner one of `inner`."""
        if outer == inner:
            return self._moved(outer)
        own = self._stretch_of(outer)
        before = sum(self.copies * each.lag for each in self.stretches if each.low < own.low)
        return outer + before + (self.copies - number if own.turned else number) * own.lag

    def _copy(self, outer: Storage, inner: Storage, number: int) -> Storage:
        """Return the storage of a copy; the first is the outer mate, the last the inner one."""
        birth, death, ready, freed, *uses = (
            self._between(a, b, number) for a, b in zip(_life(outer), _life(inner), strict=True)
        )
        is_new = 0 < number <= self.copies
        base = inner if number > self.copies else outer
        return replace(
            base,
            name=f"{base.name}~{number}" if is_new else base.name,
            parameter=self.layers.shifted(outer.parameter, number),
            birth=Step(birth),
            death=Step(death),
            ready=Step(ready),
            caller_frees_at=Step(freed),
            uses=tuple(map(Step, sorted(uses))),
        )

    def _shared(self, storage: Storage) -> Storage:
        birth, death, ready, freed, *uses = _life(storage)
        return replace(
            storage,
            parameter=self.layers.shifted(storage.parameter, self.copies if self._is_late(storage) else 0),
            birth=Step(self._moved(birth)),
            death=Step(self._moved(death)),
            ready=Step(self._moved(ready)),
            caller_frees_at=Step(self._moved(freed)),
            uses=tuple(Step(x) for x in self._spread(uses)),
        )

    def _spread(self, steps: Iterable[int]) -> list[int]:
        """Return where these steps are, and those of the copies."""
        given = set(steps)
        found = set(map(self._moved, given))
        for each in self.stretches:
            shared = [step for step in given if each.begin <= step < each.middle and step + each.lag in given]
            found |= {self._moved(step) + number * each.lag for step in shared for number in range(1, self.copies + 1)}
        return sorted(found)

    def _ops(self) -> Iterator[Op]:
        ops = self.problem.ops
        start = 0
        for each in self.stretches:
            yield from ops[start : each.middle]
            for number in range(1, self.copies + 1):
                yield from (replace(op, name=f"{op.name}~{number}") for op in ops[each.begin : each.middle])
            start = each.middle
        yield from ops[start:]


def _life(storage: Storage) -> tuple[int, ...]:
    return storage.birth, storage.death, storage.ready, storage.caller_frees_at, *storage.uses


def _about(storage: Storage) -> tuple[str, int, int, int, bool]:
    return str(storage.kind), storage.nbytes, storage.state_bytes, storage.state_saved_bytes, storage.spillable

"""Decides which offloaded parameters stay on the device in the steps of one device.

The plan of one program decides it for the parameters that it reads; other programs that read no more are planned
beside that, so that programs in turns do not move parameters to and fro. A program that does not fit like that, reads
others as well, or trains more of them, decides anew, and so is decided for another budget. Plans that count on what was
decided before are then made again.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.step_hooks import step_hooks
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Kind, Tier
from tencache_fx.planning.step import ParameterNames, SwapKey, Visit
from tencache_fx.runtime.step_parameters import Resident
from tencache_fx.runtime.swap_points import SwapPoints

Run = tuple[int, int, bool]  # region, call, and whether it is the backward


class Place(NamedTuple):
    """What tells a run of a region from others in its place: its sizes, too, by the bytes that may leave, and all."""

    region: int
    call: int
    backward: bool
    swapped_bytes: int
    nbytes: int

    @property
    def run(self) -> Run:
        """Which run of the step it is, whatever its sizes."""
        return self.region, self.call, self.backward


Order = tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class ReadParameters:
    """The offloaded parameters that a program reads: their names in its problem, each by its name, and who is trained.

    It does not keep them alive.
    """

    names: ParameterNames
    owners: WeakValueDictionary[str, OffloadedParameter]
    trained: frozenset[str]

    @property
    def first_trained(self) -> OffloadedParameter | None:
        """One of the parameters that are trained; None if there is none any more."""
        return next((owner for name, owner in sorted(self.owners.items()) if name in self.trained), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """Whether a parameter stays, and its optimizer's state with it, by the plan of the program of this order.

    It was made for a device budget, and for a parameter that was `trained`, or not.
    """

    order: Order
    limit: int | None
    trained: bool
    resident: bool
    updated_here: bool


class StepResidency:
    """The decisions for all parameters that steps of one device read."""

    def __init__(self, points: SwapPoints) -> None:
        self._points = points
        self._decisions: WeakKeyDictionary[OffloadedParameter, _Decision] = WeakKeyDictionary()

    def read_by(self, visits: Sequence[Visit]) -> ReadParameters:
        """Return the parameters that these runs read, as far as was seen in the last run of their calls."""
        seen, names = self._points.owners(), dict[SwapKey, str]()
        owners: WeakValueDictionary[str, OffloadedParameter] = WeakValueDictionary()
        known: dict[int, str] = {}
        stored: set[SwapKey] = set()
        for visit in visits:
            for storage in visit.region.problem.storages:
                owner = seen.get(SwapKey(visit.index, visit.call, storage.name))
                key = SwapKey(visit.index, visit.call, storage.parameter)
                if storage.kind is Kind.FETCHED and isinstance(owner, OffloadedParameter):
                    names[key] = known.setdefault(id(owner), str(key))
                    owners[names[key]] = owner
                elif storage.kind is Kind.STORED:
                    stored.add(key)
        at_once = frozenset(name for name, owner in owners.items() if _is_updated_in_backward(owner))
        trained = frozenset(names[key] for key in stored & names.keys())
        on_disk = frozenset(name for name, owner in owners.items() if owner.tier is Tier.NVME)
        found = ParameterNames(names=names, freed_at_once=at_once, on_disk=on_disk)
        return ReadParameters(names=found, owners=owners, trained=trained)

    def decided(
        self, order: Order, limit: int | None, read: ReadParameters
    ) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return which of these parameters stay, and of which the state, if other programs have decided it for all."""
        found = {name: self._decisions.get(owner) for name, owner in read.owners.items()}
        residents: list[str] = []
        updated_here: list[str] = []
        for name, each in found.items():
            if each is None or each.order == order or each.limit != limit:
                return None
            if name in read.trained and not each.trained:
                return None
            residents += [name] if each.resident else []
            updated_here += [name] if each.updated_here else []
        return (tuple(residents), tuple(updated_here)) if found else None

    def decide(self, order: Order, limit: int | None, read: ReadParameters, plan: Plan) -> None:
        """Have those stay that the plan of a program keeps, and no others of those that it reads."""
        for name, owner in read.owners.items():
            self._decisions[owner] = _Decision(
                order=order,
                limit=limit,
                trained=name in read.trained,
                resident=name in plan.resident,
                updated_here=name in plan.updated_here,
            )
        self._keep()

    def forget(self, regions: Collection[int]) -> None:
        """Have those leave that stay by programs of these regions, which will not run again."""
        owners = [
            owner for owner, each in self._decisions.items() if any(place.region in regions for place in each.order)
        ]
        for owner in owners:
            del self._decisions[owner]
        self._keep(owners)

    def _keep(self, leaving: Collection[OffloadedParameter] = ()) -> None:
        """Have those stay that were decided to; others leave when they are fetched next, or at once."""
        staying: dict[Resident, bool] = {
            owner: each.updated_here for owner, each in self._decisions.items() if each.resident
        }
        self._points.keep_residents(staying, leaving)

    def agrees(self, read: ReadParameters, plan: Plan) -> bool:
        """Return whether those stay that the plan counts on, and no others of those that its program reads."""
        found = [(name, self._decisions.get(owner)) for name, owner in read.owners.items()]
        return all(
            each is not None
            and each.resident == (name in plan.resident)
            and each.updated_here == (name in plan.updated_here)
            for name, each in found
        )

    def bytes_beside(self, read: ReadParameters) -> int:
        """Return the bytes of parameters that stay, and of their state, of those that a program does not read."""
        mine = {id(owner) for owner in read.owners.values()}
        others = (
            (owner, each)
            for owner, each in self._decisions.items()
            if each.resident and not owner.is_dead and id(owner) not in mine
        )
        return sum(owner.nbytes + (owner.state_bytes if each.updated_here else 0) for owner, each in others)


def _is_updated_in_backward(owner: OffloadedParameter) -> bool:
    return not owner.is_dead and any(not hook.is_dead for hook in step_hooks(owner.parameter))

"""Why a plan is what it is: for each tensor what the other choices would do, and what more of each resource would.

What would change only transfers is replayed as it stands; what would change which values are recomputed, or a budget,
is planned anew.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from tencache_fx.errors import BudgetError, OptionError
from tencache_fx.planning.collectives import busy_ns, scaled
from tencache_fx.planning.liveness import (
    clip_to_barriers,
    earliest_offload,
    inactive_intervals,
    is_candidate,
    live_bytes,
    swap_to_host,
)
from tencache_fx.planning.plan import Plan, Transfer, TransferKind
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.pool_sizing import host_buffers, pool_classes, total_bytes
from tencache_fx.planning.problem import Links, Problem, Step, Storage, Tier
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.search import make_plan, plan_region
from tencache_fx.planning.simulator import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One thing that could be done with a tensor instead: "keep", "recompute", "host" or "nvme".

    `change_ns` is what it would add to the step, negative if it would be faster; None if planning anew finds no plan.
    `over_bytes` is by how much the budget of `over_tier` would be overrun (the device first, at its fullest step): with
    anything over 0 it cannot be done. No plan and 0 bytes: the device would do, host memory or disk is short.
    """

    decision: str
    change_ns: int | None
    over_bytes: int
    over_tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReason:
    """One tensor: what was decided, what that costs, and what every other choice would do.

    `out_ns` and `in_ns` are the times of its copies at the rates the replay saw (for a tensor without a transfer: at
    the links' solo rates), `stall_ns` is how long compute stood still for them: the rest of them was hidden.
    `recipe_ns` is what recomputing it adds to the time of the steps, given what else is recomputed (None: it has no
    recipe); for that the tensors `held_longer`, of `held_longer_bytes`, have to stay alive until it is made again.
    """

    name: str
    nbytes: int
    decision: str
    out_ns: int
    in_ns: int
    stall_ns: int
    recipe_ns: int | None
    held_longer: tuple[str, ...]
    held_longer_bytes: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A shadow price: what changing one resource alone does to the step, all else planned anew.

    `amount` is the change in bytes of a tier ("device", "host", "disk"), or in percent of all rates ("links", and
    "collectives"). `change_ns` is the difference in step time, None where no plan fits. For links `copying_ns` is how
    much less time this plan's own copies, out and in added up, or collectives would take: `-change_ns / copying_ns` is
    the price of a link-second.
    """

    resource: str
    amount: int
    change_ns: int | None
    copying_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """The plan as modelled, tensors by size, prices, and how many tensors at the fullest step are not shown.

    `makespan_ns` is the plan's time as all figures here are measured against it. Where something is recomputed it can
    differ a little from the forecast made from the graph that torch split.
    """

    policy: str
    makespan_ns: int
    tensors: tuple[TensorReason, ...]
    left_out: int
    prices: tuple[Price, ...]


_GIB = 1 << 30

_FASTER_PERCENT = 10


def find_reasons(captured: Problem, plan: Plan, *, most: int = 12, tensor: str | None = None) -> Reasons:
    """Return why `plan` treats the `most` largest tensors as it does, or one `tensor`; and what resources are worth.

    The largest are those that live at the region's fullest step and may leave, be recomputed, or do. Takes about two
    plans for each, and one search for each price: seconds, for large regions a minute. Raises `BudgetError` if what the
    plan recomputes does not fit as modelled, and `OptionError` if there is no such tensor.
    """
    case = _Case(captured, plan.policy, frozenset(plan.recomputed))
    if tensor is not None and tensor not in case.storages:
        near = difflib.get_close_matches(tensor, case.storages, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"there is no tensor {tensor!r} among the {len(case.storages)} of the plan.{hint}")
    names = _in_question(captured, case.plan) if tensor is None else [tensor]
    return Reasons(
        policy=plan.policy,
        makespan_ns=case.plan.forecast.makespan_ns,
        tensors=tuple(case.reason(name) for name in names[:most]),
        left_out=len(names[most:]),
        prices=tuple(_prices(captured, case.plan)),
    )


def _in_question(captured: Problem, plan: Plan) -> list[str]:
    """Return the names of the tensors about which there is something to decide, largest first."""
    fullest = int(live_bytes(captured).argmax())
    decided = {*plan.recomputed, *(transfer.name for transfer in plan.transfers)}
    with_recipe = {recipe.name for recipe in captured.recipes}

    def in_question(storage: Storage) -> bool:
        if storage.nbytes < max(1, captured.min_spill_bytes) or not storage.birth <= fullest < storage.death:
            return False
        leaves = is_candidate(captured, storage) and any(u < fullest < v for u, v in inactive_intervals(storage))
        return leaves or storage.name in with_recipe

    worth = [s for s in captured.storages if s.name in decided or in_question(s)]
    return [storage.name for storage in sorted(worth, key=lambda s: (-s.nbytes, s.birth, s.name))]


class _Case:
    """The plan that is asked about, modelled, and what plans for other choices of what to recompute look like."""

    def __init__(self, captured: Problem, policy: str, again: frozenset[str]) -> None:
        self.captured, self.policy, self.again = captured, policy, again
        self.storages = {storage.name: storage for storage in captured.storages}
        self.recipes = {recipe.name: recipe for recipe in captured.recipes}
        self.problem = recompute(captured, again)
        self.plan = replace(make_plan(self.problem, policy), recomputed=tuple(sorted(again)))
        self.replay = simulate(self.problem, self.plan.transfers, self.plan.staging)

    def reason(self, name: str) -> TensorReason:
        """Return everything about one tensor."""
        links, storage = self.captured.links, self.storages[name]
        copied = _copy_ns(storage.nbytes, links.d2h_bytes_per_s), _copy_ns(storage.nbytes, links.h2d_bytes_per_s)
        times = next((each for each in self.replay.transfers if each.name == name), None)
        if times is not None:
            copied = times.out_end_ns - times.out_start_ns, times.in_end_ns - times.in_start_ns
        transfer = next((transfer for transfer in self.plan.transfers if transfer.name == name), None)
        moved = "keep" if transfer is None else str(transfer.tier)
        decision = "recompute" if name in self.again else moved
        longer = self._held_longer(name)
        return TensorReason(
            name=name,
            nbytes=storage.nbytes,
            decision=decision,
            out_ns=copied[0],
            in_ns=copied[1],
            stall_ns=0 if times is None else times.stall_out_ns + times.stall_in_ns,
            recipe_ns=self._recipe_ns(name),
            held_longer=tuple(s.name for s in longer),
            held_longer_bytes=sum(s.nbytes for s in longer),
            choices=tuple(choice for choice in self._choices(name) if choice.decision != decision),
        )

    def _recipe_ns(self, name: str) -> int | None:
        if name not in self.recipes:
            return None
        times = (recompute(self.captured, names).recompute_ns for names in (self.again | {name}, self.again - {name}))
        return next(times) - next(times)

    def _held_longer(self, name: str) -> list[Storage]:
        """Return what `name`'s recipe reads and would be freed before it is needed, were it not for the recipe."""
        if name not in self.recipes:
            return []
        steps, need = set(self.recipes[name].steps), self.captured.first_late_use(self.storages[name])
        read = (s for s in self.captured.storages if s.birth not in steps and steps.intersection(s.uses))
        return sorted(
            (s for s in read if s.death <= need and s.name not in self.again), key=lambda s: (-s.nbytes, s.name)
        )

    def _choices(self, name: str) -> Iterator[Choice]:
        """Yield what can be done with one tensor, each with what it would change."""
        problem, plan = self.problem, self.plan
        if name in self.again:
            problem = recompute(self.captured, self.again - {name})
            try:
                plan = make_plan(problem, self.policy)
            except BudgetError:
                yield self._refused("keep", problem)
                return
        elif name in self.recipes and self.policy == "joint":
            yield self._recomputed(name)
        others = [transfer for transfer in plan.transfers if transfer.name != name]
        yield self._transferred("keep", problem, others)
        transfer = next((s for s in plan.transfers if s.name == name), None) or _widest_swap(problem, name)
        if transfer is not None and transfer.kind is TransferKind.SWAP:  # loads and stores use host memory
            for tier in _tiers(problem):
                yield self._transferred(str(tier), problem, [*others, replace(transfer, tier=tier)])

    def _recomputed(self, name: str) -> Choice:
        problem = recompute(self.captured, self.again | {name})
        try:
            makespan_ns = make_plan(problem, self.policy).forecast.makespan_ns
        except BudgetError:
            return self._refused("recompute", problem)
        return Choice(decision="recompute", change_ns=makespan_ns - self.plan.forecast.makespan_ns, over_bytes=0)

    def _transferred(self, decision: str, problem: Problem, transfers: Sequence[Transfer]) -> Choice:
        budgets, limit = problem.budgets, problem.budgets.device_bytes
        buffers = host_buffers(transfers, budgets.host_bytes)
        replay = simulate(problem, transfers, buffers[1])
        over = (
            (Tier.DEVICE, 0 if limit is None else int(live_bytes(problem, transfers).max(initial=0)) - limit),
            (Tier.HOST, total_bytes((*buffers[0], *buffers[1])) - budgets.host_bytes),
            (Tier.NVME, total_bytes(pool_classes(transfers, Tier.NVME)) - budgets.disk_bytes),
        )
        tier, over_bytes = next((pair for pair in over if pair[1] > 0), (Tier.DEVICE, 0))
        change_ns = replay.makespan_ns - self.plan.forecast.makespan_ns
        return Choice(decision=decision, change_ns=change_ns, over_bytes=over_bytes, over_tier=tier)

    def _refused(self, decision: str, problem: Problem) -> Choice:
        """Return the choice for which there is no plan."""
        over_bytes = max(0, floor_bytes(problem) - (problem.budgets.device_bytes or 0))
        return Choice(decision=decision, change_ns=None, over_bytes=over_bytes)


def _widest_swap(problem: Problem, name: str) -> Transfer | None:
    """Return the swap with the most time for its copies that frees bytes at the fullest step; None if there is none."""
    storage = next(s for s in problem.storages if s.name == name)
    gaps = inactive_intervals(storage) if is_candidate(problem, storage) else ()
    fullest = int(live_bytes(problem).argmax())
    gap = next(((u, v) for u, v in gaps if u < fullest < v), None)
    if gap is None:
        return None
    (last_use, back), boundary = gap, problem.boundary
    barriers = problem.barriers or tuple(map(Step, range(len(problem.ops))))
    gone = max((barrier for barrier in barriers if last_use < barrier <= fullest), default=Step(fullest))
    fetch = min((Step(barrier + 1) for barrier in barriers if fullest <= barrier < back), default=back)
    if last_use < boundary <= back:
        gone, fetch = min(gone, boundary), max(fetch, boundary)
    start = earliest_offload(problem, storage, last_use)
    transfer = clip_to_barriers(problem, swap_to_host(storage, start, gone, fetch, back))
    return transfer if transfer is not None and transfer.freed_at <= fullest < transfer.prefetch_at <= back else None


def _tiers(problem: Problem) -> tuple[Tier, ...]:
    """Return the tiers that there are to swap to."""
    return (Tier.HOST, Tier.NVME) if problem.links.has_disk and problem.budgets.disk_bytes else (Tier.HOST,)


def _copy_ns(nbytes: int, bytes_per_s: int) -> int:
    return nbytes * 10**9 // max(1, bytes_per_s)


def _prices(captured: Problem, plan: Plan) -> Iterator[Price]:
    """Yield what less and more of each tier's memory would change, and faster links.

    Bytes change by 1 GiB, or by 5 % of a budget below 10 GiB. Of host memory and disk that the plan leaves that much
    of, more or less is worth nothing: they are left out.
    """
    used = {
        "device": ("device_bytes", plan.forecast.peak_bytes),
        "host": ("host_bytes", plan.forecast.host_bytes),
        "disk": ("disk_bytes", plan.forecast.disk_bytes),
    }
    for resource, (field, used_bytes) in used.items():
        budget = getattr(captured.budgets, field)
        if not budget:
            continue
        step = _GIB if budget >= 10 * _GIB else max(1, budget // 20)
        if resource != "device" and used_bytes <= budget - step:
            continue
        for change in (-step, step):
            changed = captured.within(**{field: budget + change})
            yield Price(resource=resource, amount=change, change_ns=_change_ns(changed, plan))
    if captured.links.d2h_bytes_per_s > 0:
        faster = _faster(captured.links)
        saved_ns = _copying_ns(plan, captured.links) - _copying_ns(plan, faster)
        change_ns = _change_ns(replace(captured, links=faster), plan)
        yield Price(resource="links", amount=_FASTER_PERCENT, change_ns=change_ns, copying_ns=saved_ns)
    if plan.forecast.collective_ns:
        quick = scaled(captured, faster_percent=_FASTER_PERCENT)
        saved_ns = busy_ns(captured) - busy_ns(quick)
        change_ns = _change_ns(quick, plan)
        yield Price(resource="collectives", amount=_FASTER_PERCENT, change_ns=change_ns, copying_ns=saved_ns)


def _change_ns(changed: Problem, plan: Plan) -> int | None:
    """Return how much longer the step takes when `changed` is planned anew, None if it cannot be."""
    try:
        _, other = plan_region(changed, plan.policy)
    except BudgetError:
        return None
    return other.forecast.makespan_ns - plan.forecast.makespan_ns


def _faster(links: Links) -> Links:
    rates = (field.name for field in fields(links) if field.name.endswith("_per_s"))
    return replace(links, **{name: getattr(links, name) * (100 + _FASTER_PERCENT) // 100 for name in rates})


def _copying_ns(plan: Plan, links: Links) -> int:
    """Return how long the copies of `plan` take on `links`, one after the other."""
    forecast = plan.forecast
    parts = (
        (forecast.d2h_bytes, links.d2h_bytes_per_s),
        (forecast.h2d_bytes, links.h2d_bytes_per_s),
        (forecast.disk_write_bytes, links.disk_write_bytes_per_s),
        (forecast.disk_read_bytes, links.disk_read_bytes_per_s),
    )
    return sum(_copy_ns(nbytes, rate) for nbytes, rate in parts if nbytes)

"""Why a plan is what it is: the values of `tencache_fx.explain`. No torch here.

No figure is a formula: each is the difference between the plan and another one, replayed by the same simulator.
"""

from dataclasses import dataclass

from tencache_fx.plan import Tier


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

    `out_ns` and `in_ns` are the times of its copies at the rates the replay saw (for a tensor that does not travel: at
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

    `amount` is the change in bytes of a tier ("device", "host", "disk"), or in percent of all rates ("links").
    `change_ns` is the difference in step time, None where no plan fits. For "links" `copying_ns` is how much less time
    this plan's own copies would take, out and in added up: `-change_ns / copying_ns` is the price of a link-second.
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

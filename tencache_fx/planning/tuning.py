"""Every constant that the search for a plan is tuned by, and why it has this value.

`examples/bench/ablate.py` shows what most of them are worth, on regions that a run has dumped.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The constants, level by level: see `search.py`."""

    # Transfers. Shares of the budget that variants of "joint" leave free while they choose, for copies to overlap in.
    headrooms: tuple[float, ...] = (0.0, 0.05, 0.12)
    # Copy times by which what was swapped out is prefetched ahead of the latest safe start.
    swap_lead: float = 3.0
    # Share of the best score there may still be, with which a transfer is taken: equal layers have equal bounds, and to
    # tell which is the very best they would all be looked at for each choice.
    enough_of_best_score: float = 0.9
    # Share of a link that is left to swaps, however much of it parameters and gradients take.
    least_link_share: float = 0.25
    # A repair shrinks what a policy may use by what its last plan overran; plans that converge do in 2 or 3.
    repairs: int = 6

    # Parameters. Copy times by which parameters are prefetched: late copies save memory, early ones bear disturbance.
    leads: tuple[float, ...] = (0.0, 1.0, 3.0, 8.0)
    # Shares of the parameters' bytes that are pinned on the device. The cost of a step is nearly linear in between.
    resident_shares: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    # Shares that are pinned together with their gradients and optimizer state, eight times as large: from the largest,
    state_shares: tuple[float, ...] = tuple(eighth / 8 for eighth in range(8, 0, -1))
    # ... until so many have a plan: the largest that fit are the fastest but for what activations then lack,
    state_plans: int = 3
    # ... and then this much more than the largest, one after the other, to fill what an eighth leaves free.
    finer_state_shares: tuple[float, ...] = (1 / 16, 1 / 32, 1 / 64, 1 / 128)
    # Shares that are pinned together with gradients that several backwards add up, which are as large as they are.
    gradient_shares: tuple[float, ...] = tuple(eighth / 8 for eighth in range(8, 0, -1))
    # A plan as fast as the fastest, within half a percent (forecasts err by more), may be preferred for other reasons.
    tolerance_per_mille: int = 5

    # Recomputation. One search plans so many steps in all, 5 to 10 s on one core, within bounds for small and large.
    steps_planned: int = 100_000
    least_plans: int = 12
    most_plans: int = 36
    # Copy times by which parameters are prefetched in plans that only compare what to recompute.
    compared_lead: float = 1.0
    # One plan costs about as much as so many looks (what recomputing makes of a problem, and a bound on its plans).
    looks_per_plan: int = 4
    # Steps, of all problems together, that are kept with what is recomputed in them.
    steps_kept: int = 200_000
    # Places of the price list at which it is first looked at: the whole list, and the list of each segment size.
    rungs: int = 10
    segment_rungs: int = 5
    # Segment sizes are halved from all that is saved: to a 64th, about a layer of a deep model.
    segment_halvings: int = 6
    # Share of the links' rates that plans reach about, where the links decide: the likely best is planned first.
    likely_link_share: float = 0.6
    # Single decisions are turned over only if the best plan takes a hundredth longer than the lower bound.
    gap_percent: int = 1
    # ... and those that, by a quick bound, can gain a thousandth: equal layers offer the same small gain many times.
    gain_per_mille: int = 1
    # Stretches of the price list that are turned over begin with a quarter of it, and are halved down to one decision.
    first_stretches: int = 4

    # Coarsening. Problems of more steps are searched coarsely; a plan for fewer takes a few milliseconds.
    coarse_from: int = 700
    # Steps that one search plans in all, then: 12 plans for a deep model, all of 36 for a shallow one. Where parameters
    # are offloaded there are several searches, each of half as much, and what one has missed another finds.
    coarse_steps_planned: int = 6_000
    least_plans_in_turns: int = 5
    # Choices of parameters that are best there, and are tried until two of them have a plan.
    likely_shares: int = 6
    # Stretches that a problem is searched in: more cost time, and fewer miss what fits.
    stretches: int = 200
    # Ops in all, with those that a stretch of the forward has for each set of recipes; of more, stretches are longer.
    coarse_ops: int = 600
    # Share of the budget up to which the floor may be in longer stretches: in reality it is lower.
    coarse_floor_percent: int = 75
    # Recipes of one stretch are taken or left together if their prices per byte differ by less than e to one third.
    prices_per_e: int = 3

    # Turns. Shares of the room above the floor that recomputing leaves to optimizer state: some and most of it.
    state_rooms: tuple[float, ...] = (0.4, 0.85)
    # Searches beside the parameters that are pinned in the fastest plan so far; the third has rarely found more.
    turns: int = 3

    def coarsely(self, *, in_turns: bool) -> "Tuning":
        """Return the constants for one search of a coarser problem, or for each of several."""
        if in_turns:
            return replace(self, steps_planned=self.coarse_steps_planned // 2, least_plans=self.least_plans_in_turns)
        return replace(self, steps_planned=self.coarse_steps_planned)


TUNING = Tuning()
"""The constants in use."""

SPLITS = 3
"""How often a region is split by torch's partitioner, and its code generated, before the best plan so far is taken."""

"""What a compilation finds around its region."""

import gc
from dataclasses import dataclass

import torch

from tencache_fx.hardware import rates
from tencache_fx.hardware.device_memory import held_bytes
from tencache_fx.hardware.rates import Roofline
from tencache_fx.options import Options
from tencache_fx.planning.problem import Links
from tencache_fx.region.optimizer_forecast import expected_state_bytes
from tencache_fx.region.registry import REGIONS
from tencache_fx.runtime.engine_registry import Usage, usage

_DRIFT = 256  # one part in so many of the budget is left for what others hold a little more of from call to call


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a compilation finds: the rates of the machine, the bytes held on the device, what the runtime has lent.

    `pending_bytes` of those held are kept for the backward of forwards that can keep less the next time. As far as
    there is room, `between_bytes` are to be free between this region's graphs, `expected_bytes` all the time, for what
    optimizers have yet to make, and in a plan that has something travel `drift_bytes`, for what others hold more of in
    later calls, such as generated tokens: a plan that fills the budget would be made anew for the first of them.
    `measures` says whether ops whose cost is not known yet may be timed.
    """

    roofline: Roofline
    links: Links
    held_bytes: int
    usage: Usage
    measures: bool = True
    pending_bytes: int = 0
    between_bytes: int = 0
    expected_bytes: int = 0
    drift_bytes: int = 0

    @staticmethod
    def find(device: torch.device, options: Options, between_bytes: int) -> "Environment":
        """Return those of this machine and process, measuring what is not known yet."""
        held = held_bytes(device)
        budget_bytes = (options.device_budget or 0) if held else 0  # a CPU's allocator does not count
        if budget_bytes:
            gc.collect()  # frees the inputs that what torch's compiler has left behind of other regions holds on to
            held = held_bytes(device)
        return Environment(
            roofline=rates.roofline(device, calibrate=options.calibrate),
            links=rates.links(device, options.spill_dir, calibrate=options.calibrate),
            held_bytes=held,
            usage=usage(device),
            pending_bytes=sum(each.pending_bytes for each in REGIONS.waiting(device)),
            between_bytes=between_bytes,
            expected_bytes=expected_state_bytes(device) if budget_bytes else 0,
            drift_bytes=budget_bytes // _DRIFT,
        )

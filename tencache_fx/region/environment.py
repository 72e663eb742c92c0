"""The environment of a compilation: this machine and this process, as they are now."""

import gc
from dataclasses import dataclass, field, replace

import torch

from tencache_fx.hardware import rates
from tencache_fx.hardware.device_memory import allocate_workspaces, held_bytes
from tencache_fx.hardware.roofline import Roofline
from tencache_fx.model_state.parameter_store import has_parameters_on_disk
from tencache_fx.options import Options
from tencache_fx.planning.external import drift_bytes
from tencache_fx.planning.problem import Links
from tencache_fx.region.optimizer_forecast import expected_state_bytes
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.reservations import Reservation, Reserved
from tencache_fx.runtime.engine_registry import Usage, usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The rates of the machine, the bytes held on the device, and the host memory and disk that the runtime uses.

    `reservations` are to be left free as far as there is room: a plan that fills the budget would be made anew soon.
    Where no allocator counts, `external_bytes` are what others of the step hold; None if that is of no account.
    `measures` says whether ops whose cost is not known yet may be timed.
    """

    roofline: Roofline
    links: Links
    held_bytes: int
    usage: Usage
    external_bytes: int | None = None
    measures: bool = True
    reservations: Reserved = field(default_factory=dict)

    def wanted(self, *, training: bool) -> Reserved:
        """Return the reservations of a region that has a backward, or has none: then nothing is to come behind it."""
        unwanted = () if training else (Reservation.STATE, Reservation.BOUNDARY)
        return {name: nbytes for name, nbytes in self.reservations.items() if nbytes and name not in unwanted}

    @staticmethod
    def find(
        device: torch.device, options: Options, boundary_bytes: int, external_bytes: int | None = None
    ) -> "Environment":
        """Return those of this machine and process, measuring what is not known yet."""
        if options.device_budget is not None:
            allocate_workspaces(device)
        held = held_bytes(device)
        budget_bytes = (options.device_budget or 0) if held else 0  # a CPU's allocator does not count
        if external_bytes is not None:  # calls of one region do not see what the others keep, so each keeps the least
            boundary_bytes = options.device_budget or 0
        if budget_bytes:
            gc.collect()  # frees the inputs that what torch's compiler has left behind of other regions holds on to
            held = held_bytes(device)
        return Environment(
            roofline=rates.roofline(device, calibrate=options.calibrate),
            links=links_of(device, options),
            held_bytes=held,
            usage=usage(device),
            external_bytes=external_bytes,
            reservations={
                Reservation.WAITING: sum(each.pending_bytes for each in REGIONS.waiting(device)),
                Reservation.STATE: expected_state_bytes(device) if budget_bytes else 0,
                Reservation.BOUNDARY: boundary_bytes,
                Reservation.DRIFT: drift_bytes(budget_bytes),
            },
        )


def links_of(device: torch.device, options: Options) -> Links:
    """Return the rates of the links of this machine, measuring what is not known yet.

    Where parameters are read from weight files, and there is no spill directory, the disk reads at a fixed rate.
    """
    measured = rates.links(device, options.spill_dir, calibrate=options.calibrate)
    found = measured.within(options.spill_write_budget)
    if found.disk_read_bytes_per_s or not has_parameters_on_disk(device):
        return found
    return replace(found, disk_read_bytes_per_s=rates.FIXED_DISK.read_bytes_per_s)

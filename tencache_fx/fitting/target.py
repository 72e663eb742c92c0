"""The device that a model is planned for: one of this machine, or one that is only known by its profile."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tencache_fx.errors import OptionError
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.hardware.profiles import find_profile
from tencache_fx.hardware.rates import FIXED_DISK, KnownRates, known_rates
from tencache_fx.model_state.arguments import find_device
from tencache_fx.options import Options


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device to plan for, its rates, and the options. Models are traced on `device`, which is in this machine.

    `profile` is the name of the one it is known by, else empty; `source` is where a profile's rates are from.
    """

    device: torch.device
    options: Options
    rates: KnownRates
    profile: str = ""
    source: str = ""

    @property
    def name(self) -> str:
        """Return what it is called."""
        return self.profile or str(self.device)

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU, of which a budget limits all that is held."""
        return self.device.type == "cuda" or bool(self.profile and self.rates.roofline.of_gpu)

    @staticmethod
    def find(device: torch.device | str | None, profile: str | None, given: Mapping[str, object]) -> "Target":
        """Return the target; raises `OptionError` for a device, a profile or options that cannot be used."""
        if profile is None:
            found = resolve_device(find_device(device))
            total_bytes = torch.cuda.get_device_properties(found).total_memory if found.type == "cuda" else None
            options = Options.suppose(given, device_bytes=total_bytes)
            has_disk = options.spill_budget > 0
            rates = known_rates(found, options.spill_dir, calibrate=options.calibrate, has_disk=has_disk)
            return Target(device=found, options=options, rates=rates)
        if device not in (None, "cpu", torch.device("cpu")):
            raise OptionError(f"device is {device}, and there is a device profile; give one of both.")
        known = find_profile(profile)
        options = Options.suppose(given, device_bytes=known.memory_bytes)
        links = known.links
        if options.spill_budget and not links.has_disk:
            write, read = FIXED_DISK.write_bytes_per_s, FIXED_DISK.read_bytes_per_s
            links = replace(links, disk_write_bytes_per_s=write, disk_read_bytes_per_s=read)
        return Target(
            device=torch.device("cpu"),
            options=replace(options, calibrate=False),  # what was timed of this machine's ops says nothing of it
            rates=KnownRates(roofline=known.roofline, links=links, measured=True),
            profile=known.name,
            source=known.source,
        )

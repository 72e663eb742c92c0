"""The device that a model is planned for: one of this machine, or one that is only known by its profile.

What is known of a profile's device is found without torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tencache_fx.errors import OptionError
from tencache_fx.hardware.profiles import HOST_COSTS, find_profile, workspace_bytes
from tencache_fx.hardware.roofline import KnownRates
from tencache_fx.options import Options
from tencache_fx.planning.host_work import HostCosts

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device to plan for, its rates, and the options. Models are traced on `traced_on`, which is in this machine.

    `profile` is the name of the one it is known by, else empty; `source` is where a profile's rates are from.
    `workspace_bytes` are what libraries keep on it; torch chooses some kernels by its `compute_capability`.
    `host` are the costs of the thread that runs a step; a CPU has none beside its own work.
    """

    traced_on: str
    options: Options
    rates: KnownRates
    profile: str = ""
    source: str = ""
    workspace_bytes: int = 0
    compute_capability: tuple[int, int] = (8, 0)
    host: HostCosts | None = None

    @property
    def device(self) -> "torch.device":
        """Return the device that models are traced on."""
        import torch  # here: not all that is asked of a target needs it

        return torch.device(self.traced_on)

    @property
    def name(self) -> str:
        """Return what it is called."""
        return self.profile or self.traced_on

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU, of which a budget limits all that is held."""
        return self.traced_on.startswith("cuda") or bool(self.profile and self.rates.roofline.of_gpu)

    @staticmethod
    def find(device: "torch.device | str | None", profile: str | None, given: Mapping[str, object]) -> "Target":
        """Return the target; raises `OptionError` for a device, a profile or options that cannot be used."""
        if profile is None:
            return _in_this_machine(device, given)
        if device is not None and str(device) != "cpu":
            raise OptionError(f"device is {device}, and there is a device profile; give one of both.")
        known = find_profile(profile)
        options = Options.suppose(given, device_bytes=known.memory_bytes)
        links = known.links
        if options.spill_budget and not links.has_disk:
            from tencache_fx.hardware.rates import FIXED_DISK  # here: needs torch

            write, read = FIXED_DISK.write_bytes_per_s, FIXED_DISK.read_bytes_per_s
            links = replace(links, disk_write_bytes_per_s=write, disk_read_bytes_per_s=read)
        return Target(
            traced_on="cpu",
            options=replace(options, calibrate=False),  # what was timed of this machine's ops says nothing of it
            rates=KnownRates(roofline=known.roofline, links=links.within(options.spill_write_budget), measured=True),
            profile=known.name,
            source=known.source,
            workspace_bytes=_workspace_bytes(known.compute_capability[0], known.workspace_bytes),
            compute_capability=known.compute_capability,
            host=known.host if known.roofline.of_gpu else None,
        )


def _in_this_machine(device: "torch.device | str | None", given: Mapping[str, object]) -> Target:
    import torch  # here, as all that needs it

    from tencache_fx.hardware.devices import resolve_device
    from tencache_fx.hardware.rates import known_rates
    from tencache_fx.model_state.arguments import find_device

    found = resolve_device(find_device(device))
    about = torch.cuda.get_device_properties(found) if found.type == "cuda" else None
    options = Options.suppose(given, device_bytes=None if about is None else about.total_memory)
    rates = known_rates(found, options.spill_dir, calibrate=options.calibrate, has_disk=options.spill_budget > 0)
    return Target(
        traced_on=str(found),
        options=options,
        rates=replace(rates, links=rates.links.within(options.spill_write_budget)),
        workspace_bytes=0 if about is None else _workspace_bytes(about.major),
        host=None if about is None else HOST_COSTS,
    )


def _workspace_bytes(compute_capability: int, known_bytes: int | None = None) -> int:
    """Return what cuBLAS keeps, by the environment that a training would have, too, and else as it is known."""
    configured = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if known_bytes is not None and not (configured and known_bytes):  # a profile of a CPU has none
        return known_bytes
    return workspace_bytes(compute_capability, configured)

"""The options, read once: what "12GiB" means is decided here and nowhere else.

| option             | default  | what it is                                                                           |
|--------------------|----------|--------------------------------------------------------------------------------------|
| device_budget      | auto     | most bytes of device tensors this process may hold; auto: 90 % of what it can have   |
|                    |          | when it compiles (no limit on a CPU); None: no limit                                 |
| host_budget        | auto     | most pinned host bytes; auto: 80 % of the memory available to this process, divided  |
|                    |          | by the ranks on this host: LOCAL_WORLD_SIZE, as torchrun sets it, or the size of the |
|                    |          | process group                                                                        |
| spill_dir          | ()       | directory, or several, on fast disks; none: nothing is spilled to disk               |
| spill_budget       | auto     | most bytes on disk; auto: 90 % of what is free in spill_dir, divided by these ranks  |
| spill_write_budget | None     | most bytes that this process writes to spill_dir in a day, for each device, as SSDs  |
|                    |          | are rated for so many; a twenty-fourth may be written at once; None: no limit        |
| policy             | joint    | the algorithm that plans transfers and recomputing: none, 10cache, teraio, joint     |
| scope              | auto     | what is planned as one: region, each captured graph by itself; step, all the graphs  |
|                    |          | that a training step runs; auto: the step where it has several, else the region      |
| repeated_layers    | inline   | inline: a captured graph is compiled whole; once: it is split at equal layers, whose |
|                    |          | code is compiled once and called for each of them                                    |
| recompute          | auto     | auto: the partitioner recomputes what is cheap; none: save all that autograd saves   |
| compiler           | inductor | what runs the rewritten graphs: inductor, or eager (for debugging)                   |
| calibrate          | True     | measure this machine's links, compute and memory rates (kept in a cache); False: use |
|                    |          | fixed, low rates                                                                     |
| dump_dir           | None     | directory for problems, plans and graphs of regions and steps, for `tencache dump`   |
| checksum           | False    | verify every byte that comes back from disk                                          |
| inductor           | {}       | options passed on to Inductor, such as {"max_autotune": True}                        |

A size is a number of bytes (`536870912`), a number with a unit ("12GiB", "12GB", "512 MiB"), a share of the tier
("80%": of the device's memory, of the host's memory, of the disk's free space) or "auto". An "auto" size
of an earlier start stays while it is at most what there is now, and at least 15/16 of that: kept plans are found again.

An option is looked for in `torch.compile(..., options={...})`, then in `tencache_fx.configure(...)`, then in the
environment (`TENCACHE_DEVICE_BUDGET=12GiB`; several directories as in PATH; `inductor` as JSON; `none` for None).

A host_budget or spill_budget given to torch.compile limits that region's plan only: a device's memory pool may take the
largest that any region asks for. Offloaded parameters and optimizers may take what is set for the process. `configure`
changes both, and spill_dir, at once; it refuses one below what is acquired now, or below the size of the spill files.
The next step is planned for it: a budget that was given to torch.compile is the most that its region may take of it.
New values go to the directories that were named last. A spill_write_budget counts for all that this process writes from
then on, whichever region gave it; plans take it for the rate of the disks.
"""

import dataclasses
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tencache_fx.errors import OptionError
from tencache_fx.hardware.auto_budget import lasting_bytes
from tencache_fx.hardware.capacity import device_space, disk_space, host_space, ranks_here
from tencache_fx.option_values import (
    AUTO,
    SIZE_EXAMPLES,
    Size,
    listed,
    nearest,
    read_bytes,
    read_choice,
    read_flag,
    read_inductor,
    read_path,
    read_paths,
    read_size,
    shown,
    shown_path,
)
from tencache_fx.units import format_bytes

log = logging.getLogger("tencache_fx")

if TYPE_CHECKING:
    import torch

POLICIES = ("none", "10cache", "teraio", "joint")
RECOMPUTE = ("auto", "none")
COMPILERS = ("inductor", "eager")
SCOPES = ("auto", "region", "step")
REPEATED_LAYERS = ("inline", "once")

_ENVIRONMENT_PREFIX = "TENCACHE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option, read and checked; the module's docstring says what each one is. Sizes are bytes."""

    device_budget: int | None
    host_budget: int
    spill_dir: tuple[Path, ...]
    spill_budget: int
    spill_write_budget: int | None
    policy: str
    scope: str
    repeated_layers: str
    recompute: str
    compiler: str
    calibrate: bool
    dump_dir: Path | None
    checksum: bool
    inductor: tuple[tuple[str, Any], ...]

    @property
    def may_recompute(self) -> bool:
        """Return whether more may be recomputed than torch's own partitioner would."""
        return self.policy == "joint" and self.recompute == "auto" and self.device_budget is not None

    @staticmethod
    def resolve(
        given: Mapping[str, object] | None,
        *,
        device: "torch.device",
        own_host_bytes: int = 0,
        own_disk_bytes: int = 0,
    ) -> "Options":
        """Return the options for one compilation on `device`: given, over configured, over environment, over defaults.

        What this process's runtime holds already, `own_host_bytes` and `own_disk_bytes`, counts as available to it.

        Raises `OptionError` when an option is unknown or unreadable, asks for more than the machine has, or names a
        directory that cannot be used.
        """
        value = _read_layers(given)
        return Options(
            **value
            | {
                "device_budget": _device_budget(value["device_budget"], device),
                "host_budget": _host_budget(value["host_budget"], own_host_bytes),
                "spill_budget": _spill_budget(value["spill_budget"], value["spill_dir"], own_disk_bytes),
            }
        )

    def as_configured(
        self, names: Collection[str], *, device: "torch.device", own_host_bytes: int = 0, own_disk_bytes: int = 0
    ) -> "Options":
        """Return the same options, with the budgets and directories among `names` that are set for the process now.

        What this process holds already counts as for `resolve`. Raises `OptionError` if a budget is more than there is.
        """
        value = _read_layers(None)
        found: dict[str, Any] = {"spill_dir": value["spill_dir"]} if "spill_dir" in names else {}
        if "device_budget" in names:
            found["device_budget"] = _device_budget(value["device_budget"], device)
        if "host_budget" in names:
            found["host_budget"] = _host_budget(value["host_budget"], own_host_bytes)
        directories = found.get("spill_dir", self.spill_dir)
        if "spill_budget" in names:
            size = value["spill_budget"]
            found["spill_budget"] = _spill_budget(size, directories, own_disk_bytes) if directories else 0
        return dataclasses.replace(self, **found)

    @staticmethod
    def suppose(given: Mapping[str, object] | None, *, device_bytes: int | None) -> "Options":
        """Return the options for a device of `device_bytes` that nothing will run on: no limit for None.

        As `resolve`, but sizes may be more than this machine has, and `spill_budget` needs no directory. Shares, and
        what is "auto", are of this machine.
        """
        value = _read_layers(given)
        sizes: list[Size | None] = [value[name] for name in ("device_budget", "host_budget", "spill_budget")]
        device, host, spill = (size and size.nbytes for size in sizes)
        if device is None and device_bytes is not None and (size := sizes[0]) is not None:
            device = int(device_bytes * (size.share or Decimal("0.9")))
        if host is None:
            host = _host_budget(sizes[1], 0)
        if spill is None:
            spill = _spill_budget(sizes[2], value["spill_dir"], 0)
        return Options(**value | {"device_budget": device, "host_budget": host, "spill_budget": spill})


class Settings:
    """What `configure` was told: the process-wide defaults. One instance exists, `SETTINGS`."""

    def __init__(self) -> None:
        self._given: Mapping[str, object] = MappingProxyType({})

    @property
    def given(self) -> Mapping[str, object]:
        """The options set so far, as they were given."""
        return self._given

    def configure(self, *, reset: bool = False, **options: object) -> Mapping[str, object]:
        """Set process-wide defaults for later compilations and return all that are set; `reset` forgets earlier ones.

        Names and values are checked at once, and nothing is changed when one is wrong; whether a size fits the machine
        is checked when a model is compiled, because only then the device is known.

        Raises `OptionError`.
        """
        _read_layer("configure", options)
        self._given = MappingProxyType({**({} if reset else self._given), **options})
        return self._given


SETTINGS = Settings()


_READERS: Mapping[str, Callable[[str, object], object]] = MappingProxyType(
    {
        "device_budget": read_size,
        "host_budget": read_size,
        "spill_dir": read_paths,
        "spill_budget": read_size,
        "spill_write_budget": read_bytes,
        "policy": read_choice(POLICIES),
        "scope": read_choice(SCOPES),
        "repeated_layers": read_choice(REPEATED_LAYERS),
        "recompute": read_choice(RECOMPUTE),
        "compiler": read_choice(COMPILERS),
        "calibrate": read_flag,
        "dump_dir": read_path,
        "checksum": read_flag,
        "inductor": read_inductor,
    }
)
_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "device_budget": AUTO,
        "host_budget": AUTO,
        "spill_dir": (),
        "spill_budget": AUTO,
        "spill_write_budget": None,
        "policy": "joint",
        "scope": "auto",
        "repeated_layers": "inline",
        "recompute": "auto",
        "compiler": "inductor",
        "calibrate": True,
        "dump_dir": None,
        "checksum": False,
        "inductor": (),
    }
)


def _read_layer(source: str, given: Mapping[str, object]) -> dict[str, object]:
    """Return the options of one source, each read; raises `OptionError` when one is unknown or unreadable."""
    if not isinstance(given, Mapping):
        raise OptionError(f"options={shown(given)} is not a mapping; give options by name: {listed(_READERS)}.")
    for name in given:
        if not isinstance(name, str) or name not in _READERS:
            raise OptionError(
                f"{_spelled(source, name)} is not an option;{nearest(name, _READERS)}"
                f" the options are: {listed(_READERS)}."
            )
    return {name: _READERS[name](_spelled(source, name), value) for name, value in given.items()}


def _read_layers(given: Mapping[str, object] | None) -> dict[str, Any]:
    """Return every option's value as it was asked for; directories are there, and can be written to."""
    layers = (
        _read_layer("environment", _environment()),
        _read_layer("configure", SETTINGS.given),
        _read_layer("options", {} if given is None else given),
    )
    value: dict[str, Any] = dict(_DEFAULTS)
    for layer in layers:
        value |= layer
    for directory in value["spill_dir"]:
        _check_writable("spill_dir", directory)
    if value["dump_dir"] is not None:
        _make_directory("dump_dir", value["dump_dir"])
        _check_writable("dump_dir", value["dump_dir"])
    return value


def _environment() -> dict[str, object]:
    given: dict[str, object] = {}
    for variable, text in os.environ.items():
        if variable.startswith(_ENVIRONMENT_PREFIX) and text:
            name = variable.removeprefix(_ENVIRONMENT_PREFIX).lower()
            given[name] = text.split(os.pathsep) if name == "spill_dir" and text != "none" else text
    return given


def _spelled(source: str, name: object) -> str:
    if not isinstance(name, str):
        return shown(name)
    return f"{_ENVIRONMENT_PREFIX}{name.upper()}" if source == "environment" else name


def _device_budget(size: Size | None, device: "torch.device") -> int | None:
    if size is None or (size is AUTO and device.type != "cuda"):
        return None
    space = device_space(device)
    if size is AUTO:
        most_bytes = space.available_bytes * 9 // 10  # the allocator leaves gaps between tensors
        return lasting_bytes(most_bytes, {"tier": device, "total": space.total_bytes})
    asked_bytes = _fit("device_budget", size, space.total_bytes, f"the memory of {device} that torch may take")
    if device.type != "cuda" or asked_bytes <= space.available_bytes // 2:
        return asked_bytes  # far below the limit, whatever gaps there are
    from tencache_fx.hardware.device_memory import tensor_bytes  # here, because options are read without torch, too

    limit_bytes = tensor_bytes(device)
    if limit_bytes >= asked_bytes:
        return asked_bytes
    log.log(
        logging.WARNING if space.available_bytes < asked_bytes else logging.INFO,
        "device_budget is %s, but torch may take %s of %s now, gaps between tensors included: plans hold %s.",
        *(format_bytes(asked_bytes), format_bytes(space.available_bytes), device, format_bytes(limit_bytes)),
    )
    return limit_bytes


def _host_budget(size: Size | None, own_bytes: int) -> int:
    if size is None:
        raise OptionError(
            f"host_budget=None is not possible, pinned memory needs a limit; give a size {SIZE_EXAMPLES}."
        )
    space = host_space()
    if size is AUTO:
        ranks = ranks_here()
        most_bytes = (space.available_bytes // ranks + own_bytes) * 80 // 100
        return lasting_bytes(most_bytes, {"tier": "host", "total": space.total_bytes, "ranks": ranks})
    return _fit("host_budget", size, space.total_bytes, "the memory of the host")


def _spill_budget(size: Size | None, directories: tuple[Path, ...], own_bytes: int) -> int:
    if size is None:
        raise OptionError(f"spill_budget=None is not possible, a disk can fill up; give a size {SIZE_EXAMPLES}.")
    if not directories:
        if size is not AUTO:
            raise OptionError(f"spill_budget={size.text!r} is given without spill_dir; name a directory, or drop it.")
        return 0
    space = disk_space(directories)
    if size is AUTO:
        ranks = ranks_here()
        most_bytes = (space.available_bytes // ranks + own_bytes) * 90 // 100
        return lasting_bytes(most_bytes, {"tier": listed(tuple(map(str, directories))), "ranks": ranks})
    return _fit(
        "spill_budget",
        size,
        space.available_bytes + own_bytes,
        f"the free space of {listed(tuple(map(str, directories)))}",
    )


def _fit(name: str, size: Size, most_bytes: int, what: str) -> int:
    if size.share is not None:
        return int(most_bytes * size.share)
    assert size.nbytes is not None
    if size.nbytes > most_bytes:
        raise OptionError(
            f"{name} is {format_bytes(size.nbytes)}, but {what} is {format_bytes(most_bytes)};"
            f' lower {name}, or give "auto" or a share such as "80%".'
        )
    return size.nbytes


def _make_directory(name: str, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"{name} {shown_path(directory)} cannot be made: {error.strerror}; name another directory."
        ) from error


def _check_writable(name: str, directory: Path) -> None:
    if not os.path.isdir(directory):
        raise OptionError(f"{name} {shown_path(directory)} is not a directory; make it, or name one that exists.")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise OptionError(
            f"{name} {shown_path(directory)} cannot be written to: {error.strerror};"
            " mend its permissions, or name another directory."
        ) from error


assert set(_READERS) == set(_DEFAULTS) == {field.name for field in dataclasses.fields(Options)}

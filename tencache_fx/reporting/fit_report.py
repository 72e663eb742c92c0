"""How a model would fit: the result of `tencache_fx.fit`, as values. No torch here.

Sizes are bytes, times nanoseconds, of one training step: forward and backward of every region, once.
"""

from dataclasses import dataclass

from tencache_fx.planning.host_work import HOST_THREAD
from tencache_fx.planning.loads import Load, bound_of
from tencache_fx.renames import Renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFit:
    """One captured region: its plan in figures, or, in `refusal`, why there is none; then the rest is 0.

    `floor_bytes` is the least device budget that has a plan, `peak_bytes` the most that the plan holds on the
    device, both with external memory there. `buffer_bytes` are pinned buffers for transfers; offloaded parameters and
    their gradients are not among them. Times and traffic are of one of its `calls` in a step.
    """

    name: str
    steps: int
    floor_bytes: int
    refusal: str = ""
    peak_bytes: int = 0
    step_ns: int = 0
    ideal_ns: int = 0
    buffer_bytes: int = 0
    disk_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    disk_write_bytes: int = 0
    disk_read_bytes: int = 0
    calls: int = 1

    trip_bytes = Renamed("buffer_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to take a step's samples through the device: `accumulation` times `micro_batch` of them.

    `floor_bytes` is the least device budget that has a plan. `step_ns` is of the whole step: of its plan if `planned`,
    else an estimate, which counts no stalls. `refusal` says why there is none.
    """

    micro_batch: int
    accumulation: int
    floor_bytes: int
    planned: bool = False
    step_ns: int = 0
    peak_bytes: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a model fits its budgets, where its bytes would be, and how long a step would take.

    `offloaded_bytes`, `gradient_bytes` and `state_bytes` are in host memory: parameters, their gradients, and the fp32
    state of AdamW (two moments and the master weight, of a bf16 parameter what that has besides it: 12 bytes for each
    trained parameter, or 10.1). `device_parameter_bytes` and `device_state_bytes` are those of parameters and state
    that are on the device all the time. `all_on_device_bytes` are those on the device if nothing were offloaded:
    parameters, gradients, AdamW's state and activations. `least_device_bytes` is the smallest device budget that a plan
    was found for, None where the one given suffices, or where none would help.
    `measured` says whether the rates behind the times are known, or fixed, low ones; those of a profile are from
    `rates_source`. `loads` says what keeps each resource busy in a step, by the plan's bytes: the device's compute, the
    host's memory, each direction of the link and of the disk.

    A step is `accumulation` times forward and backward; for a transformers `model` it has `samples` or `tokens`, and
    `settings` are the ways to take them through that were compared. `whole_step_ns` is with updates behind the last
    backward, `early_step_ns` with `step_in_backward=True`. Of its layers those were captured that `traced` says.
    So many `guessed_conditions` depend on values that only a run knows, and were taken to be false.
    """

    device: str
    device_budget_bytes: int | None
    host_budget_bytes: int
    spill_budget_bytes: int
    parameters: int
    parameter_bytes: int
    device_parameter_bytes: int
    offloaded_bytes: int
    gradient_bytes: int
    state_bytes: int
    device_state_bytes: int
    all_on_device_bytes: int
    least_device_bytes: int | None
    measured: bool
    regions: tuple[RegionFit, ...]
    rates_source: str = ""
    loads: tuple[Load, ...] = ()
    accumulation: int = 1
    whole_step_ns: int = 0
    early_step_ns: int = 0
    model: str = ""
    micro_batch: int = 0
    samples: int = 0
    tokens: int = 0
    traced: str = ""
    settings: tuple[Setting, ...] = ()
    guessed_conditions: int = 0

    home_bytes = Renamed("offloaded_bytes")
    state_at_home_bytes = Renamed("resting_host_bytes")
    needs_homes = Renamed("needs_offloading")

    @property
    def fits(self) -> bool:
        """Return True if every region has a plan, and host memory has room for everything offloaded."""
        return not any(region.refusal for region in self.regions) and self.host_bytes <= self.host_budget_bytes

    @property
    def needs_offloading(self) -> bool:
        """Return True if the device is too small for all the model's state."""
        return self.device_budget_bytes is not None and self.all_on_device_bytes > self.device_budget_bytes

    @property
    def bound(self) -> Load | None:
        """The resource that is busy longest: no step is shorter with the plan's copies; None without a plan."""
        return bound_of(self.loads)

    @property
    def host_ns(self) -> int:
        """How long the thread that runs a step works on a GPU's behalf; 0 on a CPU, or without a plan."""
        return next((load.busy_ns for load in self.loads if load.name == HOST_THREAD), 0)

    @property
    def floor_bytes(self) -> int:
        """The highest floor of all regions."""
        return max(region.floor_bytes for region in self.regions)

    @property
    def peak_bytes(self) -> int:
        """The highest planned peak of all regions."""
        return max(region.peak_bytes for region in self.regions)

    @property
    def resting_host_bytes(self) -> int:
        """The bytes in host memory between steps: offloaded parameters, their gradients and AdamW's state."""
        return self.offloaded_bytes + self.gradient_bytes + self.state_bytes

    @property
    def host_bytes(self) -> int:
        """All bytes in host memory: those between steps, and the buffers of the region with the most of them."""
        return self.resting_host_bytes + max(region.buffer_bytes for region in self.regions)

    @property
    def disk_bytes(self) -> int:
        """The most bytes that one region has on disk."""
        return max(region.disk_bytes for region in self.regions)

    @property
    def step_ns(self) -> int:
        """How long forward and backward of all regions take, one after the other."""
        return sum(region.calls * region.step_ns for region in self.regions)

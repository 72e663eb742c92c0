"""What a model's parameters, gradients and optimizer state take, by where they would be. No torch here."""

from dataclasses import dataclass
from functools import cached_property

from tencache_fx.planning.problem import STATE_BYTES, host_state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFigures:
    """One parameter: how many `numbers` and bytes it has, whether it is trained, and whether it would be offloaded."""

    name: str
    numbers: int
    nbytes: int
    trained: bool
    offloaded: bool
    in_float32: bool
    in_bfloat16: bool

    @property
    def state_bytes(self) -> int:
        """The bytes of AdamW's state for it on the device, if it is trained."""
        return STATE_BYTES * self.numbers

    @property
    def host_state_bytes(self) -> int:
        """The bytes of AdamW's state for it in host memory, if it is offloaded and trained."""
        return host_state_bytes(self.numbers, split=self.in_bfloat16)


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """A model's parameters; beside them `beside_bytes` stay on the device.

    These are its buffers, what it is called with, and libraries' workspaces.
    """

    parameters: tuple[ParameterFigures, ...]
    beside_bytes: int

    @cached_property
    def by_name(self) -> dict[str, ParameterFigures]:
        """The parameters by name."""
        return {each.name: each for each in self.parameters}

    @cached_property
    def offloaded(self) -> frozenset[str]:
        """The names of those that would be offloaded."""
        return frozenset(each.name for each in self.parameters if each.offloaded)

    @property
    def trains(self) -> bool:
        """Whether any is trained."""
        return any(each.trained for each in self.parameters)

    @property
    def trained_count(self) -> int:
        """How many parameters are trained."""
        return sum(each.trained for each in self.parameters)

    @property
    def count(self) -> int:
        """How many numbers the parameters have."""
        return sum(each.numbers for each in self.parameters)

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters."""
        return sum(each.nbytes for each in self.parameters)

    @property
    def offloaded_bytes(self) -> int:
        """The bytes of those that would be offloaded."""
        return sum(each.nbytes for each in self.parameters if each.offloaded)

    @property
    def kept_bytes(self) -> int:
        """The bytes of those that would not."""
        return self.nbytes - self.offloaded_bytes

    @property
    def offloaded_state_bytes(self) -> int:
        """The state of AdamW, in host memory, for those that would be offloaded and are trained."""
        return sum(each.host_state_bytes for each in self.parameters if each.offloaded and each.trained)

    @property
    def kept_state_bytes(self) -> int:
        """The state of AdamW for those that would not be, and are trained."""
        return sum(each.state_bytes for each in self.parameters if not each.offloaded and each.trained)

    @property
    def held_bytes(self) -> int:
        """What is on the device all the time."""
        return self.kept_bytes + self.kept_state_bytes + self.beside_bytes

    @property
    def plain_state_bytes(self) -> int:
        """The state of AdamW if nothing were offloaded: fp32 weights are their own masters."""
        trained = (each for each in self.parameters if each.trained)
        return sum(each.numbers * (8 if each.in_float32 else STATE_BYTES) for each in trained)

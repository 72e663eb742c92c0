"""What planning has to know of an offloaded parameter, whether it is one, or would be."""

from typing import Protocol

from tencache_fx.model_state.shard import Shard
from tencache_fx.planning.problem import Tier


class ParameterFacts(Protocol):
    """An offloaded parameter as planning knows it: its bytes, and those of it that are on the device, too."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the parameter."""

    @property
    def tier(self) -> Tier:
        """Return where its bytes are while they are not on the device."""

    @property
    def shard(self) -> Shard | None:
        """Return what it is a part of; None for a whole one."""

    @property
    def on_device(self) -> bool:
        """Return True if the parameter's bytes are on the device, too."""

    @property
    def updated_on_device(self) -> bool:
        """Return True if its gradient and its optimizer's state are there, or are to be."""

    @property
    def state_bytes(self) -> int:
        """Return the bytes of its optimizer's state on the device, or of the state that may be made."""

    @property
    def host_state_bytes(self) -> int:
        """Return what these are in host memory, or on disk."""

    @property
    def device_state_bytes(self) -> int:
        """Return the bytes of that state that are there now."""

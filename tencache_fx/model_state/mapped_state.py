"""How much host memory is mapped for optimizers' state, kept for the next start of the same program.

The plan says of which parameters the state is in host memory, and is known only when the model has been traced. That
takes seconds, in which the next start maps what the last one did. A wrong guess costs time alone: `map_state_ahead`
corrects it, and others get the room that they want.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tencache_fx.hardware.cache import cached, kept
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.serialization import Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedState:
    """The sizes of buffers, in the order in which they are wanted."""

    sizes: tuple[Positive, ...]


def keep_sizes(device: torch.device, parameters: Iterable[OffloadedParameter], sizes: Sequence[int]) -> None:
    """Keep the sizes of what is mapped for the state of these parameters, unless they are kept already."""
    key, mapped = _key(device, parameters), MappedState(sizes=tuple(sizes))
    before = kept(key, MappedState)
    if mapped != before and (before is not None or sizes):
        cached(key, MappedState, lambda: mapped, renew=True)


def kept_sizes(device: torch.device, parameters: Iterable[OffloadedParameter]) -> tuple[int, ...]:
    """Return the sizes that were kept for these parameters, with the state that their optimizers make now."""
    found = kept(_key(device, parameters), MappedState)
    return () if found is None else found.sizes


def _key(device: torch.device, parameters: Iterable[OffloadedParameter]) -> dict[str, str]:
    states = sorted((each.name, each.state_buffer_bytes) for each in parameters)
    return {"what": "state", "device": str(device), "of": hashlib.sha256(repr(states).encode()).hexdigest()}

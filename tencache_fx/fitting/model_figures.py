"""What a model's parameters, gradients and optimizer state take, by where they would be."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tencache_fx.fitting.fake_model import FactoryResult
from tencache_fx.model_state.offloading import is_adapted, should_offload
from tencache_fx.planning.problem import STATE_BYTES


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """A model's parameters by name, of which those of `offloaded` would be; what it is called with stays on the device.

    Raises `OptionError` where it is made for parameters that cannot be offloaded.
    """

    parameters: Mapping[str, Tensor]
    offloaded: frozenset[str]
    beside_bytes: int

    @staticmethod
    def of(made: FactoryResult) -> "ModelFigures":
        """Return those of a model, real or fake; of parameters that are tied, the first name counts."""
        parameters = dict(made.model.named_parameters())
        adapts = is_adapted(made.model)
        beside = {id(value): value for value in _beside(made.model, (made.inputs, made.named_inputs))}
        return ModelFigures(
            parameters=parameters,
            offloaded=frozenset(name for name, p in parameters.items() if should_offload(p, name, adapts=adapts)),
            beside_bytes=sum(map(nbytes_of, beside.values())),
        )

    @property
    def count(self) -> int:
        """How many numbers the parameters have."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters."""
        return sum(map(nbytes_of, self.parameters.values()))

    @property
    def offloaded_bytes(self) -> int:
        """The bytes of those that would be offloaded."""
        return sum(nbytes_of(self.parameters[name]) for name in self.offloaded)

    @property
    def kept_bytes(self) -> int:
        """The bytes of those that would not."""
        return self.nbytes - self.offloaded_bytes

    @property
    def offloaded_state_bytes(self) -> int:
        """The state of AdamW for those that would be offloaded and are trained."""
        return sum(map(state_bytes_of, self._trained(self.offloaded)))

    @property
    def kept_state_bytes(self) -> int:
        """The state of AdamW for those that would not be, and are trained."""
        return sum(map(state_bytes_of, self._trained(self.parameters.keys() - self.offloaded)))

    @property
    def held_bytes(self) -> int:
        """What is on the device all the time."""
        return self.kept_bytes + self.kept_state_bytes + self.beside_bytes

    @property
    def plain_state_bytes(self) -> int:
        """The state of AdamW if nothing were offloaded: fp32 weights are their own masters."""
        trained = self._trained(self.parameters)
        return sum(p.numel() * (8 if p.dtype is torch.float32 else STATE_BYTES) for p in trained)

    def _trained(self, names: Iterable[str]) -> list[Tensor]:
        return [p for name in names if (p := self.parameters[name]).requires_grad]


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor that need not have any."""
    return tensor.numel() * tensor.element_size()


def state_bytes_of(parameter: Tensor) -> int:
    """Return the bytes of AdamW's state for a parameter that is offloaded."""
    return STATE_BYTES * parameter.numel()


def _beside(model: nn.Module, inputs: Any) -> list[Tensor]:
    return [value for value in (*model.buffers(), *tree_leaves(inputs)) if isinstance(value, Tensor)]

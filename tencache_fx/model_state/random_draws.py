"""Whether an optimizer's steps draw random numbers: then the order in which parameters are updated is part of them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class RandomDraws:
    """The states of torch's generators of some devices, and of those among the options given, as they are now."""

    def __init__(self, devices: Iterable[torch.device], options: Iterable[Mapping[str, Any]]) -> None:
        generators = [torch.default_generator]
        generators += [torch.cuda.default_generators[each.index or 0] for each in devices if each.type == "cuda"]
        generators += [each for some in options for each in some.values() if isinstance(each, torch.Generator)]
        self._before: list[tuple[torch.Generator, Tensor]] = [(each, each.get_state()) for each in generators]

    def any_since(self) -> bool:
        """Return whether somebody has drawn from one of the generators since then."""
        return any(not torch.equal(generator.get_state(), state) for generator, state in self._before)

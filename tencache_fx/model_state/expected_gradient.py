"""The gradient that a parameter is about to get: what still adds to it, and what begins the update by it."""

from collections.abc import Callable
from typing import Protocol

from tencache_fx.model_state.host_gradient import HostGradientBuffer


class GradientSource(Protocol):
    """A backward that adds to a gradient. `started` is true once it runs, or where nobody would tell."""

    started: bool


class ExpectedGradient:
    """The sources of one parameter's next gradient.

    `begun_by` is the gradient that an update began with during backward, before autograd told the optimizer of it.
    `update_now` begins such an update; the optimizer sets it if it updates during backward.
    """

    def __init__(self) -> None:
        self.sources: set[GradientSource] = set()
        self.begun_by: HostGradientBuffer | None = None
        self.update_now: Callable[[HostGradientBuffer], None] | None = None

    def expect(self, source: GradientSource) -> None:
        """Add a source. A backward before it is over, or has failed."""
        self.begun_by = None
        self.sources.add(source)

    def end_started(self) -> None:
        """Remove the sources whose backward has begun: the optimizer has the sum of their gradients."""
        for source in self.sources.copy():  # others die meanwhile
            if source.started:
                self.sources.discard(source)

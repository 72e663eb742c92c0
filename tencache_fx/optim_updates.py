"""One parameter's update at home: on the host, or streamed through the device, with the same bits either way."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tencache_fx.runtime.gradients import Lease
from tencache_fx.runtime.homes import Home
from tencache_fx.runtime.stats import Stats
from tencache_fx.runtime.updates import Room, Updates

_CPU = torch.device("cpu")


@dataclass(kw_only=True, eq=False)
class HomeUpdate:
    """What an update needs: a gradient (`lease`), the weight's `home`, and the optimizer's fp32 `arrays`.

    The first of `arrays` is the master weight; `fresh` says that the weight may have been set since it was made from
    that. `numbers` are what the kernel multiplies with, the first of them the gradient, which `factor` scales as well.
    `kernels` gives the kernel for a device.
    """

    home: Home
    lease: Lease
    arrays: Sequence[Tensor]
    numbers: Tensor
    factor: Callable[[], float] | None
    fresh: bool
    kernels: Callable[[torch.device], Callable[..., None]]
    count: Callable[[], None]
    stats: Stats

    def prepare(self, updates: Updates) -> None:
        """Have the kernels compiled now, in the caller's thread."""
        self.kernels(_CPU)
        if updates.streams_through_device:
            self.kernels(self.home.parameter.device)

    @torch.no_grad()
    def on_host(self) -> None:
        """Update in host memory."""
        gradient, weight, numbers = self._begin()
        self.home.write_after()
        begin_ns = time.perf_counter_ns()
        self.kernels(_CPU)(gradient, weight, *self.arrays, numbers)
        self.stats.add(updates=1, update_ns=time.perf_counter_ns() - begin_ns)
        self._end()

    @torch.no_grad()
    def on_device(self, room: Room) -> Callable[[], None]:
        """Issue the update's pieces; return what waits for the last of them."""
        device = self.home.parameter.device
        gradient, weight, on_host = self._begin()
        kernel, numbers = self.kernels(device), room.bring(on_host)

        def work(pieces: Sequence[Tensor]) -> None:
            change, *arrays, value = pieces
            kernel(change, value, *arrays, numbers)

        reading = () if self.home.left is None else (self.home.left,)
        last = room.stream(len(weight), [gradient, *self.arrays], [*self.arrays, weight], work, reading)

        def finish() -> None:
            last.synchronize()
            self.stats.add(updates=1, device_updates=1)
            self._end()

        return finish

    def _begin(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient, the weight, and the numbers, once they are known; set a master that is out of date."""
        gradient, weight, master = flat(self.lease.landed()), flat(self.home.host), self.arrays[0]
        if self.fresh:
            master.copy_(torch.where(is_rounded(master, weight), master, weight))
        if self.factor is None:
            return gradient, weight, self.numbers
        return gradient, weight, torch.cat([self.numbers[:1] * self.factor(), self.numbers[1:]])

    def _end(self) -> None:
        self.count()
        self.stats.add(h2d_bytes=self.home.renew())


@torch.no_grad()
def update_here(
    *,
    change: Tensor,
    weight: Tensor,
    arrays: Sequence[Tensor],
    numbers: Tensor,
    kernel: Callable[..., None],
    fresh: bool,
) -> None:
    """Update a parameter all of whose state is on its device, on the caller's stream: `weight` by `change`, both [n].

    `arrays`, `numbers` and `fresh` are as for `HomeUpdate`.
    """
    if fresh:
        arrays[0].copy_(torch.where(is_rounded(arrays[0], weight), arrays[0], weight))
    if weight.is_cuda:
        numbers = numbers.pin_memory().to(weight.device, non_blocking=True)
    kernel(change, weight, *arrays, numbers)


def flat(dense: Tensor) -> Tensor:
    """Return a dense tensor's elements [n] in the order they have in memory, without a copy."""
    return dense.as_strided((dense.numel(),), (1,))


def is_rounded(master: Tensor, weight: Tensor) -> Tensor:
    """Say where a master weight, rounded, is the weight: it has more digits there, which are worth keeping."""
    return master.to(weight.dtype) == weight

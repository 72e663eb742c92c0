"""A parameter that is spread over ranks by rows, and the collectives by which it is read.

Each rank has as many rows, the last ones filled up with zeros, so that the parts lie one behind the other in the whole.
To read it is to gather it; its gradient is the mean over ranks, scattered: each rank gets that of its own rows
(SimpleFSDP, arXiv 2411.00284). In a compiled region both are nodes of the graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tencache_fx.errors import OptionError
from tencache_fx.option_values import shown
from tencache_fx.runtime.process_groups import count_up, resolve

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

UNKNOWN = "?"
"""In place of a group's name: a gradient is a rank's part of one, and nobody knows over which ranks it is spread."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a process group that share a model: its name, how many they are, and which of them this one is.

    `model` tells it from all others, of these ranks and of any.
    """

    name: str
    size: int
    rank: int
    model: str

    @property
    def process_group(self) -> "dist.ProcessGroup":
        """Return torch's group."""
        return resolve(self.name)

    @cached_property
    def mesh(self) -> "DeviceMesh":
        """Return the mesh of these ranks' host memory, by which DTensors say how they are spread."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.process_group, "cpu")


@dataclass(frozen=True, slots=True)
class Shard:
    """How a parameter of `size`, at least a row for each rank, is spread over `group`."""

    group: RankGroup
    size: torch.Size

    @property
    def local_size(self) -> torch.Size:
        """Return the size of each rank's part, with the rows that fill it up."""
        return torch.Size((-(-self.size[0] // self.group.size), *self.size[1:]))

    @property
    def own_rows(self) -> int:
        """Return how many of this rank's rows are the parameter's; 0 if all fill up."""
        rows = self.local_size[0]
        return min(max(self.size[0] - self.group.rank * rows, 0), rows)

    def cut(self, whole: Tensor) -> Tensor:
        """Return a contiguous copy of this rank's part of a tensor of `size`, filled up with zeros."""
        rows, own = self.local_size[0], self.own_rows
        part = whole.new_zeros(self.local_size)
        part[:own] = whole[self.group.rank * rows : self.group.rank * rows + own]
        return part

    def as_dtensor(self, part: Tensor) -> Tensor:
        """Return a DTensor of `size` whose local tensor is a view of this rank's rows of `part`, on the CPU.

        torch.distributed.checkpoint saves and loads it by the rows of the whole, however many ranks there are then.
        """
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as ByRows

        stride = torch.empty(self.size, device="meta").stride()
        found: Tensor = DTensor.from_local(
            part[: self.own_rows], self.group.mesh, [ByRows(0)], run_check=False, shape=self.size, stride=stride
        )
        return found

    def take(self, value: Tensor) -> Tensor | None:
        """Return this rank's part of a saved value: a DTensor, the whole, or the part; None if it is none of these.

        A DTensor that is spread otherwise is gathered first: that is a collective.
        """
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as ByRows

        if isinstance(value, DTensor):
            if value.size() != self.size:
                return None
            is_alike = value.placements == (ByRows(0),) and value.device_mesh.size() == self.group.size
            if not is_alike:
                return self.cut(value.full_tensor())
            own, part = value.to_local(), value.to_local().new_zeros(self.local_size)
            part[: own.size(0)] = own
            return part
        if value.size() == self.size:
            return self.cut(value)
        return value if value.size() == self.local_size else None

    def gather(self, part: Tensor) -> Tensor:
        """Return the whole of which each rank gives its `part`; a collective."""
        return _gather(part, self.group.size, self.group.name)[: self.size[0]]


def find_group(shard: object, device: torch.device) -> RankGroup | None:
    """Return the ranks that `shard` names, True for all or a DeviceMesh of one dimension; None for a single one.

    Raises `OptionError` for what names none, and where they cannot send each other tensors of `device`.
    """
    if shard is None or shard is False:
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise OptionError("shard= spreads a model over ranks, and there are none; call init_process_group() first.")
    from torch.distributed.device_mesh import DeviceMesh

    if shard is True:
        group = dist.group.WORLD
    elif isinstance(shard, DeviceMesh):
        if shard.ndim != 1:
            raise OptionError(
                f"shard= is a DeviceMesh of {shard.ndim} dimensions; give one of one dimension, such as "
                f"mesh[{(shard.mesh_dim_names or ('shard',))[-1]!r}]: parameters are not both spread and replicated."
            )
        group = shard.get_group()
    else:
        raise OptionError(f"shard={shown(shard)} names no ranks; give True or a DeviceMesh.")
    assert group is not None
    if device not in group._device_types and torch.device(device.type) not in group._device_types:
        raise OptionError(
            f"the process group has no backend for {device.type}: it has "
            f"{', '.join(each.type for each in group._device_types)}; call init_process_group('cpu:gloo,cuda:nccl')."
        )
    if group.size() == 1:
        return None
    ranks = dist.get_process_group_ranks(group)
    model = f"{ranks} {count_up(f'models of {ranks}')}"
    return RankGroup(group.group_name, group.size(), group.rank(), model)


class Gathered(torch.autograd.Function):
    """All ranks' parts, one behind the other; its gradient is the mean over ranks, of this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, count: int, group: str) -> Tensor:
        """Gather [rows, ...] to [count * rows, ...]."""
        ctx.count, ctx.group = count, group
        return _gather(part, count, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Reduce [count * rows, ...] and scatter it to [rows, ...]."""
        return scatter_mean(gradient, ctx.count, ctx.group), None, None


class Averaged(torch.autograd.Function):
    """A parameter that every rank has whole; its gradient is the mean over ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, count: int, group: str) -> Tensor:
        """Return the parameter."""
        ctx.count, ctx.group = count, group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the mean of all ranks' gradients."""
        total = torch.ops._c10d_functional.all_reduce(gradient.contiguous(), "sum", ctx.group)
        return torch.ops._c10d_functional.wait_tensor(total) / ctx.count, None, None


def scatter_mean(gradient: Tensor, count: int, group: str) -> Tensor:
    """Return this rank's rows of the mean of all ranks' gradients; gloo has no mean by itself."""
    part = torch.ops._c10d_functional.reduce_scatter_tensor(gradient.contiguous(), "sum", count, group)
    return torch.ops._c10d_functional.wait_tensor(part) / count  # type: ignore[no-any-return]


def whole_norms(norms: Sequence[Tensor], group: str) -> Sequence[Tensor]:
    """Return the Euclidean norms of gradients of which each rank gives those of its parts, fp32; a collective."""
    squares = torch.stack([norm.double() for norm in norms]).square()
    dist.all_reduce(squares, group=resolve(group))
    return squares.sqrt().float().unbind()


def _gather(part: Tensor, count: int, group: str) -> Tensor:
    work = torch.ops._c10d_functional.all_gather_into_tensor(part.contiguous(), count, group)
    return torch.ops._c10d_functional.wait_tensor(work)  # type: ignore[no-any-return]

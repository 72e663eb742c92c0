"""A gradient in host memory that autograd, and any training loop, takes for one on the device.

`HostGradient` is what a compiled backward returns for an offloaded parameter: a tensor of the parameter's device whose
bytes are in a pinned buffer. Autograd's own bookkeeping (accumulation, hooks, `zero_grad`) works on it as on any other,
and so do the norms and factors of gradient clipping and loss scaling, without a byte coming back: a gradient's norm is
computed on the device before it is offloaded, or as it is added to another one, and factors wait for the next reader.
All other operations are carried out on a copy on the device.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tencache_fx import compat
from tencache_fx.errors import InvariantError, UsageError
from tencache_fx.model_state.grad_accumulation import Addition, GradientAccumulator
from tencache_fx.model_state.gradient_norm import norm_of
from tencache_fx.model_state.shard import UNKNOWN, whole_norms
from tencache_fx.model_state.sum_kernel import kernel_of
from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.streams import Event
from tencache_fx.runtime.transfers import Layout
from tencache_fx.tensors import ordinary_tensors

_aten = torch.ops.aten


class HostGradientBuffer:
    """The buffer that a gradient is in, for as long as anybody has the gradient.

    It has yet to be multiplied by `factor`. `shard` names the process group of which other ranks have the other parts
    of it: none for one that is whole, `UNKNOWN` where nobody knows.
    """

    factor: Tensor | None = None
    _norm: Tensor | None = None  # fp32 on the device, with the factor; None if it is not known
    _sum: Addition | None = None  # until it is done, more is added; it gives the sum of the squares
    _on_device: Tensor | None = None
    _landed: Event | None = None
    _host: Tensor | None = None  # made when it is read: the thread that runs the backward has no time for it
    _readers: "Sequence[Future[Any]]" = ()  # somebody reads `_host` until these are done

    def __init__(self, additions: GradientAccumulator, layout: Layout, shard: str) -> None:
        self._buffers: list[Buffer] = []  # one, once there is one; of two threads that asked at once each has its own
        self._additions, self.layout, self.shard = additions, layout, shard

    def hold(self, buffer: Buffer, landed: Event, norm: Tensor | None) -> None:
        """Be what is in `buffer` once `landed` has passed, and give the buffer back.

        Without a `norm`, that is taken there, if somebody asks for it.
        """
        self._landed, self._norm = landed, norm
        self._buffers.append(buffer)

    @property
    def holds(self) -> bool:
        """Return whether there is a buffer to give back."""
        return bool(self._buffers)

    @classmethod
    def on_device(cls, additions: GradientAccumulator, value: Tensor, shard: str) -> "HostGradientBuffer":
        """Return a gradient that stays on the device until somebody asks for it in host memory."""
        made = cls(additions, Layout.of(value, "a gradient"), shard)
        made._on_device = value
        return made

    def __del__(self) -> None:
        """Let the next runtime call release the buffer; `weakref.finalize` takes far longer to set up."""
        for buffer in self._buffers:
            self._additions.buffers.release_later(buffer)

    def scale(self, factor: Tensor) -> None:
        """Multiply by a number, fp32 and without dimensions, that nobody changes, later."""
        self.factor = factor if self.factor is None else self.factor * factor.to(self.factor.device)
        if self._norm is not None:
            self._norm = self._norm * factor.abs().to(self._norm.device)

    def norm(self) -> Tensor:
        """Return the Euclidean norm, fp32, on the device; blocks the host if it is not known there."""
        if self.changes:
            return norm_of(self.device())
        if self._norm is None:
            self.wait_landed()
            norm = (norm_of(self._memory) if self._sum is None else self._sum.norm()).to(self.layout.device)
            self._norm = norm if self.factor is None else norm * self.factor.abs().to(norm.device)
        return self._norm

    def add(self, other: "HostGradientBuffer") -> bool:
        """Add another gradient, once both are in host memory; False if that has to be done by the caller, now."""
        mine, others = self.layout, other.layout
        alike = (mine.size, mine.stride, mine.dtype) == (others.size, others.stride, others.dtype)
        plain = all(each.factor is None and not each.changes for each in (self, other))
        if not (alike and plain and mine.dtype.is_floating_point) or self is other:
            return False
        self._end_readers()
        addition = Addition(kernel=kernel_of(mine.dtype), sums=self, more=other, nbytes=mine.nbytes, before=self._sum)
        if not self._additions.begin(addition):
            return False
        other.note_reader(addition.done)
        self._sum, self._norm, self.shard = addition, None, self.shard or other.shard
        return True

    def note_reader(self, reader: "Future[Any]") -> None:
        """Note that somebody reads the gradient in host memory until `reader` is done."""
        self._readers = [*(each for each in self._readers if not each.done()), reader]

    @property
    def buffer_memory(self) -> Tensor:
        """Return the bytes of the buffer that the gradient is in, uint8."""
        return self._buffers[-1].memory

    @property
    def is_copied(self) -> bool:
        """Return whether the copy out is over."""
        return self._landed is None or self._landed.query()

    @property
    def has_landed(self) -> bool:
        """Return whether the gradient is in host memory, with all that is added to it, or never will be."""
        return self.is_copied and (self._sum is None or self._sum.done.done())

    def landed(self) -> Tensor:
        """Return the gradient in host memory, but for its factor, to read only. Blocks the host.

        Raises `BudgetError` for one that was on the device alone if the host budget has no room for it.
        """
        self.wait_landed()
        return self._memory

    def wait_landed(self) -> None:
        """Block until it is in host memory, with all that is added to it; raises `InvariantError` if it is lost."""
        self.wait_copied()
        error = None if self._sum is None else self._sum.done.exception()
        if error is not None:  # raised anew: its traceback will hold the gradient, which holds the old one
            raise InvariantError(
                f"a gradient of size {tuple(self.layout.size)} is lost, another one could not be added to it: "
                f"{error!r}; set it to None, and repeat the step."
            ) from error

    def host(self) -> Tensor:
        """Return the gradient in host memory, with its factor. Blocks the host."""
        self._end_readers()
        value = self.landed()
        if self._on_device is not None:  # whoever has a view of it may have changed it
            value.copy_(self._on_device)
        if self.factor is not None:
            if self._sum is not None:
                self.norm()
            value.mul_(self.factor.item())
            self.factor = None
        return value

    def write(self) -> Tensor:
        """Return the gradient in host memory, to change it. Blocks the host."""
        value = self.host()
        self._norm = self._sum = None
        return value

    def device(self) -> Tensor:
        """Return the gradient on the device, the newer copy from now on: somebody writes to it, or views it."""
        if self._on_device is None:
            self._on_device = self.host().to(self.layout.device, copy=True)
        elif self.factor is not None:
            self._on_device.mul_(self.factor)
            self.factor = None
        self._norm = self._sum = None
        return self._on_device

    @property
    def _memory(self) -> Tensor:
        """The gradient's host memory, whatever is in it by now."""
        if (host := self._host) is None:
            layout = self.layout
            if not self._buffers:
                self._buffers.append(self._additions.buffers.acquire_settled(layout.nbytes, Use.GRADIENT))
            memory = self._buffers[-1].memory.untyped_storage()
            with ordinary_tensors():
                host = torch.empty(0, dtype=layout.dtype, device="cpu").set_(memory, 0, layout.size, layout.stride)
            self._host = host
        return host

    def wait_copied(self) -> None:
        """Block until the copy out is over; raises what that has raised."""
        if self._landed is not None:
            self._landed.synchronize()

    def _end_readers(self) -> None:
        for reader in self._readers:
            reader.exception()
        self._readers = ()

    @property
    def changes(self) -> bool:
        """Return whether what is in host memory may be out of date."""
        return self._on_device is not None


class HostGradient(Tensor):
    """A gradient of the device that is in host memory, or a rank's part of one, be it on the device."""

    buffer: HostGradientBuffer

    @staticmethod
    def __new__(cls, buffer: HostGradientBuffer) -> "HostGradient":
        """Return a gradient that lives in `buffer`."""
        layout = buffer.layout
        made: HostGradient = torch.Tensor._make_wrapper_subclass(
            cls, layout.size, strides=layout.stride, dtype=layout.dtype, device=layout.device
        )
        made.buffer = buffer
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a description without the values."""
        place = "on the device" if self.buffer.changes else "in host memory"
        return f"HostGradient(size={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, {place})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return an ordinary gradient, on the device."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be saved as an ordinary gradient, of the device."""
        return self.clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as it is switched off
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out an operation in host memory, where there is a way, else on a copy on the device."""
        own = _OWN.get(func)
        if own is not None and (result := own(*args, **(kwargs or {}))) is not NotImplemented:
            return result
        return _on_device(func, args, kwargs or {})


def _on_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out `func` on the device: on copies, if it neither writes to them nor returns a view of one.

    The schemas of collectives (namespace c10d) do not say what they write to.
    """
    schema = func._schema
    stays = schema.is_mutable or func.namespace == "c10d" or any(each.alias_info is not None for each in schema.returns)
    copies: dict[int, HostGradientBuffer] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, HostGradient):
            return value
        buffer = value.buffer
        copied = buffer.device() if stays or buffer.changes else buffer.host().to(value.device, copy=True)
        copies[id(copied)] = buffer
        return copied

    result = func(*tree_map(copy, args), **tree_map(copy, kwargs))
    return tree_map(lambda value: HostGradient(copies[id(value)]) if id(value) in copies else value, result)


def _alias(gradient: Any, *_: Any) -> Any:
    return HostGradient(gradient.buffer)


def _add(gradient: Any, other: Any, *, alpha: float = 1) -> Any:
    """Accumulate in host memory, as autograd does for the second backward without `zero_grad`."""
    in_host_memory = isinstance(gradient, HostGradient) and not gradient.buffer.changes
    if not in_host_memory or not isinstance(other, Tensor) or other.shape != gradient.shape:
        return NotImplemented
    if alpha != 1 or not isinstance(other, HostGradient) or not gradient.buffer.add(other.buffer):
        gradient.buffer.write().add_(_in_host_memory(other), alpha=alpha)
        gradient.buffer.shard = gradient.buffer.shard or (other.buffer.shard if isinstance(other, HostGradient) else "")
    return gradient


def _in_host_memory(gradient: Tensor) -> Tensor:
    """Return a gradient's values in host memory, to read only; one on the device stays there."""
    if not isinstance(gradient, HostGradient):
        return gradient.cpu()
    return gradient.buffer.device().cpu() if gradient.buffer.changes else gradient.buffer.host()


def _is_euclidean(order: Any) -> bool:
    return isinstance(order, (int, float)) and order == 2


def _refuse_shards(gradients: Iterable[Any], *, euclidean: bool) -> None:
    """Raise `UsageError` if a norm is to be taken of a gradient of which other ranks have parts.

    The Euclidean norm is had where it is known which ranks these are.
    """
    for each in gradients:
        if isinstance(each, HostGradient) and each.buffer.shard and not (euclidean and each.buffer.shard != UNKNOWN):
            raise UsageError(
                f"a gradient of size {tuple(each.shape)} is this rank's part of one that is spread over ranks, so its "
                "norm is not that of the whole, and clipping by it would differ from rank to rank; have "
                "tencache_fx.offload(model, shard=True) spread the model and clip by the Euclidean norm, or add up "
                "gradient.square().sum() of all gradients, all-reduce that, and multiply the gradients by the factor."
            )


def _gather_norms(gradients: Sequence[Any], norms: list[Tensor]) -> list[Tensor]:
    """Return the norms of the whole gradients, for those of what this rank has of them; a collective for each group."""
    shards = [each.buffer.shard if isinstance(each, HostGradient) else "" for each in gradients]
    for group in dict.fromkeys(filter(None, shards)):
        places = [place for place, shard in enumerate(shards) if shard == group]
        for place, norm in zip(places, whole_norms([norms[place] for place in places], group), strict=True):
            norms[place] = norm.to(norms[place].dtype)
    return norms


def _norm(gradient: Any, order: Any = 2, dim: Any = None, keepdim: Any = None, *, dtype: Any = None) -> Any:
    takes_all = not dim or len(dim) == gradient.dim()
    has_way = _is_euclidean(order) and dim is None and not keepdim
    if takes_all:
        _refuse_shards((gradient,), euclidean=has_way)
    if not has_way:
        return NotImplemented
    norm = gradient.buffer.norm().to(torch.float32 if dtype is None else dtype, copy=True)
    return _gather_norms((gradient,), [norm])[0]


def _norms(gradients: Sequence[Any], order: Any = 2, dtype: Any = None) -> Any:
    """Return the norms of gradients, some of them ordinary ones; in fp32, whatever the gradients are in."""
    _refuse_shards(gradients, euclidean=_is_euclidean(order))
    if not _is_euclidean(order):
        return NotImplemented
    plain = torch.float32 if dtype is None else dtype
    norms = [
        each.buffer.norm().to(plain, copy=True)
        if isinstance(each, HostGradient)
        else torch.linalg.vector_norm(each, dtype=plain)
        for each in gradients
    ]
    return _gather_norms(gradients, norms)


def _scale(gradient: Any, factor: Any) -> Any:
    if not isinstance(gradient, HostGradient) or isinstance(factor, HostGradient) or gradient.buffer.changes:
        return NotImplemented
    if isinstance(factor, Tensor) and factor.numel() != 1:
        return NotImplemented
    gradient.buffer.scale(_number(factor, gradient.device))
    return gradient


def _number(factor: Any, device: torch.device) -> Tensor:
    """Return a factor as an fp32 tensor without dimensions, and that nobody else has."""
    number = factor if isinstance(factor, Tensor) else torch.full((), factor, dtype=torch.float32, device=device)
    return number.detach().to(torch.float32, copy=True).reshape(())


def _scales(gradients: Sequence[Any], factor: Any) -> Any:
    """Multiply gradients, some of them ordinary ones, by one number."""
    if isinstance(factor, (list, tuple)):
        return NotImplemented
    number = _number(factor, gradients[0].device)
    for each in gradients:
        if not isinstance(each, HostGradient):
            each.mul_(factor)
        elif each.buffer.changes:
            each.buffer.device().mul_(factor)
        else:
            each.buffer.scale(number)
    return None


def _unscale(gradients: Sequence[Any], found_inf: Tensor, inverse: Tensor) -> None:
    """As `GradScaler` has it; a gradient whose norm is no finite number has an element that is none."""
    _refuse_shards(gradients, euclidean=True)
    on_host = [each for each in gradients if isinstance(each, HostGradient)]
    for norm in _gather_norms(on_host, [each.buffer.norm() for each in on_host]):
        found_inf.copy_(torch.maximum(found_inf, (~norm.isfinite()).to(found_inf)))
    for each in gradients:
        if isinstance(each, HostGradient):
            if _scale(each, inverse) is NotImplemented:
                each.buffer.device().mul_(inverse)
        else:
            _aten._amp_foreach_non_finite_check_and_unscale_([each], found_inf, inverse)


_OWN: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
    _aten.add_.Tensor: _add,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norms,
    _aten.mul_.Tensor: _scale,
    _aten.mul_.Scalar: _scale,
    _aten._foreach_mul_.Tensor: _scales,
    _aten._foreach_mul_.Scalar: _scales,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}

compat.run_as_is(HostGradient.__new__)
compat.run_as_is(HostGradient.__torch_dispatch__)

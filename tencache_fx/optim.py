"""Optimizers whose state is at home, in host memory: the device holds weights and gradients only.

    optimizer = tencache_fx.optim.AdamW(model.parameters(), lr=3e-4)

in place of `torch.optim.AdamW`, in any loop. Master weights and moments are fp32 in host memory, 12 bytes for each
parameter. A step takes gradients out and weights in, piece by piece, beside the update itself: one pass of a kernel
that Inductor compiles for the CPU (bf16 gradient in, fp32 state updated, bf16 weight out; ZeRO-Offload, arXiv
2101.06840, does this with kernels of its own, and casts apart from them).

Gradients stay where autograd puts them, so clipping, accumulation, `GradScaler`, schedulers and closures are torch's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import ParamsT

from tencache_fx.errors import OptionError, UsageError
from tencache_fx.options import Options
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.registry import find_engine, open_engine
from tencache_fx.runtime.rounds import PIECE_BYTES, Piece, work_at_home

_STATE = ("master", "exp_avg", "exp_avg_sq")
_UNSUPPORTED = ("amsgrad", "capturable", "differentiable")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """What a piece's update needs: its slice of the state, the numbers of its group and step, what to do behind it."""

    state: tuple[Tensor, ...]
    numbers: Tensor
    done: Callable[[], None] | None


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) as torch has it, with an fp32 master weight, all state at home.

    `params` are floating-point parameters on one or more cuda or cpu devices, as for torch; options may differ by
    group. A parameter that is changed from outside between two steps, by loading weights for instance, is taken as it
    is then. `state_dict` is `torch.optim.AdamW`'s with the master weights beside the moments; either loads the other's.

    Raises `OptionError` for options it cannot use.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        self._versions: dict[Tensor, int] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._versions = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for torch; raises `OptionError` when its options or its parameters cannot be used."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except OptionError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return what `closure`, which is called first, returns.

        Returns when the host is done; the device goes on with whatever comes next once the last weight is in. Raises
        `UsageError` for a sparse gradient, before anything is updated, and `BudgetError` when the host budget has no
        room for a few buffers of 32 MiB.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        todo = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, parameter in todo:
            if parameter.grad.is_sparse:
                raise UsageError(f"a gradient of size {tuple(parameter.shape)} is sparse; use Embedding(sparse=False).")
        before = {parameter: self._steps(parameter) for _, parameter in todo}
        try:
            for device, some in groupby(sorted(todo, key=_device_name), key=_device_name):
                work_at_home(_engine(torch.device(device)), self._pieces(some), _run)
        except BaseException as error:
            new = sum(self._steps(parameter) > steps for parameter, steps in before.items())
            error.add_note(
                f"Of {len(before)} parameters {new} have been updated, in order, and their state counts one step more; "
                "the next one may be updated in part, the others are as they were."
            )
            raise
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of this class or of `torch.optim.AdamW`; a master weight that is missing is the weight.

        Raises `OptionError` when it was made with options this class lacks, and `ValueError` as torch does when the
        groups do not match.
        """
        for group in state_dict["param_groups"]:
            _check_options(group)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        self._versions = {}
        for index, parameter in zip(indices, parameters, strict=True):
            if (saved := state_dict["state"].get(index)) is None:
                continue
            state = self.state[parameter]
            state["step"] = torch.as_tensor(saved["step"], dtype=torch.float32).to("cpu", copy=True)
            for name in _STATE:
                value = saved[name] if name in saved else parameter.detach()
                state[name] = _flat(_dense_like(parameter, value)).to("cpu", torch.float32, copy=True)
                state[name] = _shaped(state[name], parameter)

    def _pieces(self, todo: Iterable[tuple[dict[str, Any], Tensor]]) -> Iterator[Piece[_Update]]:
        """Yield what is to be updated, parameter by parameter; a step counts once a parameter's last piece is done."""
        for group, parameter in todo:
            state = self._ready(parameter)
            assert parameter.grad is not None
            gradient = _flat(_dense_like(parameter, parameter.grad.to(parameter.dtype)))
            weight = _flat(parameter.data)  # whose version is its own: pieces arrive whenever they do
            homes = tuple(_flat(state[name]) for name in _STATE)
            numbers = _numbers(group, int(state["step"]) + 1)
            most = PIECE_BYTES // weight.element_size()
            for start in range(0, weight.numel(), most):
                part = slice(start, start + most)
                done = partial(self._count, parameter) if part.stop >= weight.numel() else None
                update = _Update(state=tuple(home[part] for home in homes), numbers=numbers, done=done)
                yield Piece(source=gradient[part], target=weight[part], about=update)

    def _count(self, parameter: Tensor) -> None:
        self.state[parameter]["step"] += 1
        increment_version(parameter)
        self._versions[parameter] = parameter._version

    def _steps(self, parameter: Tensor) -> int:
        return int(self.state[parameter]["step"]) if parameter in self.state else 0

    def _ready(self, parameter: Tensor) -> dict[str, Any]:
        """Return the parameter's state, made at its first step, and with what was changed from outside taken over."""
        state: dict[str, Any] = self.state[parameter]
        if state and self._versions.get(parameter) == parameter._version:
            return state
        now = _flat(parameter.detach()).to("cpu", copy=True)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["master"] = _shaped(now.float(), parameter)
            for name in _STATE[1:]:
                state[name] = _shaped(torch.zeros_like(now, dtype=torch.float32), parameter)
        else:
            # Where the weight is the master rounded, nobody has changed it: the digits below are worth keeping.
            master = _flat(state["master"])
            torch.where(master.to(now.dtype) == now, master, now.float(), out=master)
        return state


def _numbers(group: Mapping[str, Any], step: int) -> Tensor:
    """Return what the kernel multiplies with, fp32."""
    beta_1, beta_2 = group["betas"]
    lr = float(group["lr"])
    return torch.tensor(
        [
            -1.0 if group["maximize"] else 1.0,
            1 - lr * group["weight_decay"],
            1 - beta_1,
            beta_2,
            1 - beta_2,
            lr / (1 - beta_1**step),
            (1 - beta_2**step) ** 0.5,
            group["eps"],
        ],
        dtype=torch.float64,
        device="cpu",
    ).float()


def _adamw(memory: Tensor, master: Tensor, mean: Tensor, square: Tensor, numbers: Tensor) -> None:
    """Turn the gradient in `memory` into the weight, and update the fp32 state; all [n], `numbers` as `_numbers`."""
    sign, decay, keep_1, beta_2, keep_2, rate, root, eps = numbers.unbind()
    gradient = memory.float() * sign
    mean.add_((gradient - mean) * keep_1)
    square.mul_(beta_2).add_(gradient * gradient * keep_2)
    master.mul_(decay).sub_(rate * (mean / (square.sqrt() / root + eps)))
    memory.copy_(master)


_KERNEL: Callable[..., None] = torch.compile(_adamw, dynamic=True, fullgraph=True)
"""The update in one pass over memory, compiled for the CPU at its first call, for any length."""


def _run(update: _Update, memory: Tensor) -> None:
    _KERNEL(memory, *update.state, update.numbers)
    if update.done is not None:
        update.done()


def _device_name(todo: tuple[dict[str, Any], Tensor]) -> str:
    return str(todo[1].device)


def _engine(device: torch.device) -> Engine:
    """Return the device's engine; where no compiled region has opened it, with the host budget set for the process."""
    if (engine := find_engine(device)) is not None:
        return engine
    return open_engine(device, host_budget_bytes=Options.resolve(None, device=device).host_budget)


def _flat(dense: Tensor) -> Tensor:
    """Return a dense tensor's elements [n] in the order they have in memory, without a copy."""
    return dense.as_strided((dense.numel(),), (1,))


def _dense_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the parameter's strides; a copy where it has others."""
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _shaped(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return elements [n], in the order the parameter has in memory, in its shape."""
    return flat.as_strided(parameter.shape, parameter.stride())


def _check_group(group: Mapping[str, Any]) -> None:
    _check_options(group)
    for parameter in group["params"]:
        if not parameter.is_floating_point():
            raise OptionError(f"a parameter of {parameter.dtype} cannot be updated; give floating-point ones.")
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            raise OptionError(
                f"a parameter of size {tuple(parameter.shape)} has strides {parameter.stride()}, with gaps between its "
                "elements or the same memory for several; give parameters that are contiguous."
            )


def _check_options(group: Mapping[str, Any]) -> None:
    given = [name for name in _UNSUPPORTED if group.get(name)]
    if given:
        raise OptionError(f"{', '.join(given)} cannot be had with the optimizer's state at home; leave it out.")
    beta_1, beta_2 = group["betas"]
    for name, value in (("lr", float(group["lr"])), ("eps", group["eps"]), ("weight_decay", group["weight_decay"])):
        if not value >= 0:
            raise OptionError(f"{name} is {value}; give 0 or more.")
    if not (0 <= beta_1 < 1 and 0 <= beta_2 < 1):
        raise OptionError(f"betas are {group['betas']}; give two numbers of at least 0 and below 1.")

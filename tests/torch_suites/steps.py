"""A training step around one call of torch's suites: layers before and after it save activations, and there is less
memory than these take, so that something has to be offloaded, or be computed again, while the call is under way.

    x -> tanh(x @ w) -> ... -> h -> tanh(h @ w) -> ... -> loss <-+
                               |                                 |
              arguments -> where(never, h, argument) -> call ----+
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:  # importing torch's suites changes the process
    from cases import Case, Subject

ROWS, WIDTH = 256, 64
BEFORE, BEHIND = 3, 1  # layers: behind a graph break, the first of three may leave while the last is worked on

Work = Callable[[Tensor, Sequence[Tensor], Tensor, Sequence[Tensor]], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Result:
    """What came out of one step, by name."""

    values: Mapping[str, Tensor]

    def differences(self, other: "Result", *, exact: bool) -> list[str]:
        """Return the names of what differs from `other`: in any bit, if it is to be exact, else beyond rounding."""
        if self.values.keys() != other.values.keys():
            return sorted(self.values.keys() ^ other.values.keys())
        same = _same_bits if exact else _close
        return [name for name, value in self.values.items() if not same(value, other.values[name])]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.stride() != other.stride():
        return False
    return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (one, other)))


def _close(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    rounding = 3e-2 if one.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    scale = float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=rounding, atol=rounding * max(1.0, scale), equal_nan=True)


def make_work(case: "Case", subject: "Subject") -> Work:
    """Return the step's forward: `work(x, weights, never, tensors) -> (loss, what the call returned)`."""
    leaves, spec = pytree.tree_flatten((subject.args, dict(subject.kwargs)))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    call, finish, mutated = subject.call, subject.finish, case.variant == "mutated"

    def work(x: Tensor, weights: Sequence[Tensor], never: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
        h = x
        for weight in weights[:BEFORE]:
            h = torch.tanh(h @ weight)
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor if mutated and place == places[0] else behind(h, never, tensor)
        args, kwargs = pytree.tree_unflatten(given, spec)
        out = finish(call(*args, **kwargs))
        results = [each for each in pytree.tree_leaves(out) if isinstance(each, Tensor)]
        for weight in weights[BEFORE:]:
            h = torch.tanh(h @ weight)
        loss = h.square().mean()
        for result in results:
            loss = loss + weighed(result)
        return loss, results

    return work


def behind(h: Tensor, never: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor`, bit for bit, as an activation that is computed from `h`; no gradient gets past, not even NaN."""
    if tensor.layout is not torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    mean = h.mean() if tensor.requires_grad else h.detach().mean()
    return torch.where(never, mean.to(tensor.dtype), tensor)


def weighed(result: Tensor) -> Tensor:
    """Return a number that depends on every element, each in another way."""
    if result.layout is not torch.strided:
        result = result.to_dense()
    if result.is_complex():
        result = torch.view_as_real(result.resolve_conj())
    return result.float().sin().nan_to_num(0.0).sum()


def train(case: "Case", work: Work, given: Sequence["Subject"]) -> list[Result]:
    """Run one step with each of `given`, from the same beginning each time; everything random is seeded."""
    carried = torch.bfloat16 if case.variant == "bf16" else torch.float32
    results = []
    for step, subject in enumerate(given):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, WIDTH, generator=generator).to(carried).requires_grad_()
        weights = [
            (torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5).to(carried).requires_grad_()
            for _ in range(BEFORE + BEHIND)
        ]
        leaves = pytree.tree_leaves((subject.args, dict(subject.kwargs)))
        tensors = [_fresh(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        if case.variant == "mutated":
            tensors[0] = tensors[0].detach()
        before = _state(subject)
        torch.manual_seed(100 + step)
        loss, out = work(x, weights, torch.tensor(False), tensors)
        loss.backward()
        values = {"loss": loss, "x.grad": x.grad}
        values |= {f"weight{index}.grad": weight.grad for index, weight in enumerate(weights)}
        values |= {f"out{index}": value for index, value in enumerate(out)}
        values |= {f"argument{index}": value for index, value in enumerate(tensors)}
        values |= {f"argument{index}.grad": value.grad for index, value in enumerate(tensors)}
        if subject.module is not None:
            named = dict(subject.module.named_parameters())
            values |= _state(subject) | {f"{name}.grad": value.grad for name, value in named.items()}
            subject.module.zero_grad(set_to_none=True)
            subject.module.load_state_dict(before)
        results.append(Result({name: _kept(value) for name, value in values.items() if value is not None}))
        del loss, out
    return results


def _fresh(tensor: Tensor) -> Tensor:
    """Return a leaf with the values and strides of `tensor`."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _state(subject: "Subject") -> dict[str, Tensor]:
    module = subject.module
    return {} if module is None else {name: value.clone() for name, value in module.state_dict().items()}


def _kept(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.resolve_conj().resolve_neg().clone()

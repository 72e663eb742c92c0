"""Random tensor programs for hypothesis: what torch.compile gets from people's code, a few instructions at a time.

A program is a list of instructions on a growing list of float32 matrices `[ROWS, COLS]`, so that any instruction can
read any value. Instructions look through views, slices, transposes, dtype views, in-place writes and multi-output ops
and come back to that shape. Values that nobody reads are dead ends. Some instructions write: to a value, to a buffer,
or to an input that the caller keeps. Others read parameters, of which two are one and the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, COLS = 32, 64  # 8 KiB a value, twice what is worth an op

Values = list[Tensor]
Instruction = tuple[str, int, int]


def halves(x: Tensor, y: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=1)
    return torch.cat((left * right, y[:, : COLS // 2]), dim=1)


def parts_of_one_product(x: Tensor, y: Tensor) -> Tensor:
    """Save three views of one storage, none of which spans it."""
    a, b, c = (x @ y.T @ torch.cat((y, y, y), dim=1) / COLS).split(COLS, dim=1)
    return a.sigmoid() * b.tanh() + c.sin().exp()


def in_place(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[:, ::2] = y[:, ::2].sin()
    z.mul_(0.5).add_(y)
    z[3].zero_()
    return z


def sorted_rows(x: Tensor, y: Tensor) -> Tensor:
    values, order = x.sort(dim=1)
    return values * y.gather(1, order)


def best_columns(x: Tensor, y: Tensor) -> Tensor:
    values, where = x.topk(COLS // 2, dim=1)
    return y.scatter_add(1, where, values.sin())


def normalised(x: Tensor, y: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, dim=1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-2) + y.mean(0)


def transposed_product(x: Tensor, y: Tensor) -> Tensor:
    return (x.T.contiguous() @ (y @ x.T)).T / COLS


def bits(x: Tensor, y: Tensor) -> Tensor:
    """Read a saved value's bytes as another dtype."""
    high = (x.detach().view(torch.int32) >> 30).to(torch.float32)
    return x * high + y


def complex_product(x: Tensor, y: Tensor) -> Tensor:
    a, b = (torch.view_as_complex(v.reshape(ROWS, -1, 2).contiguous()) for v in (x, y))
    return torch.view_as_real(a * b).reshape(ROWS, COLS)


def half_precision(x: Tensor, y: Tensor) -> Tensor:
    return (x.bfloat16() @ y.bfloat16().T).float().repeat(1, 2)


def spread(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(0).expand(3, -1, -1) * y.unfold(1, 2, 2).mean(-1).repeat(1, 2)).permute(1, 2, 0).amax(-1)


def shifted(x: Tensor, y: Tensor) -> Tensor:
    return F.pad(x, (1, 0))[:, :COLS] * y.roll(3, dims=1) + x.flip(0)


def attention(x: Tensor, y: Tensor) -> Tensor:
    q, k, v = (u.view(1, ROWS, 4, 16).transpose(1, 2) for u in (x, y, x + y))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(ROWS, COLS)


def picked(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > y, x * y, y)[torch.arange(ROWS - 1, -1, -1)]


def double_precision(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() @ y.double().T / COLS).sin().float().repeat(1, 2)


def dead_end(x: Tensor, y: Tensor) -> Tensor:
    (x.exp() @ y.T).softmax(1).sum()
    return x + y


def without_gradient(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        factor = (x.sin() @ y.T).tanh().repeat(1, 2)
    return factor * y


def dropped(x: Tensor, y: Tensor) -> Tensor:
    return F.dropout(x.tanh(), 0.3) + y


def same_storage(x: Tensor, y: Tensor) -> Tensor:
    """Return a view of all of `x`: what is written to either is in both."""
    return x.reshape(-1)[: ROWS * COLS].view(ROWS, COLS)


def written(x: Tensor, y: Tensor) -> Tensor:
    """Write to a value, which others may have read, or may be views of."""
    return x.mul_(0.5).add_(y.sin())


def row_written(x: Tensor, y: Tensor) -> Tensor:
    """Write to a part of a value through a view of it."""
    x[ROWS // 2 :].copy_(y[: ROWS // 2].cos())
    return x


INSTRUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f.__name__: f
    for f in (
        halves,
        parts_of_one_product,
        in_place,
        sorted_rows,
        best_columns,
        normalised,
        transposed_product,
        bits,
        complex_product,
        half_precision,
        spread,
        shifted,
        attention,
        picked,
        double_precision,
        dead_end,
        without_gradient,
        dropped,
        same_storage,
        written,
        row_written,
    )
}
INSTRUCTIONS |= {
    "add": torch.add,
    "mul": lambda x, y: x.sin() * y,
    "gelu": lambda x, y: F.gelu(x) - y,
    "softmax": lambda x, y: x.softmax(1) * y,
    "linear": lambda x, y: x @ (y.T @ y) / ROWS,
    "cumsum": lambda x, y: x.cumsum(1) / COLS + y,
}
OF_THE_MODEL = ("weighted", "weighted_again", "summed", "noted")


@dataclass(frozen=True)
class Program:
    """Instructions, the values that are returned beside the last, by their place from the end, and leaves of autograd.

    `given_twice` passes the first input as the second one, too.
    """

    instructions: list[Instruction]
    outputs: list[int]
    with_grad: tuple[bool, bool]
    given_twice: bool

    def inputs(self) -> Values:
        """Return new inputs; the last needs no gradient and may be written to."""
        generator = torch.Generator().manual_seed(1)
        found = [torch.randn(ROWS, COLS, generator=generator) for _ in range(3)]
        found[:2] = (x.requires_grad_(needed) for x, needed in zip(found, self.with_grad, strict=False))
        return [found[0], found[0] if self.given_twice else found[1], found[2]]


class Interpreted(nn.Module):
    """A program as a model: with two names of one weight, and a buffer that it writes to."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        torch.manual_seed(0)
        self.weight = self.again = nn.Parameter(torch.randn(COLS, COLS) / 8)
        self.bias = nn.Parameter(torch.randn(COLS))
        self.register_buffer("total", torch.zeros(ROWS, COLS))

    def forward(self, *inputs: Tensor) -> Values:
        values = [inputs[0] * 1.5, inputs[1] + 0.5, inputs[2]]
        for name, first, second in self.program.instructions:
            x, y = (values[-1 - place % len(values)] for place in (first, second))
            result = self.of_the_model(name, x, y, inputs[2]) if name in OF_THE_MODEL else INSTRUCTIONS[name](x, y)
            values.append(torch.tanh(result) if len(values) % 3 == 0 else result)
        return [values[-1], *(values[-1 - place % len(values)] for place in self.program.outputs)]

    def of_the_model(self, name: str, x: Tensor, y: Tensor, given: Tensor) -> Tensor:
        if name == "weighted":
            return F.linear(x, self.weight, self.bias) - y
        if name == "weighted_again":
            return (y @ self.again).tanh() * x
        if name == "summed":
            self.total.add_(x.detach().sin())
            return self.total * y
        given.add_(y.detach().cos())
        return x * given.sin()


instructions = st.tuples(st.sampled_from(sorted((*INSTRUCTIONS, *OF_THE_MODEL))), st.integers(0, 6), st.integers(0, 6))


def programs(*, most: int = 10) -> st.SearchStrategy[Program]:
    """Programs of 4 to `most` instructions."""
    return st.builds(
        Program,
        instructions=st.lists(instructions, min_size=4, max_size=most),
        outputs=st.lists(st.integers(0, 5), max_size=2),
        with_grad=st.tuples(st.booleans(), st.booleans()),
        given_twice=st.booleans(),
    )


def train(run: Callable[..., Values], model: Interpreted) -> list[Tensor]:
    """Return what one step of `run`, which is `model` in some form, leaves: results, inputs, gradients and buffers."""
    torch.manual_seed(2)
    inputs = model.program.inputs()
    model.zero_grad()
    results = run(*inputs)
    if needed := [result for result in results if result.requires_grad]:
        generator = torch.Generator().manual_seed(3)
        weighted = [(result * torch.randn(ROWS, COLS, generator=generator)).sum() for result in needed]
        torch.stack(weighted).sum().backward()
    leaves = [x.grad for x in (*inputs, *model.parameters()) if x.is_leaf and x.grad is not None]
    return [tensor.detach().clone() for tensor in (*results, *inputs, *leaves, model.total)]

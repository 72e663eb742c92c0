"""Models whose layers are equal, nearly equal, or of several kinds: what is to be compiled once for all layers.

Each takes its batch and returns the loss, as the models of the zoo do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import HEADS, LENGTH, VOCAB, WIDTH, Block, Case, Gpt2, LlamaBlock, images, text, vectors

LAYERS = 5


class Llama(nn.Module):
    """Llama blocks behind rotary tables that each run computes, without a gradient and in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(LlamaBlock() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    @torch.no_grad()
    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            frequencies = 10_000.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2)
            angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
            return angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, tables = self.embed(tokens), self.tables(tokens.shape[1])
        for block in self.blocks:
            x = block(x, *tables)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Masked(nn.Module):
    """Attention with a mask and a bias that all layers share; what each layer makes counts in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias = nn.Embedding(VOCAB, WIDTH), nn.Embedding(2 * LENGTH, HEADS)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        steps = torch.arange(LENGTH)
        bias = self.bias(steps[None, :] - steps[:, None] + LENGTH).permute(2, 0, 1)
        mask = (tokens[:, None, None, :] > 3) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        bias = torch.where(mask, bias, -1e4)
        x, made = self.embed(tokens), []
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (
                y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in qkv(F.layer_norm(x, (WIDTH,))).chunk(3, -1)
            )
            weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
            x = x + out((weights @ v).transpose(1, 2).flatten(2))
            made.append(x)
        logits = torch.stack(made).mean(0) @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Ends(nn.Module):
    """A first layer that is wider than the others, and a last one without its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.ModuleList(nn.Linear(WIDTH, (8 if k == 0 else 4) * WIDTH) for k in range(LAYERS))
        self.narrow = nn.ModuleList(nn.Linear((8 if k == 0 else 4) * WIDTH, WIDTH) for k in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for k, (wide, narrow) in enumerate(zip(self.wide, self.narrow, strict=True)):
            y = narrow(F.gelu(wide(F.layer_norm(x, (WIDTH,)))))
            x = y if k == LAYERS - 1 else x + y
        return self.last(torch.tanh(x)).square().mean()


class TwoKinds(nn.Module):
    """An encoder, and a decoder whose layers read what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList(Block(causal=False) for _ in range(3))
        self.decoder = nn.ModuleList(Block(causal=True) for _ in range(4))
        self.cross = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        memory = self.embed(tokens)
        for block in self.encoder:
            memory = block(memory)
        y = self.embed(targets.roll(1, dims=1))
        for block, cross in zip(self.decoder, self.cross, strict=True):
            y = block(y) + F.scaled_dot_product_attention(cross(y), memory, memory)
        return F.cross_entropy((y @ self.embed.weight.T / WIDTH).flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    """Convolutions with batch norms, whose running statistics are written in place, as is what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.convolutions = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(LAYERS))
        self.head = nn.Linear(16, 10)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(pictures)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)).add_(x), inplace=True)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Shared(nn.Module):
    """One layer that runs several times: all calls have the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(causal=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = self.block(x)
        return self.head(x).square().mean()


class Frozen(nn.Module):
    """A model of which only adapters beside the layers are trained, so that the first layer has less of a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block(causal=True) for _ in range(LAYERS))
        self.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 8, bias=False) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(8, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block, down, up in zip(self.blocks, self.down, self.up, strict=True):
            x = block(x) + up(down(x))
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), targets.flatten())


class Cached(nn.Module):
    """Layers that write to what all of them are given, here a tensor that was made before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = torch.tanh(layer(F.layer_norm(x, (WIDTH,))))
            total.add_(x.detach())
        return (x * total).square().mean()


@dataclass(frozen=True, kw_only=True)
class Layered:
    """A model with the number of regions that it is to be, and how often each of them is called, most often first.

    It is `exact` unless sums of gradients are taken in another order: of values that pass from layer to layer beside
    the residual stream. It `moves` storages in a tight budget.
    """

    case: Case
    calls: tuple[int, ...]
    exact: bool = True
    moves: bool = True


def _layered(
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[..., Any],
    *calls: int,
    exact: bool = True,
    moves: bool = True,
    **more: Any,
) -> Layered:
    return Layered(case=Case(name=name, build=build, batch=batch, **more), calls=calls, exact=exact, moves=moves)


ALL = (
    _layered("gpt2", lambda: Gpt2(layers=LAYERS), text, 5, 1, 1),
    _layered("gpt2-dropout", lambda: Gpt2(layers=LAYERS, dropout=0.2), text, 5, 1, 1),
    _layered("gpt2-checkpoint", lambda: Gpt2(layers=LAYERS, checkpointed=True), text, 5, 1, 1, moves=False),
    _layered("gpt2-autocast", lambda: Gpt2(layers=LAYERS), text, 5, 1, 1, autocast=True),
    _layered("gpt2-accumulate", lambda: Gpt2(layers=LAYERS), text, 5, 1, 1, accumulate=3),
    _layered("llama", Llama, text, 5, 1, 1),
    _layered("llama-autocast", Llama, text, 5, 1, 1, autocast=True),
    _layered("masked", Masked, text, 5, 1, 1, exact=False),
    _layered("ends", Ends, vectors, 3, 1, 1),
    _layered("two-kinds", TwoKinds, text, 4, 3, 1, 1, 1, exact=False),
    _layered("residual", Residual, images, 5, 1, 1, exact=False),
    _layered("shared", Shared, vectors, 4, 1, 1),
    _layered("frozen", Frozen, text, 4, 1, 1),
)
"""Models with layers to find, and what is to be found."""

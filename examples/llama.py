"""A decoder of Llama's shape, in plain PyTorch: nothing here knows how it will be trained.

Each module with weights or tables has a `reset_parameters`, so that the model can be built on "meta", without a byte,
and be made module by module.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """How large a model is; `heads` is a multiple of `kv_heads`, `hidden` an even multiple of `heads`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int


SIZES = {
    "tiny": Shape(4, 256, 8, 2, 704, 2048),
    "1b": Shape(22, 2048, 32, 4, 5632, 32000),  # TinyLlama's
    "3b": Shape(28, 3072, 24, 8, 8192, 128256),  # Llama 3.2's, with a head of its own
    "7b": Shape(32, 4096, 32, 32, 11008, 32000),  # Llama 2's
    "8b": Shape(32, 4096, 32, 8, 14336, 128256),  # Llama 3's
}


class Rotary(nn.Module):
    """Cosines and sines by which queries and keys are turned, [T, D]: made again at each start, in no checkpoint."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, seq: int, width: int, theta: float = 500_000.0) -> None:
        super().__init__()
        self.theta = theta
        for name in ("cosines", "sines"):
            self.register_buffer(name, torch.empty(seq, width), persistent=False)

    def reset_parameters(self) -> None:
        """Compute the tables, in fp32 whatever they are kept in."""
        seq, width = self.cosines.shape
        rates = self.theta ** (torch.arange(0, width, 2, device=self.cosines.device).float() / -width)
        angles = torch.outer(torch.arange(seq, device=rates.device).float(), rates).repeat(1, 2)
        self.cosines.copy_(angles.cos())
        self.sines.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [B, heads, T, D], turned by its positions."""
        left, right = x.chunk(2, dim=-1)
        return x * self.cosines + torch.cat((-right, left), dim=-1) * self.sines


class Block(nn.Module):
    """Grouped-query attention, then a SwiGLU feed-forward: each after an RMSNorm and around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, self.width = shape.hidden, shape.hidden // shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, shape.kv_heads * self.width, bias=False)
        self.value = nn.Linear(hidden, shape.kv_heads * self.width, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, shape.ffn, bias=False), nn.Linear(hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, hidden, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Return the residual stream after this block."""
        y = self.norm1(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Predicts the next token. Returns the loss, so that the logits, too, stay inside the compiled region."""

    def __init__(self, shape: Shape, seq: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.rotary = Rotary(seq, shape.hidden // shape.heads)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.hidden, eps=1e-5), nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss on `text`, int64 of shape (batch, seq + 1)."""
        x = self.embed(text[:, :-1])
        for block in self.blocks:
            x = block(x, self.rotary)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), text[:, 1:].flatten())

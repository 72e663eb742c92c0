"""Small models of the kinds that people train, each with its data: what every compiler test is run on.

A model takes its batch and returns the loss. Activations are larger than the 4 KiB below which nothing is offloaded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, HEADS, LENGTH, BATCH = 97, 32, 4, 16, 8

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its batches by step, and how it is trained."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    autocast: bool = False
    accumulate: int = 1
    allow_rnn: bool = False


class Attention(nn.Module):
    """Causal or full self-attention with one projection for queries, keys and values, or cross-attention."""

    def __init__(self, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal, self.dropout = causal, dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(y.transpose(1, 2).reshape(b, t, WIDTH))


class Block(nn.Module):
    """A pre-norm transformer block as in GPT-2 and ViT."""

    def __init__(self, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(causal=causal, dropout=dropout)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.ln_1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.ln_2(x)))))


class Gpt2(nn.Module):
    """A GPT-2 with its embedding tied to the head; blocks may be checkpointed, or set apart by graph breaks."""

    def __init__(
        self, *, layers: int = 2, dropout: float = 0.0, checkpointed: bool = False, breaks: bool = False
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True, dropout=dropout) for _ in range(layers))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.wte.weight
        self.checkpointed, self.breaks = checkpointed, breaks

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), targets.flatten())


class RmsNorm(nn.Module):
    """Root-mean-square norm written out, as in Llama and T5."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaBlock(nn.Module):
    """Rotary, grouped-query attention and a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RmsNorm(), RmsNorm()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 96, bias=False), nn.Linear(WIDTH, 96, bias=False)
        self.down = nn.Linear(96, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.norm_1(x)
        q = rotate(self.q(h).view(b, t, HEADS, -1).transpose(1, 2), cos, sin)
        k, v = self.kv(h).view(b, t, HEADS, -1).transpose(1, 2).chunk(2, dim=1)
        k, v = (part.repeat_interleave(2, dim=1) for part in (rotate(k, cos, sin), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, WIDTH))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Two Llama blocks; the rotary tables are buffers."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(LENGTH), 10_000.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks, self.norm = nn.ModuleList(LlamaBlock() for _ in range(2)), RmsNorm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class T5(nn.Module):
    """One encoder and one decoder layer: relative position bias, explicit softmax, cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias = nn.Embedding(VOCAB, WIDTH), nn.Embedding(2 * LENGTH, HEADS)
        self.q, self.k, self.v, self.o = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)) for _ in range(4)
        )
        self.norms = nn.ModuleList(RmsNorm() for _ in range(5))
        self.wi, self.wo = (
            nn.ModuleList(nn.Linear(*shape, bias=False) for _ in range(2)) for shape in ((WIDTH, 64), (64, WIDTH))
        )

    def attend(self, layer: int, x: Tensor, memory: Tensor, bias: Tensor | float) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        q, k, v = heads(self.q[layer](x)), heads(self.k[layer](memory)), heads(self.v[layer](memory))
        weights = F.softmax(q @ k.transpose(-1, -2) + bias, dim=-1)
        return self.o[layer]((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        steps = torch.arange(LENGTH)
        distance = steps[None, :] - steps[:, None] + LENGTH
        bias = self.bias(distance).permute(2, 0, 1)
        causal = bias.masked_fill(distance > LENGTH, float("-inf"))
        x = self.embed(tokens)
        h = self.norms[0](x)
        x = x + self.attend(0, h, h, bias)
        x = x + self.wo[0](F.relu(self.wi[0](self.norms[1](x))))
        y = self.embed(targets.roll(1, dims=1))
        h = self.norms[2](y)
        y = y + self.attend(1, h, h, causal)
        y = y + self.attend(2, self.norms[3](y), x, 0.0)
        y = y + self.wo[1](F.relu(self.wi[1](self.norms[4](y))))
        return F.cross_entropy((y @ self.embed.weight.T).flatten(0, 1), targets.flatten())


class Vit(nn.Module):
    """Patches by convolution, a class token, full attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH))
        self.blocks, self.ln = nn.Sequential(*(Block(causal=False) for _ in range(2))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.place
        return F.cross_entropy(self.head(self.ln(self.blocks(x))[:, 0]), labels)


class ConvNet(nn.Module):
    """Residual convolutions with batch norm (its running statistics are written in place), pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn_0 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv_1, self.bn_1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv_2, self.bn_2 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.bn_0(self.stem(images)), inplace=True)
        x = F.relu(x + self.bn_1(self.conv_1(x)))
        x = F.max_pool2d(F.relu(self.bn_2(self.conv_2(x))), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Lstm(nn.Module):
    """A two-layer LSTM over the first half of an embedded text: each step of it is many ops."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        tokens, targets = tokens[:, : LENGTH // 2], targets[:, : LENGTH // 2]
        x, (h, _) = self.lstm(self.embed(tokens))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()) + h.square().mean()


class Views(nn.Module):
    """Saved views of one storage, in-place ops, ops with several outputs, slices that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.wide(x).split(WIDTH, dim=-1)
        y = torch.cat((a * b, (c.transpose(-1, -2) @ d).expand(x.shape[0], -1, -1)[:, :LENGTH].sin()), dim=-1)
        y = y.add(1).mul_(2).tanh_()
        top, where = y.topk(5, dim=-1)
        y = y.clone()
        y[:, ::2] += y[:, 1::2].detach()
        y = y.scatter_add(-1, where, top)
        best, _ = self.back(y).max(dim=-1)
        values, _ = y.flatten(1).sort(dim=-1)
        return (
            best.exp().mean()
            + values[:, ::3].square().mean()
            + torch.view_as_complex(y.unflatten(-1, (-1, 2))).abs().mean()
        )


class Turned(nn.Module):
    """Checkpointed layers that drop out what is turned: drawn anew in the backward, and turned back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self._drop, layer, x, use_reentrant=False)
        return x.square().mean()

    @staticmethod
    def _drop(layer: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(layer(x)).transpose(0, 1), 0.1).transpose(0, 1)


def text(step: int) -> Batch:
    """Return tokens and targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def images(step: int) -> Batch:
    """Return images and labels."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 3, 16, 16, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


def vectors(step: int) -> Batch:
    """Return a batch of sequences of vectors."""
    return (torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step)),)


CASES = (
    Case(name="gpt2", build=Gpt2, batch=text),
    Case(name="gpt2-dropout", build=lambda: Gpt2(dropout=0.2), batch=text),
    Case(name="gpt2-checkpoint", build=lambda: Gpt2(checkpointed=True), batch=text),
    Case(name="gpt2-checkpoint-dropout", build=lambda: Gpt2(checkpointed=True, dropout=0.2), batch=text),
    Case(name="gpt2-autocast", build=Gpt2, batch=text, autocast=True),
    Case(name="gpt2-accumulate", build=Gpt2, batch=text, accumulate=3),
    Case(name="gpt2-breaks", build=lambda: Gpt2(breaks=True), batch=text),
    Case(name="llama", build=Llama, batch=text),
    Case(name="t5", build=T5, batch=text),
    Case(name="vit", build=Vit, batch=images),
    Case(name="convnet", build=ConvNet, batch=images),
    Case(name="convnet-autocast", build=ConvNet, batch=images, autocast=True),
    Case(name="lstm", build=Lstm, batch=text, allow_rnn=True),
    Case(name="lstm-default", build=Lstm, batch=text),
    Case(name="views", build=Views, batch=vectors),
    Case(name="turned-dropout", build=Turned, batch=vectors),
)
"""Every model of the zoo."""


def case(name: str) -> Case:
    """Return the case of that name."""
    return next(each for each in CASES if each.name == name)

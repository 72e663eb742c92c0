"""The benchmark's models, in plain torch. Each returns its loss, so that all of the step is in the compiled region."""

from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Stack(nn.Module):
    """A model made of blocks; while `checkpointed`, each block's activations are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpointed = False

    def run_blocks(self, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
        """Return `x` after all `blocks`."""
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class DecoderBlock(nn.Module):
    """A decoder layer: attention with heads of 128 and a gated MLP, each behind an RMS norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // 128
        inner = int(8 * hidden / 3 / 256) * 256
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, [B, T, H] as its input."""
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.heads, 128).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        y = self.norm_2(x)
        y = F.silu(self.gate(y)) * self.up(y)
        added: Tensor = self.down(y)
        return x + added


class Decoder(Stack):
    """A decoder-only language model; `hidden` is a multiple of 128, at least 128."""

    def __init__(self, *, layers: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(DecoderBlock(hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of `targets` [B, T] given `tokens` [B, T]."""
        x = self.run_blocks(self.blocks, self.embed(tokens))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class MixtureBlock(nn.Module):
    """A decoder layer whose MLP is one of several experts, by token: the sizes are data, so that the graph breaks."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.heads = hidden // 128
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(hidden, 2 * hidden, bias=False) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(2 * hidden, hidden, bias=False) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, [B, T, H] as its input."""
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.heads, 128).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        y = self.norm_2(x).flatten(0, 1)
        weight, expert = self.router(y).softmax(-1).max(-1)
        order = expert.argsort()
        counts = torch.bincount(expert, minlength=len(self.up)).tolist()  # the graph breaks here
        parts = y[order].split(counts)
        found = [down(F.gelu(up(part))) for part, up, down in zip(parts, self.up, self.down, strict=True)]
        weighed = torch.cat(found) * weight[order].unsqueeze(-1)
        return x + torch.zeros_like(y).index_copy(0, order, weighed.to(y.dtype)).view(batch, seq, hidden)


class Mixture(Stack):
    """A decoder-only language model of mixtures of experts; `hidden` is a multiple of 128, at least 128."""

    def __init__(self, *, layers: int, hidden: int, vocabulary: int, experts: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(MixtureBlock(hidden, experts) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of `targets` [B, T] given `tokens` [B, T]."""
        x = self.run_blocks(self.blocks, self.embed(tokens))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class EncoderBlock(nn.Module):
    """A vision transformer's layer: attention with heads of 64 and a GELU MLP, each behind a layer norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // 64
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, [B, T, H] as its input."""
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        added: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + added


class VisionTransformer(Stack):
    """A ViT with patches of 16 and a mean over the patches; the defaults are ViT-L's."""

    def __init__(self, *, layers: int = 24, hidden: int = 1024, pixels: int = 224, classes: int = 1000) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, hidden, 16, stride=16)
        self.position = nn.Parameter(0.02 * self.patch.weight.new_ones(1, (pixels // 16) ** 2, hidden))
        self.blocks = nn.ModuleList(EncoderBlock(hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of `labels` [B] given `images` [B, 3, pixels, pixels]."""
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        x = self.norm(self.run_blocks(self.blocks, x))
        return F.cross_entropy(self.head(x.mean(1)).float(), labels)


class Bottleneck(nn.Module):
    """A residual block of three convolutions, the middle one 3x3, each followed by a batch norm."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels = 4 * width
        self.squeeze, self.norm_1 = nn.Conv2d(channels_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.spatial, self.norm_2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.expand, self.norm_3 = nn.Conv2d(width, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            convolution = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.skip = nn.Sequential(convolution, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = F.relu(self.norm_1(self.squeeze(x)))
        y = F.relu(self.norm_2(self.spatial(y)))
        return F.relu(self.norm_3(self.expand(y)) + self.skip(x))


class ResNet(Stack):
    """A ResNet of bottleneck blocks; the defaults are ResNet-50's."""

    def __init__(self, *, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.ModuleList()
        channels = width
        for stage, count in enumerate(blocks):
            for k in range(count):
                self.blocks.append(Bottleneck(channels, width << stage, stride=2 if stage and not k else 1))
                channels = 4 * (width << stage)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of `labels` [B] given `images` [B, 3, pixels, pixels]."""
        x = self.run_blocks(self.blocks, self.stem(images))
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


class UNet(Stack):
    """A diffusion model's UNet, of two convolutions a level; trained to tell the way from noise to the image."""

    def __init__(self, *, widths: tuple[int, ...] = (128, 256, 512, 512)) -> None:
        super().__init__()
        self.start, self.end = nn.Conv2d(4, widths[0], 3, 1, 1), nn.Conv2d(widths[0], 3, 3, 1, 1)
        below = list(pairwise(widths))
        self.down = nn.ModuleList(_two_convolutions(a, b, stride=2) for a, b in below)
        self.up = nn.ModuleList(_two_convolutions(a + b, a, stride=1) for a, b in reversed(below))

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error for `images` and `noise`, both [B, 3, pixels, pixels], mixed."""
        time = torch.linspace(0, 1, len(images), device=images.device, dtype=images.dtype)[:, None, None, None]
        mixed = torch.cat((images * (1 - time) + noise * time, time.expand(-1, 1, *images.shape[2:])), 1)
        kept = [self.start(mixed)]
        for block in self.down:
            kept.append(self.run_blocks([block], kept[-1]))
        x = kept.pop()
        for block in self.up:
            x = self.run_blocks([block], torch.cat((kept.pop(), F.interpolate(x, scale_factor=2)), 1))
        return F.mse_loss(self.end(x).float(), (noise - images).float())


def _two_convolutions(channels_in: int, channels: int, stride: int) -> nn.Sequential:
    first, second = nn.Conv2d(channels_in, channels, 3, stride, 1), nn.Conv2d(channels, channels, 3, 1, 1)
    return nn.Sequential(first, nn.GroupNorm(8, channels), nn.SiLU(), second, nn.GroupNorm(8, channels), nn.SiLU())

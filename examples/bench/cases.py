"""What is measured: each case is a model, a batch, a dtype, the ways to run by default, and what must come out."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from models import Decoder, ResNet, Stack, UNet, VisionTransformer
from torch import Tensor

Batch = tuple[Tensor, Tensor]

CHECKPOINTS = ("checkpoint", "checkpoint-compiled")
PEERS = (*CHECKPOINTS, "memory-budget:0.5", "native-offload", "save-on-cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case. `model` and `batch` are called with the device as torch's default device.

    `must` gives, for some ways, the largest ratio to plain that is good enough; `unbeaten` are the ways that nothing
    else may beat within their budget.
    """

    title: str
    model: Callable[[], Stack]
    batch: Callable[[], Batch]
    dtype: torch.dtype
    ways: tuple[str, ...]
    must: Mapping[str, float] = field(default_factory=dict)
    unbeaten: tuple[str, ...] = ()


def tokens(batch: int, seq: int, vocabulary: int) -> Batch:
    """Return random tokens and targets, [batch, seq]."""
    return torch.randint(vocabulary, (batch, seq)), torch.randint(vocabulary, (batch, seq))


def images(batch: int, pixels: int, classes: int) -> Batch:
    """Return random images in channels-last order and labels."""
    pictures = torch.randn(batch, 3, pixels, pixels).to(memory_format=torch.channels_last)
    return pictures, torch.randint(classes, (batch,))


def noisy_images(batch: int, pixels: int) -> Batch:
    """Return random images in channels-last order, and noise."""
    first, second = (torch.randn(batch, 3, pixels, pixels).to(memory_format=torch.channels_last) for _ in range(2))
    return first, second


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "A": Case(
            title="8 decoder layers of hidden 4096, batch 4 x 4096, bf16",
            model=partial(Decoder, layers=8, hidden=4096, vocabulary=32000),
            batch=partial(tokens, 4, 4096, 32000),
            dtype=torch.bfloat16,
            ways=(
                "plain",
                "tencache:joint@auto",
                *PEERS,
                *(f"tencache:all@{budget}" for budget in ("16.8", "13.8", "10.6")),
                "tencache:joint@floor",
                f"tencache:joint@16.8+host_budget=2GiB+spill_dir={tempfile.gettempdir()}",
            ),
            must={"tencache:joint@16.8": 1.01, "tencache:joint@13.8": 1.05, "tencache:joint@10.6": 1.12},
            unbeaten=tuple(f"tencache:joint@{budget}" for budget in ("16.8", "13.8", "10.6")),
        ),
        "deep": Case(
            title="32 decoder layers of hidden 2048, batch 8 x 2048, bf16",
            model=partial(Decoder, layers=32, hidden=2048, vocabulary=32000),
            batch=partial(tokens, 8, 2048, 32000),
            dtype=torch.bfloat16,
            ways=(
                "plain",
                *PEERS,
                *("memory-budget:0.3", "memory-budget:0.7"),
                *(f"tencache:all@peak/{share}" for share in ("1.5", "1.9", "2.5")),
            ),
            unbeaten=tuple(f"tencache:joint@peak/{share}" for share in ("1.5", "1.9", "2.5")),
        ),
        "wide": Case(
            title="4 decoder layers of hidden 8192, batch 2 x 4096, bf16",
            model=partial(Decoder, layers=4, hidden=8192, vocabulary=32000),
            batch=partial(tokens, 2, 4096, 32000),
            dtype=torch.bfloat16,
            ways=("plain", *CHECKPOINTS, "tencache:all@half-activations"),
            must={"tencache:joint@half-activations": 1.02},
        ),
        # 97 % and 92 % of plain's speed. Of 32000 words the logits alone would not fit peak/3.8.
        "fp32": Case(
            title="8 decoder layers of hidden 2048, batch 16 x 2048, fp32 without TF32",
            model=partial(Decoder, layers=8, hidden=2048, vocabulary=16000),
            batch=partial(tokens, 16, 2048, 16000),
            dtype=torch.float32,
            ways=("plain", "checkpoint", "tencache:all@peak/1.9", "tencache:all@peak/3.8"),
            must={"tencache:joint@peak/1.9": 1 / 0.97, "tencache:joint@peak/3.8": 1 / 0.92},
        ),
        "resnet": Case(
            title="ResNet-50, batch 256 x 224 x 224, bf16",
            model=ResNet,
            batch=partial(images, 256, 224, 1000),
            dtype=torch.bfloat16,
            ways=("plain", *CHECKPOINTS, *(f"tencache:all@{way}" for way in CHECKPOINTS)),
            unbeaten=tuple(f"tencache:joint@{way}" for way in CHECKPOINTS),
        ),
        "vit": Case(
            title="ViT-L/16, batch 128 x 224 x 224, bf16",
            model=VisionTransformer,
            batch=partial(images, 128, 224, 1000),
            dtype=torch.bfloat16,
            ways=("plain", *CHECKPOINTS, *(f"tencache:all@{way}" for way in CHECKPOINTS)),
            unbeaten=tuple(f"tencache:joint@{way}" for way in CHECKPOINTS),
        ),
        "long": Case(
            title="16 decoder layers of hidden 2048, one sequence of 65536 tokens, bf16",
            model=partial(Decoder, layers=16, hidden=2048, vocabulary=4096),
            batch=partial(tokens, 1, 65536, 4096),
            dtype=torch.bfloat16,
            ways=("plain", *CHECKPOINTS, *(f"tencache:joint@{way}" for way in ("peak/2", "checkpoint-compiled"))),
            unbeaten=("tencache:joint@checkpoint-compiled",),
        ),
        "unet": Case(
            title="UNet of 4 levels from 128 to 512 channels, batch 32 x 256 x 256, bf16",
            model=UNet,
            batch=partial(noisy_images, 32, 256),
            dtype=torch.bfloat16,
            ways=("plain", *CHECKPOINTS, *(f"tencache:joint@{way}" for way in ("peak/1.5", "checkpoint-compiled"))),
            unbeaten=("tencache:joint@checkpoint-compiled",),
        ),
        "tiny": Case(
            title="2 decoder layers of hidden 128, batch 4 x 256, fp32",
            model=partial(Decoder, layers=2, hidden=128, vocabulary=256),
            batch=partial(tokens, 4, 256, 256),
            dtype=torch.float32,
            ways=("plain", "checkpoint", "tencache:all@60%"),
        ),
    }
)

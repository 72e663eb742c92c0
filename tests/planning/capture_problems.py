"""Capture ten models of several kinds as `Problem`s, and write down what each policy makes of them.

    python tests/planning/capture_problems.py            # capture and plan all, with torch
    python tests/planning/capture_problems.py --plan     # plan what is there again, after plans have changed

Models have few layers and real sizes: a problem's sizes cost no planning time. Nothing is allocated and nothing is
measured: tensors are fakes, and rates are those of one large GPU behind PCIe 5 and one NVMe disk.
"""

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from captured import POLICIES, Run, planned, read_problem, read_runs, write_problem, write_runs

import tencache_fx
from examples.bench.models import Decoder
from tencache_fx.hardware.cache import cached
from tencache_fx.hardware.rates import device_key
from tencache_fx.hardware.roofline import Roofline
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import first_parameters, keep_resident
from tencache_fx.planning.problem import Budgets, Links, Problem
from tencache_fx.planning.search import policy_floor_bytes
from tencache_fx.reporting.dump import read_regions

GIB, TIB = 1 << 30, 1 << 40
LINKS = Links(
    d2h_bytes_per_s=48 * 10**9,
    h2d_bytes_per_s=48 * 10**9,
    d2h_duplex_bytes_per_s=40 * 10**9,
    h2d_duplex_bytes_per_s=40 * 10**9,
    disk_write_bytes_per_s=5 * 10**9,
    disk_read_bytes_per_s=6 * 10**9,
    host_bytes_per_s=150 * 10**9,
)
ROOFLINE = Roofline(
    flops_per_s=(("bfloat16", 600 * 10**12), ("float32", 50 * 10**12)),
    memory_bytes_per_s=3 * 10**12,
    launch_ns=3_000,
    issue_ns=4_000,
)
CPU = torch.device("cpu")


class Gpt2(nn.Module):
    """GPT-2 blocks, and an embedding that is the head, too."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.tokens(tokens) + self.places.weight)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _block(width: int, heads: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, heads, 4 * width, 0.0, activation="gelu", batch_first=True, norm_first=True
    )


class Adapted(nn.Module):
    """A frozen linear layer with a trained correction of low rank (LoRA)."""

    def __init__(self, frozen: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(requires_grad=False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False, dtype=frozen.weight.dtype)
        self.up = nn.Linear(rank, frozen.out_features, bias=False, dtype=frozen.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def _adapted_decoder() -> nn.Module:
    model = _decoder(layers=1).requires_grad_(requires_grad=False)
    for block in model.blocks:
        block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)
    return model


def _decoder(layers: int) -> nn.Module:
    return Decoder(layers=layers, hidden=4096, vocabulary=32000).bfloat16()


class Loss(nn.Module):
    """A model and its cross entropy."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x).float(), labels)


def _mlp() -> nn.Module:
    width = 8192
    layers = [module for _ in range(8) for module in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
    return Loss(*layers, nn.Linear(width, 1000)).bfloat16()


class Patches(nn.Module):
    """Images as rows of patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 16, stride=16)

    def forward(self, images: Tensor) -> Tensor:
        return self.cut(images).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    """The mean over a dimension or several."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims)


def _vit() -> nn.Module:
    return Loss(Patches(1024), *(_block(1024, 16) for _ in range(2)), Mean(1), nn.Linear(1024, 1000)).bfloat16()


def _conv(into: int, out: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(into, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out))


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, into: int, inner: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = _conv(into, inner, 1), _conv(inner, inner, 3, stride)
        self.third = _conv(inner, 4 * inner, 1)
        self.beside = _conv(into, 4 * inner, 1, stride) if into != 4 * inner else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.third(F.relu(self.second(F.relu(self.first(x))))) + self.beside(x))


def _resnet() -> nn.Module:
    stem = _conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    return Loss(*stem, Bottleneck(64, 64), Bottleneck(256, 128, 2), Mean(2, 3), nn.Linear(512, 1000))


class Unet(nn.Module):
    """Convolutions down and up again, joined by long connections."""

    def __init__(self, widths: Sequence[int] = (128, 256, 512)) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, widths[0], 3, padding=1), nn.Conv2d(widths[0], 4, 3, padding=1)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(self._level(a, b, 2) for a, b in pairs)
        self.up = nn.ModuleList(self._level(a + b, a, 1) for a, b in reversed(pairs))

    @staticmethod
    def _level(into: int, out: int, stride: int) -> nn.Sequential:
        return nn.Sequential(nn.GroupNorm(32, into), nn.SiLU(), nn.Conv2d(into, out, 3, stride, 1))

    def forward(self, noisy: Tensor, noise: Tensor) -> Tensor:
        x, kept = self.first(noisy), []
        for level in self.down:
            kept.append(x)
            x = level(x)
        for level in self.up:
            x = level(torch.cat((F.interpolate(x, scale_factor=2.0), kept.pop()), dim=1))
        return F.mse_loss(self.last(x), noise)


class Experts(nn.Module):
    """A feed-forward layer of which each token gets two experts, each of which takes a fixed number of tokens."""

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.norm, self.route = nn.LayerNorm(width), nn.Linear(width, count, bias=False)
        self.into, self.out = (
            nn.Parameter(torch.empty(count, width, inner)),
            nn.Parameter(torch.empty(count, inner, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x)
        count = len(self.into)
        taken, which = F.softmax(self.route(tokens), dim=-1).t().topk(2 * len(tokens) // count, dim=-1)
        y = torch.bmm(F.gelu(torch.bmm(tokens[which], self.into)), self.out) * taken[..., None]
        return x.index_add(0, which.flatten(), y.flatten(0, 1))


def _experts() -> nn.Module:
    return Loss(Experts(4096, 8192, 8), nn.Linear(4096, 32000)).bfloat16()


class Lstm(nn.Module):
    """An LSTM over a short text, one step after the other."""

    def __init__(self, *, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.into, self.again = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.into(self.embed(tokens))
        h = cell = torch.zeros_like(x[0, :, : x.shape[-1] // 4])
        for step in x:
            i, f, g, o = (step + self.again(h)).chunk(4, dim=-1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            h = o.sigmoid() * cell.tanh()
        return F.cross_entropy(self.head(h), targets)


class Recommender(nn.Module):
    """Large tables of embeddings, their products in pairs, and layers for these and for dense features."""

    def __init__(self, *, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear((tables + 1) ** 2 + width, 1024), nn.ReLU(), nn.Linear(1024, 1))

    def forward(self, dense: Tensor, rows: Tensor, clicked: Tensor) -> Tensor:
        first = self.dense(dense)
        parts = torch.stack((first, *(table(rows[k]) for k, table in enumerate(self.tables))), dim=1)
        pairs = torch.bmm(parts, parts.transpose(1, 2)).flatten(1)
        return F.binary_cross_entropy_with_logits(self.top(torch.cat((pairs, first), dim=1))[:, 0], clicked)


def ids(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.long)


def floats(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to capture: with `offloaded`, its parameters live in host memory, else all is on the device.

    `shares` are the tight and the medium budget: places between the least and the most device memory of use.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    offloaded: bool = False
    compiler: str = "eager"
    recompute: str = "auto"
    host_bytes: int = 512 * GIB
    disk_bytes: int = 0
    boundary_bytes: int = 0
    shares: tuple[float, float] = (0.1, 0.5)


MODELS = (
    Model(
        name="gpt2-tied",
        build=lambda: Gpt2(layers=1, width=1600, heads=25, vocabulary=50304, length=1024),
        inputs=lambda: (ids(8, 1024), ids(8, 1024)),
        offloaded=True,
    ),
    Model(
        name="llama",
        build=lambda: _decoder(layers=2),
        recompute="none",
        inputs=lambda: (ids(4, 4096), ids(4, 4096)),
        offloaded=True,
    ),
    Model(
        name="llama-adapted",
        build=_adapted_decoder,
        recompute="none",
        inputs=lambda: (ids(2, 4096), ids(2, 4096)),
        offloaded=True,
    ),
    Model(
        name="mlp-disk",
        compiler="inductor",
        build=_mlp,
        inputs=lambda: (floats(16384, 8192, dtype=torch.bfloat16), ids(16384)),
        recompute="none",
        host_bytes=2 * GIB,
        disk_bytes=64 * GIB,
    ),
    Model(
        name="vit",
        compiler="inductor",
        build=_vit,
        inputs=lambda: (floats(256, 3, 224, 224, dtype=torch.bfloat16), ids(256)),
        host_bytes=GIB,
        boundary_bytes=GIB,
    ),
    Model(name="resnet", build=_resnet, inputs=lambda: (floats(128, 3, 224, 224), ids(128)), shares=(0.05, 0.4)),
    Model(name="unet", build=Unet, inputs=lambda: (floats(32, 4, 256, 256), floats(32, 4, 256, 256))),
    Model(
        name="experts",
        compiler="inductor",
        build=_experts,
        inputs=lambda: (floats(16384, 4096, dtype=torch.bfloat16), ids(16384)),
        offloaded=True,
    ),
    Model(name="lstm", build=lambda: Lstm(width=2048, vocabulary=32000), inputs=lambda: (ids(6, 4096), ids(4096))),
    Model(
        name="recommender",
        build=lambda: Recommender(tables=6, rows=1_000_000, width=128),
        inputs=lambda: (floats(65536, 16), ids(6, 65536), floats(65536)),
        offloaded=True,
    ),
)


def capture(model: Model) -> Problem:
    """Return the problem of a training step, as the backend states it for a device that holds everything."""
    with torch.device("meta"):
        module, inputs = model.build(), model.inputs()
    with tempfile.TemporaryDirectory() as folder:
        options = {"device_budget": TIB, "host_budget": TIB, "recompute": model.recompute, "dump_dir": folder}
        options["compiler"] = model.compiler
        found = tencache_fx.fit(module, *inputs, device=CPU, **options)
        assert found.measured
        (record,) = read_regions(Path(folder))
    problem = record.captured
    if not model.offloaded:
        every = first_parameters(problem, 1.0)
        problem = keep_resident(problem, every, every)
    budgets = Budgets(device_bytes=None, host_bytes=model.host_bytes, disk_bytes=model.disk_bytes)
    links = LINKS if model.disk_bytes else replace(LINKS, disk_write_bytes_per_s=0, disk_read_bytes_per_s=0)
    least = max(4096, int(live_bytes(problem).max()) // 4096)
    return replace(problem, budgets=budgets, links=links, boundary_bytes=model.boundary_bytes, min_spill_bytes=least)


def budgets_of(problem: Problem, shares: tuple[float, float]) -> dict[str, int]:
    """Return the tight and the medium budget."""
    every = first_parameters(problem, 1.0)
    low, high = policy_floor_bytes(problem, "teraio"), int(live_bytes(keep_resident(problem, every, every)).max())
    return {name: int(low + share * (high - low)) for name, share in zip(("tight", "medium"), shares, strict=True)}


def plan_all(name: str, budgets: dict[str, int]) -> list[Run]:
    problem = read_problem(name)
    return [
        Run(
            problem=name,
            budget=budget,
            device_bytes=device_bytes,
            policy=policy,
            figures=planned(problem.within(device_bytes=device_bytes), policy),
        )
        for budget, device_bytes in budgets.items()
        for policy in POLICIES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="plan the problems that are there, at the same budgets")
    parser.add_argument("names", nargs="*", help="problems to capture (default: all)")
    arguments = parser.parse_args()
    if arguments.plan:
        known = {run.problem: {} for run in read_runs()}
        for run in read_runs():
            known[run.problem][run.budget] = run.device_bytes
    else:
        known = {}
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder  # what this machine has measured is not to be found
            cached(device_key("links", CPU), Links, lambda: LINKS)
            cached(device_key("roofline", CPU), Roofline, lambda: ROOFLINE)
            for model in MODELS:
                if not arguments.names or model.name in arguments.names:
                    write_problem(model.name, capture(model))
                    known[model.name] = budgets_of(read_problem(model.name), model.shares)
                    print(model.name, known[model.name], flush=True)
    write_runs(tuple(run for name, budgets in known.items() for run in plan_all(name, budgets)))


if __name__ == "__main__":
    main()

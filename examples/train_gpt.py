"""Train a small GPT on the Python standard library's own sources, in less device memory than that takes.

    python examples/train_gpt.py                  # any machine: trains in 60 % of what plain training holds
    python examples/train_gpt.py --compare        # the same, beside plain torch.compile: losses, peaks, step times
    python examples/train_gpt.py --device cuda --layers 8 --hidden 1024 --seq 1024 --budget 6GiB --spill-dir /scratch

The training loop is ordinary PyTorch. All that tencache adds to it is one `torch.compile` call: `compile_tencache`.
On a CPU, "device memory" is what the model's region holds: parameters, inputs, activations and gradients.
"""

import argparse
import itertools
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from tqdm import tqdm

import tencache_fx
from tencache_fx.units import format_bytes, format_ns

# ---------------------------------------------------------------- the model: a decoder-only transformer over bytes


class Block(nn.Module):
    """Causal attention, then a SwiGLU feed-forward: each after an RMSNorm and around a residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 6 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block; heads are 32 wide."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 32))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class GPT(nn.Module):
    """Predicts the next byte. Calling it returns the loss, so that the logits, too, stay inside the compiled region."""

    def __init__(self, layers: int, hidden: int, seq: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, 256, bias=False)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss on `text`, int64 of shape (batch, seq + 1)."""
        x = self.bytes(text[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


# ---------------------------------------------------------------- the text: what every Python brings along


def read_sources() -> tuple[Tensor, Tensor]:
    """Return the standard library's sources as bytes: nine tenths to train on, the rest to validate on."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def batches(text: Tensor, args: argparse.Namespace) -> Iterator[Tensor]:
    """Yield random pieces of `text` for ever; the same seed yields the same pieces."""
    random = torch.Generator().manual_seed(args.seed)
    while True:
        starts = torch.randint(len(text) - args.seq, (args.batch,), generator=random).tolist()
        yield torch.stack([text[start : start + args.seq + 1] for start in starts]).to(args.device, torch.int64)


# ---------------------------------------------------------------- training: nothing here knows who compiled the model


@dataclass
class Run:
    """What one training run showed."""

    losses: list[float]
    validation_loss: float
    step_ns: int
    peak_bytes: int


def train(name: str, compile_model: Callable[..., nn.Module], steps: int, args: argparse.Namespace) -> Run:
    """Train a fresh model; its second step is traced, to learn how much device memory is held at the peak."""
    torch._dynamo.reset()
    torch.manual_seed(args.seed)
    training_text, validation_text = read_sources()
    model = GPT(args.layers, args.hidden, args.seq).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # with zero gradients: it makes AdamW's state, which plans for a GPU must know of
    optimizer.zero_grad()
    compiled = compile_model(model, args)
    pieces, losses, stamps_ns = batches(training_text, args), [], [time.perf_counter_ns()]
    with tqdm(total=steps, desc=name, unit="step", mininterval=1.0) as bar:

        def step() -> None:
            loss = compiled(next(pieces))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            stamps_ns.append(time.perf_counter_ns())
            tokens_per_s = args.batch * args.seq * 1e9 / (stamps_ns[-1] - stamps_ns[-2])
            bar.set_postfix_str(f"loss {losses[-1]:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
            bar.update()

        on_gpu = args.device.type == "cuda"  # there AdamW's state counts, too
        held_bytes = torch.cuda.memory_allocated() if on_gpu else sum(p.nbytes for p in model.parameters())
        peak_bytes = held_bytes + tencache_fx.peak_bytes(step, args.device, warm_up=step)
        tencache_fx.stats()  # forget these two steps: the summary is about the ordinary ones
        for _ in range(steps - 2):
            step()

    steps_ns = [later - earlier for earlier, later in itertools.pairwise(stamps_ns)]
    with torch.no_grad():
        validation = [model(piece).item() for piece in itertools.islice(batches(validation_text, args), 8)]
    return Run(losses, statistics.mean(validation), int(statistics.median(steps_ns[3:] or steps_ns)), peak_bytes)


# ---------------------------------------------------------------- the two ways to compile, and the program


def compile_plain(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """Compile as torch does by itself."""
    return torch.compile(model, backend="inductor" if args.compiler == "inductor" else "aot_eager_decomp_partition")


def compile_tencache(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """Compile so that the budgets are kept."""
    options = {
        "device_budget": args.budget if args.policy != "none" else None,
        "host_budget": args.host_budget,
        "spill_dir": args.spill_dir,
        "policy": args.policy,
        "compiler": args.compiler,
        "dump_dir": args.dump_dir,
    }
    return torch.compile(model, backend="tencache", options=options)


def choose_compiler(args: argparse.Namespace) -> str:
    """Return the compiler asked for, or eager where Inductor could not build its kernels for a CPU."""
    if args.device.type != "cpu":
        return args.compiler
    try:
        get_cpp_compiler()
        missing = None if Path(sysconfig.get_paths()["include"], "Python.h").exists() else "Python.h"
    except InvalidCxxCompiler:
        missing = "a C++ compiler"
    if missing and args.compiler == "inductor":
        print(f"Inductor needs {missing} on a CPU, and there is none: the graphs run without it (--compiler eager).")
    return "eager" if missing else args.compiler


def main() -> None:
    args = make_parser(__doc__).parse_args()
    args.compiler = choose_compiler(args)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the traces of `peak_bytes` need no announcement
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory(prefix="tencache-") as fresh_dir:
        args.spill_dir = args.spill_dir or fresh_dir
        plain = None
        if args.compare or args.budget == "auto":
            plain = train("plain", compile_plain, args.steps if args.compare else 2, args)
        if args.budget == "auto":
            args.budget = plain.peak_bytes * 60 // 100
            if args.host_budget == "auto":
                args.host_budget = (plain.peak_bytes - args.budget) * 75 // 100
            print(f"\nPlain training holds {format_bytes(plain.peak_bytes)}. The device may hold 60 % of that;")
            print("host memory may hold 75 % of what is missing, so that some has to go to disk.\n")
        run = train("tencache", compile_tencache, args.steps, args)
        print("\n" + tencache_fx.report() + "\n\n" + summary(run, plain, tencache_fx.stats()))
        tencache_fx.close()
    if args.compare:
        print("\n" + comparison(plain, run))
    if args.dump_dir:
        print(f"\nTo see each tensor's transfers and the rewritten graphs: tencache dump {args.dump_dir} --what all")


def summary(run: Run, plain: Run | None, stats: dict[str, int | float]) -> str:
    rows = [
        ("training loss", f"{run.losses[0]:.3f} -> {run.losses[-1]:.3f}"),
        ("validation loss", f"{run.validation_loss:.3f}"),
        ("device peak, plain", format_bytes(plain.peak_bytes) if plain else "not run"),
        ("device peak, tencache", format_bytes(run.peak_bytes)),
        ("median step", format_ns(run.step_ns)),
    ]
    if stats:  # nothing was offloaded otherwise
        steps = max(1, len(run.losses) - 2)
        rows += [
            ("to host memory, a step", format_bytes(stats["d2h_bytes"] // steps)),
            ("of it on to disk, a step", format_bytes(stats["disk_write_bytes"] // steps)),
            ("stall, a step", format_ns(stats["stall_ns"] // steps)),
            ("there when wanted", f"{stats['hit_rate']:.0%} of the bytes"),
        ]
    return tabulate(rows, tablefmt="plain")


def comparison(plain: Run, run: Run) -> str:
    ways = (("plain", plain), ("tencache", run))
    rows = [(way, format_ns(r.step_ns), r.step_ns / plain.step_ns, format_bytes(r.peak_bytes)) for way, r in ways]
    table = tabulate(rows, headers=("way", "step", "ratio to plain", "device peak"), floatfmt=".3f")
    apart = max(abs(a - b) for a, b in zip(plain.losses, run.losses, strict=True))
    return f"{table}\n\nThe losses differ by at most {apart:.1e} over {len(run.losses)} steps."


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of this program's arguments; `draw_memory.py` takes them, too."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", default="auto", help="device bytes, such as 6GiB; auto: measure plain training")
    parser.add_argument("--host-budget", default="auto", help="pinned host bytes, such as 2GiB")
    parser.add_argument("--spill-dir", help="directory on a fast disk (default: a fresh temporary one)")
    parser.add_argument("--policy", choices=("joint", "teraio", "10cache", "none"), default="joint")
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    sizes = {"layers": 4, "hidden": 128, "batch": 8, "seq": 256, "steps": 100, "seed": 0, "lr": 2e-3}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=type(size), default=size, help=f"default: {size}")
    parser.add_argument("--compare", action="store_true", help="train the plain way, too, and compare")
    parser.add_argument("--dump-dir", help="keep the plan and the graphs here, for `tencache dump`")
    return parser


if __name__ == "__main__":
    main()

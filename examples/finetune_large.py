"""Train a Llama-shaped model whose weights, gradients and optimizer are larger than the device; stop and go on.

    python examples/finetune_large.py                  # any machine: a tiny model, in what its weights alone would take
    python examples/finetune_large.py --size 8b --batch 2 --seq 4096 --accumulate 4 --device-budget 20GiB \
        --steps 1000 --checkpoint run.pt --save-every 100
    python examples/finetune_large.py ... --resume      # the same command after a crash goes on where it had stopped
    python examples/finetune_large.py --weights out.safetensors --export new.safetensors

The loop is ordinary PyTorch: accumulation, clipping, a scheduler, `torch.save`. Three lines are tencache's: `offload`,
the optimizer, and the backend. The model is built on "meta" and made module by module, so it is never held twice.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import resource
import sysconfig
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from llama import SIZES, Llama, Shape
from tabulate import tabulate
from torch import Tensor, nn

import tencache_fx
from tencache_fx.units import format_bytes, format_ns


def choose_shape(args: argparse.Namespace) -> Shape:
    """Return the size asked for, with what was asked to be otherwise."""
    given = {field.name: getattr(args, field.name) for field in fields(Shape)}
    return replace(SIZES[args.size], **{name: value for name, value in given.items() if value is not None})


def build(args: argparse.Namespace) -> Llama:
    """Return the model without any bytes, on "meta", its first blocks frozen."""
    with torch.device("meta"):
        model = Llama(choose_shape(args), args.seq).to(getattr(torch, args.dtype))
    model.blocks[: args.freeze_layers].requires_grad_(requires_grad=False)
    return model


# ---------------------------------------------------------------- the text, and what of it a step sees


def read_tokens(path: Path | None, vocab: int) -> Tensor:
    """Return a text, by default Python's standard library, as words, spaces and signs, each a number by its hash."""
    files = [path] if path else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-m]*.py"))
    pieces = (piece for file in files for piece in re.findall(rb"\w+|\s+|[^\w\s]", file.read_bytes()))
    return torch.tensor([zlib.crc32(piece) % vocab for piece in pieces], dtype=torch.int32)


def batches(tokens: Tensor, step: int, args: argparse.Namespace) -> Iterable[Tensor]:
    """Yield the batches of one step, each (batch, seq + 1): the same for the same step, seed and text."""
    random = torch.Generator().manual_seed((args.seed << 32) + step)
    for _ in range(args.accumulate):
        starts = torch.randint(len(tokens) - args.seq, (args.batch,), generator=random).tolist()
        rows = torch.stack([tokens[start : start + args.seq + 1] for start in starts])
        yield rows.to(args.device, torch.int64, non_blocking=True)


# ---------------------------------------------------------------- files: whole or not there, and plain torch reads them


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` make a file, and put it in the place of `path` once all of it is on disk: never half a file."""
    part = path.with_name(path.name + ".part")
    try:
        write(part)
        _sync(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def export(model: nn.Module, path: Path) -> None:
    """Write the weights as a plain state_dict, as safetensors where that is installed."""
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    if importlib.util.find_spec("safetensors"):
        from safetensors.torch import save_file

        write_whole(path, lambda part: save_file(state, part))
        print(f"exported {path}: safetensors, for safetensors.torch.load_file")
    else:
        write_whole(path, lambda part: torch.save(state, part))
        print(f"exported {path}: for torch.load (safetensors is not installed)")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return a state_dict in either form; its bytes are read from disk as they are used."""
    if zipfile.is_zipfile(path):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    from safetensors.torch import load_file

    return load_file(path)


# ---------------------------------------------------------------- training


class Trainer:
    """A model, its optimizer and its schedule at one step; all of that can be saved, and gone on with."""

    def __init__(self, model: Llama, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args, shape = args, choose_shape(args)
        self.tokens = read_tokens(args.text, shape.vocab)
        self.settings = {name: getattr(args, name) for name in SETTINGS} | asdict(shape)
        self.settings["text"] = zlib.crc32(self.tokens.numpy())
        self.model = tencache_fx.offload(model, args.device)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = tencache_fx.optim.AdamW(
            groups, lr=args.lr, betas=(0.9, 0.95), step_in_backward=args.step_in_backward
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.share_of_lr)
        self.compiled = torch.compile(self.model, backend="tencache")
        self.done = 0
        self.loss = self.norm = 0.0

    def share_of_lr(self, step: int) -> float:
        """Return the learning rate at `step` as a share of `--lr`: a warm-up, then a cosine down to a tenth."""
        if step < self.args.warm_up:
            return (step + 1) / self.args.warm_up
        through = (step - self.args.warm_up) / max(1, self.args.steps - self.args.warm_up)
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, through))

    def step(self) -> None:
        """Train on the batches of the next step."""
        losses = []
        for text in batches(self.tokens, self.done, self.args):
            loss = self.compiled(text) / self.args.accumulate
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip) if self.args.clip else None
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.done += 1
        self.loss = torch.stack(losses).sum().item()
        self.norm = norm.item() if norm is not None else 0.0

    def save(self, path: Path) -> None:
        """Write all of it, once the updates under way are done."""
        start_ns = time.perf_counter_ns()
        state = {
            "step": self.done,  # says which text comes next
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state() if self.args.device.type == "cuda" else None,
        }
        write_whole(path, lambda part: torch.save(state, part))
        took_s = (time.perf_counter_ns() - start_ns) / 1e9
        print(f"saved {path}: step {self.done}, {format_bytes(path.stat().st_size)} in {took_s:.1f} s", flush=True)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote, or from the same made by plain torch; nothing of it is held twice."""
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        before = state.get("settings", self.settings)
        if changed := [name for name in self.settings if before.get(name) != self.settings[name]]:
            told = ", ".join(f"{name} {before.get(name)}, now {self.settings[name]}" for name in changed)
            raise SystemExit(f"{path} was made with {told}; give the same, or begin a new run with --weights.")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if "random" in state:
            torch.set_rng_state(state["random"])
        if state.get("random_cuda") is not None and self.args.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"])
        self.done = state["step"]
        print(f"resumed {path}: step {self.done}", flush=True)


def train(trainer: Trainer, args: argparse.Namespace) -> dict[str, int]:
    """Train to the end, and save as often as asked; return the peaks that were measured on the device."""
    last = min(args.steps, trainer.done + (args.stop_after or args.steps))
    marks_ns = [time.perf_counter_ns()]

    def step() -> None:
        trainer.step()
        marks_ns.append(time.perf_counter_ns())
        tell(trainer, marks_ns[-1] - marks_ns[-2], args)
        if args.checkpoint and (trainer.done == last or trainer.done % args.save_every == 0):
            trainer.save(args.checkpoint)
            marks_ns.append(time.perf_counter_ns())

    peaks = {}
    if args.device.type == "cuda" and trainer.done < last:
        step()
        peaks["device, until the first step"] = torch.cuda.max_memory_allocated(args.device)
        torch.cuda.reset_peak_memory_stats(args.device)
    elif last - trainer.done >= 2:
        peaks["device"] = tencache_fx.peak_bytes(step, args.device, warm_up=step)
    while trainer.done < last:
        step()
    if args.device.type == "cuda":
        peaks["device"] = torch.cuda.max_memory_allocated(args.device)
    return peaks


def tell_sizes(model: nn.Module, args: argparse.Namespace) -> int:
    """Print what training this model holds; return the bytes of its weights."""
    weights_bytes = sum(p.nbytes for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    state_bytes = sum(int(p.numel() * (10.125 if p.dtype == torch.bfloat16 else 12)) for p in trained)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.dtype} on {args.device}, {args.compiler}\n"
        f"in host memory: {format_bytes(weights_bytes)} of weights, {format_bytes(sum(p.nbytes for p in trained))} of "
        f"gradients, {format_bytes(state_bytes)} of AdamW's state",
        flush=True,
    )
    return weights_bytes


def tell(trainer: Trainer, step_ns: int, args: argparse.Namespace) -> None:
    """Print a line about the step before, and add one to the file."""
    tokens_per_s = args.accumulate * args.batch * args.seq * 1e9 / step_ns
    norm = f"norm {trainer.norm:.3f}  " if args.clip else ""
    print(
        f"step {trainer.done}/{args.steps}  loss {trainer.loss:.4f}  {norm}"
        f"{format_ns(step_ns)}  {tokens_per_s:,.0f} tokens/s",
        flush=True,
    )
    if args.json:
        line = {"step": trainer.done, "loss": trainer.loss, "norm": trainer.norm, "step_ns": step_ns}
        with args.json.open("a") as file:
            file.write(json.dumps(line) + "\n")


def summary(peaks: dict[str, int], args: argparse.Namespace) -> str:
    """Return what each tier held at most, beside what it was allowed."""
    stats, regions = tencache_fx.stats(), tencache_fx.regions()
    budgets = regions[-1].problem.budgets if regions else None
    limits = {}
    if budgets is not None:
        limits = {"device": budgets.device_bytes, "host, pinned": budgets.host_bytes, "disk": budgets.disk_bytes}
    rows = peaks | {
        "device, as planned": max((record.plan.forecast.peak_bytes for record in regions), default=0),
        "host, pinned": stats["host_pool_bytes"],
        "host, whole process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "disk": stats["disk_bytes"],
    }
    cells = [
        (name, format_bytes(n), format_bytes(limits[name]) if limits.get(name) else "") for name, n in rows.items()
    ]
    return tabulate(cells, headers=("", "peak", "budget"), disable_numparse=True)


# ---------------------------------------------------------------- the program

SETTINGS = ("dtype", "batch", "seq", "accumulate", "steps", "lr", "warm_up", "clip", "freeze_layers", "seed")
"""What losses depend on, beside the shape and the text: a run can be gone on with only if they are the same."""


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the traces of `peak_bytes` need no announcement
    torch.set_float32_matmul_precision("high")
    model = build(args)
    weights_bytes = tell_sizes(model, args)
    if args.device_budget is None:
        args.device_budget = "auto" if args.device.type == "cuda" else weights_bytes
    tencache_fx.configure(
        device_budget=args.device_budget,
        host_budget=args.host_budget,
        spill_dir=args.spill_dir or (),
        compiler=args.compiler,
    )
    try:
        trainer = Trainer(model, args)
        if args.resume and args.checkpoint.exists():
            trainer.load(args.checkpoint)
        elif args.resume:
            print(f"there is no {args.checkpoint} yet: a new run begins")
        elif args.weights:
            trainer.model.load_state_dict(read_weights(args.weights))
        peaks = train(trainer, args)
        if args.export:
            export(trainer.model, args.export)
        print("\n" + summary(peaks, args))
    finally:
        tencache_fx.close()


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--device", type=torch.device, default=torch.device("cuda" if on_cuda else "cpu"))
    add("--size", choices=SIZES, default="1b" if on_cuda else "tiny", help="a shape; the next flags change parts of it")
    for field in fields(Shape):
        add(f"--{field.name.replace('_', '-')}", type=int)
    add("--seq", type=int, default=2048 if on_cuda else 64)
    add("--batch", type=int, default=4)
    add("--accumulate", type=int, default=1, help="batches in a step (default: 1)")
    dtype = "bfloat16" if on_cuda else "float32"  # few CPUs are quick in bf16
    add("--dtype", choices=("bfloat16", "float32"), default=dtype, help="of weights; their masters are fp32")
    add("--device-budget", help="device bytes, such as 20GiB (default: auto; on a CPU, what the weights alone take)")
    add("--host-budget", default="auto", help="pinned host bytes, such as 64GiB")
    add("--spill-dir", help="directory on a fast disk, for activations (default: none)")
    add("--compiler", choices=("inductor", "eager"), help="default: inductor on a GPU, eager on a CPU")
    add("--steps", type=int, default=20, help="of the whole run, which the schedule is made for (default: 20)")
    add("--stop-after", type=int, help="stop after so many of them, as if time were up; --resume goes on")
    add("--lr", type=float, default=3e-4)
    add("--warm-up", type=int, default=5, help="steps of it (default: 5)")
    add("--clip", type=float, help="largest norm of all gradients; 0: any (default: 1.0; 0 with --step-in-backward)")
    add("--freeze-layers", type=int, default=0, help="so many blocks, the first ones, are not trained")
    add("--step-in-backward", action="store_true", help="update as gradients come: no clipping, no accumulation")
    add("--seed", type=int, default=0)
    add("--text", type=Path, help="a file to train on (default: the Python standard library's sources)")
    add("--weights", type=Path, help="begin with the weights of this state_dict, as --export writes it")
    add("--checkpoint", type=Path, help="save all of the run here, at its end and")
    add("--save-every", type=int, default=100, help="after so many steps (default: 100)")
    add("--resume", action="store_true", help="go on from the checkpoint, if it is there")
    add("--export", type=Path, help="write the weights here at the end, for plain torch")
    add("--json", type=Path, help="append a line to this file for each step")
    args = parser.parse_args(argv)
    args.compiler = args.compiler or ("inductor" if args.device.type == "cuda" else "eager")
    if args.step_in_backward and (args.clip or args.accumulate > 1):
        parser.error("--step-in-backward updates before all gradients are known: leave out --clip and --accumulate")
    if args.clip is None:
        args.clip = 0.0 if args.step_in_backward else 1.0
    if args.resume and not args.checkpoint:
        parser.error("--resume needs the --checkpoint to go on from")
    return args


if __name__ == "__main__":
    main()

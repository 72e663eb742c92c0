"""Train one model on several devices, each of which keeps its part of weights, gradients and state in host memory.

    torchrun --standalone --nproc-per-node 2 examples/train_sharded.py               # two processes on a CPU, over gloo
    torchrun --standalone --nproc-per-node 8 examples/train_sharded.py --layers 32 --hidden 4096 --device-budget 20GiB

Each process reads its own part of every batch. `--checkpoint DIR` is loaded from, if it is there, and saved to at the
end, with any number of processes.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn

import tencache_fx


class Block(nn.Module):
    """A feed-forward block around a residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (rows, hidden) after this block."""
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def batch(step: int, args: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return this rank's inputs of a step, and what the model is to make of them."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    x = torch.randn(args.rows, args.hidden, generator=generator).to(device)
    return x, x.roll(1, dims=1)


def main() -> None:
    """Train, and say how the loss falls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 4, "hidden": 256, "rows": 128, "steps": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--device-budget", default="auto", help="bytes of each device, such as 20GiB")
    parser.add_argument("--checkpoint", type=Path, help="a directory")
    args = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

    with torch.device("meta"):  # no rank ever has the whole model
        model = nn.Sequential(*(Block(args.hidden) for _ in range(args.layers)))
    torch.manual_seed(0)
    tencache_fx.offload(model, device, shard=True)
    optimizer = tencache_fx.optim.AdamW(model.parameters(), lr=1e-3)
    run = torch.compile(model, backend="tencache", options={"device_budget": args.device_budget})

    def step(number: int) -> Tensor:
        x, wanted = batch(number, args, device)
        loss = (run(x) - wanted).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach().clone())
        return mean / dist.get_world_size()

    begun = 0
    if args.checkpoint is not None and args.checkpoint.exists():
        step(0)  # makes the optimizer's state, to load to
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": torch.zeros(())}
        checkpoint.load(state, checkpoint_id=args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begun = int(state["steps"])
    for number in range(begun, begun + args.steps):
        loss = step(number)
        if dist.get_rank() == 0 and number % 5 == 4:
            print(f"step {number + 1}: loss {loss.item():.4f}", flush=True)
    if args.checkpoint is not None:
        steps = torch.tensor(float(begun + args.steps))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
        checkpoint.save(state, checkpoint_id=args.checkpoint)
    if dist.get_rank() == 0:
        own = sum(parameter.nbytes for parameter in model.parameters())
        print(f"{own:,} bytes of weights on each of {dist.get_world_size()} ranks")
    tencache_fx.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

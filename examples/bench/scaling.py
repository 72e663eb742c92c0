"""Weak scaling: the same model and batch a rank on one device and on several, beside FSDP2 and DeepSpeed that offload.

    python examples/bench/scaling.py --ranks 1 2 --layers 6 --hidden 4096 --batch 4 --seq 2048 --budget 10GiB
    python examples/bench/scaling.py --device cpu --ranks 1 2 --layers 2 --hidden 128 --batch 2 --seq 64 --budget 64MiB

A way is `ours` (`offload(model, shard=True)`, our AdamW with fp32 masters, one compiled region), `fsdp2` (fully_shard
of each block with CPUOffloadPolicy, mixed precision, torch's fused AdamW on fp32 weights, blocks compiled one by one)
or `deepspeed` (ZeRO-3 with parameters and optimizer on the CPU, blocks checkpointed; DeepSpeed is to be installed).
Each run is a torchrun of its own. Prints a JSON line a run: the median time of a step on rank 0, tokens a second and
device, that rank's peak on the device, the first and last loss, the seconds until the model was made and of the first
step, and for `ours` the pinned host memory of all ranks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import tokens
from exposure import exposed_shares
from models import Decoder
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import tencache_fx
from tencache_fx.optim import AdamW

VOCABULARY = 32000
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}


Step = Callable[..., torch.Tensor]  # trains for one step with a batch, and returns its loss


def ours(arguments: argparse.Namespace, device: torch.device) -> Step:
    """Return a step of the model, spread over the ranks' host memory."""
    torch.manual_seed(0)
    with torch.device("meta" if arguments.meta else "cpu"):
        model = Decoder(layers=arguments.layers, hidden=arguments.hidden, vocabulary=VOCABULARY).bfloat16()
    tencache_fx.offload(model, device, shard=dist.get_world_size() > 1)
    run = torch.compile(model, backend="tencache", options={"device_budget": arguments.budget})
    return partial(train_step, run, AdamW(model.parameters(), lr=1e-4, state_dtype=STATES[arguments.state]))


def fsdp2(arguments: argparse.Namespace, device: torch.device) -> Step:
    """Return a step of the model as FSDP2 has it, with fp32 weights in host memory."""
    torch.manual_seed(0)
    model = Decoder(layers=arguments.layers, hidden=arguments.hidden, vocabulary=VOCABULARY)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if device.type == "cuda":
        how["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        block.compile()
        fully_shard(block, **how)
    fully_shard(model, **how)
    return partial(train_step, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def deepspeed(arguments: argparse.Namespace, device: torch.device) -> Step:
    """Return a step of the model as DeepSpeed's ZeRO-3 has it, with parameters and fp32 state in host memory."""
    import deepspeed

    home = {"device": "cpu", "pin_memory": True}
    settings = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_param": home, "offload_optimizer": home},
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
        model = Decoder(layers=arguments.layers, hidden=arguments.hidden, vocabulary=VOCABULARY)
    model.checkpointed = True
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def train_step(run: Any, optimizer: torch.optim.Optimizer, *batch: torch.Tensor) -> torch.Tensor:
    """Train for one step; return its loss."""
    loss: torch.Tensor = run(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


WAYS = {"ours": ours, "fsdp2": fsdp2, "deepspeed": deepspeed}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps as one rank of several."""
    is_gpu = arguments.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu else "gloo")
    begun_s = time.perf_counter()
    step = WAYS[arguments.within[0]](arguments, device)
    made_s = time.perf_counter() - begun_s
    torch.manual_seed(1 + dist.get_rank())
    batch = [each.to(device) for each in tokens(arguments.batch, arguments.seq, VOCABULARY)]
    losses, step_ns = [], []
    for index in range(arguments.warm_up + arguments.steps):
        if is_gpu:
            torch.cuda.synchronize()
        if is_gpu and index == arguments.warm_up:
            torch.cuda.reset_peak_memory_stats()
        begun_ns = time.perf_counter_ns()
        losses.append(step(*batch).item())
        if is_gpu:
            torch.cuda.synchronize()
        step_ns.append(time.perf_counter_ns() - begun_ns)
    first_ns, step_ns = step_ns[0], step_ns[arguments.warm_up :]
    median_ns = int(statistics.median(step_ns))
    line: dict[str, Any] = {"step_ns": median_ns, "losses": [losses[0], losses[-1]]}
    line |= {"made_s": round(made_s, 1), "first_step_s": round(first_ns / 1e9, 1)}
    line["tokens_per_s"] = arguments.batch * arguments.seq * 1_000_000_000 // median_ns
    if is_gpu:
        line["peak_bytes"] = torch.cuda.max_memory_allocated()
        line["reserved_bytes"] = torch.cuda.max_memory_reserved()
    if is_gpu and arguments.trace:
        line |= exposed_shares(partial(step, *batch))
    if arguments.within[0] == "ours":
        held = torch.tensor(float(tencache_fx.stats()["host_pool_bytes"]))
        dist.all_reduce(held)
        line["host_bytes"] = int(held)
    del step
    tencache_fx.close()
    return line


def main() -> None:
    """Measure each way with each number of ranks, and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=["ours", "fsdp2"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", default="10GiB", help="of each device")
    sizes = {"layers": 6, "hidden": 4096, "batch": 4, "seq": 2048, "warm-up": 4, "steps": 6}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--meta", action="store_true", help="`ours`: no rank makes the model whole; other values")
    parser.add_argument("--state", choices=STATES, default="fp32", help="of `ours`' optimizer")
    parser.add_argument("--trace", action="store_true", help="how long only collectives or copies run, on GPUs")
    parser.add_argument("--within", nargs=2, help=argparse.SUPPRESS)  # a way, and the file for what is found
    arguments = parser.parse_args()
    if arguments.within:
        line = measure(arguments)
        if dist.get_rank() == 0:
            Path(arguments.within[1]).write_text(json.dumps(line))
        dist.destroy_process_group()
        return
    about = {"torch": torch.__version__, **vars(arguments)}
    del about["ways"], about["ranks"], about["within"]
    for way in arguments.ways:
        for ranks in arguments.ranks:
            with tempfile.TemporaryDirectory() as folder:
                found = Path(folder, "found.json")
                command = ["--standalone", "--nproc-per-node", str(ranks), __file__, *sys.argv[1:]]
                command += ["--within", way, str(found)]
                subprocess.run([sys.executable, "-m", "torch.distributed.run", *command], check=True)
                print(json.dumps(about | {"way": way, "ranks": ranks} | json.loads(found.read_text())), flush=True)


if __name__ == "__main__":
    main()

"""Generate with a Llama of transformers whose weights exceed the device: ours against accelerate's `cpu_offload`.

    python examples/bench/generate_hf.py --size 1b --batch 64 --prompt 128 --new 64 --ways plain tencache cpu_offload

A budget is given by its share of the weights: `--share 0.5` has a device half their size. `plain` has all of them on
the device; `cpu_offload` keeps no budget, it has one module there at a time. All have a static cache of keys and
values; `plain` and `tencache` are compiled. Prints JSON lines.
"""

import argparse
import statistics
import time
from typing import Any

import accelerate
import torch
from finetune_hf import SIZES, make
from measure import print_ways

import tencache_fx


@torch.no_grad()
def measure(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a way's tokens per second over all sequences, and its peak on the device in bytes."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model: Any = make(arguments.size).eval()
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if way == "cpu_offload":
        accelerate.cpu_offload(model, device)
    elif way == "tencache":
        model = tencache_fx.offload(model, device)
        model.compile(backend="tencache", options={"device_budget": int(weights_bytes * arguments.share)})
    else:
        model.to(device).compile()
    prompt = torch.randint(1, SIZES[arguments.size]["vocab_size"], (arguments.batch, arguments.prompt))
    prompt = prompt.to(device)
    how: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "cache_implementation": "static"}
    how |= {"do_sample": False, "disable_compile": True, "pad_token_id": 0, "eos_token_id": None}
    how |= {"max_new_tokens": arguments.new, "min_new_tokens": arguments.new}
    model.generate(prompt, **how)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times_ns = []
    for _ in range(arguments.times):
        start_ns = time.perf_counter_ns()
        tokens = model.generate(prompt, **how)
        tokens.cpu()
        times_ns.append(time.perf_counter_ns() - start_ns)
    median_ns = int(statistics.median(times_ns))
    return {
        "weights_bytes": weights_bytes,
        "median_ns": median_ns,
        "tokens_per_s": arguments.batch * arguments.new * 10**9 // median_ns,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "last_tokens": tokens[0, -8:].tolist(),
    }


def main() -> None:
    """Measure each way in turn and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    for name, default in (("batch", 4), ("prompt", 16), ("new", 8), ("times", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--share", type=float, default=0.5, help="the budget, as a share of the weights")
    parser.add_argument("--ways", nargs="+", default=["plain", "tencache", "cpu_offload"])
    arguments = parser.parse_args()
    print_ways(measure, arguments)


if __name__ == "__main__":
    main()

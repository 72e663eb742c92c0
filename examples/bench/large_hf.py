"""Train models of transformers with 7e9 parameters on short batches, with AdamW on exact fp32 masters.

    python examples/bench/large_hf.py --model opt --budget 48GiB

`tencache` offloads parameters, gradients and state, and updates during backward; `once` is that with
`repeated_layers="once"`; `plain` is torch.compile with torch's AdamW on bf16 weights, all on the device. A way to be
timed from empty caches is the only one of its process. Prints a JSON line a way: when the first step ended, from the
start of the way, the median of later steps, and what the counters say of one.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from measure import print_ways

import tencache_fx

Settings = dict[str, Any]
MODELS: dict[str, tuple[str, Callable[[int], Settings], Settings]] = {  # a class, layers, and what a tiny one has
    "opt": (
        "OPT",
        lambda layers: {
            "hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": layers, "num_attention_heads": 32,
            "word_embed_proj_dim": 4096,
        },
        {"hidden_size": 64, "ffn_dim": 256, "num_attention_heads": 4, "word_embed_proj_dim": 64, "vocab_size": 512},
    ),
    "bloom": (
        "Bloom",
        lambda layers: {"hidden_size": 4096, "n_layer": layers, "n_head": 32, "vocab_size": 250880},
        {"hidden_size": 64, "n_head": 4, "vocab_size": 512},
    ),
    "falcon": (
        "Falcon",
        lambda layers: {"num_hidden_layers": layers},
        {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512},
    ),
}  # fmt: skip
LAYERS = {"opt": 32, "bloom": 30, "falcon": 32}


def make(arguments: argparse.Namespace, device: torch.device) -> Any:
    """Return the model in bf16, with random weights, on a device."""
    name, settings, tiny = MODELS[arguments.model]
    settings_of_all = settings(arguments.layers or LAYERS[arguments.model]) | (tiny if arguments.tiny else {})
    config = getattr(transformers, f"{name}Config")(**settings_of_all)
    torch.manual_seed(0)
    with device:
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, dtype=torch.bfloat16)
    model.config.use_cache = False
    return model.train()


def measure(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in one way; times are in ns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begun_ns = time.perf_counter_ns()
    model = make(arguments, device)
    if way == "plain":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        model.compile()
    else:
        model = tencache_fx.offload(model, device)
        optimizer = tencache_fx.optim.AdamW(model.parameters(), lr=1e-5, step_in_backward=True)
        layers = "once" if way == "once" else "inline"
        model.compile(backend="tencache", options={"device_budget": arguments.budget, "repeated_layers": layers})
    tokens = torch.randint(0, model.config.vocab_size, (arguments.batch, arguments.seq), device=device)

    def step_ns() -> int:
        start_ns = time.perf_counter_ns()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        return time.perf_counter_ns() - start_ns

    step_ns()
    line: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_step_ended_ns": time.perf_counter_ns() - begun_ns,
    }
    for _ in range(arguments.warm_up):
        step_ns()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tencache_fx.stats()
    times_ns = [step_ns() for _ in range(arguments.steps)]
    stats = tencache_fx.stats()
    line |= {"median_ns": int(statistics.median(times_ns)), "steps_ns": times_ns, "hit_rate": stats["hit_rate"]}
    line |= {name: stats[name] // arguments.steps for name in ("h2d_bytes", "d2h_bytes", "stall_in_ns")}
    if device.type == "cuda":
        line["peak_bytes"] = torch.cuda.max_memory_allocated()
        line["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return line


def main() -> None:
    """Measure each way in turn and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="opt")
    for name, default in (("layers", 0), ("batch", 16), ("seq", 128), ("warm-up", 4), ("steps", 9)):
        parser.add_argument(f"--{name}", type=int, default=default, help="0: all" if name == "layers" else None)
    parser.add_argument("--budget", default="48GiB")
    parser.add_argument("--tiny", action="store_true", help="small layers, to try the program out on a CPU")
    parser.add_argument("--ways", nargs="+", default=["tencache"], choices=["tencache", "once", "plain"])
    print_ways(measure, parser.parse_args())


if __name__ == "__main__":
    main()

"""What `tencache fit` says of transformers models, beside what they measure: the time of a step, and the peak.

    python examples/bench/fit_hf.py --profile h200 --models llama gpt2 --share 0.4
    python examples/bench/fit_hf.py --device cpu --models tiny --share 0.5 --warm-up 2 --steps 5

Each model is trained whole under a budget: a share of what it would hold if nothing were offloaded, as `fit` has it.
Weights, gradients and AdamW's state, all but the weights in fp32, are in host memory; a step is a forward, a backward
and an update. The forecast is by a profile, or by the rates of this device. Each model has a process of its own.
Several may take their first steps at once (`--at-once`); the steps that count run one model after the other. Prints a
JSON line a model, with the shares by which the forecast is above the measured time and peak; a CPU counts no peak.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import tencache_fx
from tencache_fx.fitting.config_fit import fit_config
from tencache_fx.fitting.transformers_model import find_config
from tencache_fx.fitting.workload import Workload


class Model(NamedTuple):
    """A configuration of transformers, and a micro-batch of so many samples; of images, `sequence` is None."""

    config: str
    settings: dict[str, int]
    samples: int
    sequence: int | None


def _wide(hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": vocabulary,
    }  # fmt: skip


def _narrow(hidden: int, layers: int, **more: int) -> dict[str, int]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64, **more}


MODELS = {
    "llama": Model("LlamaConfig", _wide(2048, 8192, 8, 32, 8, 32000), 8, 2048),
    "qwen2": Model("Qwen2Config", _wide(1536, 8960, 8, 12, 2, 32000), 8, 2048),
    "mistral": Model("MistralConfig", _wide(4096, 14336, 4, 32, 8, 32000), 4, 2048),
    "gemma2": Model("Gemma2Config", _wide(2304, 9216, 6, 8, 4, 32000), 4, 2048),
    "phi3": Model("Phi3Config", _wide(3072, 8192, 4, 32, 32, 32064), 4, 2048),
    "gpt2": Model("GPT2Config", {"n_embd": 1024, "n_layer": 8, "n_head": 16, "vocab_size": 50304}, 16, 1024),
    "neox": Model("GPTNeoXConfig", _narrow(2048, 8, intermediate_size=8192, vocab_size=50304), 8, 2048),
    "opt": Model("OPTConfig", _narrow(2048, 8, ffn_dim=8192, word_embed_proj_dim=2048, vocab_size=50304), 8, 2048),
    "bert": Model("BertConfig", _narrow(1024, 12, intermediate_size=4096, vocab_size=30528), 32, 512),
    "vit": Model("ViTConfig", _narrow(1024, 16, intermediate_size=4096, num_labels=1000), 128, None),
    "tiny": Model("LlamaConfig", _wide(64, 128, 2, 4, 2, 256), 2, 32),
}


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what `fit` says of a model, and what it measures."""
    model, device = MODELS[name], torch.device(arguments.device)
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    load = Workload(
        config=model.config, settings=model.settings, dtype=dtype, sequence=model.sequence, micro_batch=model.samples
    )
    options: dict[str, Any] = {"host_budget": arguments.host_budget}
    target = {"profile": arguments.profile} if arguments.profile else {}
    place = None if arguments.profile else arguments.device
    whole = fit_config(load, place, options, **target)
    options["device_budget"] = int(whole.all_on_device_bytes * arguments.share)
    begun_ns = time.perf_counter_ns()
    fitted = fit_config(load, place, options, **target)
    line: dict[str, Any] = {
        "budget_bytes": options["device_budget"],
        "fits": fitted.fits,
        "fit_ns": time.perf_counter_ns() - begun_ns,
    }
    if not fitted.fits:
        return line | {"least_bytes": fitted.least_device_bytes}
    found = train(load, device, options, arguments)
    forecast = {"forecast_ns": fitted.whole_step_ns, "forecast_bytes": max(each.peak_bytes for each in fitted.regions)}
    off = {"time_above": forecast["forecast_ns"] / found["step_ns"] - 1}
    if found["peak_bytes"] is not None:
        off["peak_above"] = forecast["forecast_bytes"] / found["peak_bytes"] - 1
    return line | forecast | found | {key: round(value, 4) for key, value in off.items()}


def train(
    load: Workload, device: torch.device, options: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train a model with its weights in host memory; return the median time of a step, and the peak on a GPU."""
    configured = find_config(load)
    with torch.device(device):
        made: Any = getattr(transformers, configured.maker)
        model = made.from_config(configured.config, dtype=configured.dtype).to("cpu").train()
        batch = {
            key: torch.randint(0, 256, value.shape) if value.dtype is torch.int64 else torch.randn(value.shape)
            for key, value in configured.make(load.micro_batch or 1).named_inputs.items()
        }
    batch = {key: value.to(configured.dtype) if value.is_floating_point() else value for key, value in batch.items()}
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"
    model.config.use_cache = False
    model = tencache_fx.offload(model, device)
    optimizer = tencache_fx.optim.AdamW(model.parameters(), lr=1e-4)
    if device.type == "cuda":
        torch.cuda.empty_cache()

    def loss_of(**inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(**inputs).loss  # the logits would stay until the backward; `fit` has none
        return found

    run: Any = torch.compile(loss_of, backend="tencache", options=options)
    times_ns, begun_ns = [], time.perf_counter_ns()
    for step in range(arguments.warm_up + arguments.steps):
        if step == arguments.warm_up and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started_ns = time.perf_counter_ns()
        loss = run(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times_ns.append(time.perf_counter_ns() - started_ns)
        if step == 0:
            arguments.wait_for_turn()
    return {
        "loss": float(loss.detach()),
        "regions": len(tencache_fx.regions()),
        "first_step_ns": times_ns[0],
        "all_ns": time.perf_counter_ns() - begun_ns,
        "step_ns": int(statistics.median(times_ns[arguments.warm_up :])),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


def within(arguments: argparse.Namespace) -> None:
    """Measure one model; its first step is taken at once, the others once a line comes in."""
    name, file = arguments.within

    def wait_for_turn() -> None:
        Path(f"{file}.compiled").touch()
        sys.stdin.readline()

    arguments.wait_for_turn = wait_for_turn
    Path(file).write_text(json.dumps(measure(name, arguments)))
    tencache_fx.close()


def measure_at_once(names: Sequence[str], limit_s: float) -> Iterator[dict[str, Any]]:
    """Measure models whose first steps are taken at once, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, f"{name}.json") for name in names}
        processes = {
            name: subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--within", name, str(file)], stdin=subprocess.PIPE, text=True
            )
            for name, file in files.items()
        }
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s and not all(
            Path(f"{file}.compiled").exists() or processes[name].poll() is not None for name, file in files.items()
        ):
            time.sleep(0.1)
        for name, process in processes.items():
            try:
                process.communicate("go\n", timeout=max(1.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            ended = process.returncode
            yield {"model": name} | ({"error": f"ended with {ended}"} if ended else json.loads(files[name].read_text()))


def main() -> None:
    """Measure the models, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", help="a device profile to forecast by; else the rates of this device are")
    parser.add_argument("--share", type=float, default=0.4, help="the budget, of what all would take on the device")
    parser.add_argument("--host-budget", default="16GiB")
    for name, default in (("warm-up", 8), ("steps", 7), ("at-once", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit-s", type=int, default=300, help="for the models that are measured at once, together")
    parser.add_argument("--within", nargs=2, help=argparse.SUPPRESS)  # a model, and the file for what is found
    arguments = parser.parse_args()
    if arguments.within:
        within(arguments)
        return
    about = {"torch": torch.__version__, "transformers": transformers.__version__, **vars(arguments)}
    del about["models"], about["within"], about["limit_s"]
    for start in range(0, len(arguments.models), arguments.at_once):
        for line in measure_at_once(arguments.models[start : start + arguments.at_once], arguments.limit_s):
            print(json.dumps(about | line), flush=True)


if __name__ == "__main__":
    main()

"""Fine-tune a Llama of transformers by its Trainer: as it is, with gradient checkpointing, and in a device budget.

    python examples/bench/finetune_hf.py --size 1b --ways plain checkpointing tencache@12GiB
    python examples/bench/finetune_hf.py --size 1b --ways plain-lora checkpointing-lora tencache-lora@12GiB

All are compiled, `tencache` by our backend, the others by Inductor. Weights are bfloat16. In full fine-tuning,
`tencache` has the weights, and an AdamW with fp32 masters and moments, in host memory; the others have torch's
fused AdamW, whose moments are bfloat16 as the weights are. With LoRA all have that one, on the adapters. A step is
timed from one line of the log to the next, each of which reads the loss. Prints JSON lines, also with the time from the
start of the way to the end of its first step, and to what comes before that: the model, the training, the optimizer's
first step. `tencache` says what compiling took. A way to be timed from empty caches is the only one of its process.
"""

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
from measure import print_ways
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

import tencache_fx
from tencache_fx.integrations import hf

SIZES = {  # as in Meta's Llama 3.2, but for "tiny"
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "vocab_size": 128256},
}
HEAD_DIM = {"tiny": 32, "1b": 64, "3b": 128}


def make(size: str) -> LlamaForCausalLM:
    """Return a model of that size, in bfloat16, with random weights."""
    set_seed(0)
    shape = SIZES[size]
    heads = shape["hidden_size"] // HEAD_DIM[size]
    grouped = {"num_attention_heads": heads, "num_key_value_heads": min(8, heads // 2)}
    return LlamaForCausalLM(LlamaConfig(**shape, **grouped, tie_word_embeddings=True)).bfloat16()


class Clock(TrainerCallback):
    """Marks the time of each line of the training log, behind the loss of its step."""

    def __init__(self, warm_up: int) -> None:
        self.marks_ns: list[int] = []
        self.losses: list[float] = []
        self.start_ns: dict[str, int] = {}  # when the training, and its first update, began
        self._warm_up = warm_up

    def on_train_begin(self, *about: Any, **more: Any) -> None:
        """Note when the training begins."""
        self.start_ns["train"] = time.perf_counter_ns()

    def on_pre_optimizer_step(self, *about: Any, **more: Any) -> None:
        """Note when the first update begins, behind the first backward."""
        self.start_ns.setdefault("update", time.perf_counter_ns())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Note the time; forget the peak of what came before the first step that is timed."""
        if logs is None or "loss" not in logs:
            return
        self.marks_ns.append(time.perf_counter_ns())
        self.losses.append(float(logs["loss"]))
        if len(self.losses) == self._warm_up and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


def measure(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a way's median step in ns, its tokens per second, and its peak on the device in bytes."""
    kind, _, budget = way.partition("@")
    ours, lora = kind.startswith("tencache"), kind.endswith("lora")
    on_gpu = torch.cuda.is_available()
    begun_ns = time.perf_counter_ns()
    model: Any = make(arguments.size)
    if lora:
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).bfloat16()
    if ours:
        hf.register()
        tencache_fx.configure(device_budget=budget)
        model = tencache_fx.offload(model, "cuda" if on_gpu else "cpu")
    made_ns = time.perf_counter_ns()
    checkpointing = kind.startswith("checkpointing")
    if checkpointing and lora:
        model.enable_input_require_grads()
    vocabulary = SIZES[arguments.size]["vocab_size"]
    rows = [torch.randint(vocabulary, (arguments.seq,)) for _ in range(arguments.batch * 4)]
    clock = Clock(arguments.warm_up)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=arguments.batch,
            max_steps=arguments.warm_up + arguments.steps,
            use_cpu=not on_gpu,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            torch_compile=True,
            torch_compile_backend="tencache" if ours else "inductor",
            gradient_checkpointing=checkpointing,
        )
        optimizer = (tencache_fx.optim.AdamW, {"lr": 1e-4, "step_in_backward": arguments.step_in_backward})
        if lora or not ours:
            optimizer = (torch.optim.AdamW, {"lr": 1e-4, "fused": on_gpu})
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model, settings, train_dataset=data, callbacks=[clock], optimizer_cls_and_kwargs=optimizer)
        trainer.train()
    step_ns = int(statistics.median(b - a for a, b in pairwise(clock.marks_ns[arguments.warm_up - 1 :])))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_step_ended_ns": clock.marks_ns[0] - begun_ns,
        "start_ns": {name: at - begun_ns for name, at in ({"model": made_ns} | clock.start_ns).items()},
        "median_ns": step_ns,
        "tokens_per_s": arguments.batch * arguments.seq * 10**9 // step_ns,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "losses": [clock.losses[0], clock.losses[-1]],
        "stats": tencache_fx.stats() if ours else {},
        "compiling": tencache_fx.report().splitlines()[-2:] if ours else [],
    }


def main() -> None:
    """Measure each way in turn and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    for name, default in (("batch", 4), ("seq", 64), ("steps", 7), ("warm-up", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", default=["plain", "checkpointing", "tencache@4MB"])
    parser.add_argument("--step-in-backward", action="store_true", help="update in the backward; no clipping then")
    arguments = parser.parse_args()
    print_ways(measure, arguments)


if __name__ == "__main__":
    main()

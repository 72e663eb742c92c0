"""Fine-tune with the Trainer: weights, gradients and AdamW's state in host memory, the rest within 2.5 MB.

python examples/hf_trainer.py checkpoints           # and once more with --resume, to go on from the last checkpoint
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import tencache_fx
from tencache_fx.integrations import hf

SHAPE = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
TEXT = [{"input_ids": (ids := torch.arange(64) * step % 256), "labels": ids} for step in range(1, 49)]
USUAL = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "max_steps": 8}
USUAL |= {"use_cpu": not torch.cuda.is_available(), "logging_steps": 1, "save_steps": 4, "report_to": []}


def train(folder: str, *, resume: bool = False, plain: bool = False) -> Trainer:
    """Train for 8 steps, and save at the 4th and the 8th; `plain` is how it was before."""
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **SHAPE))
    compiling, optimizer = {}, torch.optim.AdamW
    if not plain:
        hf.register()
        tencache_fx.configure(device_budget="2.5MB", host_budget="64MiB")
        compiling, optimizer = {"torch_compile": True, "torch_compile_backend": "tencache"}, tencache_fx.optim.AdamW
        model = tencache_fx.offload(model, "cuda" if torch.cuda.is_available() else "cpu")
    arguments = TrainingArguments(folder, **USUAL, **compiling)
    chosen = (optimizer, {"lr": 1e-2})
    trainer = Trainer(model, arguments, train_dataset=TEXT, optimizer_cls_and_kwargs=chosen)
    hf.TencacheCallback.add_to(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], resume="--resume" in sys.argv)

"""Train with TRL, by examples (SFT) or by rewards (GRPO): the backbone's weights in host memory, the rest within 30 MB.

One argument of the configuration names the backend.

python examples/trl_training.py sft checkpoints     # or grpo
"""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, set_seed
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import tencache_fx
from tencache_fx.integrations import hf

SHAPE = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
WORDS = [*(f"w{k}" for k in range(253)), "<pad>", "<eos>", "<unk>"]
BUDGET = "30MB"  # of it 25 are a buffer of TRL's loss, which is as wide as 32768 words in each position
USUAL = {"per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 1}
USUAL |= {"use_cpu": not torch.cuda.is_available(), "bf16": False, "save_strategy": "no", "report_to": []}


def text(step: int, length: int) -> str:
    return " ".join(WORDS[k * step % 253] for k in range(length))


def tokenizer() -> PreTrainedTokenizerFast:
    """Return one that needs no download: every word is a token."""
    words = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def variety(completions: list[str], **_: object) -> list[float]:
    """Return the reward of each completion: how many different words it has."""
    return [float(len(set(each.split()))) for each in completions]


def train(way: str, folder: str, *, plain: bool = False) -> Trainer:
    """Train a small Llama for 6 steps; `plain` is how it was before."""
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **SHAPE))
    compiling, optimizer = {}, torch.optim.AdamW
    if not plain:
        hf.register()
        tencache_fx.configure(device_budget=BUDGET, host_budget="64MiB")
        compiling, optimizer = {"torch_compile_backend": "tencache"}, tencache_fx.optim.AdamW
        # The head stays on the device: TRL's loss reads its weight outside of compiled code.
        tencache_fx.offload(model.model, "cpu" if USUAL["use_cpu"] else "cuda")
    settings = {"output_dir": folder, **USUAL, **compiling}
    given = {"processing_class": tokenizer(), "optimizers": (optimizer(model.parameters(), lr=1e-2), None)}
    if way == "sft":
        data = Dataset.from_list([{"text": text(step, 30 + step % 20)} for step in range(1, 49)])
        trainer = SFTTrainer(model, args=SFTConfig(max_length=64, **settings), train_dataset=data, **given)
    else:
        data = Dataset.from_list([{"prompt": text(step, 8)} for step in range(1, 49)])
        config = GRPOConfig(num_generations=4, max_completion_length=12, **settings)
        trainer = GRPOTrainer(model, variety, args=config, train_dataset=data, **given)
    hf.TencacheCallback.add_to(trainer)
    trainer.train()
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2])

"""LoRA over frozen weights in host memory: they stream through the device, the small adapters stay there."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import tencache_fx

SHAPE = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
ADAPT = {"r": 4, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def make() -> torch.nn.Module:
    """Return a Llama of 2.9 million parameters with LoRA; adapters first, then offloaded."""
    set_seed(0)
    return get_peft_model(LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **SHAPE)), LoraConfig(**ADAPT))


def train(model: torch.nn.Module, steps: int = 6) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(1, steps + 1):
        tokens = torch.arange(32) * torch.arange(step, step + 2)[:, None] % 256
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    model = tencache_fx.offload(make())
    model.compile(backend="tencache", options={"device_budget": "4MB", "host_budget": "64MiB"})
    print(train(model))
    model.save_pretrained("adapters")

"""A plain loop with Accelerate: weights, gradients and AdamW's state in host memory, the rest within 5 MB."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import GPT2Config, GPT2LMHeadModel

import tencache_fx.integrations.dynamo_backend

SHAPE = {"vocab_size": 256, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0}
SHAPE |= {"eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "loss_type": "ForCausalLM"}
TEXT = torch.arange(64) * torch.arange(1, 49)[:, None] % 256


def train(folder: str, *, resume: bool = False, plain: bool = False) -> tuple[torch.nn.Module, list[float]]:
    set_seed(0)
    model, optimizer, backend = GPT2LMHeadModel(GPT2Config(**SHAPE)), torch.optim.AdamW, "no"
    if not plain:
        tencache_fx.integrations.dynamo_backend.register()
        tencache_fx.configure(device_budget="5MB", host_budget="64MiB")
        model, optimizer, backend = tencache_fx.offload(model), tencache_fx.optim.AdamW, "tencache"
    accelerator = Accelerator(gradient_accumulation_steps=2, dynamo_backend=backend)
    batches, losses = torch.utils.data.DataLoader(TEXT, batch_size=4), []
    model, optimizer, batches = accelerator.prepare(model, optimizer(model.parameters(), lr=1e-2), batches)
    if resume:
        accelerator.load_state(folder)
    for step, tokens in enumerate(accelerator.skip_first_batches(batches, 8) if resume else batches):
        with accelerator.accumulate(model):
            accelerator.backward(loss := model(input_ids=tokens, labels=tokens).loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        if step == 7:
            accelerator.save_state(folder)
    return model, torch.stack(losses).tolist()


if __name__ == "__main__":
    print(train("accelerate_state")[1])

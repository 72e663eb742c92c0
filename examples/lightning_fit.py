"""Lightning: the model is compiled in `configure_model`, in place, so that checkpoints have its own names."""

import lightning
import torch
from transformers import BertConfig, BertForMaskedLM

import tencache_fx

SHAPE = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = torch.arange(64) * torch.arange(1, 49)[:, None] % 256


class Task(lightning.LightningModule):
    plain = False

    def configure_model(self):
        if not hasattr(self, "model"):
            self.model, self.losses = BertForMaskedLM(BertConfig(**SHAPE)), []
            if not self.plain:
                tencache_fx.configure(device_budget="3MB", host_budget="64MiB")
                tencache_fx.offload(self.model, self.device).compile(backend="tencache")

    def training_step(self, batch, _):
        self.losses.append(self.model(input_ids=batch, labels=batch).loss)
        return self.losses[-1]

    def configure_optimizers(self):
        return (torch.optim if self.plain else tencache_fx.optim).AdamW(self.parameters(), lr=1e-3)


def fit(task, *, resume=None, **more):
    lightning.seed_everything(0)
    trainer = lightning.Trainer(accumulate_grad_batches=2, gradient_clip_val=0.5, **more)
    trainer.fit(task, torch.utils.data.DataLoader(TEXT, batch_size=4), ckpt_path=resume)
    return trainer


if __name__ == "__main__":
    fit(Task(), max_epochs=1)

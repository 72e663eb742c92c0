"""Small models of the families that people train, as their libraries build them: random weights, nothing downloaded.

A subject is a model, its inputs by step, and how a loss is had from what it returns. Sizes are such that activations
are worth moving (far above 4 KiB) and a step takes milliseconds. What libraries do by default stays: dropout, caches of
keys and values, masks of padding, tied weights.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, HIDDEN, LAYERS, HEADS, BATCH, LENGTH = 101, 64, 2, 4, 4, 64

Inputs = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model as a training loop has it: `loss(model(**inputs(step)))`."""

    model: nn.Module
    inputs: Callable[[int], Inputs]
    loss: Callable[[Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A builder of a subject, and the library it needs.

    `allow_rnn` lets Dynamo trace recurrent modules, which it leaves alone by default.
    """

    name: str
    build: Callable[[], Subject]
    library: str = "transformers"
    autocast: bool = False
    allow_rnn: bool = False

    @property
    def installed(self) -> bool:
        """Whether its library is there."""
        return importlib.util.find_spec(self.library) is not None


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def text(step: int, *, length: int = LENGTH) -> Inputs:
    """Return tokens to be predicted; the second half of the last row is padding, as a collator makes it."""
    tokens = torch.randint(3, VOCAB, (BATCH, length), generator=generator(step))
    mask = torch.ones_like(tokens)
    mask[-1, length // 2 :] = 0
    tokens = tokens.masked_fill(mask == 0, 0)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def images(step: int, *, size: int = 32) -> Tensor:
    return torch.randn(BATCH, 3, size, size, generator=generator(step))


def labels(step: int) -> Tensor:
    return torch.randint(0, 10, (BATCH,), generator=generator(step))


def own_loss(returned: Any) -> Tensor:
    """Return the loss that a model of transformers has computed."""
    loss: Tensor = returned.loss
    return loss


def from_transformers(
    kind: str,
    auto: str,
    inputs: Callable[[int], Inputs] = text,
    loss: Callable[[Any], Tensor] = own_loss,
    **sizes: Any,
) -> Callable[[], Subject]:
    """Return a builder of the model that `auto` makes of a config of `kind`."""

    def build() -> Subject:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = getattr(transformers, auto)
        model = model.from_config(config) if auto.startswith("Auto") else model(config)
        return Subject(model=model.train(), inputs=inputs, loss=loss)

    return build


LLAMA_LIKE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 2 * LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: Mapping[str, Any] = {**LLAMA_LIKE, "num_key_value_heads": 2}


def decoder(kind: str, **sizes: Any) -> Callable[[], Subject]:
    return from_transformers(kind, "AutoModelForCausalLM", **sizes)


def classes(step: int) -> Inputs:
    return {"pixel_values": images(step), "labels": labels(step)}


def pairs(step: int) -> Inputs:
    """Return texts and the images they describe."""
    inputs = text(step, length=LENGTH // 2)
    inputs["input_ids"][:, -1] = VOCAB - 1  # where CLIP reads the text's embedding
    del inputs["labels"]
    return {**inputs, "pixel_values": images(step), "return_loss": True}  # type: ignore[dict-item]


def speech(step: int) -> Inputs:
    """Return spectrograms and what is said in them."""
    sound = torch.randn(BATCH, 16, 2 * LENGTH, generator=generator(step))
    return {"input_features": sound, "labels": text(step, length=LENGTH // 2)["labels"]}


SMALL_TOWER: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}


def from_timm(name: str, **sizes: Any) -> Callable[[], Subject]:
    """Return a builder of a classifier of timm's."""

    def build() -> Subject:
        import timm

        model = timm.create_model(name, num_classes=10, **sizes)
        return Subject(
            model=model.train(),
            inputs=lambda step: {"x": images(step)},
            loss=lambda logits: F.cross_entropy(logits, labels(0).repeat(len(logits) // BATCH).to(logits.device)),
        )

    return build


def noise(step: int, *, channels: int, size: int) -> Inputs:
    """Return noisy images and the time step of each."""
    sample = torch.randn(BATCH, channels, size, size, generator=generator(step))
    return {"sample": sample, "timestep": torch.randint(0, 1000, (BATCH,), generator=generator(step))}


def denoised(returned: Any) -> Tensor:
    loss: Tensor = returned.sample.square().mean()
    return loss


def unet() -> Subject:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
    )
    return Subject(model=model.train(), inputs=lambda step: noise(step, channels=3, size=16), loss=denoised)


def conditional_unet() -> Subject:
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
        cross_attention_dim=HIDDEN,
        attention_head_dim=8,
    )

    def inputs(step: int) -> Inputs:
        told = torch.randn(BATCH, 8, HIDDEN, generator=generator(step))
        return {**noise(step, channels=4, size=16), "encoder_hidden_states": told}

    return Subject(model=model.train(), inputs=inputs, loss=denoised)


def diffusion_transformer() -> Subject:
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_num_groups=4,
    )

    def inputs(step: int) -> Inputs:
        given = noise(step, channels=4, size=16)
        return {"hidden_states": given["sample"], "timestep": given["timestep"], "class_labels": labels(step)}

    return Subject(model=model.train(), inputs=inputs, loss=denoised)


class SelectiveScan(nn.Module):
    """A state-space layer as in Mamba, with its recurrence as torch's associative scan."""

    def __init__(self, *, state: int = 4) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.steps, self.writes, self.reads = (nn.Linear(HIDDEN, size) for size in (HIDDEN, state, state))
        self.rates = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(HIDDEN, 1))

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.associative_scan import associative_scan

        x, gate = self.inward(x).chunk(2, dim=-1)
        step = F.softplus(self.steps(x))
        keep = torch.exp(-step[..., None] * self.rates.exp())
        add = (step * x)[..., None] * self.writes(x)[..., None, :]
        _, states = associative_scan(
            lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (keep, add), dim=1, combine_mode="generic"
        )
        return self.outward((states * self.reads(x)[..., None, :]).sum(-1) * F.silu(gate))


class Recurrent(nn.Module):
    """A language model of layers that go along the text."""

    def __init__(self, layers: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, HIDDEN), layers()
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.layers(self.embed(input_ids))
        x = x[0] if isinstance(x, tuple) else x
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def short_text(step: int) -> Inputs:
    inputs = text(step, length=LENGTH // 2)
    return {"input_ids": inputs["input_ids"], "labels": inputs["labels"]}


def recurrent(layers: Callable[[], nn.Module]) -> Callable[[], Subject]:
    return lambda: Subject(model=Recurrent(layers), inputs=short_text, loss=lambda loss: loss)


def scan() -> nn.Module:
    return nn.Sequential(*(SelectiveScan() for _ in range(2)))


def lstm() -> nn.Module:
    return nn.LSTM(HIDDEN, HIDDEN, num_layers=2, batch_first=True)


def gru() -> nn.Module:
    return nn.GRU(HIDDEN, HIDDEN, bidirectional=False, batch_first=True)


MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "output_router_logits": True}

T5: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "d_kv": 16,
    "d_ff": 2 * HIDDEN,
    "num_layers": 2,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}
VIT: Mapping[str, Any] = {"image_size": 32, "patch_size": 4, "num_labels": 10, **SMALL_TOWER}

FAMILIES = (
    Family(name="gpt2", build=decoder("gpt2", vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS)),
    Family(name="llama", build=decoder("llama", **GROUPED)),
    Family(name="qwen2", build=decoder("qwen2", **GROUPED)),
    Family(name="qwen3", build=decoder("qwen3", head_dim=16, **GROUPED)),
    Family(name="mistral", build=decoder("mistral", sliding_window=16, **GROUPED)),
    Family(name="mixtral", build=decoder("mixtral", **MOE, **GROUPED)),
    Family(name="gemma", build=decoder("gemma", head_dim=16, **GROUPED)),
    Family(name="gemma2", build=decoder("gemma2", head_dim=16, sliding_window=16, **GROUPED)),
    Family(name="phi", build=decoder("phi", partial_rotary_factor=0.5, **LLAMA_LIKE)),
    Family(name="gptj", build=decoder("gptj", vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=HEADS, rotary_dim=8)),
    Family(
        name="opt",
        build=decoder(
            "opt", ffn_dim=2 * HIDDEN, word_embed_proj_dim=HIDDEN, **{**LLAMA_LIKE, "intermediate_size": None}
        ),
    ),
    Family(name="bloom", build=decoder("bloom", vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS)),
    Family(name="falcon", build=decoder("falcon", **LLAMA_LIKE)),
    Family(name="bert", build=from_transformers("bert", "AutoModelForMaskedLM", **LLAMA_LIKE)),
    Family(name="t5", build=from_transformers("t5", "AutoModelForSeq2SeqLM", **T5)),
    Family(
        name="whisper",
        build=from_transformers(
            "whisper",
            "WhisperForConditionalGeneration",
            speech,
            vocab_size=VOCAB,
            num_mel_bins=16,
            d_model=HIDDEN,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=2 * HIDDEN,
            decoder_ffn_dim=2 * HIDDEN,
            max_source_positions=LENGTH,
            max_target_positions=LENGTH,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
    ),
    Family(name="vit", build=from_transformers("vit", "AutoModelForImageClassification", classes, **VIT)),
    Family(
        name="clip",
        build=from_transformers(
            "clip",
            "CLIPModel",
            pairs,
            text_config={**SMALL_TOWER, "vocab_size": VOCAB, "eos_token_id": VOCAB - 1, "pad_token_id": 0},
            vision_config={**SMALL_TOWER, "image_size": 32, "patch_size": 4},
            projection_dim=HIDDEN,
        ),
    ),
    Family(
        name="mamba",
        build=decoder("mamba", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4, pad_token_id=0),
    ),
    Family(
        name="convnext", library="timm", build=from_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 32, 64, 64))
    ),
    Family(name="resnet", library="timm", build=from_timm("resnet10t", channels=(16, 32, 32, 64))),
    Family(
        name="vit-timm", library="timm", build=from_timm("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=2)
    ),
    Family(
        name="swin",
        library="timm",
        build=from_timm(
            "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4)
        ),
    ),
    Family(name="unet", library="diffusers", build=unet),
    Family(name="unet-conditional", library="diffusers", build=conditional_unet),
    Family(name="dit", library="diffusers", build=diffusion_transformer),
    Family(name="scan", library="torch", build=recurrent(scan)),
    Family(name="lstm", library="torch", build=recurrent(lstm), allow_rnn=True),
    Family(name="lstm-untraced", library="torch", build=recurrent(lstm)),
    Family(name="gru", library="torch", build=recurrent(gru), allow_rnn=True),
)
"""Every row of the matrix."""

INNER = {"intermediate_size": 4 * HIDDEN}
WIDE = (
    Family(name="llama-wide", build=decoder("llama", **{**GROUPED, **INNER})),
    Family(name="bert-wide", build=from_transformers("bert", "AutoModelForMaskedLM", **{**LLAMA_LIKE, **INNER})),
    Family(name="t5-wide", build=from_transformers("t5", "AutoModelForSeq2SeqLM", **{**T5, "d_ff": 4 * HIDDEN})),
    Family(
        name="vit-wide",
        build=from_transformers("vit", "AutoModelForImageClassification", classes, **{**VIT, **INNER}),
    ),
)
"""Families with matrices of 64 KiB, the least that is offloaded, where the row of the matrix has none."""


def family(name: str) -> Family:
    """Return the family of that name."""
    return next(each for each in (*FAMILIES, *WIDE) if each.name == name)

"""Generation by models whose weights exceed the device: the same tokens as without tencache, with either cache."""

import pytest
import torch

import tencache_fx

pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, set_seed

pytestmark = pytest.mark.usefixtures("quick_libraries")

BUDGET_BYTES = {"llama": 4_000_000, "gpt2": 5_000_000, "tied": 6_600_000}


def make(kind: str) -> torch.nn.Module:
    set_seed(0)
    tokens = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4, n_positions=128, **tokens)).eval()
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    if kind == "tied":
        tokens |= {"vocab_size": 4096, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **shape, **tokens)).eval()


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        pytest.param("llama", "dynamic", marks=pytest.mark.slow),
        pytest.param("llama", "static", marks=pytest.mark.slow),
        ("gpt2", "dynamic"),
        ("tied", "static"),
    ],
)
def test_prefill_and_decode_find_the_same_tokens(kind: str, cache: str) -> None:
    prompt = torch.randint(1, 256, (2 if kind != "tied" else 16, 16), generator=torch.Generator().manual_seed(3))
    how = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt), "disable_compile": True}
    how |= {"cache_implementation": "static"} if cache == "static" else {}
    with torch.no_grad():
        expected = make(kind).generate(prompt, **how)
        model = tencache_fx.offload(make(kind))
        model.compile(backend="tencache", options={"device_budget": BUDGET_BYTES[kind], "host_budget": "64MiB"})
        first, second = model.generate(prompt, **how), model.generate(prompt, **how)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights > 2 * BUDGET_BYTES[kind]
    plans = [record.plan for record in tencache_fx.regions()]  # transformers breaks graphs in some of its releases
    assert sum(bool(plan.transfers) for plan in plans) >= 2, "for the prompt, and for each token"
    assert all(plan.forecast.peak_bytes <= BUDGET_BYTES[kind] for plan in plans)
    assert tencache_fx.stats()["h2d_bytes"] > weights

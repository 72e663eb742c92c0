"""Losses of the GPT of `train_gpt.py` by what the optimizer keeps its state in, beside torch's own optimizer.

    python examples/loss_curves.py --steps 300 --seeds 2

Weights are bf16 and in host memory, and our AdamW has fp32 masters. `torch` has all on the device and steps fp32
weights, of which a bf16 copy is trained: the same arithmetic with nothing of ours. All see the same text in the same
order. Prints a JSON line a run: the mean loss of every `--every` steps, and the loss on other text at the end.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from train_gpt import GPT, batches, read_sources

import tencache_fx
from tencache_fx.optim import AdamW


class Model(GPT):
    """The same model with its loss in fp32: in bf16 losses would have three digits."""

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss on `text`, int64 of shape (batch, seq + 1)."""
        x = self.bytes(text[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), text[:, 1:].flatten())


STATES: dict[str, Any] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}


def ours(model: Model, state: str, arguments: argparse.Namespace) -> Callable[[], None]:
    """Offload the model; return what takes a step of our optimizer, with its state in `state`."""
    tencache_fx.offload(model, arguments.device)
    optimizer = AdamW(model.parameters(), lr=arguments.lr, state_dtype=STATES[state])

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchs(model: Model, arguments: argparse.Namespace) -> Callable[[], None]:
    """Return what takes a step of torch's optimizer on fp32 copies of the weights."""
    pairs = [(weight, weight.detach().float().requires_grad_()) for weight in model.parameters()]
    optimizer = torch.optim.AdamW([master for _, master in pairs], lr=arguments.lr)

    @torch.no_grad()
    def step() -> None:
        for weight, master in pairs:
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        for weight, master in pairs:
            weight.copy_(master)

    return step


def train(state: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one model, and return its losses."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    arguments.seed = seed
    model = Model(arguments.layers, arguments.hidden, arguments.seq).to(arguments.device, torch.bfloat16)
    step = torchs(model, arguments) if state == "torch" else ours(model, state, arguments)
    run: Any
    if state == "torch":
        eager = arguments.compiler == "eager"
        run = torch.compile(model, backend="aot_eager_decomp_partition" if eager else "inductor")
    else:
        run = torch.compile(model, backend="tencache", options={"compiler": arguments.compiler})
    training_text, validation_text = read_sources()
    losses = []
    for text in islice(batches(training_text, arguments), arguments.steps):
        loss = run(text)
        loss.backward()
        step()
        losses.append(loss.item())
    with torch.no_grad():
        validation = [run(text).item() for text in islice(batches(validation_text, arguments), 16)]
    tencache_fx.close()
    return {
        "state": state,
        "seed": seed,
        "losses": [round(statistics.fmean(some), 4) for some in chunks(losses, arguments.every)],
        "validation_loss": round(statistics.fmean(validation), 4),
    }


def chunks(values: list[float], length: int) -> Iterator[list[float]]:
    """Yield the values, so many at a time.

    >>> list(chunks([1, 2, 3], 2))
    [[1, 2], [3]]
    """
    for start in range(0, len(values), length):
        yield values[start : start + length]


def main() -> None:
    """Print a line for each form of state and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--states", nargs="+", choices=("torch", *STATES), default=["torch", *STATES])
    sizes = {"steps": 300, "every": 50, "seeds": 2, "layers": 4, "hidden": 128, "seq": 128, "batch": 16}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    print(json.dumps({"torch": torch.__version__, **vars(arguments), "device": str(arguments.device)}))
    for seed in range(arguments.seeds):
        for state in arguments.states:
            print(json.dumps(train(state, seed, arguments)), flush=True)


if __name__ == "__main__":
    main()

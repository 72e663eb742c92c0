"""How many parameters a second the CPU's update takes, by what the optimizer keeps its moments in.

    python examples/bench/optimizer_states.py --threads 2

The update is that of offloaded bf16 parameters by AdamW, one pass over `--elements`; the median of `--rounds` counts.
"""

import argparse
import statistics
import time

import torch

from tencache_fx.model_state.step_kernel import find_rule
from tencache_fx.model_state.stored_form import parts_of, store_values

_STATES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}


def parameters_per_s(state: str, elements: int, rounds: int) -> float:
    """Return the rate with moments in `state`."""
    rule, group = find_rule(torch.optim.AdamW, _STATES[state], {"lr": 1e-3})
    forms = rule.arrays(group, 1)
    first = rule.step(group, 1, {}, frozenset())
    step = rule.step(group, 1, first.after, frozenset(forms))
    gradient, weight = (torch.randn(elements).bfloat16() for _ in range(2))
    parts = [torch.empty(part.count(elements), dtype=part.dtype) for part in parts_of(forms.values())]
    store_values(forms, parts, {name: torch.rand(elements) for name in forms})
    update = step.kernel.compiled(torch.bfloat16, torch.device("cpu"))
    update(gradient, weight, *parts, step.numbers)
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        update(gradient, weight, *parts, step.numbers)
        seconds.append(time.perf_counter() - begin)
    return elements / statistics.median(seconds)


def main() -> None:
    """Print a line for each form of state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for state in _STATES:
        rate = parameters_per_s(state, arguments.elements, arguments.rounds)
        print(f"{arguments.threads} threads, {state}: {rate / 1e6:.0f} million parameters/s")


if __name__ == "__main__":
    main()

"""One row of the matrix of models: a family trained with torch's own compiler and with tencache in a tight budget."""

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from families import Family, Inputs, Subject
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import BudgetError
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Problem
from tencache_fx.records import RegionRecord

Options = Mapping[str, object]
Wrap = Callable[[nn.Module], Callable[..., Any]]

EAGER: Options = {"compiler": "eager", "calibrate": False, "host_budget": "256MiB"}
INDUCTOR: Options = {"compiler": "inductor", "calibrate": False, "host_budget": "256MiB"}
# The same graphs, partitioner and decompositions without us; with `plain_draws`, also the same random numbers.
REFERENCES = {"eager": "aot_eager_decomp_partition", "inductor": "inductor"}
STEPS = 3
CPU = torch.device("cpu")
TRIES = 4  # with the budget that the error before asks for
# A step on a GPU is of so many batches: a single one is less than what kernels' libraries keep there, tens of MB, and
# no more than what these vary by.
GPU_BATCHES = 16


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came out of training, on the CPU; `peak_bytes` of the last step are measured.

    They are with parameters, buffers and inputs.
    """

    losses: Tensor
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    peak_bytes: int
    graph_breaks: int
    graphs: int
    regions: tuple[RegionRecord, ...]


def train(family: Family, wrap: Wrap, *, steps: int = STEPS, device: torch.device = CPU) -> Run:
    """Train a fresh model on `device` for `steps` steps through `wrap(model)`; the last is measured."""
    torch.compiler.reset()
    gc.collect()
    torch._dynamo.utils.counters.clear()
    known = {record.region for record in tencache_fx.regions()}
    torch.manual_seed(0)
    subject = family.build()
    run = wrap(subject.model.to(device))
    batches = 1 if device == CPU else GPU_BATCHES
    sgd = torch.optim.SGD(subject.model.parameters(), lr=0.05)
    losses, peak_bytes = [], 0
    with torch._dynamo.config.patch(allow_rnn=family.allow_rnn), _steady_kernels():
        for step in range(steps):
            sgd.zero_grad()
            inputs = gather(subject, step, batches, device)

            def work(inputs: Inputs = inputs) -> None:
                losses.append(backward(family, subject, run, inputs))

            if step < steps - 1:
                work()
                sgd.step()
            else:
                peak_bytes = resting_bytes(subject, inputs) + tencache_fx.peak_bytes(work, device)
    counters = torch._dynamo.utils.counters
    model = subject.model
    return Run(
        losses=torch.stack(losses).cpu(),
        gradients={name: p.grad.to(CPU, copy=True) for name, p in model.named_parameters() if p.grad is not None},
        state={name: value.to(CPU, copy=True) for name, value in model.state_dict().items()},
        peak_bytes=peak_bytes,
        graph_breaks=sum(counters["graph_break"].values()),
        graphs=counters["stats"]["unique_graphs"],
        regions=tuple(record for record in tencache_fx.regions() if record.region not in known),
    )


def gather(subject: Subject, step: int, batches: int, device: torch.device) -> Inputs:
    """Return the inputs of a step of so many batches, one behind the other."""
    parts = [subject.inputs(step * batches + part) for part in range(batches)]
    return {
        name: torch.cat([part[name] for part in parts]).to(device) if isinstance(value, Tensor) else value
        for name, value in parts[0].items()
    }


def plain_draws(*, wanted: bool) -> AbstractContextManager[None]:
    """Have torch's own compilers draw random numbers as torch does without one, if that is `wanted`."""
    return torch._inductor.config.patch(fallback_random=wanted)  # type: ignore[no-any-return]


def _steady_kernels() -> AbstractContextManager[None]:
    """Have cuDNN take kernels that add up in one order, in full precision."""
    return torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)


def backward(family: Family, subject: Subject, run: Callable[..., Any], inputs: Inputs) -> Tensor:
    """Return the loss of one forward and backward."""
    device = next(subject.model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=family.autocast):
        loss = subject.loss(run(**inputs))
    loss.backward()
    return loss.detach()


def resting_bytes(subject: Subject, inputs: Inputs) -> int:
    """Return the bytes that are there between steps: parameters, buffers and inputs."""
    held = [*subject.model.parameters(), *subject.model.buffers(), *inputs.values()]
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in held if isinstance(each, Tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def compiled(options: Options) -> Wrap:
    return lambda model: torch.compile(model, backend="tencache", options=dict(options))


def tight_budget(regions: Sequence[RegionRecord], *, share: float) -> int:
    """Return the budget that leaves `share` of what the largest region could do without, or what all need at least."""
    problems = [record.problem for record in regions]
    return max((floor_of(each) + int(share * (peak_of(each) - floor_of(each))) for each in problems), default=1 << 20)


def floor_of(problem: Problem) -> int:
    """Return the least a plan may hold when everything that is worth an op in a tight budget may be offloaded."""
    return floor_bytes(replace(problem, min_spill_bytes=max(4096, peak_of(problem) // 4096)))


def peak_of(problem: Problem) -> int:
    return int(live_bytes(problem).max(initial=0))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A family with torch's compiler (`theirs`), with ours without a budget (`free`) and within `budget_bytes`.

    `asked` says whether that is what an error asked for, and not a share of what its regions could do without.
    """

    family: Family
    theirs: Run
    free: Run
    ours: Run
    budget_bytes: int
    asked: bool
    rounding: float

    @property
    def differences(self) -> list[str]:
        """The numbers in which training with us differs by more than the family's rounding, by name."""
        found = [] if self._same(self.theirs.losses, self.ours.losses) else ["losses"]
        for mine, other in ((self.ours.gradients, self.theirs.gradients), (self.ours.state, self.theirs.state)):
            assert mine.keys() == other.keys()
            found += [name for name in mine if not self._same(other[name], mine[name])]
        return found

    def _same(self, theirs: Tensor, ours: Tensor) -> bool:
        if self.rounding == 0 or not theirs.is_floating_point():
            return torch.equal(theirs, ours)
        return torch.allclose(theirs, ours, rtol=self.rounding, atol=self.rounding)

    @property
    def transfers(self) -> int:
        return sum(len(record.plan.transfers) for record in self.ours.regions)

    @property
    def recomputed(self) -> int:
        return sum(len(record.plan.recomputed) for record in self.ours.regions)


def make_row(
    family: Family,
    options: Options = EAGER,
    *,
    share: float = 0.25,
    steps: int = STEPS,
    device: torch.device = CPU,
) -> Row:
    """Train `family` all three ways; on a GPU in as large a budget as errors ask for.

    What a region is given at another layer, and what lies between two, only the run shows; a CPU's are not counted.
    """
    backend = REFERENCES[str(options["compiler"])]
    with plain_draws(wanted=backend != "inductor"):
        theirs = train(family, lambda model: torch.compile(model, backend=backend), steps=steps, device=device)
    free = train(family, compiled(options), steps=1, device=device)
    budget_bytes, asked = tight_budget(free.regions, share=share), None
    for _ in range(TRIES):
        try:
            ours = train(family, compiled({**options, "device_budget": budget_bytes}), steps=steps, device=device)
            break
        except (BudgetError, torch._dynamo.exc.BackendCompilerFailed) as error:
            asked = re.search(r"Set device_budget to (\d+)MiB or more", str(error))
            if asked is None or device == CPU:
                raise
            budget_bytes = int(asked[1]) << 20
    else:
        raise AssertionError(f"{family.name} asks for more each time, at last for {budget_bytes} bytes")
    # Other graphs are fused and laid out in other ways, and a GPU may add up in any order; else bits are the same.
    rounding = 0.0 if options["compiler"] == "eager" and device == CPU else 1e-4
    return Row(
        family=family,
        theirs=theirs,
        free=free,
        ours=ours,
        budget_bytes=budget_bytes,
        asked=asked is not None,
        rounding=rounding,
    )


def train_offloaded(
    family: Family, device_budget: str | None, *, steps: int = 4
) -> tuple[Tensor, tuple[RegionRecord, ...]]:
    """Return the losses of training with AdamW, and the regions: offloaded, in a budget, or as torch does it."""
    torch.compiler.reset()
    gc.collect()
    known = {record.region for record in tencache_fx.regions()}
    torch.manual_seed(0)
    subject = family.build()
    model, inputs = subject.model, subject.inputs(0)
    if device_budget is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = torch.compile(model, backend=REFERENCES["eager"])
    else:
        model = tencache_fx.offload(model)
        optimizer = tencache_fx.optim.AdamW(model.parameters(), lr=1e-3)
        run = compiled({**EAGER, "device_budget": device_budget})(model)
    losses = []
    with torch._dynamo.config.patch(allow_rnn=family.allow_rnn), plain_draws(wanted=device_budget is None):
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(backward(family, subject, run, inputs))
            optimizer.step()
    return torch.stack(losses), tuple(record for record in tencache_fx.regions() if record.region not in known)

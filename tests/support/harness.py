"""What compiler tests share: train a model of the zoo under some options, and keep what came out."""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from conftest import MIB, eventually, settled, without_kernels
from faulty_streams import FaultyCpuStreams, FaultyCudaStreams
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition
from zoo import Case

import tencache_fx
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Problem
from tencache_fx.records import RegionRecord
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine

Options = Mapping[str, object]

EAGER: Options = {"compiler": "eager", "calibrate": False, "host_budget": 64 * MIB}
INDUCTOR: Options = {"compiler": "inductor", "calibrate": False, "host_budget": 64 * MIB}


@dataclass(frozen=True)
class Outcome:
    """Losses of all steps, gradients of the last, parameters and buffers at the end."""

    losses: Tensor
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


@contextlib.contextmanager
def faulty_engine(*, delay_s: float = 0.0002, host_budget_bytes: int = 64 * MIB) -> Iterator[Engine]:
    """Serve the CPU, inside, with an engine that poisons what is freed and copies late; nothing may stay acquired."""
    engine = Engine(torch.device("cpu"), host_budget_bytes=host_budget_bytes, streams=FaultyCpuStreams(delay_s=delay_s))
    install_engine(engine)
    try:
        yield engine
        if not engine.closed:
            assert eventually(lambda: settled(engine)), engine.stats.take()
    finally:
        engine.close()
        torch.compiler.reset()
        gc.collect()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("tencache")]


@contextlib.contextmanager
def faulty_cuda_engine(*, host_budget_bytes: int = 2048 * MIB) -> Iterator[Engine]:
    """Serve the CUDA device, inside, with an engine that poisons what is freed and copies late."""
    torch.compiler.reset()
    device = resolve_device(torch.device("cuda"))
    streams = FaultyCudaStreams(device, delay_cycles=1_000_000)
    engine = Engine(device, host_budget_bytes=host_budget_bytes, streams=streams)
    install_engine(engine)
    yield engine
    assert eventually(lambda: settled(engine)), engine.stats.take()
    engine.close()
    torch.compiler.reset()


def compiled(model: Callable[..., Tensor], options: Options, **more: object) -> Callable[..., Tensor]:
    """Return `model` compiled by tencache."""
    return torch.compile(model, backend="tencache", options=dict(options), **more)


def train(
    case: Case, wrap: Callable[[nn.Module], Callable[..., Tensor]], steps: int, *, optimizer: bool = True
) -> Outcome:
    """Train a fresh model of `case` for `steps` steps through `wrap(model)`; everything random is seeded."""
    torch.manual_seed(0)
    model = case.build()
    run = wrap(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with torch._dynamo.config.patch(allow_rnn=case.allow_rnn):
        for step in range(steps):
            sgd.zero_grad()
            for part in range(case.accumulate):
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    loss = run(*case.batch(step * case.accumulate + part))
                loss.backward()
                losses.append(loss.detach())
            if optimizer:
                sgd.step()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(torch.stack(losses), gradients, {k: v.clone() for k, v in model.state_dict().items()})


def regions_of(work: Callable[[], object]) -> tuple[RegionRecord, ...]:
    """Return the records of the regions that `work()` compiles."""
    torch.compiler.reset()
    gc.collect()
    before = {record.region for record in tencache_fx.regions()}
    kept = work()
    found = tuple(record for record in tencache_fx.regions() if record.region not in before)
    del kept
    return found


def problems_of(case: Case, options: Options = EAGER) -> tuple[Problem, ...]:
    """Return the problems of the regions of `case` that have a backward, as they are without a budget."""
    with without_kernels():
        return train_and_look(case, options, 1)[1]


def train_and_look(case: Case, options: Options, steps: int) -> tuple[Outcome, tuple[Problem, ...]]:
    """Train `case` compiled with `options`; return what came out, and the problems of its regions."""
    outcomes: list[Outcome] = []

    def work() -> object:
        kept: list[object] = []  # what keeps the compiled regions alive

        def wrap(model: nn.Module) -> Callable[..., Tensor]:
            kept.append(run := compiled(model, options))
            return run

        outcomes.append(train(case, wrap, steps))
        return kept

    records = regions_of(work)
    return outcomes[0], tuple(record.problem for record in records)


def budget_for(problems: Sequence[Problem], percent: int) -> int:
    """Return the device budget that leaves `percent` of the activation peak, or the floor if that is higher."""
    return max(max(share_of(problem, percent), planned_floor(problem)) for problem in problems)


def share_of(problem: Problem, percent: int) -> int:
    """Return the inputs' bytes and `percent` of what the region holds beside them at its peak."""
    peak, static = int(live_bytes(problem).max()), entering_bytes(problem)
    return static + (peak - static) * percent // 100


def entering_bytes(problem: Problem) -> int:
    """Return the bytes of the parameters and inputs that exist before the region runs."""
    return sum(s.nbytes for s in problem.storages if s.birth == 0 and s.kind.value in ("parameter", "input"))


def planned_floor(problem: Problem) -> int:
    """Return the floor of `problem` when everything that is worth an op may be offloaded."""
    return floor_bytes(replace(problem, min_spill_bytes=4096))


def capture_of(function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> RegionGraphs:
    """Return the forward and backward of `function`, as they are before any pass, saving all that autograd would."""
    found: list[RegionGraphs] = []

    def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        kwargs.pop("static_lifetime_input_indices", None)
        forward, backward = default_partition(joint, joint_inputs, **kwargs)
        found.append(
            RegionGraphs(
                forward=forward.graph,
                backward=backward.graph,
                num_outputs=kwargs["num_fwd_outputs"],
                static_inputs=frozenset(),
                device=torch.device("cpu"),
            )
        )
        return forward, backward

    def run(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        return gm

    results = aot_function(function, fw_compiler=run, bw_compiler=run, partition_fn=partition)(*inputs)
    (results if isinstance(results, Tensor) else results[0]).sum().backward()
    return found[0]


class Block(torch.nn.Module):
    """A residual block of a norm and two matrices, `widen` times as wide between them, with GELU."""

    def __init__(self, hidden: int, widen: int = 1) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.into, self.out = torch.nn.Linear(hidden, widen * hidden), torch.nn.Linear(widen * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.nn.functional.gelu(self.into(self.norm(x))))

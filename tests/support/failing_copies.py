"""A step of Muon on three offloaded matrices, one copy of which fails."""

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from torch import nn

import tencache_fx
from tencache_fx.errors import InvariantError, TencacheError
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.optim import Muon
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import engines, install_engine


def step_with_failing_copy(failing: int) -> tuple[nn.Module, int]:
    """Let the copy of that number fail; return the model, and how many readers of its weights are told."""
    streams = FaultyCpuStreams()
    install_engine(Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=streams))
    model = tencache_fx.offload(nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3))), "cpu")
    optimizer = Muon(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(2, 128)).square().mean().backward()
    engines()[0].streams.wait_host([])
    streams._failing = frozenset({streams.copies + failing})
    with pytest.raises(TencacheError, match="failed"):
        optimizer.step()
    streams._failing = frozenset()
    told = 0
    for parameter in model.parameters():  # who reads a weight that may be half written is told, once
        offloaded = find_offloaded(parameter)
        assert offloaded is not None
        try:
            offloaded.wait_update()
        except InvariantError:
            told += 1
    return model, told

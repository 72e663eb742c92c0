"""Parameters that stay on the device are refreshed behind their last reader in a backward, not behind all of it."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from harness import Block
from torch import Tensor, fx, nn

import tencache_fx
from tencache_fx.api import regions
from tencache_fx.errors import InvariantError
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.ops import OFFLOAD_GRAD, REFRESH_PARAM, SYNC_PARAM, key_tensor
from tencache_fx.optim import AdamW
from tencache_fx.passes.verify_parameters import check_parameters
from tencache_fx.runtime.engine_registry import install_engine
from tencache_fx.runtime.streams import Event

HIDDEN = 160


def train(model: nn.Module, *, compiler: str = "eager", now: bool, steps: int = 4) -> list[float]:
    options = {"compiler": compiler, "calibrate": False}
    run: Callable[[Tensor], Tensor] = torch.compile(model, backend="tencache", options=options)
    optimizer = AdamW(model.parameters(), lr=1e-2, step_in_backward=now)
    losses = []
    for step in range(steps):
        loss = run(torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(HIDDEN) for _ in range(3)))


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_each_is_refreshed_behind_its_last_reader(monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    known: dict[str, list[bool]] = {}
    end = OffloadedParameter.set_readers

    def noting(home: OffloadedParameter, readers: Event) -> int:
        known.setdefault(home.name, []).append(home._update.readers is not None)
        return end(home, readers)

    monkeypatch.setattr(OffloadedParameter, "set_readers", noting)
    expected = train(tencache_fx.offload(network()), compiler=compiler, now=False)
    assert not known
    torch.compiler.reset()
    tencache_fx.close()
    assert train(tencache_fx.offload(network()), compiler=compiler, now=True) == expected
    assert len(known) == 6
    assert all(found == [False, True] * 3 for found in known.values())  # the first step does not know the optimizer yet
    (backward,) = (listing for listing in regions()[-1].listings if listing.phase == "backward")
    rows = list(backward.nodes)
    refreshes = [row for row in rows if row.name.startswith("refresh_param_")]
    readers = [row for row in rows if "mm" in row.target]
    assert len(refreshes) == 6
    assert rows.index(refreshes[0]) < rows.index(readers[-1])  # while others are read still
    for row in refreshes:
        assert not any(row.inputs[0] in other.inputs for other in rows[rows.index(row) + 1 : -1])


def test_late_copies_change_nothing(new_engine: Callable[..., object]) -> None:
    expected = train(tencache_fx.offload(network()), now=False)
    torch.compiler.reset()
    tencache_fx.close()
    install_engine(new_engine(streams=FaultyCpuStreams(delay_s=0.002, poison=True), host_budget_bytes=1 << 28))
    assert train(tencache_fx.offload(network()), now=True) == expected


def graph_of(*ops: str) -> fx.Graph:
    """A graph in which a weight is synced, and then what `ops` say."""
    graph, weight, gradient = fx.Graph(), torch.ones(2, 2), torch.ones(2, 2)
    inputs = [graph.placeholder(name) for name in ("weight", "gradient")]
    for node, value in zip(inputs, (weight, gradient), strict=True):
        node.meta["val"] = value
    made = []
    for op in ("sync_param", *ops):
        if op == "read":
            node = graph.call_function(torch.ops.aten.mm.default, (inputs[1], inputs[0]))
            node.meta["val"] = torch.ones(2, 2)
        else:
            target = {"sync_param": SYNC_PARAM, "refresh_param": REFRESH_PARAM, "offload_grad": OFFLOAD_GRAD}[op]
            args = (inputs[1], 0, "change", "weight") if op == "offload_grad" else (inputs[0], 0, "weight")
            node = graph.call_function(target, args)
            node.meta["val"] = key_tensor()
        made.append(node)
    graph.output((*made, inputs[0]))
    return graph


def check(*ops: str) -> None:
    storage = SimpleNamespace(name="change", parameter="weight")
    check_parameters(SimpleNamespace(storages=[storage]), (graph_of(*ops),))


def test_what_reads_a_parameter_behind_its_refresh_is_found() -> None:
    check("read", "offload_grad", "read", "refresh_param")
    with pytest.raises(InvariantError, match=r"refreshes: mm_default reads weight, which is refreshed before it"):
        check("offload_grad", "refresh_param", "read")
    with pytest.raises(InvariantError, match="refreshes: refresh_param.* stands before the beginning of an update"):
        check("read", "refresh_param", "offload_grad")


def test_gradients_that_one_op_makes_leave_each_by_itself() -> None:
    """Weight norm's backward has two results, gradients both."""

    def run(*, home: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN)) for _ in range(2)))
        losses = train(tencache_fx.offload(model) if home else model, now=home)
        torch.compiler.reset()
        tencache_fx.close()
        return losses

    assert run(home=True) == run(home=False)

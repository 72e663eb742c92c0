"""How a model gets to host memory: from "meta" without a copy too many, and with a progress bar where it takes long."""

import gc
import io
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import OptionError
from tencache_fx.model_state import modules, offloading
from tencache_fx.model_state.parameter_store import ParameterStore, find_offloaded, parameters_of
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine_registry import engines

HIDDEN = 192
LARGE_BYTES = HIDDEN * HIDDEN * 4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Table(nn.Module):
    """A module that has buffers only, as rotary positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.arange(8, out=self.angles)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN))


def test_buffers_on_meta_are_made_by_their_module() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Table(), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
    tencache_fx.offload(model, "cpu")
    assert torch.equal(model[0].angles, torch.arange(8.0))
    assert torch.equal(model[1].running_var, torch.ones(4))
    assert torch.equal(model[2].running_var, torch.ones(4))


def test_buffers_on_meta_that_nothing_makes_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Module())
        model[0].register_buffer("angles", torch.empty(8))
    with pytest.raises(OptionError, match=r"module 0 \(Module\) is on the meta device and has no reset_parameters"):
        tencache_fx.offload(model, "cpu")


def test_what_is_not_on_meta_is_kept() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[0].running_mean = torch.full((4,), 3.0)
    model[1].bias = nn.Parameter(torch.full((4,), 5.0))
    tencache_fx.offload(model, "cpu")
    assert torch.equal(model[0].running_mean, torch.full((4,), 3.0))
    assert torch.equal(model[0].running_var, torch.ones(4))
    assert torch.equal(model[1].bias, torch.full((4,), 5.0))
    assert model[1].weight.abs().max() <= 0.5


@pytest.mark.parametrize(
    ("model", "device", "said"),
    [
        (None, "cpu", r"the model is a NoneType; give a torch\.nn\.Module"),
        (nn.Linear, "cpu", r"the model is a class; give a torch\.nn\.Module"),
        (nn.Sequential(nn.LazyLinear(4)), "cpu", "0.weight has no size yet, as it is of a lazy module; call the model"),
        (nn.Sequential(nn.LazyBatchNorm1d(affine=False)), "cpu", "0.running_mean has no size yet"),
        (nn.Linear(4, 4), "xyz", "device 'xyz' is not a device; give cuda, cuda:1 or cpu"),
        (nn.Linear(4, 4), 3.5, "device 3.5 is not a device"),
        (nn.Linear(4, 4), "cuda:99", r"device 'cuda:99' is not there: torch sees \d CUDA devices; give .*cpu"),
        (nn.Linear(4, 4), "meta", "device 'meta' is not there"),
    ],
)
def test_what_is_no_model_and_what_is_no_device_is_refused(model: Any, device: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        tencache_fx.offload(model, device)
    if not isinstance(model, nn.Module):
        with pytest.raises(OptionError, match=said), tencache_fx.summon(model):
            pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_a_gpu_without_a_driver_is_refused() -> None:
    with pytest.raises(OptionError, match="device 'cuda' is not there: torch sees 0 CUDA devices; give cpu"):
        tencache_fx.offload(nn.Linear(HIDDEN, HIDDEN), "cuda")


@pytest.mark.parametrize("start", ["cpu", "meta"])
def test_memory_that_one_parameter_has_left_is_not_shared_with_the_next(start: str) -> None:
    with torch.device(start):
        model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(64)))
    tencache_fx.offload(model, "cpu")
    assert len(parameters_of(engines()[0])) == 64


def test_parameters_on_meta_that_share_memory_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    with pytest.raises(OptionError, match="1.weight shares memory with 0.weight; tie them"):
        tencache_fx.offload(model, "cpu")


@pytest.mark.parametrize("start", ["cpu", "meta"])
def test_progress_counts_the_bytes_that_move_and_shows_their_rate(
    start: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(modules, "_BAR_DELAY_S", 0.0)
    bars = []
    original = modules.tqdm

    def kept(**options: object) -> object:
        bars.append(original(**options, mininterval=0))
        return bars[-1]

    monkeypatch.setattr(modules, "tqdm", kept)
    with torch.device(start):
        model = layers()
    tencache_fx.offload(model, "cpu", progress=True)
    assert (bars[0].n, bars[0].total) == (2 * LARGE_BYTES, 2 * LARGE_BYTES)
    shown = capsys.readouterr().err
    assert "parameters to host memory: 100%" in shown
    assert "295k/295k" in shown
    assert "B/s" in shown
    tencache_fx.offload(model, progress=True)  # nothing is left to move
    assert bars[1].total == 0


@pytest.mark.parametrize(("progress", "shows"), [(None, False), (False, False), (True, True)])
@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_on_a_terminal_or_when_asked(
    progress: bool | None,  # noqa: FBT001
    shows: bool,  # noqa: FBT001
    terminal: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modules, "_BAR_DELAY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    tencache_fx.offload(layers(), progress=progress)
    assert bool(sys.stderr.getvalue()) == (terminal if progress is None else shows)


def test_what_is_done_at_once_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    tencache_fx.offload(layers(), progress=True)
    assert capsys.readouterr().err == ""


def adapted(rows: int = HIDDEN) -> nn.Sequential:
    """31 frozen matrices, and a trained one of as many `rows`."""
    frozen = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(31))).requires_grad_(False)
    for layer in frozen:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(frozen, nn.Linear(HIDDEN, rows, bias=False))


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, tencache_fx.optim.AdamW])
def test_what_a_frozen_model_trains_stays_with_all_that_belongs_to_it(
    optimizer_class: type[torch.optim.Optimizer],
) -> None:
    model = tencache_fx.offload(adapted(), "cpu")
    (trained,) = (p for p in model.parameters() if p.requires_grad)
    assert trained.nbytes == LARGE_BYTES > offloading.LEAST_BYTES
    assert len(parameters_of(engines()[0])) == 31
    model.compile(backend="tencache", options={"device_budget": "1MB", "compiler": "eager"})
    optimizer = optimizer_class([trained], lr=1e-3)
    losses = []
    for _ in range(3):
        loss = (model(torch.ones(4, HIDDEN)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    assert engines()[0].pool.held_for(Use.STATE) == 0
    torch.compiler.reset()


def test_what_is_trained_is_offloaded_if_it_is_more_than_a_few() -> None:
    model = tencache_fx.offload(adapted(HIDDEN + 8), "cpu")
    assert len(parameters_of(engines()[0])) == 32
    assert not find_offloaded(model[1].weight).on_device


def test_a_new_head_beside_small_matrices_stays() -> None:
    small = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(80))).requires_grad_(False)
    model = tencache_fx.offload(nn.Sequential(small, nn.Linear(100, 200, bias=False)), "cpu")
    assert len(parameters_of(engines()[0])) == 0
    optimizer = tencache_fx.optim.AdamW(model[1].parameters())
    model(torch.ones(4, 100)).sum().backward()
    optimizer.step()
    assert engines()[0].pool.held_for(Use.STATE) == 0


def test_a_master_keeps_its_digits_wherever_its_state_goes() -> None:
    """From host memory to the device, where a model of which it is a small part is given homes, and back again."""

    def trained(*, moves: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = adapted().bfloat16()
        weight = model[1].weight
        optimizer = tencache_fx.optim.AdamW([weight], lr=1e-4)
        places = []
        for step in range(9):
            if moves and step == 3:
                tencache_fx.offload(model, "cpu")
            if moves and step == 6:
                tencache_fx.close()
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.step()
            places.append(optimizer._states[weight].place)
        assert len(set(places)) == 1 + moves
        found = [weight.detach().clone(), optimizer.state_dict()["state"][0]["master"].clone()]
        tencache_fx.close()
        return found

    assert all(map(torch.equal, trained(moves=True), trained(moves=False)))


def test_what_is_strided_on_meta_is_made_dense() -> None:
    with torch.device("meta"):
        model = nn.Linear(512, 256)
    model.weight = nn.Parameter(torch.empty(256, 512, device="meta")[:, ::2])
    tencache_fx.offload(model, "cpu")
    assert model.weight.stride() == (256, 1)


def test_a_module_between_regions_brings_its_own_parameters() -> None:
    """What loads them runs as frames of its own there, which torch would compile as if they were parts of a region."""
    model = tencache_fx.offload(layers(), "cpu")
    inputs = torch.ones(4, HIDDEN)
    expected = model(inputs).detach()

    @torch.compile(backend="tencache", options={"compiler": "eager"})
    def run(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        for layer in model:
            x = nn.Module.__call__(layer, x)
            torch._dynamo.graph_break()
        return x

    for each in model.parameters():
        if (home := modules.find_offloaded(each)) is not None:
            home.evict()
    torch.testing.assert_close(run(inputs), expected)
    torch.compiler.reset()


def test_a_state_dict_taken_in_a_compiled_forward_breaks_the_graph_as_often_as_without_offloading() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) * self.first.state_dict()["weight"].sum()

    breaks, outputs = [], []
    for offloaded in (False, True):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model: nn.Module = Reading()
        if offloaded:
            model = tencache_fx.offload(model, "cpu")
        run = torch.compile(model, backend="tencache" if offloaded else "eager")
        outputs.append(run(torch.ones(2, 256)).detach())
        breaks.append(sum(torch._dynamo.utils.counters["graph_break"].values()))
    assert breaks[1] == breaks[0]
    torch.testing.assert_close(*outputs)


class Dropping(nn.Module):
    """What one of its layers returns is dropped, as models without a head drop what a pooler returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pooler, self.last = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        self.pooler(hidden)
        result: Tensor = self.last(hidden).tanh()
        return result


def test_a_layer_whose_result_is_dropped_takes_no_memory() -> None:
    gradients = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Dropping()
        if offloaded:
            model = tencache_fx.offload(model, "cpu")
        options = {"compiler": "eager", "device_budget": "2MB"}
        run = torch.compile(model, backend="tencache", options=options) if offloaded else model
        run(torch.ones(64, HIDDEN)).square().mean().backward()
        gradients.append([p.grad for name, p in model.named_parameters() if not name.startswith("pooler")])
        assert all(p.grad is None for p in model.pooler.parameters())
    torch.testing.assert_close(*gradients)


def test_parameters_may_die_while_all_are_looked_at() -> None:
    """Python's collector may run at any allocation."""
    kept = [tencache_fx.offload(nn.Linear(HIDDEN, HIDDEN, bias=False), "cpu") for _ in range(20)]
    store, before = parameters_of(engines()[0]), gc.get_threshold()
    for later in range(1, 40):
        gc.disable()
        for _ in range(3):
            model = nn.Linear(HIDDEN, HIDDEN, bias=False)
            model.itself = [model]  # a cycle
            tencache_fx.offload(model, "cpu")
        del model
        gc.set_threshold(gc.get_count()[0] + later)
        gc.enable()
        try:
            assert len(list(store)) >= len(kept)
        finally:
            gc.set_threshold(*before)
            gc.collect()


def test_few_parameters_are_mapped_before_their_values_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values come slowly, host memory would have the model twice."""
    tencache_fx.configure(host_budget="64MiB")
    ahead_bytes: list[int] = []
    offload = ParameterStore.offload

    def noting(store: ParameterStore, *args: Any) -> Any:
        ahead_bytes.append(engines()[0].pool.ahead.nbytes)
        return offload(store, *args)

    monkeypatch.setattr(ParameterStore, "offload", noting)
    tencache_fx.offload(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(12))), "cpu")
    assert len(ahead_bytes) == 12
    assert max(ahead_bytes) == 4 << 20
    assert min(ahead_bytes[:-1]) >= 2 << 20  # the next one is mapped while one is copied
    assert engines()[0].pool.ahead.nbytes == 0

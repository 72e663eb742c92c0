"""What goes wrong in the middle of a step: a clear error or a slower run, no buffer kept, and the next is right."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import MIB, eventually, settled
from faulty_streams import FaultyCpuStreams, FaultyIO
from harness import EAGER, compiled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tencache_fx
from tencache_fx.errors import InvariantError, StoreError, TencacheError, UsageError
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine
from tencache_fx.runtime.store import Store

BUDGET = 1_000_000  # sixteen layers need 1.6 MB at their peak, and 0.9 MB at least
LAYERS = 16


class Stumbling:
    """Which call of `stumble` raises, forward and backward, counted from the next one; none at first."""

    def __init__(self) -> None:
        self.forward_in = self.backward_in = -1

    def step(self, way: str) -> None:
        left = getattr(self, f"{way}_in")
        setattr(self, f"{way}_in", left - 1)
        if left == 0:
            raise RuntimeError(f"the {way} of the custom op failed")


STUMBLING = Stumbling()


@torch.library.custom_op("tencache_tests::stumble", mutates_args=())
def stumble(x: Tensor) -> Tensor:
    STUMBLING.step("forward")
    return x.clone()


@torch.library.custom_op("tencache_tests::stumble_backward", mutates_args=())
def stumble_backward(grad: Tensor) -> Tensor:
    STUMBLING.step("backward")
    return grad.clone()


for op in (stumble, stumble_backward):
    op.register_fake(torch.empty_like)
stumble.register_autograd(lambda ctx, grad: stumble_backward(grad))


class Tower(nn.Module):
    """Linear layers and tanh; each saves 64 kB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i % 4 == 1:
                x = stumble(x)
        return x


class Bench:
    """A compiled tower on a faulty engine, and the gradients that it must have."""

    def __init__(self, spill_dir: Path, options: dict[str, object], io: FaultyIO | None = None) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.engine = Engine(torch.device("cpu"), host_budget_bytes=64 * MIB, streams=FaultyCpuStreams(delay_s=0.0005))
        install_engine(self.engine)
        self.engine.attach_store(Store((spill_dir,), 64 * MIB, io=io))
        self.model, self.x = Tower(), torch.randn(256, 64)
        self.model(self.x).square().sum().backward()
        self.truth = [p.grad.clone() for p in self.model.parameters()]
        self.run = compiled(self.model, {**EAGER, "device_budget": BUDGET, **options})
        STUMBLING.forward_in = STUMBLING.backward_in = -1

    def backward(self, out: Tensor) -> None:
        self.model.zero_grad()
        out.square().sum().backward()

    def step_is_right(self) -> None:
        """Run a whole step; no buffer may be in use after it."""
        self.backward(self.run(self.x))
        for parameter, true in zip(self.model.parameters(), self.truth, strict=True):
            torch.testing.assert_close(parameter.grad, true, rtol=1e-4, atol=1e-5)
        assert eventually(lambda: settled(self.engine)), self.engine.stats.take()


@pytest.fixture
def bench(spill_dir: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(io: FaultyIO | None = None, **options: object) -> Bench:
        made.append(Bench(spill_dir, options, io))
        return made[-1]

    yield make
    for each in made:
        each.engine.close()
    torch.compiler.reset()


def on_disk(spill_dir: Path) -> dict[str, object]:
    """Return options that leave so little host memory that values go to disk."""
    return {"spill_dir": spill_dir, "spill_budget": 64 * MIB, "host_budget": 300_000}


def test_it_spills_at_all(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.step_is_right()
    assert tencache_fx.regions()[-1].plan.transfers


def test_user_code_fails_between_forward_and_backward(bench: Callable[..., Bench]) -> None:
    made = bench()
    for _ in range(3):
        out = made.run(made.x)
        with pytest.raises(RuntimeError, match="shape"):
            out.view(7, 11)  # the user's loss fails
        del out
        made.step_is_right()


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_custom_op_fails_inside_the_region(bench: Callable[..., Bench], compiler: str) -> None:
    """Transfers are under way in either direction when it does: some tensors are away, some on their way back."""
    made = bench(compiler=compiler)
    made.step_is_right()
    assert tencache_fx.regions()[-1].plan.transfers
    for n in (0, 2, 3):
        STUMBLING.forward_in = n
        with pytest.raises(RuntimeError, match="the forward of the custom op failed"):
            made.run(made.x)
        made.step_is_right()
        out = made.run(made.x)
        STUMBLING.backward_in = n
        with pytest.raises(RuntimeError, match="the backward of the custom op failed"):
            made.backward(out)
        del out
        made.step_is_right()
    assert made.engine.stats.take()["disk_write_failures"] == 0


PACKS = {
    "clone": (torch.clone, lambda saved: saved),
    "another type": (lambda x: x.to(torch.float64), lambda saved: saved),
    "numpy": (lambda x: x.detach().numpy().copy(), torch.from_numpy),
}


@pytest.mark.parametrize("name", PACKS)
def test_saved_tensors_hooks_that_copy_are_refused(bench: Callable[..., Bench], name: str) -> None:
    made = bench()
    made.step_is_right()
    with torch.autograd.graph.saved_tensors_hooks(*PACKS[name]):
        out = made.run(made.x)
    with pytest.raises(UsageError, match=r"cannot prefetch \w+: .* was copied; .* outside of saved_tensors_hooks"):
        made.backward(out)
    del out
    made.step_is_right()


def test_saved_tensors_hooks_that_keep_what_they_get_are_served(bench: Callable[..., Bench]) -> None:
    """Such as checkpointing, which runs the forward again, and `save_on_cpu` on a CPU."""
    made = bench()
    with torch.autograd.graph.save_on_cpu():
        out = made.run(made.x)
    made.backward(out)
    del out
    made.step_is_right()
    made.backward(checkpoint(made.run, made.x, use_reentrant=False))
    for parameter, true in zip(made.model.parameters(), made.truth, strict=True):
        torch.testing.assert_close(parameter.grad, true, rtol=1e-4, atol=1e-5)
    made.step_is_right()


def test_a_copy_fails_in_the_forward(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.step_is_right()
    streams = made.engine.streams
    assert isinstance(streams, FaultyCpuStreams)
    streams._failing = frozenset([streams.copies + 1])
    with pytest.raises(InvariantError, match="injected copy failure"):
        made.backward(made.run(made.x))
    made.step_is_right()


def test_a_second_backward_is_refused(bench: Callable[..., Bench]) -> None:
    made = bench()
    out = made.run(made.x)
    loss = out.square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match=r"\w+ was asked for a second time: .* without retain_graph=True"):
        loss.backward()
    del out, loss
    made.step_is_right()


def test_a_closed_engine_says_so_and_a_new_one_works(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.step_is_right()
    tencache_fx.close()
    with pytest.raises(TencacheError, match=r"closed; call torch.compiler.reset\(\) and compile again"):
        made.run(made.x)
    torch.compiler.reset()
    made.run = compiled(made.model, {**EAGER, "device_budget": BUDGET})
    made.backward(made.run(made.x))
    for parameter, true in zip(made.model.parameters(), made.truth, strict=True):
        torch.testing.assert_close(parameter.grad, true, rtol=1e-4, atol=1e-5)


def test_a_slow_disk(bench: Callable[..., Bench], spill_dir: Path) -> None:
    io = FaultyIO()
    io.short = True
    made = bench(io, **on_disk(spill_dir))
    made.step_is_right()
    io.delay_s = 0.01
    made.step_is_right()
    assert made.engine.stats.take()["disk_acquired_bytes"] == 0


def test_a_write_that_fails_loses_nothing(bench: Callable[..., Bench], spill_dir: Path) -> None:
    """The value stays in its buffer, which another one replaces where the host budget has room for it."""
    io = FaultyIO()
    made = bench(io, **on_disk(spill_dir))
    made.step_is_right()
    made.engine.pool.resize_budget(64 * MIB)
    made.engine.stats.take()
    io.write_errors = [errno.ENOSPC]
    with pytest.warns(UserWarning, match=r"could not write .*nothing is lost.* The run goes on, slower") as caught:
        made.step_is_right()
    assert len(caught) == 1
    assert io.write_errors == []
    made.step_is_right()


@pytest.mark.filterwarnings("ignore:.*could not write:UserWarning")
def test_a_disk_that_fails_for_good_ends_the_step(bench: Callable[..., Bench], spill_dir: Path) -> None:
    """All staging buffers keep what could not be written. The disk is to blame, and once it is mended all is well."""
    io = FaultyIO()
    made = bench(io, **on_disk(spill_dir))
    made.step_is_right()
    made.engine.pool.resize_budget(made.engine.pool.allocated_bytes)
    io.write_errors = [errno.ENOSPC] * 1000
    with pytest.raises(StoreError, match=r"^could not write .*\n.* found no free staging buffer"):
        made.backward(made.run(made.x))
    assert made.engine.stats.take()["disk_write_failures"] > 0
    io.write_errors = []
    made.step_is_right()


def test_a_read_that_fails_is_told(bench: Callable[..., Bench], spill_dir: Path) -> None:
    io = FaultyIO()
    made = bench(io, **on_disk(spill_dir))
    made.step_is_right()
    out = made.run(made.x)
    assert eventually(lambda: not any(transfer.writing for transfer in made.engine.transfers.table._transfers.values()))
    io.read_errors = [errno.EIO] * 8
    with pytest.raises(StoreError, match=r"could not read .* it is lost"):
        made.backward(out)
    io.read_errors = []
    del out
    made.step_is_right()


def test_a_disk_without_room_is_told_before_anything_runs(bench: Callable[..., Bench], spill_dir: Path) -> None:
    io = FaultyIO()
    io.room_bytes = 4096
    made = bench(io, **on_disk(spill_dir))
    with pytest.raises(Exception, match="has 4096 bytes free"):
        made.run(made.x)
    io.room_bytes = None
    torch.compiler.reset()
    made.step_is_right()


FORKING = """
import gc, multiprocessing, os, pathlib, sys, torch
collected = []  # whether garbage is, when another library's handlers run: before a fork, behind it, and in the child
note = lambda: collected.append(gc.isenabled())
os.register_at_fork(before=note, after_in_parent=note, after_in_child=note)
from torch import nn
import tencache_fx
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine_registry import open_engine
torch.set_num_threads(1)
layers = [m for _ in range(16) for m in (nn.Linear(64, 64), nn.Tanh())]
run = torch.compile(nn.Sequential(*layers), backend="tencache", options={
    "compiler": "eager", "calibrate": False, "device_budget": 1_000_000, "host_budget": 300_000,
    "spill_dir": sys.argv[1], "spill_budget": 1 << 26, "dump_dir": sys.argv[2]})
x = torch.randn(256, 64)

def call():
    run(x).sum().backward()

def call_and_tell():
    try:
        call()
    except tencache_fx.UsageError as error:
        assert "was forked from process" in str(error) and "spawn" in str(error), error
        assert not tencache_fx.stats()["offloads"]
        tencache_fx.close()
        sys.exit(3)

def compile_anew():  # without gradients: torch's autograd does not survive a fork everywhere
    torch.compiler.reset()
    with torch.no_grad():
        run(x)
    src = torch.ones(9)
    engine = open_engine(src.device, host_budget_bytes=1 << 20)
    assert torch.equal(engine.wait(engine.prefetch(engine.offload(src, Tier.HOST))), src)
    tencache_fx.close()
    assert engine.closed
    sys.exit(4)

class Numbers(torch.utils.data.Dataset):
    __len__ = lambda self: 4
    __getitem__ = lambda self, i: torch.full((2,), float(i))

call()
out = run(x)  # transfers are under way while others fork
for work, code in ((call_and_tell, 3), (compile_anew, 4)):
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    assert child.exitcode == code, (work, child.exitcode)
loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork", timeout=60)
assert [int(batch[0, 0]) for batch in loader] == [0, 1, 2, 3]
for told in ([False] * 2 + [True], [False] * 3):
    del collected[:]
    child = os.fork()
    if child == 0:  # ends as a whole interpreter does
        sys.exit(5 if collected + [gc.isenabled()] == told else 1)
    assert os.waitpid(child, 0)[1] >> 8 == 5
    assert collected + [gc.isenabled()] == told, collected
    gc.disable()
gc.enable()
assert not list(pathlib.Path(sys.argv[2]).rglob("measured*")), "written by a child"
out.sum().backward()
call()
stats = tencache_fx.stats()
assert (stats["host_acquired_bytes"], stats["disk_acquired_bytes"], stats["disk_write_failures"]) == (0, 0, 0), stats
print("ended", flush=True)
"""


def run_script(script: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_forked_processes(spill_dir: Path, tmp_path: Path) -> None:
    """One that calls the model is told; one that compiles anew is served; one that does neither sees nothing of us."""
    done = run_script(FORKING, spill_dir, tmp_path / "dump")
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr[-3000:]
    assert len(list((tmp_path / "dump").rglob("measured*"))) == 1, "written by the parent, at its end"


SCRIPT = """
import os, signal, sys, torch
from torch import nn
layers = [m for _ in range(16) for m in (nn.Linear(64, 64), nn.Tanh())]
run = torch.compile(nn.Sequential(*layers), backend="tencache", options={
    "compiler": "eager", "calibrate": False, "device_budget": 1_000_000, "host_budget": 300_000,
    "spill_dir": sys.argv[1], "spill_budget": 1 << 26})
for _ in range(2):
    run(torch.randn(256, 64)).sum().backward()
out = run(torch.randn(256, 64))
import tencache_fx
assert tencache_fx.stats()["disk_bytes"] > 0
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
print("ended", flush=True)
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_process_leaves_nothing_on_disk(spill_dir: Path, end: str) -> None:
    """`spill_dir` fails this test if a file is left in it."""
    done = run_script(SCRIPT, spill_dir, end)
    assert (done.returncode == 0) == (end == "exit"), done.stderr[-2000:]
    assert ("ended" in done.stdout) == (end == "exit")

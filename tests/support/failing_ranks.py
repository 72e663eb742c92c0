"""Two ranks of which one fails: `python failing_ranks.py FOLDER` prints, by case, how each ended and what it said.

All processes are forked from one that has loaded torch and its compiler. Waits are a tenth of what they are in use.
"""

import contextlib
import json
import logging
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from faulty_streams import FaultyCpuStreams
from shard_training import OPTIONS, STEPS, Block, blocks, loss_of, off_by, spread, wanted
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tencache_fx
from tencache_fx.optim import AdamW
from tencache_fx.region import compilation
from tencache_fx.runtime import rank_watch
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import RankStage, install_engine

LIVES_ON_S = 40.0
"""How long a rank lives on that has failed, if the other one is not over before: then it has to live on no longer."""


class Training:
    """A model that is spread over the ranks; copies of this one fail if it is told so."""

    def __init__(self, budget: str = "7MB", model: nn.Module | None = None) -> None:
        self.rank = dist.get_rank()
        self.streams = FaultyCpuStreams()
        install_engine(Engine(torch.device("cpu"), host_budget_bytes=1 << 27, streams=self.streams))
        self.model = spread(model or nn.Sequential(Block()))
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)
        self.compile(budget)

    def compile(self, budget: str) -> None:
        torch.compiler.reset()
        self.run = torch.compile(self.model, backend="tencache", options=OPTIONS | {"device_budget": budget})

    def forward(self) -> torch.Tensor:
        return loss_of(self.run, self.rank)

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.forward().backward()
            self.optimizer.step()

    def fail_to_copy(self) -> None:
        self.streams._failing = frozenset(range(self.streams.copies, self.streams.copies + 1000))


@contextlib.contextmanager
def lives_on() -> Iterator[None]:
    """What fails in the context is caught, and the process does nothing any more."""
    try:
        yield
    except (tencache_fx.TencacheError, RuntimeError) as error:
        print("caught", type(error).__name__, file=sys.stderr)
        time.sleep(LIVES_ON_S)
        os._exit(3)


def fails() -> float:
    raise RuntimeError("this closure fails")


def one_fails_to_offload() -> None:
    if dist.get_rank() == 1:
        with lives_on():
            tencache_fx.configure(host_budget="100kB")
            spread()
    spread()


def one_fails_to_compile() -> None:
    training = Training("7MB" if dist.get_rank() == 0 else "100kB")
    with lives_on() if training.rank == 1 else contextlib.nullcontext():
        training.step()


def one_fails_in_the_forward() -> None:
    training = Training(model=blocks())
    training.step()
    if training.rank == 1:
        training.fail_to_copy()
    with lives_on() if training.rank == 1 else contextlib.nullcontext():
        training.forward()


def one_fails_in_the_backward() -> None:
    training = Training(model=blocks())
    training.step()
    training.optimizer.zero_grad()
    loss = training.forward()
    if training.rank == 1:
        training.fail_to_copy()
    with lives_on() if training.rank == 1 else contextlib.nullcontext():
        loss.backward()


def one_fails_in_the_update() -> None:
    training = Training()
    training.step()
    training.forward().backward()
    with lives_on() if training.rank == 1 else contextlib.nullcontext():
        training.optimizer.step(fails if training.rank == 1 else None)
    training.step()


def one_fails_behind_a_reducer() -> None:
    model = DistributedDataParallel(blocks())
    budget = "20MB" if dist.get_rank() == 0 else "100kB"
    run = torch.compile(model, backend="tencache", options=OPTIONS | {"device_budget": budget})
    with lives_on() if dist.get_rank() == 1 else contextlib.nullcontext():
        loss_of(run, dist.get_rank()).backward()


def one_fails_and_the_other_is_set_free() -> None:
    """As with NCCL, whose collectives end when they are aborted; gloo's do not."""
    training = Training()
    training.step()
    if training.rank == 1:
        with lives_on():
            training.optimizer.step(fails)
    dist.all_reduce(torch.ones(8), async_op=True)
    while dist.is_initialized():
        time.sleep(0.01)
    try:
        training.forward()
    except tencache_fx.RankError as error:
        print(f"RankError: {error}")
        sys.stdout.flush()
        os._exit(0)


def one_is_killed() -> None:
    training = Training()
    training.step()
    if training.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    training.step()


def one_ends_early() -> None:
    training = Training()
    training.step(2 - training.rank)


def all_fail_and_go_on() -> None:
    training = Training("100kB", blocks())
    with contextlib.suppress(tencache_fx.BudgetError, torch._dynamo.exc.BackendCompilerFailed):
        training.step()
    time.sleep(2 * rank_watch.GRACE_S)
    training.compile("7MB")
    training.step(STEPS)
    assert off_by(training.model, wanted()) < 2e-4


def one_fails_and_tries_again() -> None:
    """It takes longer for that than the others would wait for one that does nothing more."""
    training = Training("7MB" if dist.get_rank() == 0 else "100kB", blocks())
    if training.rank == 1:
        with contextlib.suppress(tencache_fx.BudgetError, torch._dynamo.exc.BackendCompilerFailed):
            training.step()
        training.compile("7MB")
        with slow_planning():
            training.step()
    else:
        training.step()
    training.step(STEPS - 1)
    assert off_by(training.model, wanted()) < 2e-4


@contextlib.contextmanager
def slow_planning() -> Iterator[None]:
    split = compilation.split_joint

    def late(*args: object, **kwargs: object) -> object:
        time.sleep(3 * rank_watch.GRACE_S)
        compilation.split_joint = split
        return split(*args, **kwargs)

    compilation.split_joint = late
    yield
    assert compilation.split_joint is split  # it was slow


def one_fails_and_nobody_waits() -> None:
    """Who needs nothing of the others goes on."""
    training = Training()
    training.step()
    if training.rank == 1:
        with lives_on():
            training.optimizer.step(fails)
    time.sleep(3 * rank_watch.GRACE_S + rank_watch.LEAVE_S)
    os._exit(0)  # gloo's own end may wait for the other one


def one_fails_and_then_saves() -> None:
    """It takes its time for something else, and comes to the others in the end."""
    training = Training()
    training.step()
    if training.rank == 1:
        with contextlib.suppress(RuntimeError):
            training.optimizer.step(fails)
        until = time.monotonic() + 3 * rank_watch.GRACE_S + rank_watch.LEAVE_S
        while time.monotonic() < until:
            sum(range(1000))
    dist.barrier()


def groups_come_and_go() -> None:
    """The same address serves one process group after the other."""
    rank, over = dist.get_rank(), dist.FileStore(os.environ["MEETING"], 2)
    dist.barrier()
    dist.destroy_process_group()
    for group in range(3):
        dist.init_process_group("gloo", init_method=os.environ["ADDRESS"], rank=rank, world_size=2)
        with RankStage("a stage"):
            dist.all_reduce(torch.ones(8))
        assert sum(each.name == "tencache-ranks" for each in threading.enumerate()) >= 1
        dist.destroy_process_group()
        if rank == 0:
            while is_served():
                time.sleep(0.01)
            over.set(f"{group}", "")
        over.wait([f"{group}"])  # else a rank might meet the other one, for the next group, where this one was
    time.sleep(5 * rank_watch.POLL_S)
    assert not [each for each in threading.enumerate() if each.name == "tencache-ranks"]


def is_served() -> bool:
    host, port = os.environ["ADDRESS"].removeprefix("tcp://").split(":")
    with socket.socket() as asking:
        return asking.connect_ex((host, int(port))) == 0


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        one_fails_to_offload,
        one_fails_to_compile,
        one_fails_in_the_forward,
        one_fails_in_the_backward,
        one_fails_in_the_update,
        one_fails_behind_a_reducer,
        one_fails_and_the_other_is_set_free,
        one_is_killed,
        one_ends_early,
        all_fail_and_go_on,
        one_fails_and_tries_again,
        one_fails_and_nobody_waits,
        one_fails_and_then_saves,
        groups_come_and_go,
    )
}


OUTLIVED = ("one_fails_and_the_other_is_set_free", "one_fails_and_nobody_waits")
"""Cases of which rank 0 ends well, and rank 1 lives on."""


def become(rank: int, case: Callable[[], None], folder: Path) -> None:
    """Run a case as one of its ranks; ends the process."""
    name = case.__name__
    said = os.open(folder / f"{name}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    code = 1
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder / name}.meeting", rank=rank, world_size=2)
        case()
        code = 0
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    multiprocessing.util._exit_function()  # as at the end of any process
    os._exit(code)


def main(folder: Path, names: list[str]) -> None:
    rank_watch.POLL_S, rank_watch.GRACE_S, rank_watch.LEAVE_S, rank_watch.LOST_S = 0.1, 1.0, 0.5, 1.0
    torch._dynamo.lookup_backend("tencache")  # what compiling imports is loaded by now, too
    found: dict[str, object] = {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MEETING"] = str(folder / "meeting")
        os.environ["ADDRESS"] = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    for name in names or CASES:
        begun = time.monotonic()
        children = {}
        for rank in range(2):
            child = os.fork()
            if child == 0:
                become(rank, CASES[name], folder)
            children[rank] = child
        codes = []
        for rank in (0, 1):
            if rank == 1 and (codes[0] != 0 or name in OUTLIVED):
                threading.Timer(1.0, _end, [children[1]]).start()
            codes.append(os.waitstatus_to_exitcode(os.waitpid(children[rank], 0)[1]))
            if rank == 0:
                took_s = time.monotonic() - begun
        said = [(folder / f"{name}-{rank}").read_text() for rank in range(2)]
        found[name] = {"codes": codes, "said": said, "took_s": took_s}
        print(name, codes, round(took_s, 1), file=sys.stderr, flush=True)
    print(json.dumps(found))


def _end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

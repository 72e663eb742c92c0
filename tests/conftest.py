"""Fixtures that runtime tests share: engines that must end clean, and a check that nothing leaks."""

import contextlib
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from hypothesis import settings
from meter import Meter, metered_cpu
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from tqdm import TMonitor

import tencache_fx
from tencache_fx.hardware import rates
from tencache_fx.region.registry import REGIONS
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import engines
from tencache_fx.runtime.file_io import FileIO
from tencache_fx.runtime.store import Store
from tencache_fx.runtime.streams import Streams

MIB = 1 << 20

# MKL's sums depend on where in memory a matrix lies, on some processors, unless it is told otherwise before its first.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

# Workers that share the cores take one share each: threads that wait for a core that another worker has cost time.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // WORKERS))
    inductor_config.compile_threads = torch.get_num_threads()

# The same examples in each run, however long each takes; `--hypothesis-profile explore` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("repeatable")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Let a worker that is done take over tests of another: some take long. Each begins with files of its own."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    for item in items if not torch.cuda.is_available() else ():
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def open_files() -> set[str]:
    """Return this process's open files, without those that come and go by themselves."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:  # the descriptor of listdir itself
            continue
    return found


def eventually(holds: Callable[[], bool], *, limit_s: float = 10.0) -> bool:
    """Wait until `holds()`, at most `limit_s`; return whether it does."""
    until = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


class _Cycle:
    """Garbage that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def collect() -> None:
    """Collect all garbage there is: `gc.collect()` does nothing while another thread is at it."""
    enabled = gc.isenabled()
    gc.disable()  # a collection of young objects alone would take the cycle
    try:
        garbage = weakref.ref(_Cycle())
        while garbage() is not None:
            gc.collect()
    finally:
        if enabled:
            gc.enable()


def settled(engine: Engine) -> bool:
    """Return whether the engine holds nothing for anybody."""
    collect()
    gauges = engine.stats.take()
    return not (gauges["host_acquired_bytes"] or gauges["disk_acquired_bytes"] or gauges["transfers"])


@pytest.fixture(autouse=True, scope="module")
def no_compiled_code_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave no region to the next file: Dynamo's reset keeps code that calls collectives among its file's globals."""
    yield
    for name in [name for name in vars(request.module) if name.startswith("__compiled_fn_")]:
        delattr(request.module, name)
    collect()


@pytest.fixture(autouse=True, scope="module")
def modules_are_not_garbage() -> None:
    """Look no more, when garbage is collected, at what is there before a file's first test: modules, most of it.

    Tests collect often, to see what is left; with all of torch to look through that takes longer than the tests.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)  # the frames of a test that has failed hold its tensors, on a GPU as well
    collect()  # what is frozen as garbage stays for good
    gc.freeze()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without options from outside, and leave no engine, no compiled graph and no option to the next test."""
    for variable in [name for name in os.environ if name.startswith("TENCACHE_")]:
        monkeypatch.delenv(variable)
    yield
    tencache_fx.close()
    tencache_fx.configure(reset=True)
    torch.compiler.reset()
    if REGIONS.live():  # an error's frames hold them in cycles: a report of the next test would list them
        collect()


@pytest.fixture(scope="session")
def measured_rates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that knows this machine's rates: measuring them takes seconds."""
    folder = tmp_path_factory.mktemp("rates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            rates.links(torch.device(device), (), calibrate=True)
            rates.roofline(torch.device(device), calibrate=True)
    return folder


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured_rates: Path) -> Iterator[None]:
    """Keep what this test measures, learns and compiles from the next; the machine's rates are known.

    No region comes from AOTAutograd's cache: tests look at what happens while one is compiled.
    """
    monkeypatch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
    with tempfile.TemporaryDirectory() as folder, functorch_config.patch(enable_autograd_cache=False):
        shutil.copytree(measured_rates, folder, dirs_exist_ok=True)
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        yield


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of everything that is measured; nothing is known yet."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "tencache_fx"


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Let Inductor's C++ kernels do nothing: what is allocated and freed stands around them, in the generated Python.

    So none has to be compiled, and a trace is still one of real tensors in real code. Integers they get become 0: real
    operations may take them for indices.
    """

    def run(*arguments: object) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and not argument.is_floating_point() and not argument.is_complex():
                argument.data.zero_()

    def hollow(*args: object, **more: object) -> Callable[..., None]:
        return run

    with mock.patch.object(AsyncCompile, "cpp_pybinding", hollow):
        try:
            yield
        finally:
            PyCodeCache.cache_clear()  # the same code is to be loaded with kernels again


@pytest.fixture
def quick_libraries(alone: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run graphs as they are, with fixed rates, on one thread; what other libraries set is taken back.

    With more threads an embedding's gradient is added up in any order.
    """
    for variable in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TENCACHE_COMPILER", "eager")
    monkeypatch.setenv("TENCACHE_CALIBRATE", "0")
    if "accelerate.state" in sys.modules:  # it remembers the first backend of a process
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()  # regions of the test before are none of this one's
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for variable in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[variable]


@pytest.fixture
def hollow_kernels() -> Iterator[None]:
    """Let Inductor's C++ kernels do nothing in this test."""
    with without_kernels():
        yield


def own_threads() -> set[threading.Thread]:
    """Return the threads there are, but for those that are started for good: by progress bars and by Inductor.

    Ours all have names.
    """
    others = (thread for thread in threading.enumerate() if not isinstance(thread, TMonitor))
    return {thread for thread in others if not thread.name.startswith("ThreadPoolExecutor-")}


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail when the test leaves an engine, a thread or a file open."""
    gc.collect()
    threads, files = own_threads(), open_files()
    yield
    gc.collect()
    left = engines()
    for engine in left:
        engine.close()
    assert not left, "an engine was left open"
    assert eventually(lambda: own_threads() <= threads), threading.enumerate()
    assert open_files() <= files


@pytest.fixture
def spill_dir(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in which no file may ever show up."""
    directory = tmp_path / "spill"
    directory.mkdir()
    yield directory
    assert list(directory.iterdir()) == []


@pytest.fixture
def new_engine(no_leaks: None, spill_dir: Path) -> Iterator[Callable[..., Engine]]:
    """Return a maker of CPU engines that must have given everything back when the test ends."""
    made: list[Engine] = []

    def make(
        *,
        host_budget_bytes: int = 64 * MIB,
        streams: Streams | None = None,
        io: FileIO | None = None,
        spill_budget_bytes: int = 64 * MIB,
        checksum: bool = True,
        block_bytes: int = 8 * MIB,
    ) -> Engine:
        engine = Engine(torch.device("cpu"), host_budget_bytes=host_budget_bytes, streams=streams or FaultyCpuStreams())
        made.append(engine)
        engine.attach_store(Store((spill_dir,), spill_budget_bytes, checksum=checksum, io=io, block_bytes=block_bytes))
        return engine

    yield make
    try:
        for engine in made:
            if not engine.closed:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    assert eventually(lambda engine=engine: settled(engine)), engine.stats.take()
                assert engine.pool.allocated_bytes <= engine.pool.budget_bytes
    finally:
        for engine in made:
            engine.close()
            assert engine.pool.allocated_bytes == 0


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Meter]:
    """A CPU whose allocator counts."""
    yield from metered_cpu(monkeypatch, caplog)

"""C++ code that this machine's compiler builds in the background, kept on disk for the next process.

A build takes a fraction of a second where the code includes nothing of torch. It is kept under a name made of the code,
the compiler and the CPU, with a digest of its bytes behind them, so that a damaged file is never loaded.
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch._inductor import cpp_builder

from tencache_fx.hardware import cache

log = logging.getLogger("tencache_fx")

_FLAGS = (
    *("-x", "c++", "-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv"),  # IEEE's arithmetic, as written down
)
_MOST_S = 120
_DIGEST_BYTES = 32


class BuildError(Exception):
    """There is no library: the message says why."""


class Library:
    """The shared library of some code, which is looked for on disk, or else built, once `start` is called."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._loaded: ctypes.CDLL | None = None
        self._build: _Build | None = None

    def start(self) -> None:
        """Begin the build, if there is none on disk; does not wait for it."""
        with self._lock, contextlib.suppress(BuildError):  # which `load` raises
            if self._loaded is None and self._build is None and not _is_intact(_kept(self._source)):
                self._build = _Build(self._source)

    def load(self) -> ctypes.CDLL:
        """Return the library, loaded, once it is built; raises `BuildError` if it cannot be built or loaded."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._find()
            return self._loaded

    def stop(self) -> None:
        """End a build that nobody has waited for; a later `load` begins another."""
        with self._lock:
            if self._build is not None:
                self._build.stop()
                self._build = None

    def _find(self) -> ctypes.CDLL:
        kept = _kept(self._source)
        if self._build is None and _is_intact(kept):
            with contextlib.suppress(OSError):  # it was built where other libraries are
                library = ctypes.CDLL(str(kept))
                cache.USES.note(kept)
                return library
        build, self._build = self._build or _Build(self._source), None
        try:
            built = build.wait()
            _keep(built, kept)
            return ctypes.CDLL(str(kept if _is_intact(kept) else built))
        except OSError as error:
            raise BuildError(f"what the compiler built cannot be loaded: {error}") from error
        finally:
            build.stop()


class _Build:
    """A compiler that runs, in a folder of its own."""

    def __init__(self, source: str) -> None:
        self._begin = time.perf_counter()
        command = [_compiler(), *_FLAGS, "source.cpp", "-o", "built.so"]
        with _no_build_without("a folder for the compiler"):
            self._folder = Path(tempfile.mkdtemp(prefix="tencache_fx-"))
        try:
            with _no_build_without(command[0]), self._said.open("wb") as said:
                (self._folder / "source.cpp").write_text(source)
                self._process = subprocess.Popen(
                    command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
                )
        except BuildError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def _said(self) -> Path:
        return self._folder / "said"

    def wait(self) -> Path:
        """Return the file that was built; raises `BuildError`, and `OSError` for a folder that is gone."""
        waited = time.perf_counter()
        try:
            status = self._process.wait(_MOST_S)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"the compiler was not done after {_MOST_S} s") from error
        if status:
            said = self._said.read_text(errors="replace").strip().splitlines()
            raise BuildError(f"the compiler failed ({said[0] if said else f'status {status}'})")
        now = time.perf_counter()
        log.debug("the compiler began %.2f s ago; waited for it for %.2f s", now - self._begin, now - waited)
        return self._folder / "built.so"

    def stop(self) -> None:
        """End the compiler, and remove its folder."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _no_build_without(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BuildError(f"there is no {what}: {error.strerror}") from error


class _Libraries:
    def __init__(self) -> None:
        self._by_source: dict[str, Library] = {}

    def of(self, source: str) -> Library:
        return self._by_source.setdefault(source, Library(source))

    def stop(self) -> None:
        for library in list(self._by_source.values()):
            library.stop()


_LIBRARIES = _Libraries()
atexit.register(_LIBRARIES.stop)


def library_of(source: str) -> Library:
    """Return the library of this code: one for the process."""
    return _LIBRARIES.of(source)


def stop_builds() -> None:
    """End all builds that nobody has waited for."""
    _LIBRARIES.stop()


def _compiler() -> str:
    """Return the C++ compiler, which is Inductor's; raises `BuildError` if there is none."""
    try:
        return cpp_builder.get_cpp_compiler()
    except (OSError, RuntimeError) as error:
        raise BuildError("there is no C++ compiler") from error


@functools.cache
def _version(compiler: str) -> str:
    try:
        command, most_s = [compiler, "--version"], _MOST_S
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=most_s).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the compiler {compiler} cannot be asked for its version: {error}") from error


@functools.cache
def _cpu() -> str:
    """Return what `-march=native` depends on."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in first if line.split(":")[0].strip() in names)


def _kept(source: str) -> Path:
    """Return the file in which the library of this code is kept, if it is."""
    compiler = _compiler()
    key = json.dumps([source, compiler, _version(compiler), _FLAGS, _cpu()])
    try:
        folder = cache.folder()
    except OSError as error:
        raise BuildError(str(error)) from error
    return folder / f"native-{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"


def _is_intact(path: Path) -> bool:
    try:
        found = path.read_bytes()
    except OSError:
        return False
    return found[-_DIGEST_BYTES:] == _digest(path.name, found[:-_DIGEST_BYTES])


def _keep(built: Path, path: Path) -> None:
    content = built.read_bytes()
    try:
        cache.keep_file(path, content + _digest(path.name, content))  # loaders do not look behind what they load
    except OSError as error:
        log.info("compiled code cannot be kept in %s: %s", path, error.strerror)


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()

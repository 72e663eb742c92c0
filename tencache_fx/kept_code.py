"""The generated code of a region, and what is known of its plan, as AOTAutograd's cache keeps them: in one entry.

AOTAutograd's cache spares a second process that a region is traced, split, planned and lowered. Its entries may hold
any `OutputCode` (torch: `_functorch/_aot_autograd/aot_autograd_result.py`, "bundled"). A `KeptCode` is one: Inductor's
code for one graph, with `facts` about the region beside it. What watches the region's runs is no part of it. It is put
around the code in each process anew: `run` is what runs.
"""

import contextlib
import copy
import dataclasses
import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal

from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._inductor import config
from torch._inductor.codecache import FxGraphCache
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants, OutputCode
from torch._inductor.triton_bundler import TritonBundle
from torch._inductor.utils import BoxedBool

Phase = Literal["forward", "backward", "inference"]

Foresee = Callable[[object], object]
"""Is told the facts of a graph, before its code is loaded."""

_LOADED: ContextVar[tuple[list["KeptCode"], Foresee] | None] = ContextVar("loaded", default=None)


class KeptCode(OutputCode):
    """The code of the graph of one phase.

    A `planned` graph never runs as a CUDA graph. `facts` are read when the entry is written; None keeps it from being
    written, as does code that is not Inductor's.
    """

    def __init__(self, code: Any, phase: Phase, *, planned: bool, facts: Callable[[], object] | None) -> None:
        self.code, self.phase, self.planned, self.facts = code, phase, planned, facts
        self.run: Callable[[Sequence[Any]], Any] = code
        self._content = b""
        self._boxed_call = True  # not the class's: what wraps this copies only what is its own

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run the graph, watched."""
        return self.run(inputs)

    def __copy__(self) -> "KeptCode":
        """Return a copy that has the same code."""
        copied = KeptCode.__new__(KeptCode)
        copied.__dict__.update(self.__dict__)
        return copied

    def prepare_for_serialization(self) -> None:
        """Make of this, a copy that torch has made, what is written to disk."""
        facts = None if self.facts is None else self.facts()
        if facts is None or not isinstance(self.code, CompiledFxGraph):
            raise BypassAOTAutogradCache("a region that tencache cannot take up again is not kept")
        code = copy.copy(self.code)
        code.prepare_for_serialization()
        code._triton_bundle = without_loaded(code)
        self._content = pickle.dumps((code, self.phase, self.planned, facts))
        self.code = self.facts = self.run = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the content with its digest."""
        return _read, (self._content, hashlib.sha256(self._content).hexdigest())

    def post_compile(
        self, example_inputs: Sequence[Any], constants: CompiledFxGraphConstants, graph_kwargs: Any
    ) -> None:
        """Load the code, as torch does for its own (`BundledOutputCodeLoadable`), and tell who waits for it."""
        waiting = _LOADED.get()
        if waiting is None:
            raise BypassAOTAutogradCache("tencache's code was kept for tencache")
        loaded, foresee = waiting
        if self.facts is not None:
            foresee(self.facts())
        code, _ = FxGraphCache.cache_hit_post_compile(self.code, {}, constants)
        if code is None:
            raise BypassAOTAutogradCache("the generated code cannot be written to Inductor's folder")
        cudagraphs = BoxedBool(False) if self.planned else graph_kwargs["cudagraphs"]
        with config.patch({"triton.cudagraphs": False} if self.planned else {}):
            settings: Any = {**graph_kwargs, "cudagraphs": cudagraphs}
            code.post_compile(example_inputs, constants, settings)
        self.code = self.run = code
        loaded.append(self)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Do nothing: Inductor's code has its own."""


def without_loaded(code: CompiledFxGraph) -> TritonBundle | None:
    """Return the Triton kernels of a graph as they were before this process has loaded any.

    Code that came from Inductor's cache launches those of its bundle themselves. Then they cannot be written: they name
    addresses of this process. They are as they were in the entry of that cache, which is read again. If it is gone they
    are left out: who reads what is written compiles each of them by Triton, which has their binaries from the bundle.
    """
    bundle, key = code._triton_bundle, code._fx_graph_cache_key
    if bundle is None or not any(each.kernel.launchers for each in bundle.static_autotuners):
        return bundle
    for graph, *_ in () if key is None else FxGraphCache.iterate_over_candidates(True, None, key):
        if graph.source_code == code.source_code and graph._triton_bundle is not None:
            return graph._triton_bundle
    unloaded = [each for each in bundle.static_autotuners if not each.kernel.launchers]
    return dataclasses.replace(bundle, static_autotuners=unloaded)


def _read(content: bytes, digest: str) -> KeptCode:
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError("a region that was kept is not as it was written.")
    code, phase, planned, facts = pickle.loads(content)
    return KeptCode(code, phase, planned=planned, facts=lambda: facts)


@contextlib.contextmanager
def loaded_codes(foresee: Foresee) -> Iterator[list[KeptCode]]:
    """Yield a list of the codes that AOTAutograd's cache has while this is entered: none, if it has not got them.

    `foresee` is called with the facts of each before it is loaded.
    """
    codes: list[KeptCode] = []
    token = _LOADED.set((codes, foresee))
    try:
        yield codes
    finally:
        _LOADED.reset(token)

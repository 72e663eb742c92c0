"""Torch's own test suites as cases: every operation, module, higher-order operation and custom operation that torch
tests itself on, with samples of its arguments.

Importing this freezes `torch.backends` for the process, as torch's suites do: run it in one of its own.
"""

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.testing._internal.hop_db import hop_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

POLICIES = ("joint", "teraio", "10cache")
MOST_SAMPLES, MOST_SAMPLE_BYTES = 200, 4 << 20
INDUCTOR_SHARE = 8  # compiling C++ takes seconds: one in so many


@dataclass(frozen=True)
class Case:
    """One entry of a suite and how it is run.

    `variant` is "plain", "inplace" (into an activation), "mutated" (in place, into an input of the step), "bf16",
    "complex", "dynamic" or "inductor".
    """

    suite: str
    entry: str
    variant: str
    info: Any

    @property
    def name(self) -> str:
        return f"{self.suite}:{self.entry}:{self.variant}"

    @property
    def policy(self) -> str:
        """Return the policy it is run with: the same in every version of torch."""
        return POLICIES[zlib.crc32(self.name.encode()) % len(POLICIES)]

    @property
    def dtype(self) -> torch.dtype:
        wanted = {"bf16": torch.bfloat16, "complex": torch.complex64}.get(self.variant, torch.float32)
        supported = dtypes_of(self.info)
        # An operation on integers only is run on these.
        return wanted if wanted in supported else min(supported, key=lambda dtype: (dtype.itemsize != 8, str(dtype)))


@dataclass(frozen=True)
class Subject:
    """What the step calls, and with what: `call(*args, **kwargs)`; `module` is what `call` is, if it is one."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    finish: Callable[[Any], Any]
    module: nn.Module | None = None


def all_cases() -> list[Case]:
    """Return every case of the four suites, in their order."""
    found = []
    suites: Mapping[str, Sequence[OpInfo]] = MappingProxyType(
        {"op_db": op_db, "hop_db": hop_db, "custom_op_db": custom_op_db}
    )
    for suite, infos in suites.items():
        for info in infos:
            entry = info.full_name
            found += [Case(suite, entry, variant, info) for variant in _op_variants(suite, entry, info)]
    for info in module_db:
        entry = info.name
        found += [Case("module_db", entry, variant, info) for variant in _module_variants(entry, info)]
    return found


def dtypes_of(info: OpInfo | ModuleInfo) -> set[torch.dtype]:
    """Return what it supports on a CPU."""
    return set(info.supported_dtypes("cpu")) if isinstance(info, ModuleInfo) else set(info.dtypes)


def _inductor_too(entry: str) -> bool:
    return zlib.crc32(entry.encode()) % INDUCTOR_SHARE == 0


def _op_variants(suite: str, entry: str, info: OpInfo) -> Iterator[str]:
    if not info.dtypes:  # for a GPU only
        return
    yield "plain"
    if suite == "op_db" and info.get_inplace() is not None:
        yield "inplace"
        yield "mutated"
    if torch.bfloat16 in info.dtypes:
        yield "bf16"
    if torch.complex64 in info.dtypes:
        yield "complex"
    yield "dynamic"
    if suite != "op_db" or _inductor_too(entry):
        yield "inductor"


def _module_variants(entry: str, info: ModuleInfo) -> Iterator[str]:
    yield from ("plain", "eval")
    if torch.bfloat16 in dtypes_of(info):
        yield "bf16"
    yield "dynamic"
    if _inductor_too(entry):
        yield "inductor"


def subjects(case: Case, steps: int) -> list[Subject]:
    """Return the case's call for each step: equal ones, of other values where the suite makes such."""
    if case.suite == "module_db":
        return _module_subjects(case, steps)
    index = None
    found: list[Subject] = []
    for step in range(steps):
        torch.manual_seed(step)
        samples = _samples(case)
        index = _choose(samples) if index is None else index
        call = case.info.get_inplace() if case.variant in ("inplace", "mutated") else case.info.get_op()
        sample = samples[min(index, len(samples) - 1)]
        found.append(
            Subject(call, (sample.input, *sample.args), MappingProxyType(sample.kwargs), sample.output_process_fn_grad)
        )
    return found if len({_shape(each) for each in found}) == 1 else found[:1] * steps


def _samples(case: Case) -> list[SampleInput]:
    info, inplace = case.info, case.variant in ("inplace", "mutated")
    wants_grad = info.supports_autograd and (case.dtype.is_floating_point or case.dtype.is_complex)
    found = list(itertools.islice(info.sample_inputs("cpu", case.dtype, requires_grad=wants_grad), MOST_SAMPLES))
    if info.reference_inputs_func is not None and case.suite == "op_db":
        more = info.reference_inputs("cpu", case.dtype, requires_grad=wants_grad)
        found += itertools.islice(more, MOST_SAMPLES)
    return [sample for sample in found if not (inplace and sample.broadcasts_input)]


def _choose(samples: Sequence[SampleInput]) -> int:
    """Return the position of the largest sample that is not too large: there is most to spill."""
    sizes = [sum(each.nbytes for each in tensors_in((s.input, s.args, s.kwargs))) for s in samples]
    fitting = [index for index, size in enumerate(sizes) if size <= MOST_SAMPLE_BYTES]
    return max(fitting or range(len(samples)), key=lambda index: sizes[index])


def tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors of `tree` that are laid out in strides."""
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, Tensor) and each.layout is torch.strided]


def _shape(subject: Subject) -> str:
    """Return all of a call but its tensors' values."""
    leaves, spec = pytree.tree_flatten((subject.args, dict(subject.kwargs)))
    described = [
        f"{each.dtype} {tuple(each.shape)} {each.layout}" if isinstance(each, Tensor) else _plain(each)
        for each in leaves
    ]
    return f"{spec} {described}"


def _plain(leaf: object) -> str:
    return repr(leaf) if isinstance(leaf, bool | int | float | complex | str) else type(leaf).__name__


def _module_subjects(case: Case, steps: int) -> list[Subject]:
    info: ModuleInfo = case.info
    wants_grad = case.dtype.is_floating_point
    torch.manual_seed(0)
    training = case.variant != "eval"
    inputs = [
        each
        for each in info.module_inputs_func(info, "cpu", case.dtype, wants_grad, training)
        if each.forward_input is not None
    ]
    sizes = [sum(t.nbytes for t in tensors_in((i.forward_input.args, i.forward_input.kwargs))) for i in inputs]
    chosen = inputs[max(range(len(inputs)), key=lambda index: sizes[index])]
    constructor = chosen.constructor_input
    module = info.module_cls(*constructor.args, **constructor.kwargs).to(case.dtype).train(training)
    forward = chosen.forward_input
    subject = Subject(
        module, tuple(forward.args), MappingProxyType(forward.kwargs), finish=lambda out: out, module=module
    )
    return [subject] * steps

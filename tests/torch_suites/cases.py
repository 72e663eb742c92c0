"""Torch's own test suites as cases: every operation, module, higher-order operation and custom operation that torch
tests itself on, with samples of its arguments.

Importing this freezes `torch.backends` for the process, as torch's suites do: run it in one of its own.
"""

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.testing._internal.hop_db import hop_db
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.testing._internal.opinfo.definitions import _masked, linalg, special
from torch.utils import _pytree as pytree

POLICIES = ("joint", "teraio", "10cache")
MOST_SAMPLES, WORTH_SPILLING = 64, 4096
LENGTHS: Mapping[str, int] = MappingProxyType({"S": 36, "M": 44, "L": 52})
HUGE = frozenset({"grid_sampler_3d"})  # its samples have five sides: of these lengths they take gigabytes
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
        """Return the policy it is run with: the same in every version of torch.

        What is written to in place is a matter of what may be computed again, which only `joint` does.
        """
        if self.variant == "mutated":
            return "joint"
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
    if case.suite == "op_db" and case.entry not in HUGE and (larger := _larger_subjects(case, steps)):
        return larger
    return _op_subjects(case, steps)


def _larger_subjects(case: Case, steps: int) -> list[Subject]:
    """Return calls with samples that are worth spilling, or none if the operation has none of other sizes.

    Torch's samples are of five to twenty elements a side; these lengths are patched where their makers look them up.
    """
    with contextlib.ExitStack() as stack:
        for module in (core, common_methods_invocations, _masked, linalg, special):
            lengths = {name: length for name, length in LENGTHS.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **lengths))
        try:
            found = _op_subjects(case, steps)
            for subject in found:
                values = pytree.tree_map_only(Tensor, lambda each: each.detach().clone(), subject.args)
                with torch.no_grad():
                    subject.call(*values, **subject.kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError):  # other numbers are written out, and do not match
            return []
    return found


def _op_subjects(case: Case, steps: int) -> list[Subject]:
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
    """Return samples of which the largest is worth spilling, if there are any such."""
    info, inplace = case.info, case.variant in ("inplace", "mutated")
    wants_grad = info.supports_autograd and (case.dtype.is_floating_point or case.dtype.is_complex)

    def taken(samples: Iterable[SampleInput]) -> list[SampleInput]:
        found: list[SampleInput] = []
        with contextlib.suppress(ValueError):  # some of integers come late, and want a gradient all the same
            for sample in itertools.islice(samples, MOST_SAMPLES):
                found += [] if inplace and sample.broadcasts_input else [sample]
        return found

    found = taken(info.sample_inputs("cpu", case.dtype, requires_grad=wants_grad))
    small = max(map(_nbytes, found), default=0) < WORTH_SPILLING
    if small and case.suite == "op_db" and info.reference_inputs_func is not None:
        found += taken(info.reference_inputs("cpu", case.dtype, requires_grad=wants_grad))
    return found


def _nbytes(sample: SampleInput) -> int:
    return sum(each.nbytes for each in tensors_in((sample.input, sample.args, sample.kwargs)))


def _choose(samples: Sequence[SampleInput]) -> int:
    """Return the position of the smallest sample that is well worth spilling, or of the largest there is.

    What the layers around it save should count beside it.
    """
    sizes = [_nbytes(sample) for sample in samples]
    worth = [index for index, size in enumerate(sizes) if size >= 4 * WORTH_SPILLING]
    return min(worth, key=sizes.__getitem__) if worth else max(range(len(samples)), key=sizes.__getitem__)


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

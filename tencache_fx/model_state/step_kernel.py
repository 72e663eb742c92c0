"""The arithmetic of an optimizer: for a step of its class, a kernel in one pass over memory, and its numbers.

A kernel makes of a gradient in the parameter's dtype, an fp32 master weight and the optimizer's arrays the new ones,
and the new weight. The master may be kept as what it has besides the weight (`split_master`). Arrays may be kept in
other forms than fp32 (`stored_form`). In bfloat16 they are rounded stochastically, because to the nearest a moment that
changes by less than a 256th a step would stay as it is. What they are rounded by is hashed from the values themselves,
so a run can be repeated to the last bit.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from tencache_fx.errors import OptionError
from tencache_fx.model_state.decoded_update import Arrange, compile_on_parts, on_parts
from tencache_fx.model_state.eight_bit_form import SIGNED_8BIT, UNSIGNED_8BIT
from tencache_fx.model_state.group_options import GroupOptions, exactly
from tencache_fx.model_state.kernel_source import UncoveredError
from tencache_fx.model_state.native_kernel import NativeFunctions, NativeKernel
from tencache_fx.model_state.split_master import SPLIT
from tencache_fx.model_state.step_tracing import TracedStep, trace_step
from tencache_fx.model_state.stored_form import BF16, FP32, StoredForm, parts_of
from tencache_fx.model_state.value_signs import nonnegative
from tencache_fx.native_code import BuildError
from tencache_fx.option_values import listed, nearest
from tencache_fx.stages import STAGES
from tencache_fx.thread_safe import compile_for_threads

log = logging.getLogger("tencache_fx")

MASTER = "master"

StateDtype: TypeAlias = torch.dtype | Literal["8bit"]
"""What an optimizer keeps its arrays in, besides the master."""

LEAST_8BIT = 1 << 12
"""Parameters of fewer elements keep their state in fp32 where that of others is in 8 bits."""

# Of arrays that may have numbers below zero, and of others.
_FORMS: Mapping[StateDtype, tuple[StoredForm, StoredForm]] = MappingProxyType(
    {torch.float32: (FP32, FP32), torch.bfloat16: (BF16, BF16), "8bit": (SIGNED_8BIT, UNSIGNED_8BIT)}
)
_MOST_STEPS = 256  # that are known at once: parameters are at the same one, in some groups
_EXAMPLE_LENGTH = 1 << 20  # so many elements that a kernel is compiled for all threads
_LEAST_LENGTH = 1 << 14  # 64 blocks: more than a step has numbers
_CPU = torch.device("cpu")
_STAGE = "the optimizer's kernels"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One step: `numbers`, fp32, are for `kernel`, and the first of them multiplies the gradient.

    `initial` is what is in arrays that there were none of before. `after` is what the optimizer has of the parameter
    once it is done, besides arrays; `numbers_after` are those in the tensors of that.
    """

    numbers: Tensor
    kernel: "Kernel"
    initial: Mapping[str, float]
    after: Mapping[str, Any]
    numbers_after: Mapping[str, Any]


class Rule:
    """How a torch optimizer class updates single elements, with what it keeps in `state_dtype`, but for fp32 masters.

    It is made with the options of a group, and with those `given` that are no group's. Raises `OptionError` for another
    `state_dtype` than fp32, bfloat16 and "8bit". Where `elements` are asked for, they are a parameter's: state of fewer
    than `LEAST_8BIT` is not kept in 8 bits.
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], state_dtype: StateDtype, given: Mapping[str, Any]
    ) -> None:
        if state_dtype not in _FORMS:
            raise OptionError(f"state_dtype is {state_dtype!r}; choose torch.float32, torch.bfloat16 or '8bit'.")
        self._class = optimizer_class
        self._state_dtype = state_dtype
        self._given = given
        self._arrays: dict[tuple[object, ...], tuple[Mapping[str, StoredForm], ...]] = {}  # also with a split master
        self._first: dict[tuple[object, ...], tuple[TracedStep, ...]] = {}
        self._steps: dict[tuple[object, ...], Step] = {}
        self._kernels: dict[tuple[object, ...], Kernel] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return rule_of, (self._class, self._state_dtype, self._given)

    def arrays(
        self, group: Mapping[str, Any], dim: int, elements: int = LEAST_8BIT, *, split: bool = False
    ) -> Mapping[str, StoredForm]:
        """Return the forms of the state of parameters of so many dimensions in a group, the master weight first.

        With `split` the master is what it has besides the weight, which is of bf16. Raises `OptionError` when the class
        cannot be used, or not with these options.
        """
        key = self._first_key(group, dim, elements)
        if key not in self._arrays:
            small, other = ((2,) * max(0, dim - 1) + (each,) for each in (3, 4))
            first, again = (self._trace(group, shape, {}, ()) for shape in (small, other))
            second = self._trace(group, small, first.scalars, first.names)
            name = self._class.__name__
            if second.names != first.names:
                raise OptionError(
                    f"{name} keeps {', '.join(first.names)} after one step, and {', '.join(second.names)} after two; "
                    "use an optimizer that always keeps the same."
                )
            if (again.graph.key, again.numbers) != (first.graph.key, first.numbers):
                raise OptionError(f"what {name} does depends on a parameter's size; use another optimizer.")
            kept = self._forms(first, second, elements)
            if len(self._arrays) >= _MOST_STEPS:
                self._arrays.clear()
                self._first.clear()
            self._first[key] = first, second
            self._arrays[key] = tuple(MappingProxyType({MASTER: form, **kept}) for form in (FP32, SPLIT))
            for traced in self._first[key]:
                self._kernel(traced, self._arrays[key][False])
        return self._arrays[key][split]

    def begin(
        self,
        group: Mapping[str, Any],
        dim: int,
        dtype: torch.dtype,
        elements: int = LEAST_8BIT,
        *,
        split: bool = False,
    ) -> None:
        """Begin to build, in the background, the kernels of the first steps of such parameters on the CPU."""
        forms = self.arrays(group, dim, elements, split=split)
        for traced in self._first[self._first_key(group, dim, elements)]:
            self._kernel(traced, forms).begin(dtype)

    def initial(self, group: Mapping[str, Any], dim: int) -> Mapping[str, float]:
        """Return what is in each array before the first step."""
        return {MASTER: float("nan"), **self.step(group, dim, {}, frozenset()).initial}

    def step(
        self,
        group: Mapping[str, Any],
        dim: int,
        scalars: Mapping[str, Any],
        made: Collection[str],
        elements: int = LEAST_8BIT,
        *,
        split: bool = False,
    ) -> Step:
        """Return a step of a parameter in a group, of which the class has `scalars` and has `made` so many arrays."""
        arrays = self.arrays(group, dim, elements, split=split)
        names = tuple(name for name in arrays if name in made and name != MASTER)
        key = GroupOptions.of(group).text, dim, exactly(scalars), names, self._is_small(elements), split
        if key not in self._steps:
            traced = self._trace(group, (2,) * max(0, dim - 1) + (4,), scalars, names)
            self._check_signs(traced, arrays)
            if len(self._steps) >= _MOST_STEPS:
                self._steps.clear()
            self._steps[key] = Step(
                numbers=torch.tensor([1.0, *traced.numbers], dtype=torch.float64, device="cpu").float(),
                kernel=self._kernel(traced, arrays),
                initial=traced.initial,
                after=traced.scalars,
                numbers_after={
                    name: value.tolist() for name, value in traced.scalars.items() if isinstance(value, Tensor)
                },
            )
        return self._steps[key]

    def _is_small(self, elements: int) -> bool:
        return self._state_dtype == "8bit" and elements < LEAST_8BIT

    def _first_key(self, group: Mapping[str, Any], dim: int, elements: int) -> tuple[object, ...]:
        """Return what decides on the arrays and the first steps of such parameters of a group."""
        return GroupOptions.of(group).outline, dim, self._is_small(elements)

    def _forms(self, first: TracedStep, second: TracedStep, elements: int) -> dict[str, StoredForm]:
        """Return the forms of arrays, given the first two steps."""
        unsigned, found = frozenset(first.names), frozenset[str]()
        while (found := unsigned & nonnegative(first, unsigned) & nonnegative(second, unsigned)) != unsigned:
            unsigned = found
        of_any, of_unsigned = _FORMS[torch.float32 if self._is_small(elements) else self._state_dtype]
        return {name: of_unsigned if name in unsigned else of_any for name in first.names}

    def _check_signs(self, traced: TracedStep, arrays: Mapping[str, StoredForm]) -> None:
        """Raise `OptionError` where a step may make an array negative that the first steps did not."""
        unsigned = frozenset(name for name, form in arrays.items() if form is UNSIGNED_8BIT)
        if unsigned and (wrong := unsigned - nonnegative(traced, unsigned)):
            raise OptionError(
                f"{self._class.__name__} has {', '.join(sorted(wrong))} at or above zero in its first steps only; "
                "use state_dtype=torch.bfloat16."
            )

    def _trace(
        self, group: Mapping[str, Any], shape: tuple[int, ...], scalars: Mapping[str, Any], names: Sequence[str]
    ) -> TracedStep:
        return trace_step(self._class, self._given, group, shape, scalars, names)

    def _kernel(self, traced: TracedStep, arrays: Mapping[str, StoredForm]) -> "Kernel":
        if set(traced.names) - set(arrays):
            raise OptionError(f"{self._class.__name__} keeps {', '.join(traced.names)} by now; use another optimizer.")
        key = traced.graph.key, traced.reads, traced.names, tuple(arrays.items())
        if key not in self._kernels:
            kernel = Kernel(traced, arrays)
            try:
                kernel.try_out()
            except RuntimeError as error:
                raise OptionError(f"{self._class.__name__} cannot update an offloaded parameter: {error}") from error
            self._kernels[key] = kernel
        return self._kernels[key]


@functools.cache
def rule_of(optimizer_class: type[torch.optim.Optimizer], state_dtype: StateDtype, given: GroupOptions) -> Rule:
    """Return the rule of a class, which all its optimizers share, and so its kernels; raises what `Rule` raises."""
    return Rule(optimizer_class, state_dtype, given)


def find_rule(
    optimizer_class: type[torch.optim.Optimizer], state_dtype: StateDtype, options: Mapping[str, Any]
) -> tuple[Rule, dict[str, Any]]:
    """Return the rule of a class made with `options`, and the options of its groups, with those not given.

    Raises `OptionError` for what is no such class, for one whose `step` needs a closure, and for options it refuses.
    """
    check_class(optimizer_class, options)
    try:
        weight = torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))
        defaults = dict(optimizer_class([weight], **options).defaults)
    except (RuntimeError, TypeError, ValueError) as error:
        name, said = optimizer_class.__name__, str(error).rstrip(".")
        raise OptionError(f"{name} cannot be made with these options: {said}; correct them.") from error
    given = GroupOptions({name: value for name, value in options.items() if name not in defaults})
    return rule_of(optimizer_class, state_dtype, given), defaults  # type: ignore[arg-type]


def check_class(given: object, options: Mapping[str, Any]) -> None:
    """Raise `OptionError` for a class that cannot update offloaded parameters, or has no such options."""
    if not isinstance(given, type) or not issubclass(given, torch.optim.Optimizer):
        kind = given.__name__ if isinstance(given, type) else f"an object of type {type(given).__name__}"
        raise OptionError(f"optimizer_class is {kind}; give a class of torch.optim.Optimizer, such as torch.optim.SGD.")
    name, known = given.__name__, inspect.signature(given).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    if unknown := [] if takes_any else [option for option in options if option not in known]:
        names = tuple(known)[1:]
        hint = nearest(unknown[0], names)
        raise OptionError(f"{name} has no option {unknown[0]};{hint} its options are: {listed(names)}.")
    closure = inspect.signature(inspect.unwrap(given.step)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptionError(
            f"{name} cannot update an offloaded parameter: within a step it calls a closure several times, which runs "
            "the model; use an optimizer whose step() needs none."
        )


class Kernel:
    """A step's arithmetic, compiled for each dtype and device it is asked for.

    On the CPU it is native code, which takes a fraction of a second to build; where that cannot be had, and on other
    devices, it is compiled by Inductor.
    """

    def __init__(self, traced: TracedStep, forms: Mapping[str, StoredForm]) -> None:
        self._forms = tuple(forms.values())
        self._count = len(traced.numbers) + 1
        self._on_fp32 = _updating(traced, [name for name in forms if name != MASTER])
        self._update = on_parts(self._on_fp32, self._forms, 2)
        self._staged = on_parts(_staged(self._on_fp32), self._forms, 3)
        self._compiled: dict[tuple[torch.dtype, torch.device], Callable[..., None]] = {}
        self._begun: dict[torch.dtype, NativeKernel | UncoveredError] = {}
        self._native: dict[torch.dtype, NativeFunctions | None] = {}

    def try_out(self) -> None:
        """Run it uncompiled on a few elements; raises `RuntimeError` if it cannot be run on tensors."""
        numbers = torch.ones(self._count, dtype=torch.float32, device="cpu")
        dtype = torch.bfloat16 if self._forms[0] is SPLIT else torch.float32
        self._update(*_zeros(dtype, self._forms, 3, torch.device("cpu")), numbers)

    def begin(self, dtype: torch.dtype) -> None:
        """Begin to build, in the background, what updates parameters of `dtype` on the CPU."""
        if dtype not in self._begun:
            update, staged = self._on_fp32, _staged(self._on_fp32)
            try:
                self._begun[dtype] = NativeKernel(update, staged, dtype, self._forms, self._count)
            except UncoveredError as error:
                self._begun[dtype] = error

    def compiled(self, dtype: torch.dtype, device: torch.device) -> Callable[..., None]:
        """Return the update of parameters of `dtype` on `device`, compiled at the first call.

        It is called with a gradient and a weight, [n], the parts of the arrays, master first, and a step's numbers.
        """
        if (dtype, device) not in self._compiled:
            with STAGES.stage(_STAGE):
                native = self._find_native(dtype) if device.type == "cpu" else None
                self._compiled[dtype, device] = self._by_inductor(dtype, device) if native is None else native.update
        return self._compiled[dtype, device]

    def staged(self, dtype: torch.dtype) -> Callable[..., None]:
        """Return what updates what is in host memory for a while: parameters of `dtype` that are not offloaded.

        It is called with a gradient, a weight, the weight as last written, the arrays' parts and a step's numbers, and
        leaves the new weight in the gradient's place. Where the weight is what was written last, its master has more
        digits, which are worth keeping; else somebody has set it since.
        """
        with STAGES.stage(_STAGE):
            native = self._find_native(dtype)
        return self._staged_by_inductor if native is None else native.staged

    def _find_native(self, dtype: torch.dtype) -> NativeFunctions | None:
        """Return the native code for a dtype, once it is built, or None if there is none."""
        if dtype not in self._native:
            self.begin(dtype)
            begun, self._native[dtype] = self._begun[dtype], None
            try:
                if isinstance(begun, UncoveredError):
                    raise begun
                self._native[dtype] = begun.load()
            except (BuildError, UncoveredError) as error:
                log.info("an optimizer's kernel for the CPU is compiled by Inductor, which takes longer: %s", error)
        return self._native[dtype]

    def _by_inductor(self, dtype: torch.dtype, device: torch.device) -> Callable[..., None]:
        length = _EXAMPLE_LENGTH if device.type == "cpu" else _LEAST_LENGTH  # a device's budget may be all but full

        def compiler(update: Callable[..., None], arrange: Arrange) -> Callable[..., None]:
            numbers = torch.ones(self._count, dtype=torch.float32, device=device)
            return compile_for_threads(update, arrange([*_zeros(dtype, self._forms, length, device), numbers]))

        return compile_on_parts(self._on_fp32, self._forms, 2, 0, device, compiler)

    @functools.cached_property
    def _staged_by_inductor(self) -> Callable[..., None]:
        return compile_on_parts(
            _staged(self._on_fp32), self._forms, 3, 1, _CPU, lambda update, _: torch.compile(update, dynamic=True)
        )


def _zeros(dtype: torch.dtype, forms: Sequence[StoredForm], count: int, device: torch.device) -> list[Tensor]:
    """Return a gradient and a weight of so many elements, and the parts of the weight's state."""
    parts = [torch.zeros(part.count(count), dtype=part.dtype, device=device) for part in parts_of(forms)]
    return [*(torch.zeros(count, dtype=dtype, device=device) for _ in range(2)), *parts]


def _updating(traced: TracedStep, names: Sequence[str]) -> Callable[..., None]:
    """Return the function that a kernel is compiled from, for fp32 arrays by `names` behind the master."""
    module = fx.GraphModule(torch.nn.Module(), traced.graph.as_fx())
    reads = [names.index(name) for name in traced.reads]
    writes = [names.index(name) for name in traced.names]

    # What is written first must not change what is written next.
    given = [each in traced.graph.inputs for each in traced.graph.results]

    def update(gradient: Tensor, weight: Tensor, master: Tensor, *rest: Tensor) -> None:
        *arrays, numbers = rest
        change = gradient.float() * numbers[0]
        found = module(change, master, *(arrays[index] for index in reads), numbers[1:])
        new, *made = (value.clone() if same else value for value, same in zip(found, given, strict=True))
        master.copy_(new)
        for index, value in zip(writes, made, strict=True):
            arrays[index].copy_(value)
        weight.copy_(new)

    return update


def _staged(update: Callable[..., None]) -> Callable[..., None]:
    def staged(gradient: Tensor, weight: Tensor, written: Tensor, master: Tensor, *rest: Tensor) -> None:
        master.copy_(torch.where(written == weight, master, weight.float()))
        update(gradient, written, master, *rest)
        gradient.copy_(written)

    return staged

"""C++ code of a function that does arithmetic on single elements of 1-D tensors, in one pass over memory.

The function runs once, on a few elements, and each op is written down as it comes. A local variable stands for what one
element of a storage is at that moment, so a copy into a tensor is seen by all that read its storage later, as it is
when the function runs. Each op rounds as eager mode's does; what has no exact counterpart in C++ is refused.

The code goes over blocks of elements. What is not kept as it is computed with is decoded into fp32 for a block, and
encoded behind it, in loops of their own: the arithmetic of an update has long chains of dependent instructions, and a
CPU runs several of them at once only while there are few instructions to each.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tencache_fx.model_state.cpp_prelude import FROM_STORED, STORED, TO_STORED
from tencache_fx.model_state.stored_form import BLOCK, FP32, StoredForm

_COUNT = 3
_LEAST_COUNT = 1 << 14  # elements for which threads are begun


class UncoveredError(Exception):
    """A function does what cannot be written down: the message says what."""


def write_function(
    name: str,
    function: Callable[..., None],
    arguments: Sequence[torch.dtype | StoredForm],
    numbers: int,
    other: int = 0,
) -> str:
    """Return the code of `name(arrays, count, threads)`, which does what `function` does.

    That is called with 1-D tensors, all of one length and none of them sharing memory, and behind them an fp32 tensor
    of so many `numbers`. It changes some of the tensors, and returns nothing. `arguments` has the tensors' dtypes.
    Where that has a form, the tensor is of fp32: the code decodes it from the form's parts, and encodes it again, by
    the new values of argument `other`, the master. Before that is the weight, which its form may read. `arrays` has the
    addresses of all tensors and parts, and of the numbers. Raises `UncoveredError`. The code stands behind `PRELUDE`
    and the forms' own.
    """
    direct = [_direct_dtype(each) for each in arguments]
    if unknown := {each for each in direct if each is not None} - set(STORED):
        raise UncoveredError(f"{unknown.pop()} is not written")
    with _disable_current_modes(), torch.no_grad():
        tensors = [torch.zeros(_COUNT, dtype=each or torch.float32, device="cpu") for each in direct]
        places = [f"b{k}[j]" if each is None else f"a{k}[begin + j]" for k, each in enumerate(direct)]
        writer = _Writer(tensors, places, given := torch.ones(numbers, dtype=torch.float32, device="cpu"))
        with writer:
            function(*tensors, given)
    known, decodes, encodes, at = [], [], [], 0
    for k, (each, dtype) in enumerate(zip(arguments, direct, strict=True)):
        if dtype is not None:
            known.append(f"auto* a{k} = static_cast<{STORED[dtype]}*>(arrays[{at}]);")
            at += 1
        elif isinstance(each, StoredForm):
            weight = f"a{other - 1}, " if each.reads_weight else ""
            decodes += [f"float b{k}[{BLOCK}];", f"{each.name}::decode({weight}arrays + {at}, begin, size, b{k});"]
            master = f"b{other}" if direct[other] is None else f"a{other} + begin"
            encodes.append(f"{each.name}::encode(b{k}, {master}, arrays + {at}, begin, size);")
            at += len(each.parts)
    known.append(f"const float* numbers = static_cast<const float*>(arrays[{at}]);")
    known += [f"const float n{k} = numbers[{k}];" for k in range(numbers)]
    return (
        f'extern "C" void {name}(void* const* arrays, std::int64_t count, int threads) {{\n'
        + _indented(2, known)
        + f"  #pragma omp parallel for schedule(static) num_threads(threads) if(count >= {_LEAST_COUNT})\n"
        + f"  for (std::int64_t begin = 0; begin < count; begin += {BLOCK}) {{\n"
        + f"    const int size = count - begin < {BLOCK} ? static_cast<int>(count - begin) : {BLOCK};\n"
        + _indented(4, decodes)
        + "    #pragma omp simd\n    for (int j = 0; j < size; ++j) {\n"
        + _indented(6, writer.finish())
        + "    }\n"
        + _indented(4, encodes)
        + "  }\n}\n"
    )


def _direct_dtype(argument: torch.dtype | StoredForm) -> torch.dtype | None:
    """Return the dtype of what is computed with as it is kept, but for a cast; None for what is encoded."""
    if isinstance(argument, StoredForm):
        return torch.float32 if argument is FP32 else None
    return argument


def _indented(spaces: int, lines: Sequence[str]) -> str:
    return "".join(f"{' ' * spaces}{line}\n" for line in lines)


class _Writer(TorchDispatchMode):
    """Writes down what is done to elements of `tensors`, which are at `places`, given `numbers`."""

    def __init__(self, tensors: Sequence[Tensor], places: Sequence[str], numbers: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors, self._places, self._numbers = tensors, places, numbers
        self._alive = [*tensors]  # so that no two have the same memory
        self._values: dict[int, tuple[str, torch.dtype]] = {}
        self._written: set[int] = set()
        self._lines: list[str] = []
        for each, place in zip(tensors, places, strict=True):
            self._set(each, place)

    def finish(self) -> list[str]:
        """Return the lines, with those that keep what was changed."""
        stores = []
        for each, place in zip(self._tensors, self._places, strict=True):
            if _memory(each) in self._written:
                stores.append(f"{place} = {self._values[_memory(each)][0]};")
        return [*self._lines, *stores]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name not in _SAME and (func._schema.is_mutable or not self._is_number(result)):
            self._note(name, func, args, kwargs or {}, result)
        return result

    def _note(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if not isinstance(result, Tensor) or result.dtype not in _LOCAL or result.shape not in ((_COUNT,), ()):
            raise UncoveredError(f"{func} returns what is not written")
        if name == "copy_":
            target, source = args[:2]
            if not isinstance(source, Tensor) or target.shape != (_COUNT,) or self._is_number(target):
                raise UncoveredError(f"{func} of these operands is not written")
            self._set(target, self._as(target.dtype, source))
            self._written.add(_memory(target))
        elif name in ("_to_copy", "clone"):
            self._set(result, self._as(result.dtype, args[0]))
        elif name in _FULL:
            self._set(result, _literal(_FULL[name], result.dtype))
        elif name in ("where", "masked_fill"):
            condition, *others = args if name == "where" else (args[1], args[2], args[0])
            if condition.dtype != torch.bool:
                raise UncoveredError(f"{func} of {condition.dtype} is not written")
            first, second = (self._as(result.dtype, each) for each in others)
            self._set(result, f"{self._as(torch.bool, condition)} ? {first} : {second}")
        else:
            self._set(result, self._operation(name, func, args, kwargs, result.dtype))
        self._alive.append(result)

    def _operation(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], to: torch.dtype) -> str:
        """Return the expression of an op; between operands of one dtype, and what compares may return another."""
        among = {_computed(each.dtype) for each in args if isinstance(each, Tensor)}
        if len(among) != 1 or kwargs or to in _HALVES:
            raise UncoveredError(f"{func} of these operands is not written")
        (dtype,) = among
        if name == "pow" and len(args) == 2 and not isinstance(args[1], Tensor):
            name, args = f"pow {float(args[1])}", args[:1]
        text = _OPERATIONS.get(dtype, {}).get(name)
        if text is None or (name not in _COMPARES and to != dtype):
            raise UncoveredError(f"{func} of {dtype} is not written")
        return text.format(*(self._as(dtype, each) for each in args))

    def _as(self, dtype: torch.dtype, given: Any) -> str:
        """Return the expression of an operand as a value of a dtype."""
        if not isinstance(given, Tensor):
            return _literal(given, dtype)
        value, has = self._read(given)
        if has == dtype:
            return value
        if dtype in _HALVES and has in _HALVES | {torch.float32}:
            value, has = f"{TO_STORED[dtype]}({_to_float(value, has)})", dtype
        elif dtype == torch.float32 and has in _HALVES:
            value, has = _to_float(value, has), dtype
        if has != dtype:
            raise UncoveredError(f"{has} as {dtype} is not written")
        return value

    def _read(self, tensor: Tensor) -> tuple[str, torch.dtype]:
        """Return what a tensor has, and the dtype that it is seen as."""
        if self._is_number(tensor):
            return f"n{tensor.storage_offset()}", torch.float32
        if _memory(tensor) not in self._values or tensor.storage_offset():
            raise UncoveredError("a tensor that comes from elsewhere is not written")
        value, dtype = self._values[_memory(tensor)]
        if tensor.dtype == dtype:
            return value, dtype
        if {tensor.dtype, dtype} != {torch.float32, torch.int32}:
            raise UncoveredError(f"the bits of {dtype} as {tensor.dtype} are not written")
        return f"bits<{_LOCAL[tensor.dtype]}>({value})", tensor.dtype

    def _set(self, tensor: Tensor, expression: str) -> None:
        if _memory(tensor) in self._values and self._values[_memory(tensor)][1] != tensor.dtype:
            raise UncoveredError("a change by way of other bits is not written")
        name = f"v{len(self._lines)}"
        self._lines.append(f"const {_LOCAL[tensor.dtype]} {name} = {expression};")
        self._values[_memory(tensor)] = name, tensor.dtype

    def _is_number(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and _memory(tensor) == _memory(self._numbers)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def _computed(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALVES else dtype


def _to_float(value: str, dtype: torch.dtype) -> str:
    return f"{FROM_STORED.get(dtype, '')}({value})"


def _literal(value: Any, dtype: torch.dtype) -> str:
    if dtype == torch.bool and type(value) is bool:
        return str(int(value))
    if dtype == torch.int32 and type(value) is int and -(1 << 31) < value < 1 << 31:
        return f"std::int32_t({value})"
    if dtype == torch.float32 and isinstance(value, int | float):
        nearest = float(torch.tensor(float(value), dtype=torch.float32, device="cpu"))
        if math.isfinite(nearest):
            return f"{nearest.hex()}f"
        return "NAN" if math.isnan(nearest) else f"({'-' if nearest < 0 else ''}INFINITY)"
    raise UncoveredError(f"{value!r} as {dtype} is not written")


_HALVES = frozenset({torch.bfloat16, torch.float16})
_LOCAL = MappingProxyType({**STORED, torch.int32: "std::int32_t", torch.bool: "bool"})
_SAME = ("view", "detach", "alias", "lift_fresh")  # of the same memory
_FULL = MappingProxyType({"zeros_like": 0.0, "ones_like": 1.0})
_COMPARISONS = MappingProxyType(
    {
        "eq": "{0} == {1}",
        "ne": "{0} != {1}",
        "lt": "{0} < {1}",
        "le": "{0} <= {1}",
        "gt": "{0} > {1}",
        "ge": "{0} >= {1}",
    }
)
_COMPARES = frozenset(_COMPARISONS)
_OPERATIONS: Mapping[torch.dtype, Mapping[str, str]] = MappingProxyType(
    {
        torch.float32: {
            **_COMPARISONS,
            "add": "{0} + {1}",
            "sub": "{0} - {1}",
            "mul": "{0} * {1}",
            "div": "{0} / {1}",
            "neg": "-{0}",
            "abs": "std::fabs({0})",
            "sqrt": "std::sqrt({0})",
            "rsqrt": "1.0f / std::sqrt({0})",
            "reciprocal": "1.0f / {0}",
            "sign": "float({0} > 0.0f) - float({0} < 0.0f)",
            "pow 2.0": "{0} * {0}",
            "pow 0.5": "std::sqrt({0})",
            "maximum": "greatest({0}, {1})",
            "minimum": "least({0}, {1})",
            "clamp": "least(greatest({0}, {1}), {2})",
        },
        torch.int32: {
            **_COMPARISONS,
            "add": "{0} + {1}",
            "sub": "{0} - {1}",
            "mul": "{0} * {1}",
            "__rshift__": "{0} >> {1}",
            "bitwise_right_shift": "{0} >> {1}",
            "bitwise_and": "{0} & {1}",
            "bitwise_xor": "{0} ^ {1}",
            "bitwise_or": "{0} | {1}",
        },
        torch.bool: {
            "mul": "{0} & {1}",
            "logical_and": "{0} & {1}",
            "logical_or": "{0} | {1}",
            "logical_not": "!{0}",
            "bitwise_and": "{0} & {1}",
            "bitwise_or": "{0} | {1}",
            "bitwise_not": "!{0}",
        },
    }
)

"""How an optimizer keeps an array: as it is computed with (fp32), or as parts from which that is decoded and encoded.

A form has the same arithmetic twice, with the same bits: in torch's ops, and in C++ for native kernels (`code`). That
is a struct with two functions for at most `BLOCK` elements that begin where a block begins:

    static void decode(void* const* parts, std::int64_t begin, int size, float* values);
    static void encode(const float* values, const float* others, void* const* parts, std::int64_t begin, int size);

A form that reads the weight is given all its elements before the parts, as they are before the update: in `decode` of
both. `others` are the master's new values, which change at each step: what is rounded at random is rounded by these.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
"""Elements that a native kernel works on at once; a part has an item for a divisor of this."""

MOVED = 1 << 20
"""Elements of whole blocks that are decoded or encoded at once on a device, for which its budget has no room."""


@dataclass(frozen=True, slots=True)
class Part:
    """A 1-D tensor that is kept, with one item for each `per` elements. `suffix` is what its name ends in."""

    suffix: str
    dtype: torch.dtype
    per: int = 1

    def count(self, elements: int) -> int:
        """Return how many items there are for so many elements."""
        return -(-elements // self.per)

    def nbytes(self, elements: int) -> int:
        """Return how many bytes these take."""
        return self.count(elements) * self.dtype.itemsize

    def of(self, array: Tensor, elements: slice) -> Tensor:
        """Return the items for some elements, which begin where a block begins."""
        return array[elements.start // self.per : self.count(elements.stop)]


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A form called `name`, in C++ too. `decode` makes fp32 elements [n] of `parts`; `encode` and `store` set these.

    `encode` is given elements [n], the master's new values, and the parts; `store` elements [n], of any dtype and
    device, and the parts: it takes what is nearest. `decode` and `encode` also take whole blocks in rows: elements
    [m, BLOCK], and parts [m, BLOCK // per].

    `made_on` returns the same form with what it looks up on a device; None if it looks up nothing. One that
    `reads_weight`, the master's only, decodes the weight and the parts.
    """

    name: str
    parts: tuple[Part, ...]
    decode: Callable[[Sequence[Tensor]], Tensor]
    encode: Callable[[Tensor, Tensor, Sequence[Tensor]], None]
    store: Callable[[Tensor, Sequence[Tensor]], None]
    code: str
    made_on: "Callable[[torch.device], StoredForm] | None" = None
    reads_weight: bool = False

    def on(self, device: torch.device) -> "StoredForm":
        """Return the form for code that is compiled for a device."""
        return self if self.made_on is None else self.made_on(device)

    @property
    def is_elementwise(self) -> bool:
        """Whether each element is kept by itself."""
        return all(part.per == 1 for part in self.parts)


@dataclass(frozen=True, slots=True)
class Stored:
    """The values of an array as they are kept: the parts of a form, and the weight, [n], if the form reads it."""

    shape: torch.Size
    form: StoredForm
    parts: Sequence[Tensor]
    weight: Tensor | None

    def of(self, elements: slice) -> "Stored":
        """Return some of the values, in order, which begin where a block begins."""
        parts = [part.of(array, elements) for part, array in zip(self.form.parts, self.parts, strict=True)]
        shape = torch.Size([elements.stop - elements.start])
        return Stored(shape, self.form, parts, None if self.weight is None else self.weight[elements])

    def store(self, form: StoredForm, parts: Sequence[Tensor]) -> None:
        """Set parts of a form, which may be on another device, to the same values: they are decoded there."""
        if form is self.form and self.weight is None:
            for part, mine in zip(parts, self.parts, strict=True):
                part.copy_(mine)
            return
        device, count = parts[0].device, self.shape.numel()
        for start in range(0, count, MOVED):
            elements = slice(start, min(start + MOVED, count))
            some = self.of(elements)
            kept = some.parts if some.weight is None else [some.weight, *some.parts]
            value = self.form.on(device).decode([each.to(device) for each in kept])
            form.store(value, [part.of(array, elements) for part, array in zip(form.parts, parts, strict=True)])


def parts_of(forms: Iterable[StoredForm]) -> list[Part]:
    """Return the parts of arrays of such forms, in order."""
    return [part for form in forms for part in form.parts]


def named_parts(forms: Mapping[str, StoredForm]) -> dict[str, Part]:
    """Return the parts of arrays by their names: an array's own, with the part's suffix."""
    return {name + part.suffix: part for name, form in forms.items() for part in form.parts}


def state_bytes(forms: Iterable[StoredForm], elements: int) -> int:
    """Return the bytes that arrays of such forms take."""
    return sum(part.nbytes(elements) for part in parts_of(forms))


def by_form(forms: Sequence[StoredForm], arrays: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Return the parts of each form, given the parts of all."""
    left = iter(arrays)
    return [[next(left) for _ in form.parts] for form in forms]


def store_values(
    forms: Mapping[str, StoredForm],
    arrays: Sequence[Tensor],
    values: Mapping[str, Tensor | Stored | float],
    *,
    are_zero: bool = False,
) -> None:
    """Set the parts of all arrays to values by name: elements [n], parts that keep them, or one number for all.

    Where the arrays `are_zero` already, a number that is kept as zeros takes no time.
    """
    for (name, form), parts in zip(forms.items(), by_form(tuple(forms.values()), arrays), strict=True):
        value = values[name]
        if isinstance(value, Tensor):
            form.store(value, parts)
            continue
        if isinstance(value, Stored):
            value.store(form, parts)
            continue
        block = [torch.empty(part.count(BLOCK), dtype=part.dtype, device="cpu") for part in form.parts]
        form.store(torch.full((BLOCK,), value, dtype=torch.float32, device="cpu"), block)
        for array, items in zip(parts, block, strict=True):
            if not are_zero or items[:1].view(torch.uint8).any():  # its bytes: -0.0 is no zero
                array.fill_(items[0].item())


def round_by_hash(value: Tensor, other: Tensor) -> Tensor:
    """Return fp32 values rounded to bfloat16 at random: up as often as the digits that go are near the next value.

    What decides is hashed from `value` and `other`, of which one changes with each step.
    """
    bits = value.view(torch.int32)
    mixed = (other.view(torch.int32) * 0x3C6EF372 + bits) * 0x5851F42D
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
    noise = (mixed >> 16) & 0xFFFF
    rounded = ((bits + noise) & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(value), rounded, value)


def _set_rounded(value: Tensor, other: Tensor, parts: Sequence[Tensor]) -> None:
    parts[0].copy_(round_by_hash(value, other))


def _copy(value: Tensor, parts: Sequence[Tensor]) -> None:
    parts[0].copy_(value)


def _is_kept(value: Tensor, other: Tensor, parts: Sequence[Tensor]) -> None:
    """Do nothing: what `decode` gave is what is kept."""


# Almost no block has an element that is not finite, and a select for each would cost as much as rounding it.
_BFLOAT16 = """\
struct Bfloat16 {
  static inline void decode(void* const* parts, std::int64_t begin, int size, float* values) {
    const auto* stored = static_cast<const std::uint16_t*>(parts[0]) + begin;
    #pragma omp simd
    for (int j = 0; j < size; ++j) values[j] = from_bfloat16(stored[j]);
  }

  static inline std::uint32_t rounded(float value, float other) {
    const std::uint32_t all = bits<std::uint32_t>(value);
    const std::uint32_t mixed = (bits<std::uint32_t>(other) * 0x3c6ef372u + all) * 0x5851f42du;
    const auto high = static_cast<std::uint32_t>(static_cast<std::int32_t>(mixed) >> 15);
    return all + (((mixed ^ high) * 0x2c1b3c6du) >> 16);
  }

  static inline void encode(
      const float* values, const float* others, void* const* parts, std::int64_t begin, int size) {
    auto* stored = static_cast<std::uint16_t*>(parts[0]) + begin;
    std::int32_t most = 0;
    #pragma omp simd reduction(max:most)
    for (int j = 0; j < size; ++j) {
      const std::int32_t all = bits<std::int32_t>(values[j]) & 0x7fffffff;
      most = all > most ? all : most;
      stored[j] = static_cast<std::uint16_t>(rounded(values[j], others[j]) >> 16);
    }
    for (int j = 0; j < size && most >= 0x7f800000; ++j) {
      if (!(std::fabs(values[j]) < INFINITY)) stored[j] = to_bfloat16(values[j]);
    }
  }
};
"""

FP32 = StoredForm("Float32", (Part("", torch.float32),), lambda parts: parts[0], _is_kept, _copy, "")
BF16 = StoredForm(
    "Bfloat16", (Part("", torch.bfloat16),), lambda parts: parts[0].float(), _set_rounded, _copy, _BFLOAT16
)

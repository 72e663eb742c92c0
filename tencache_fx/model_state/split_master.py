"""The fp32 master of a bf16 weight, kept as what it has besides that weight: 16 bits, and one bit of eight for ties.

A master's bits are those of the weight, which is the master rounded to nearest even, in the upper half of a word, and
behind that a remainder from -32768 to 32768, both included. The remainder's lower 16 bits are kept as they are in the
master. They stand for -32768 as well as for 32768, which are of two masters half-way between the same two weights; a
bit for each element says which. So every master but NaN comes back to the last bit, and NaN comes back as NaN.

Who writes to the weight from outside has `Remainder` know before, so that elements that change lose what is of the old
ones. Where that is not known the remainder stays, less than half a unit in the weight's last place. Only at zero could
one of another sign change all bits; there the master is the weight.
"""

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tencache_fx.model_state.stored_form import MOVED, Part, StoredForm

_PER_BYTE = 8
_PIECE = 1 << 15  # elements at once: what is made of them stays in a core's cache, and no other core waits for it


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(_PER_BYTE, dtype=torch.int32, device=like.device)


def _wide(weight: Tensor) -> Tensor:
    """Return the bits of bf16 elements as the upper halves of words."""
    return weight.view(torch.int16).to(torch.int32) << 16


def _decode(parts: Sequence[Tensor]) -> Tensor:
    weight, rest, ties = parts
    bits = (ties.to(torch.int32).unsqueeze(-1) >> _shifts(ties)) & 1
    is_above = bits.flatten(-2).narrow(-1, 0, rest.shape[-1])
    upper = _wide(weight)
    found = upper + rest.to(torch.int32) + (is_above << 16)
    return torch.where((found ^ upper) >= 0, found, upper).view(torch.float32)


def _encode(value: Tensor, other: Tensor, parts: Sequence[Tensor]) -> None:
    _split(value, parts)


def _store(value: Tensor, parts: Sequence[Tensor]) -> None:
    rest, ties = parts
    if value.device.type != "cpu":
        for start in range(0, len(rest), MOVED):
            some, of_ties = slice(start, start + MOVED), slice(start // _PER_BYTE, (start + MOVED) // _PER_BYTE)
            _split(value[some].float().contiguous(), [rest[some], ties[of_ties]])
        return
    ties.zero_()
    for start in range(0, len(rest), _PIECE):
        piece = value[start : start + _PIECE].float().contiguous().view(torch.int32)
        rest[start : start + _PIECE].copy_(piece)
        above = ((piece & 0x1FFFF) == 0x8000).nonzero()[:, 0] + start
        ties.index_put_((above // _PER_BYTE,), (1 << above % _PER_BYTE).to(torch.uint8), accumulate=True)


def _split(value: Tensor, parts: Sequence[Tensor]) -> None:
    rest, ties = parts
    bits = value.view(torch.int32)
    rest.copy_(bits.to(torch.int16))
    is_above = ((bits & 0x1FFFF) == 0x8000).to(torch.int32)
    missing = ties.shape[-1] * _PER_BYTE - rest.shape[-1]
    padded = torch.nn.functional.pad(is_above, (0, missing)) if missing else is_above
    ties.copy_((padded.unflatten(-1, (-1, _PER_BYTE)) << _shifts(bits)).sum(-1))


# Ties are one of 65536 elements, so almost no block has any.
_CODE = """\
struct SplitMaster {
  static inline void decode(
      const std::uint16_t* weights, void* const* parts, std::int64_t begin, int size, float* values) {
    const auto* rest = static_cast<const std::int16_t*>(parts[0]) + begin;
    const auto* ties = static_cast<const std::uint8_t*>(parts[1]) + begin / 8;
    #pragma omp simd
    for (int j = 0; j < size; ++j) {
      const std::int32_t upper = static_cast<std::int32_t>(static_cast<std::uint32_t>(weights[begin + j]) << 16);
      const std::int32_t found = upper + rest[j];
      values[j] = bits<float>((found ^ upper) >= 0 ? found : upper);
    }
    std::uint8_t any = 0;
    for (int k = 0; k < (size + 7) / 8; ++k) any |= ties[k];
    for (int j = 0; j < size && any; ++j) {
      if (((ties[j / 8] >> j % 8) & 1) == 0) continue;
      const std::int32_t upper = static_cast<std::int32_t>(static_cast<std::uint32_t>(weights[begin + j]) << 16);
      const std::int32_t found = upper + rest[j] + 0x10000;
      values[j] = bits<float>((found ^ upper) >= 0 ? found : upper);
    }
  }

  static inline void encode(const float* values, const float*, void* const* parts, std::int64_t begin, int size) {
    auto* rest = static_cast<std::int16_t*>(parts[0]) + begin;
    auto* ties = static_cast<std::uint8_t*>(parts[1]) + begin / 8;
    std::int32_t any = 0;
    #pragma omp simd reduction(|:any)
    for (int j = 0; j < size; ++j) {
      const std::int32_t all = bits<std::int32_t>(values[j]);
      rest[j] = static_cast<std::int16_t>(all);
      any |= (all & 0x1ffff) == 0x8000;
    }
    std::memset(ties, 0, (size + 7) / 8);
    for (int j = 0; j < size && any; ++j) {
      if ((bits<std::int32_t>(values[j]) & 0x1ffff) == 0x8000) ties[j / 8] |= 1 << j % 8;
    }
  }
};
"""

SPLIT = StoredForm(
    "SplitMaster",
    (Part("_rest", torch.int16), Part("_ties", torch.uint8, _PER_BYTE)),
    _decode,
    _encode,
    _store,
    _CODE,
    reads_weight=True,
)


class Remainder(ABC):
    """A state whose master is what it has besides `weight`, [n]; None if the master is whole.

    That is the host copy itself, or what the host copy was before somebody else wrote to it; of a parameter that is not
    offloaded it is what was written last.
    """

    weight: Tensor | None = None

    def keep_weight(self) -> None:
        """Keep the weight as it is now: another one is about to be where it is."""
        if self.weight is not None:
            self.weight = self.weight.clone()

    def take_weight(self, weight: Tensor) -> None:
        """Let the master go on from `weight`: of elements that are others than before it is the weight."""
        if self.weight is not None and self.weight.data_ptr() != weight.data_ptr():
            self._drop_changed(self.weight, weight)
        self.weight = weight

    @abstractmethod
    def _drop_changed(self, before: Tensor, now: Tensor) -> None:
        """Let elements that have changed have no remainder."""


@contextlib.contextmanager
def weight_set(reference: "weakref.ref[Any] | None") -> Iterator[None]:
    """Let the state referred to, if there is one, take over the weight that is written in this context."""
    held = None if reference is None else reference()
    if not isinstance(held, Remainder) or held.weight is None:
        yield
        return
    weight = held.weight
    held.keep_weight()
    yield  # after an error it still has what its remainder is of
    held.take_weight(weight)


def decode_into(target: Tensor, parts: Sequence[Tensor]) -> None:
    """Set fp32 elements [n] to what the form makes of the weight and its parts, in host memory, some at a time."""
    weight, rest, ties = parts
    for start in range(0, len(target), _PIECE):
        some, of_ties = slice(start, start + _PIECE), ties[start // _PER_BYTE : (start + _PIECE) // _PER_BYTE]
        upper = weight[some].view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        found = rest[some].to(torch.int32).add_(upper)
        for byte in of_ties.nonzero()[:, 0].tolist():  # one of 65536 elements
            elements = found[byte * _PER_BYTE : (byte + 1) * _PER_BYTE]
            elements += ((of_ties[byte].int() >> _shifts(ties)) & 1)[: len(elements)] << 16
        torch.where((found ^ upper) >= 0, found, upper, out=target[some].view(torch.int32))


def drop_changed(parts: Sequence[Tensor], before: Tensor, now: Tensor) -> None:
    """Let elements have no remainder, in a split master's parts, where the weight is not what it was before."""
    rest, ties = parts
    for start in range(0, len(now), _PIECE):
        some = slice(start, start + _PIECE)
        changed = before[some].view(torch.int16) != now[some].view(torch.int16)
        if not changed.any():
            continue
        rest[some].masked_fill_(changed, 0)
        bits = torch.nn.functional.pad(changed.to(torch.uint8), (0, -len(changed) % _PER_BYTE)).view(-1, _PER_BYTE)
        ties[start // _PER_BYTE :][: len(bits)] &= ~(bits << _shifts(bits)).sum(-1).to(torch.uint8)

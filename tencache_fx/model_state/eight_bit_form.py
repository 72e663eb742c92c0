"""Arrays in 8 bits for an element: codes of numbers from 0 to 1, and for each block of 256 elements one fp32 scale.

The codes are those of bitsandbytes (dynamic quantisation; Dettmers et al., arXiv 2110.02861): seven decades, each cut
into twice as many equal bins as the one below, and a code for the middle of each bin. A code is an index into the
sorted map. Codes of `SIGNED_8BIT` have a sign and 1 to 64 bins a decade, those of `UNSIGNED_8BIT` 2 to 128.

Unlike bitsandbytes, an array that was decoded is encoded to the same codes and scales. There is a code for 1, but the
least one is -0.993; bitsandbytes takes the largest magnitude of a block for its scale, so a negative one shrinks each
time. Here the scale is such that a block's largest element is one that has a code, whatever its sign.

Nor does `UNSIGNED_8BIT` round a number above zero to zero: Adam would divide by epsilon where it has a moment that is
not zero.

A block with an element that is not finite becomes NaN. One whose largest magnitude is below 2 ** -100 becomes zeros:
below that, decoded numbers would lose digits.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tencache_fx.model_state.stored_form import BLOCK, Part, StoredForm

_DECADES = 7
_PIECE = 1 << 20  # elements encoded at once by torch's ops, which takes 40 times as many bytes besides
_MAX = torch.finfo(torch.float32).max
_TIE = 1 + 2.0**-22  # a quotient by less than this above another number may be that number, rounded
_LEAST = 2.0**-100
# Of numbers from 2 ** (e - 127) on, below twice that, (factor * e + other) // 256, between 0 and 6, is how many bounds
# they reach, or one less: 256 times the decimal logarithm of 2 is 77.
_BY_EXPONENT = 77, -7885


def dynamic_map(*, signed: bool) -> tuple[float, ...]:
    """Return the 256 numbers that codes stand for, ascending.

    >>> [round(number, 3) for number in dynamic_map(signed=True)[::51]]
    [-0.993, -0.289, -0.004, 0.005, 0.296, 1.0]
    """
    positive = [
        10.0 ** (decade + 1 - _DECADES) * (0.1 + 0.9 * (k + 0.5) / bins)
        for decade, bins in enumerate(_bins(signed=signed))
        for k in range(bins)
    ]
    negative = [-number for number in positive] if signed else []
    return tuple(torch.tensor(sorted([0.0, 1.0, *positive, *negative]), dtype=torch.float32, device="cpu").tolist())


def _bins(*, signed: bool) -> list[int]:
    """Return how many bins each decade has."""
    return [1 << (decade if signed else decade + 1) for decade in range(_DECADES)]


class _Tables(NamedTuple):
    """What codes stand for [256], and the steps of a codec [9 or 8], as fp32 tensors of one device."""

    numbers: Tensor
    bounds: Tensor
    slopes: Tensor
    offsets: Tensor
    most: Tensor


class _Codec:
    """Encodes and decodes, with a sign or without.

    A magnitude y has the code min(int(y * slope + offset), most), counted from that of zero. Which `slope`, `offset`
    and `most` are meant is how many of `bounds` y reaches: these are in the middle between codes of two decades.

    Elements are [n], or whole blocks in rows, [m, 256] with scales [m, 1], for code that is compiled. With a `device`
    the tables are there, else they are made where the parts are: copies of these to a device would stop the host.
    """

    def __init__(self, *, signed: bool, device: torch.device | None = None) -> None:
        self.signed = signed
        self.map = dynamic_map(signed=signed)
        self.zero = self.map.index(0.0)
        bins = _bins(signed=signed)
        firsts = [sum(bins[:decade]) + 1 for decade in range(_DECADES)]  # codes, counted from that of zero
        ends = [*firsts, len(self.map) - 1 - self.zero]
        self.bounds = _as_fp32([(self.map[self.zero + k - 1] + self.map[self.zero + k]) / 2 for k in ends])
        slopes = [count / 0.9 * 10.0 ** (_DECADES - 1 - decade) for decade, count in enumerate(bins)]
        offsets = [k - count / 9 for k, count in zip(firsts, bins, strict=True)]
        if not signed:  # the first code, to the middle of the lowest decade, is that of all numbers above zero
            self.bounds[0], slopes[0], offsets[0] = torch.finfo(torch.float32).tiny, 1 / 0.55e-6, 1.0
        self.slopes = _as_fp32([0.0, *slopes, 0.0])
        self.offsets = _as_fp32([0.0, *offsets, float(ends[-1])])
        self.most = [0, *(k + count - 1 for k, count in zip(firsts, bins, strict=True)), ends[-1]]
        self._tables = None if device is None else self._tables_on(device)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """Return fp32 elements."""
        codes, scales = parts
        numbers = (self._tables or self._tables_on(codes.device)).numbers
        if codes.dim() == 2:
            return numbers[codes.int()] * scales
        result = torch.empty(len(codes), dtype=torch.float32, device=codes.device)
        for start in range(0, len(codes), _PIECE):
            some = scales[start // BLOCK : (start + _PIECE) // BLOCK].repeat_interleave(BLOCK)
            found = numbers[codes[start : start + _PIECE].int()]
            torch.mul(found, some[: len(found)], out=result[start : start + _PIECE])
        return result

    def encode(self, value: Tensor, other: Tensor, parts: Sequence[Tensor]) -> None:
        """Set codes and scales; they do not depend on `other`."""
        if value.dim() < 2:
            self.store(value, parts)
            return
        for part, found in zip(parts, self._quantise(value), strict=True):
            part.copy_(found)

    def store(self, value: Tensor, parts: Sequence[Tensor]) -> None:
        """Set codes [n] and scales to what is nearest."""
        codes, scales = parts
        for start in range(0, len(codes), _PIECE):
            piece = value[start : start + _PIECE].to(device=codes.device, dtype=torch.float32)
            found, some = self._quantise(pad(piece, (0, -len(piece) % BLOCK)).view(-1, BLOCK))
            codes[start : start + _PIECE].copy_(found.view(-1)[: len(piece)])
            scales[start // BLOCK : start // BLOCK + len(some)].copy_(some.view(-1))

    def _quantise(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes [m, 256] and scales [m, 1] of blocks [m, 256]."""
        tables = self._tables or self._tables_on(blocks.device)
        finite = blocks.isfinite().all(1, keepdim=True)
        blocks = blocks.where(finite, 0.0)
        scale, least = blocks.amax(1, keepdim=True).clamp(min=0), blocks.amin(1, keepdim=True)
        if self.signed:
            by_least = (least / tables.numbers[0]).clamp(max=_MAX)
            scale = torch.where(by_least > scale * _TIE, by_least, scale)
        scale = scale.where(scale >= _LEAST, 0.0)
        inverse = torch.where(scale > 0, torch.ones_like(scale) / scale, 0.0)
        magnitudes = (blocks.abs() if self.signed else blocks) * inverse
        decade = torch.bucketize(magnitudes, tables.bounds, out_int32=True, right=True)
        code = magnitudes * tables.slopes[decade] + tables.offsets[decade]
        code = code.int().minimum(tables.most[decade].int())
        if self.signed:
            code = torch.where(blocks < 0, -code.clamp(max=self.zero), code)
        return (code + self.zero).to(torch.uint8), scale.where(finite, float("nan"))

    def _tables_on(self, device: torch.device) -> _Tables:
        every = self.map, self.bounds, self.slopes, self.offsets, self.most
        return _Tables(*(torch.tensor(numbers, dtype=torch.float32, device=device) for numbers in every))

    def code(self, name: str) -> str:
        """Return the same in C++, as a struct of this name."""
        steps = zip(self.bounds, self.slopes[1:], self.offsets[1:], self.most[1:], strict=True)
        chain = "".join(
            f"      slope = y >= {_hex(bound)} ? {_hex(slope)} : slope;\n"
            f"      offset = y >= {_hex(bound)} ? {_hex(offset)} : offset;\n"
            f"      most = y >= {_hex(bound)} ? {most}.0f : most;\n"
            for bound, slope, offset, most in steps
        )
        by_least = f"std::fmin(bits<float>(low) / {_hex(-self.map[0])}, {_hex(_MAX)})" if self.signed else "0.0f"
        sign = f"values[j] < 0.0f ? -(code < {self.zero} ? code : {self.zero}) : code" if self.signed else "code"
        replaced = {
            "NAME": name,
            "MAP": ", ".join(map(_hex, self.map)),
            "BY_LEAST": by_least,
            "TIE": _hex(_TIE),
            "LEAST": _hex(_LEAST),
            "MAGNITUDE": "std::fabs(values[j])" if self.signed else "values[j]",
            "CHAIN": chain.strip(),
            "SIGN": sign,
            "ZERO": str(self.zero),
            "BOUNDS": ", ".join(map(_hex, self.bounds)),
            "SLOPES": ", ".join(map(_hex, self.slopes[:-1])),
            "OFFSETS": ", ".join(map(_hex, self.offsets[:-1])),
            "MOST": ", ".join(f"{most}.0f" for most in self.most[:-1]),
            "FACTOR": str(_BY_EXPONENT[0]),
            "SHIFTED": str(_BY_EXPONENT[1]),
            "TOP": _hex(self.bounds[-1]),
            "HIGHEST": f"{self.most[-1]}.0f",
            "MAGNITUDES": "_mm256_andnot_ps(_mm256_set1_ps(-0.0f), product)"
            if self.signed
            else "_mm256_max_ps(product, _mm256_setzero_ps())",
            "BLOCK": str(BLOCK),
        }
        code = _CODE
        for key, text in replaced.items():
            code = code.replace(f"@{key}@", text)
        return code


def _as_fp32(numbers: Sequence[float]) -> list[float]:
    return torch.tensor(numbers, dtype=torch.float32, device="cpu").tolist()


def _hex(number: float) -> str:
    return f"{number.hex()}f"


_CODE = """\
#ifdef __AVX2__
#include <immintrin.h>
#endif

static const float map_of_@NAME@[256] = {@MAP@};
#ifdef __AVX2__
static const float steps_of_@NAME@[4][8] = {{@BOUNDS@}, {@SLOPES@}, {@OFFSETS@}, {@MOST@}};
#endif

struct @NAME@ {
  static inline void decode(void* const* parts, std::int64_t begin, int size, float* values) {
    const auto* codes = static_cast<const std::uint8_t*>(parts[0]) + begin;
    const float scale = static_cast<const float*>(parts[1])[begin / @BLOCK@];
    for (int j = 0; j < size; ++j) values[j] = map_of_@NAME@[codes[j]] * scale;
  }

  static inline void encode(const float* values, const float*, void* const* parts, std::int64_t begin, int size) {
    auto* codes = static_cast<std::uint8_t*>(parts[0]) + begin;
    float& kept = static_cast<float*>(parts[1])[begin / @BLOCK@];
    std::int32_t high = 0, low = 0;  // bits of the largest number and, with its sign changed, of the least one
    #pragma omp simd reduction(max:high, low)
    for (int j = 0; j < size; ++j) {
      const std::int32_t all = bits<std::int32_t>(values[j]), changed = bits<std::int32_t>(-values[j]);
      high = all > high ? all : high;
      low = changed > low ? changed : low;
    }
    if (high >= 0x7f800000 || low >= 0x7f800000) {
      kept = NAN;
      std::memset(codes, @ZERO@, size);
      return;
    }
    const float by_least = @BY_LEAST@;
    float scale = bits<float>(high);
    scale = by_least > scale * @TIE@ ? by_least : scale;
    scale = scale >= @LEAST@ ? scale : 0.0f;
    kept = scale;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    std::int32_t found_codes[@BLOCK@];
    int first = 0;
#ifdef __AVX2__  // whose tables have eight entries; y's exponent says which decade it is in, but for one comparison
    const __m256 bounds = _mm256_loadu_ps(steps_of_@NAME@[0]), slopes = _mm256_loadu_ps(steps_of_@NAME@[1]);
    const __m256 offsets = _mm256_loadu_ps(steps_of_@NAME@[2]), mosts = _mm256_loadu_ps(steps_of_@NAME@[3]);
    for (; first + 8 <= size; first += 8) {
      const __m256 product = _mm256_mul_ps(_mm256_loadu_ps(values + first), _mm256_set1_ps(inverse));
      const __m256 y = @MAGNITUDES@;
      const __m256i exponent = _mm256_srli_epi32(_mm256_castps_si256(y), 23);
      __m256i at = _mm256_mullo_epi32(exponent, _mm256_set1_epi32(@FACTOR@));
      at = _mm256_srai_epi32(_mm256_add_epi32(at, _mm256_set1_epi32(@SHIFTED@)), 8);
      at = _mm256_min_epi32(_mm256_max_epi32(at, _mm256_setzero_si256()), _mm256_set1_epi32(6));
      const __m256 reached = _mm256_cmp_ps(y, _mm256_permutevar8x32_ps(bounds, at), _CMP_GE_OQ);
      at = _mm256_sub_epi32(at, _mm256_castps_si256(reached));
      __m256 code = _mm256_mul_ps(y, _mm256_permutevar8x32_ps(slopes, at));
      code = _mm256_add_ps(code, _mm256_permutevar8x32_ps(offsets, at));
      code = _mm256_min_ps(code, _mm256_permutevar8x32_ps(mosts, at));
      const __m256 highest = _mm256_cmp_ps(product, _mm256_set1_ps(@TOP@), _CMP_GE_OQ);
      code = _mm256_blendv_ps(code, _mm256_set1_ps(@HIGHEST@), highest);
      const __m256i signed_code = _mm256_sign_epi32(_mm256_cvttps_epi32(code), _mm256_castps_si256(product));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(found_codes + first), signed_code);
    }
#endif
    for (int j = first; j < size; ++j) {
      const float y = @MAGNITUDE@ * inverse;
      float slope = 0.0f, offset = 0.0f, most = 0.0f;
      @CHAIN@
      const float found = y * slope + offset;
      const std::int32_t code = static_cast<std::int32_t>(found < most ? found : most);
      found_codes[j] = @SIGN@;
    }
    #pragma omp simd
    for (int j = 0; j < size; ++j) codes[j] = static_cast<std::uint8_t>(@ZERO@ + found_codes[j]);
  }
};
"""


def _form(name: str, *, signed: bool, device: torch.device | None = None) -> StoredForm:
    codec = _Codec(signed=signed, device=device)
    parts = Part("", torch.uint8), Part("_absmax", torch.float32, BLOCK)
    made_on = partial(_made_on, name, signed)
    return StoredForm(name, parts, codec.decode, codec.encode, codec.store, codec.code(name), made_on)


def _made_on(name: str, signed: bool, device: torch.device) -> StoredForm:  # noqa: FBT001
    return _form(name, signed=signed, device=device)


SIGNED_8BIT = _form("Signed8", signed=True)
UNSIGNED_8BIT = _form("Unsigned8", signed=False)

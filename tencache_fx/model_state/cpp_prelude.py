"""C++ code that native kernels share: how values are kept in memory, and cast from that and to it."""

from types import MappingProxyType

import torch

# What a dtype is in memory, and what casts it from that and to it: nothing does where it is computed with as it is.
STORED = MappingProxyType({torch.float32: "float", torch.bfloat16: "std::uint16_t", torch.float16: "std::uint16_t"})
FROM_STORED = MappingProxyType({torch.bfloat16: "from_bfloat16", torch.float16: "from_float16"})
TO_STORED = MappingProxyType({torch.bfloat16: "to_bfloat16", torch.float16: "to_float16"})

PRELUDE = """\
#include <cmath>
#include <cstdint>
#include <cstring>

template <typename To, typename From>
static inline To bits(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from), "of other sizes");
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

static inline float from_bfloat16(std::uint16_t stored) {
  return bits<float>(static_cast<std::uint32_t>(stored) << 16);
}

static inline std::uint16_t to_bfloat16(float value) {
  const std::uint32_t all = bits<std::uint32_t>(value);
  const std::uint32_t nearest = all + 0x7fffu + ((all >> 16) & 1u);
  return static_cast<std::uint16_t>((value == value ? nearest : 0x7fc00000u) >> 16);
}

static inline float from_float16(std::uint16_t stored) {
  const std::uint32_t wide = static_cast<std::uint32_t>(stored) << 16, twice = wide + wide;
  const float normal = bits<float>((twice >> 4) + (0xe0u << 23)) * 0x1p-112f;
  const float subnormal = bits<float>((twice >> 17) | (126u << 23)) - 0.5f;
  return bits<float>((wide & 0x80000000u) | bits<std::uint32_t>(twice < (1u << 27) ? subnormal : normal));
}

static inline std::uint16_t to_float16(float value) {
  const std::uint32_t all = bits<std::uint32_t>(value), twice = all + all, exponent = twice & 0xff000000u;
  const std::uint32_t least = exponent < 0x71000000u ? 0x71000000u : exponent;
  const float scaled = std::fabs(value) * 0x1p+112f * 0x1p-110f;  // infinite where a half would be
  const std::uint32_t sum = bits<std::uint32_t>(bits<float>((least >> 1) + 0x07800000u) + scaled);
  const std::uint32_t nearest = ((sum >> 13) & 0x7c00u) + (sum & 0x0fffu);
  return static_cast<std::uint16_t>(((all >> 16) & 0x8000u) | (twice > 0xff000000u ? 0x7e00u : nearest));
}

static inline float greatest(float one, float other) { return one > other || one != one ? one : other; }
static inline float least(float one, float other) { return one < other || one != one ? one : other; }
"""
"""What the code of functions stands behind."""

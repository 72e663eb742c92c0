"""Compute rates of a device, and what is known of a machine. No torch here: a command may answer without it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tencache_fx.planning.problem import Links
from tencache_fx.serialization import Positive

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Compute rates of a device: FLOP/s by dtype name ("bfloat16"), memory traffic (read + write), and small costs.

    `launch_ns` is what a kernel costs the device beyond its work, `issue_ns` what it costs the thread that issues it:
    a device whose kernels are shorter than that waits for them. On a CPU both are one, and `issue_ns` is 0.
    `attention_flops_per_s` are those of attention in reduced precision, forward and backward, which is far from what
    matmuls reach; None where attention was not measured, as where its ops are timed one by one.
    """

    flops_per_s: tuple[tuple[str, Positive], ...]
    memory_bytes_per_s: Positive
    launch_ns: int
    issue_ns: int
    attention_flops_per_s: tuple[Positive, Positive] | None = None

    def check(self) -> None:
        """Raise `ValueError` for rates of no dtype at all."""
        if not self.flops_per_s:
            raise ValueError("flops_per_s has no rate.")

    @property
    def of_gpu(self) -> bool:
        """Whether these are the rates of a GPU, which has a thread to issue its kernels."""
        return self.issue_ns > 0

    def flops_rate(self, dtype: "torch.dtype") -> int:
        """Return the FLOP/s of matmul-class work in `dtype`; one that was not measured counts as the slowest."""
        rates = dict(self.flops_per_s)
        return rates.get(dtype_name(dtype), min(rates.values()))

    def attention_rate(self, dtype: "torch.dtype", *, backward: bool, causal: bool) -> int:
        """Return the FLOP/s of attention in `dtype`, all keys of a query counted; if not measured, those of matmuls."""
        if self.attention_flops_per_s is None:
            return self.flops_rate(dtype)
        rate = self.attention_flops_per_s[backward] if dtype.itemsize <= 2 else self.flops_rate(dtype)
        return 2 * rate if causal else rate  # kernels leave out the keys that come later


def dtype_name(dtype: "torch.dtype") -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRates:
    """What is known of a machine without measuring; `measured` says whether it was measured earlier."""

    roofline: Roofline
    links: Links
    measured: bool

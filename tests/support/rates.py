"""Make a CPU pass for a fast device behind slow links: what it can do is read from the cache of measured rates."""

import torch

from tencache_fx.hardware.cache import cached
from tencache_fx.hardware.rates import device_key
from tencache_fx.hardware.roofline import Roofline
from tencache_fx.planning.problem import Links


def pretend_slow_links(*, bytes_per_s: int = 50_000_000, host_bytes_per_s: int = 0) -> None:
    """Let `calibrate=True` find links of `bytes_per_s` and compute so fast that no op is worth timing.

    Of the host's memory nothing is known, unless its rate is given.
    """
    cpu = torch.device("cpu")
    links = Links(
        d2h_bytes_per_s=bytes_per_s,
        h2d_bytes_per_s=bytes_per_s,
        d2h_duplex_bytes_per_s=bytes_per_s,
        h2d_duplex_bytes_per_s=bytes_per_s,
        host_bytes_per_s=host_bytes_per_s,
    )
    roofline = Roofline(flops_per_s=(("float32", 10**13),), memory_bytes_per_s=10**13, launch_ns=200, issue_ns=0)
    cached(device_key("links", cpu), Links, lambda: links, renew=True)
    cached(device_key("roofline", cpu), Roofline, lambda: roofline, renew=True)

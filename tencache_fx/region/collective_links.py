"""The collectives of a captured region, with what is known of the process groups that run them."""

from tencache_fx.hardware.collective_rates import group_rates
from tencache_fx.passes.collective_steps import Group, find_collectives
from tencache_fx.planning.problem import Collective
from tencache_fx.region.analysis import RegionAnalysis
from tencache_fx.region.collective_order import find_order
from tencache_fx.runtime.process_groups import resolve


def state_collectives(known: RegionAnalysis, *, of_gpu: bool) -> tuple[Collective, ...]:
    """Return the region's collectives for its problem; `of_gpu` says that it is planned for a GPU, be it here or not.

    No other rank is asked: all have the same rates (`hardware/collective_rates.py`).
    """
    device_type = "cuda" if of_gpu else known.capture.device.type
    groups = {name: resolve(name) for name in find_order(known.capture.graphs)[0]}
    rates = {name: Group(each.size(), group_rates(each, device_type)) for name, each in groups.items()}
    return find_collectives(known.capture, known.storages, rates)

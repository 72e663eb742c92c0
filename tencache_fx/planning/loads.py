"""What keeps a step from being shorter: how long it keeps each resource busy. No step is shorter than the longest."""

from collections.abc import Sequence
from dataclasses import dataclass

from tencache_fx.planning.parameter_schedule import adding_bytes, host_memory_ns, updating_bytes
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How long a step keeps one resource busy, if nothing holds it up, and the bytes that it moves meanwhile."""

    name: str
    busy_ns: int
    nbytes: int


def loads_of(problem: Problem, plan: Plan) -> tuple[Load, ...]:
    """Return the load of each resource in a step, forwards and backwards and the update, with the plan's copies.

    They are the device's compute, without what is recomputed for want of memory, the host's memory, each direction
    of the link and of the disk, and the link of collectives.
    """
    links, forecast, count = problem.links, plan.forecast, problem.accumulation
    copied_bytes = forecast.d2h_bytes + forecast.h2d_bytes
    host_ns = host_memory_ns(problem, copied_bytes)
    if links.host_peak_bytes_per_s:  # a step reaches less, which is no bound
        host_ns = host_ns * links.host_bytes_per_s // links.host_peak_bytes_per_s
    host_bytes = updating_bytes(problem) + count * copied_bytes + adding_bytes(problem)
    moved = {
        "link out": (forecast.d2h_bytes, links.d2h_bytes_per_s),
        "link in": (forecast.h2d_bytes, links.h2d_bytes_per_s),
        "disk write": (forecast.disk_write_bytes, links.disk_write_bytes_per_s),
        "disk read": (forecast.disk_read_bytes, links.disk_read_bytes_per_s),
    }
    return (
        Load(name="compute", busy_ns=count * forecast.compute_ns, nbytes=0),
        Load(name="host memory", busy_ns=host_ns, nbytes=host_bytes if host_ns else 0),
        *(
            Load(name=name, busy_ns=count * nbytes * 1_000_000_000 // rate if rate else 0, nbytes=count * nbytes)
            for name, (nbytes, rate) in moved.items()
        ),
        Load(
            name="collectives",
            busy_ns=count * forecast.collective_ns,
            nbytes=count * sum(each.kind.traffic(each.nbytes, each.ranks) for each in problem.collectives),
        ),
    )


def bound_of(loads: Sequence[Load]) -> Load | None:
    """Return the resource that is busy longest; None without any."""
    return max(loads, key=lambda load: load.busy_ns, default=None)

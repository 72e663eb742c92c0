"""What the runtime did: counters since they were last taken, and gauges of now."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

from tencache_fx.renames import new_name
from tencache_fx.runtime.streams import Watch

_UNRESOLVED = 32
"""So many stalls may wait to be looked at."""
READY_NS = 20_000
"""A stall shorter than this is what it costs to ask: between two marks on a GPU there is never no time at all."""

_COUNTERS = (
    "offloads",
    "prefetches",
    "dropped",
    "d2h_bytes",
    "h2d_bytes",
    "disk_write_bytes",
    "disk_read_bytes",
    "disk_write_failures",
    "stall_out_ns",
    "stall_in_ns",
    "updates",
    "update_ns",
    "device_updates",
)
GAUGES = (
    "host_acquired_bytes",
    "host_high_water_bytes",
    "host_pool_bytes",
    "host_waste_bytes",
    "disk_bytes",
    "disk_acquired_bytes",
    "disk_written_bytes",
    "parameter_disk_bytes",
    "transfers",
)
"""Those that every engine has; those of its spill directories come behind them."""

_RENAMED = {
    "trips": "transfers",
    "host_lent_bytes": "host_acquired_bytes",
    "disk_lent_bytes": "disk_acquired_bytes",
}


class Counts(dict[str, int | float]):
    """Figures by name. One that has a new name is refused with it."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(new_name("stats()", name, _RENAMED[name]) if name in _RENAMED else name)


def no_counts() -> Counts:
    """Return the figures of no engine: nothing was moved, nothing is held, nothing was waited for."""
    return Counts({**dict.fromkeys((*_COUNTERS, "stall_ns"), 0), "hit_rate": 1.0, **dict.fromkeys(GAUGES, 0)})


class _Stall(NamedTuple):
    watch: Watch
    counter: str
    wanted_bytes: int


class Stats:
    """Collects counts from any thread. `gauges` is called by `take`, outside the lock."""

    def __init__(self, gauges: Callable[[], Mapping[str, int]]) -> None:
        self._gauges = gauges
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._stalls: deque[_Stall] = deque()

    def add(self, **amounts: int) -> None:
        """Add to counters."""
        with self._lock:
            for name, amount in amounts.items():  # `Counter.update` takes three times as long
                self._counts[name] += amount

    def add_copy(self, counter: str, bytes_counter: str, nbytes: int) -> None:
        """Add one to a counter, and bytes to another, as each op of a graph does: in half the time of `add`."""
        with self._lock:
            self._counts[counter] += 1
            self._counts[bytes_counter] += nbytes

    def add_ready(self, wanted_bytes: int) -> None:
        """Count bytes that were there when their reader asked: no stall, whatever the asking itself took."""
        with self._lock:
            self._counts["wanted_bytes"] += wanted_bytes
            self._counts["hit_bytes"] += wanted_bytes

    def add_stall(self, watch: Watch, counter: str, wanted_bytes: int = 0) -> None:
        """Add a stall whose length may be known only later; `wanted_bytes` count for the hit rate."""
        with self._lock:
            self._stalls.append(_Stall(watch, counter, wanted_bytes))
            if len(self._stalls) > _UNRESOLVED:  # the device may not have come to it: to ask each time takes long
                self._resolve()

    def take(self) -> Counts:
        """Return the counters since the last call, and the gauges; never waits for the device.

        Counters: `offloads`, `prefetches`, `dropped` (released without a backward), `d2h_bytes`, `h2d_bytes`,
        `disk_write_bytes`, `disk_read_bytes`, `disk_write_failures`, `stall_out_ns` (at release, or for want of a
        staging buffer), `stall_in_ns` (at wait), `stall_ns` (both), `updates` of offloaded parameters,
        `device_updates`, those of them that were streamed through the device, as a whole or in part, `update_ns`, the
        time of those on the host, `hit_rate`. Stalls that the device has not reached yet count next time.
        `hit_rate` is the share of the bytes waited for that were ready: their copy in was over when the host asked, or
        their reader on the device stood still for less than `READY_NS`. 1.0 when nothing was waited for.
        Gauges: the engine's, see `Engine.stats`.
        """
        gauges = self._gauges()
        with self._lock:
            self._resolve()
            counts, self._counts = self._counts, Counter()
        values: dict[str, int | float] = {name: counts[name] for name in _COUNTERS}
        values["stall_ns"] = counts["stall_out_ns"] + counts["stall_in_ns"]
        values["hit_rate"] = counts["hit_bytes"] / counts["wanted_bytes"] if counts["wanted_bytes"] else 1.0
        return Counts({**values, **gauges})

    def _resolve(self) -> None:
        while self._stalls:
            stall = self._stalls[0]
            elapsed_ns = stall.watch.elapsed_ns()
            if elapsed_ns is None:
                return
            self._stalls.popleft()
            self._counts[stall.counter] += elapsed_ns
            self._counts["wanted_bytes"] += stall.wanted_bytes
            if elapsed_ns < READY_NS:
                self._counts["hit_bytes"] += stall.wanted_bytes

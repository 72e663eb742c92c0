"""Plans as memory snapshots, in the form of `torch.cuda.memory._snapshot()`, which pytorch.org/memory_viz draws.

Each plan has three "devices" in it: the device's memory, then the pinned host buffers that its swaps are in, then the
spill files. torch's allocator is not modelled: addresses are given first fit, so that nothing overlaps. No torch here.
"""

import bisect
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tencache_fx.errors import OptionError
from tencache_fx.planning.liveness import Profile, device_changes
from tencache_fx.planning.plan import TransferKind
from tencache_fx.planning.problem import Storage, Tier
from tencache_fx.reporting.timeline import Held, Timeline
from tencache_fx.reporting.view import View

_BASE = 1 << 32  # an address of 0 counts as none
_STEPPED = (Held.EXTERNAL, Held.OPTIMIZER, Held.SCRATCH)  # of these a plan knows sums only


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes that are held from `start_ns` to `stop_ns`; the end of the step, for what outlives it, is None."""

    name: str
    what: str
    nbytes: int
    start_ns: int
    stop_ns: int | None


def write_snapshot(path: Path, views: Sequence[View]) -> int:
    """Write the snapshot of all views to `path` and return its bytes; raises `OptionError` if it cannot be written."""
    content = pickle.dumps(snapshot_of(views), protocol=4)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OptionError(f"{path} cannot be written to: {error.strerror}; name another file.") from error
    return len(content)


def snapshot_of(views: Sequence[View]) -> dict[str, Any]:
    """Return the snapshot: for each view a trace of each tier, and what is held at the end as segments."""
    segments: list[dict[str, Any]] = []
    traces: list[list[dict[str, Any]]] = []
    for view in views:
        for spans in (device_spans(view.timeline), *_other_spans(view.timeline)):
            segment, trace = _traced(len(traces), list(spans), view)
            traces.append(trace)
            segments += segment
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def device_spans(timeline: Timeline) -> Iterator[Span]:
    """Yield what the device holds, under the plan's transfers; at each op it adds up to the plan's bytes."""
    problem, plan = timeline.problem, timeline.plan
    ends = (*timeline.replay.starts_ns, timeline.replay.makespan_ns)
    transfers = {transfer.name: transfer for transfer in plan.transfers}
    for storage in problem.storages:
        changes = [(int(storage.birth), 1), (int(storage.death), -1)]
        if (transfer := transfers.get(storage.name)) is not None:
            changes += [(int(step), sign) for step, sign in device_changes(transfer, storage)]
        held, since = 0, 0
        for step, sign in sorted(changes):
            if held == 0 and sign > 0:
                since = step
            held += sign
            if held == 0 and sign < 0 and step > since:
                stop = None if step >= len(problem.ops) else ends[step]
                yield _span(storage, ends[since], stop)
    for each in _STEPPED:
        yield from _runs(each.value, timeline.held[each], ends)


def _span(storage: Storage, start_ns: int, stop_ns: int | None) -> Span:
    name = storage.parameter or storage.name
    return Span(name=name, what=str(storage.kind), nbytes=storage.nbytes, start_ns=start_ns, stop_ns=stop_ns)


def _runs(name: str, profile: Profile, ends: Sequence[int]) -> Iterator[Span]:
    """Yield a sum over time: what is always there, and what each run of equal steps has beyond."""
    least = int(profile.min(initial=int(profile.max(initial=0))))
    if least:
        yield Span(name=name, what="sum", nbytes=least, start_ns=0, stop_ns=None)
    begin = 0
    for step in range(1, len(profile) + 1):
        if step == len(profile) or profile[step] != profile[begin]:
            if (nbytes := int(profile[begin]) - least) > 0:
                stop = None if step == len(profile) else ends[step]
                yield Span(name=name, what="sum", nbytes=nbytes, start_ns=ends[begin], stop_ns=stop)
            begin = step


def _other_spans(timeline: Timeline) -> tuple[list[Span], list[Span]]:
    """Return what swaps have in pinned host buffers, and in spill files."""
    times = {each.name: each for each in timeline.replay.transfers}
    host: list[Span] = []
    disk: list[Span] = []
    for transfer in timeline.plan.transfers:
        if transfer.kind is not TransferKind.SWAP:
            continue  # parameters and gradients have buffers of their own, all the time
        each = times[transfer.name]
        spans = [("buffer", host, each.out_start_ns, each.in_end_ns)]
        if transfer.tier is Tier.NVME:
            spans = [
                ("staging buffer", host, each.out_start_ns, each.written_ns),
                ("staging buffer", host, each.read_start_ns, each.in_end_ns),
                ("extent", disk, each.write_start_ns, each.read_end_ns),
            ]
        for what, tier, start, stop in spans:
            tier.append(Span(name=transfer.name, what=what, nbytes=transfer.nbytes, start_ns=start, stop_ns=stop))
    return host, disk


class _Addresses:
    """Free ranges by address; what is taken is the first that is large enough, what is given back joins neighbours."""

    def __init__(self) -> None:
        self.high = _BASE
        self._free: list[tuple[int, int]] = []

    def take(self, nbytes: int) -> int:
        """Return where so many bytes are free."""
        for index, (address, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[index : index + 1] = [(address + nbytes, size - nbytes)] if size > nbytes else []
                return address
        address = self.high
        self.high += nbytes
        return address

    def give(self, address: int, nbytes: int) -> None:
        """Take a range back."""
        index = bisect.bisect(self._free, (address, nbytes))
        low, size = address, nbytes
        if index < len(self._free) and self._free[index][0] == address + nbytes:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == address:
            index -= 1
            low, size = self._free[index][0], size + self._free.pop(index)[1]
        self._free.insert(index, (low, size))


def _traced(device: int, spans: list[Span], view: View) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the segment of one tier, as it is at the end, and its trace."""
    spans = [span for span in spans if span.nbytes and span.stop_ns != span.start_ns]
    changes = [(span.start_ns, True, index) for index, span in enumerate(spans)]
    changes += [(span.stop_ns, False, index) for index, span in enumerate(spans) if span.stop_ns is not None]
    addresses, placed, trace = _Addresses(), dict[int, int](), list[dict[str, Any]]()
    for at_ns, begins, index in sorted(changes):
        span = spans[index]
        if begins:
            placed[index] = addresses.take(span.nbytes)
            trace.append(_event("alloc", span, placed[index], at_ns))
        else:
            address = placed.pop(index)
            addresses.give(address, span.nbytes)
            trace += [_event(action, span, address, at_ns) for action in ("free_requested", "free_completed")]
    total = addresses.high - _BASE
    if not total:
        return [], []
    whole = Span(name=view.name, what="all of the tier", nbytes=total, start_ns=0, stop_ns=None)
    blocks = list(_blocks([(address, spans[index]) for index, address in placed.items()], addresses.high))
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    segment = {
        "device": device,
        "address": _BASE,
        "total_size": total,
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": _frames(whole),
        "blocks": blocks,
    }
    return [segment], [_event("segment_alloc", whole, _BASE, 0), *trace]


def _blocks(held: Iterable[tuple[int, Span]], high: int) -> Iterator[dict[str, Any]]:
    """Yield what is held and the gaps between, by address."""
    at = _BASE
    for address, span in sorted(held, key=lambda each: each[0]):
        if address > at:
            yield _block(at, address - at, "inactive", [])
        yield _block(address, span.nbytes, "active_allocated", _frames(span))
        at = address + span.nbytes
    if high > at:
        yield _block(at, high - at, "inactive", [])


def _block(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}


def _event(action: str, span: Span, address: int, at_ns: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": span.nbytes,
        "stream": 0,
        "time_us": at_ns // 1000,
        "frames": _frames(span),
    }


def _frames(span: Span) -> list[dict[str, Any]]:
    """Return what a viewer shows as the stack: what it is, and what for."""
    return [{"name": span.name, "filename": span.what, "line": 0}]

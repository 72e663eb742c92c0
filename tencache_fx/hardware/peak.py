"""What a piece of work really holds on a device: the independent witness for what plans promise."""

import itertools
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_START = "tencache_fx.peak_bytes"


def peak_bytes(fn: Callable[[], object], device: torch.device, *, warm_up: Callable[[], object] | None = None) -> int:
    """Return the most device bytes allocated at any one time while `fn()` runs, over those allocated when it starts.

    `warm_up` runs first and does not count. On CUDA the caching allocator keeps the books (requested bytes rounded to
    512). On a CPU the profiler's memory events are added up. They tell of a free only when they told of the allocation,
    so what `fn` frees and did not make itself (gradients of the last step, say) must be made in `warm_up`, else it
    counts as held. Only this thread and autograd's are seen: a tensor freed in another one counts as held to the end.
    """
    if warm_up is not None and device.type == "cuda":
        warm_up()
    return _cuda_peak(fn, device) if device.type == "cuda" else _cpu_peak(fn, warm_up)


def _cuda_peak(fn: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start_bytes = torch.cuda.memory_allocated(device)
    fn()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - start_bytes


def _cpu_peak(fn: Callable[[], object], warm_up: Callable[[], object] | None) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        if warm_up is not None:
            warm_up()
        with record_function(_START):
            pass
        fn()
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    (start_ns,) = (event.start_ns() for event in events if event.name() == _START)
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type().name == "CPU" and event.start_ns() >= start_ns
    )
    return int(max(itertools.accumulate((nbytes for _, nbytes in changes), initial=0)))

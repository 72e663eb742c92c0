"""A region as AOTAutograd's cache keeps it beside its code: nothing of it is traced, split or planned a second time.

All that decides its graphs is in the key; where that cannot be, because it is known only behind planning, or changes by
the minute, it is compared when an entry is read (`PlannedLowering.take_up`).
"""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

import tencache_fx
from tencache_fx.errors import TencacheError
from tencache_fx.hardware.cache import digest_sources
from tencache_fx.planning.swap_region import SwapRegion
from tencache_fx.records import RegionRecord
from tencache_fx.region.candidate import RegionPlanner
from tencache_fx.region.compiled_region import Placement, Request
from tencache_fx.region.dynamic_shapes import Footprint, hints_of
from tencache_fx.region.source import RegionSource
from tencache_fx.runtime.engine_registry import expected_indices

_OF_THIS_START = ("host_budget", "spill_budget", "spill_dir", "dump_dir")
"""Options that are of one start: the budgets change by the minute, and count as far as `RegionPlanner.facts` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRegion:
    """What is left of a region's compilation beside its code: all that its monitors and reports need.

    `donated` are the positions of donated inputs that its plan offloads. Its graphs call the engine, or the swap
    points, of the index `server`; None if they call neither. Its `placement` has no names yet. It `is_timeable` if its
    times say something about the plan.
    """

    record: RegionRecord
    footprint: Footprint | None
    placement: Placement
    swap_region: SwapRegion | None
    donated: frozenset[int]
    server: int | None
    is_timeable: bool


def cache_key(source: RegionSource, request: Request, names: Mapping[int, str], planner: RegionPlanner) -> str | None:
    """Return a digest of all that decides what becomes of a joint graph; None for a region that is not to be kept.

    Torch's own key has the Dynamo graph, the inputs and Inductor's settings. A region without a device budget is not
    kept, for its backward is compiled when it first runs, when torch does not ask for this key any more; one without
    Inductor has no code; and ranks agree in each run anew on the order of collectives for parameters that are spread.
    Nor does torch's key name somebody's own pass over the joint graph.
    """
    options = source.options
    if options.device_budget is None or options.compiler != "inductor" or planner.models:
        return None
    if source.compilers.functorch["joint_custom_pass"] is not None:
        return None
    (folder,) = map(Path, tencache_fx.__path__)
    try:
        hints, bound_bytes = hints_of(source.fakes()), source.bound_bytes
    except TencacheError:  # a size that nothing bounds
        return None
    facts = (
        tuple((each.name, getattr(options, each.name)) for each in fields(options) if each.name not in _OF_THIS_START),
        bool(options.spill_dir),
        sorted(source.settings.items()),
        "device_budget" in source.own,
        str(source.device),
        hints,
        sorted(names.items()),
        sorted(request.donated),
        request.by_step,
        request.sizes if hints else None,  # it says the same if there is only one
        None if request.recomputed is None else sorted(request.recomputed),
        planner.facts(bound_bytes),
        expected_indices(source.device),
        torch.get_num_threads(),
        (torch.__version__, np.__version__, sys.version),
        digest_sources(folder, folder / "passes"),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()

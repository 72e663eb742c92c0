"""The variants of one captured region: one for each set of its inputs that is offloaded.

Blocks of one kind share their code, and only some of them may have been given to `offload`. A plan is for parameters
that are offloaded, or are not: so each set of them has a region of its own, which is planned and watched as if it had
been captured for itself. In a step such regions alternate, and nothing is compiled for it.
"""

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tencache_fx import compat
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import find_all_offloaded
from tencache_fx.records import RegionRecord
from tencache_fx.region.cache_uses import count_uses, show_uses
from tencache_fx.region.region import Region
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.source import RegionSource
from tencache_fx.runtime.engine_registry import RankStage
from tencache_fx.stages import STAGES, show_times
from tencache_fx.tensors import are_faked

log = logging.getLogger("tencache_fx")

_MOST_VARIANTS = 8  # more sets of parameters come from offloading them one after another, and do not recur

_Key = frozenset[int]
"""The positions of the inputs that are offloaded."""


class Variants:
    """The function that torch calls. Of too many variants the one that has not run for longest is dropped."""

    def __init__(self, source: RegionSource, inputs: Sequence[Any]) -> None:
        self._source = source
        self._uses = itertools.count()
        self._used: dict[_Key, int] = {}  # when each ran last
        self._regions: dict[_Key, Region] = {}
        self._make(source, inputs, find_all_offloaded(inputs, source.device))

    @RankStage("the forward of a region")
    def __call__(self, *args: Any) -> Any:
        """Run the variant for the inputs that are offloaded; fakes are not, and run by the one that ran last.

        Raises what `Region.run` does, and `UsageError` for fake tensors where Inductor's code would read them.
        """
        if are_faked(args):
            return self._last.run_fakes(args)
        offloaded = find_all_offloaded(args, self._source.device)
        key = frozenset(offloaded)
        region = self._regions.get(key) or self._add(key, args, offloaded)
        self._used[key] = next(self._uses)
        return region.run(args, offloaded)

    @property
    def record(self) -> RegionRecord | None:
        """The plan of the variant that ran last, for reports; None if it runs without one."""
        return self._last.record

    @property
    def _last(self) -> Region:
        """The variant that ran last, or if none has yet, the first one."""
        return self._regions[max(self._regions, key=lambda key: self._used.get(key, -1))]

    def _add(self, key: _Key, args: Sequence[Any], offloaded: Mapping[int, OffloadedParameter]) -> Region:
        """Compile a variant as the others run; if that fails, all stays as it was."""
        with compat.compile_lock():
            if (found := self._regions.get(key)) is not None:  # another thread has made it
                return found
            last = self._last
            log.info("region %d: %d of its parameters are offloaded; planning it for that, too", last.index, len(key))
            source = dataclasses.replace(self._source, index=REGIONS.next_index())
            region = self._make(source, args, offloaded, last)
            while len(self._regions) > _MOST_VARIANTS:
                oldest = min(self._regions.keys() - {key}, key=lambda each: self._used.get(each, -1))
                del self._regions[oldest]
            return region

    def _make(
        self,
        source: RegionSource,
        inputs: Sequence[Any],
        offloaded: Mapping[int, OffloadedParameter],
        runs: Region | None = None,
    ) -> Region:
        before = count_uses()
        with STAGES.compilation(f"region {source.index}") as spent_ns:
            region = Region(source, inputs, offloaded, runs)
        log.info("region %d: compiled in %s", source.index, show_times(spent_ns))
        log.info("region %d: read from caches: %s", source.index, show_uses(count_uses(), before))
        if region.record is not None and region.record.plan.transfers and (lost := compat.overruled(source.settings)):
            log.warning("region %d has a plan, and so it runs without %s.", source.index, ", ".join(lost))
        REGIONS.add(region)
        self._regions[frozenset(offloaded)] = region
        return region

"""Whether a region's plan still holds: at the sizes of a call, and beside all else that is on the device by then."""

import gc
import logging

import torch

from tencache_fx.errors import BudgetError, StoreError
from tencache_fx.hardware.device_memory import held_bytes, most_bytes
from tencache_fx.model_state.parameter_store import evict_residents
from tencache_fx.region.current_options import CurrentOptions
from tencache_fx.region.dynamic_shapes import Footprint, Sizes
from tencache_fx.region.lowering import reserve
from tencache_fx.region.registry import REGIONS, compilations
from tencache_fx.region.source import RegionSource

log = logging.getLogger("tencache_fx")


class BudgetCheck:
    """Compares what one region's plan needs with its device budget."""

    def __init__(self, source: RegionSource, current_options: CurrentOptions) -> None:
        self._source, self._current_options = source, current_options
        self._collected_at = -1  # so many compilations ago was garbage collected, for the region to fit

    def passes(self, footprint: Footprint, sizes: Sizes, external_bytes: int | None) -> bool:
        """Return True if the plan fits at these sizes, beside the external memory there is now; reserve its buffers.

        Where no allocator counts that, `external_bytes` are what others of the step hold.
        """
        source, need = self._source, footprint.at(sizes)
        device, budget_bytes = source.device, source.options.device_budget
        assert budget_bytes is not None
        own_bytes = need.peak_bytes - footprint.held_bytes - (need.input_bytes - footprint.input_bytes)
        own_bytes += 0 if external_bytes is None else external_bytes + need.input_bytes
        peak_bytes = own_bytes + held_bytes(device)
        if peak_bytes > budget_bytes and self._collected_at != (compiled := compilations()):
            self._collected_at = compiled
            gc.collect()  # garbage of torch's compiler holds on to the inputs that it compiled for
            peak_bytes = own_bytes + held_bytes(device)
        # A region that trains is planned again beside them instead: they would come and go in each step.
        if peak_bytes > budget_bytes and not torch.is_grad_enabled() and evict_residents(device):
            peak_bytes = own_bytes + held_bytes(device)
        if (over_bytes := peak_bytes - budget_bytes) > 0:
            waiting, most = REGIONS.waiting(device), most_bytes(device)
            excused = over_bytes <= sum(each.pending_bytes for each in waiting)
            if not excused or (most is not None and peak_bytes > most):
                return False
            for each in waiting:
                each.report_peak(peak_bytes)
            log.info(
                "region %d goes %d bytes over the budget this once: others kept more for their backward than will do.",
                source.index,
                over_bytes,
            )
        if not footprint.is_reserved(sizes):
            try:
                reserve(self._current_options.source, footprint.plan_for(sizes))
            except (BudgetError, StoreError):
                return False
            footprint.note_reserved(sizes)
        return True

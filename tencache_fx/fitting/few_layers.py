"""A transformers model captured with a few of its layers of each kind, if that is possible."""

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tencache_fx.errors import OptionError
from tencache_fx.fitting.captures import Capture
from tencache_fx.fitting.fake_model import figures_of
from tencache_fx.fitting.target import Target
from tencache_fx.fitting.transformers_model import find_config
from tencache_fx.fitting.trial import Trial
from tencache_fx.fitting.workload import Workload


def capture_layers(load: Workload, target: Target, micro_batch: int, ends: int | None) -> Capture:
    """Return the model captured at a micro-batch with so many layers at each end of two units; with all for None.

    Raises `UsageError` if it cannot be captured, and `OptionError` if its graph breaks.
    """
    model = find_config(load)
    few, unit = (model, 1) if ends is None else model.shorter(ends)
    capturing = replace(target, options=replace(target.options, policy="none", dump_dir=None))
    torch.compiler.reset()  # it would count as one more size of the same code
    trial = Trial(few.make(micro_batch), capturing, FakeTensorMode())
    trial.capture()
    plans = trial.plans()
    if len(plans) > 1:
        raise OptionError(
            f"{model.name} breaks into {len(plans)} graphs, which are planned one by one; write a factory, "
            "and name it MODULE:FUNCTION."
        )
    pairs = [f"{few.depths[name]} of {depth}" for name, depth in model.depths.items()]
    return Capture(
        problem=plans[0].captured,
        few=trial.figures,
        whole=figures_of(model.make(micro_batch), target.workspace_bytes),
        unit=unit,
        traced=f"{' and '.join(dict.fromkeys(pairs))} layers" if few is not model else "all layers",
    )

"""A transformers model captured with a few of its layers of each kind, if that is possible."""

from dataclasses import replace

import torch

from tencache_fx.fitting.captures import Capture, SeveralGraphsError
from tencache_fx.fitting.fake_model import figures_of
from tencache_fx.fitting.host_values import HostValues
from tencache_fx.fitting.target import Target
from tencache_fx.fitting.transformers_model import find_config
from tencache_fx.fitting.trial import Trial
from tencache_fx.fitting.workload import Workload
from tencache_fx.reporting.fit_report import Fit


def capture_layers(load: Workload, target: Target, micro_batch: int, ends: int | None) -> Capture:
    """Return the model captured at a micro-batch with so many layers at each end of two units; with all for None.

    Raises `UsageError` if it cannot be captured, and `SeveralGraphsError` if its graph breaks.
    """
    model = find_config(load)
    few, unit = (model, 1) if ends is None else model.shorter(ends)
    capturing = replace(target, options=replace(target.options, policy="none", dump_dir=None))
    torch.compiler.reset()  # it would count as one more size of the same code
    trial = Trial(few.make(micro_batch), capturing, HostValues())
    trial.capture()
    plans = trial.plans()
    if len(plans) > 1:
        raise SeveralGraphsError(f"{model.name} breaks into {len(plans)} graphs; set micro_batch, and no more samples.")
    pairs = [f"{few.depths[name]} of {depth}" for name, depth in model.depths.items()]
    return Capture(
        problem=plans[0].captured,
        few=trial.figures,
        whole=figures_of(model.make(micro_batch), target.workspace_bytes),
        unit=unit,
        traced=f"{' and '.join(dict.fromkeys(pairs))} layers" if few is not model else "all layers",
    )


def fit_graph_by_graph(load: Workload, target: Target, micro_batch: int) -> Fit:
    """Return how a model whose graph breaks would train at a micro-batch, with each region planned by itself."""
    model = find_config(load)
    torch.compiler.reset()
    trial = Trial(model.make(micro_batch), target, HostValues())
    trial.capture()
    return trial.result()

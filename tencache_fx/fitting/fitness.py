"""`tencache fit`: does a model fit, in which tiers, how fast? From fake tensors, without memory for it anywhere.

The model is captured and planned by the backend itself, region by region, as if every large parameter were offloaded
by `tencache_fx.offload` and trained by `tencache_fx.optim.AdamW`. Not included: memory that the generated code holds
beyond the graphs, memory that libraries keep on the device, and the time of ops that no earlier run has measured.

A transformers model is known by its configuration: `fit_config` is in `config_fit.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from tencache_fx.fitting.fake_model import FactoryResult, call_factory
from tencache_fx.fitting.host_values import HostValues
from tencache_fx.fitting.target import Target
from tencache_fx.fitting.trial import Trial
from tencache_fx.model_state.arguments import need_model
from tencache_fx.reporting.fit_report import Fit


def fit(
    model: nn.Module,
    *inputs: Any,
    loss_fn: Callable[..., Any] | None = None,
    named_inputs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    device_profile: str | None = None,
    **options: object,
) -> Fit:
    """Return how `model` would train on `device` within the budgets: whether it fits, in which tiers, how fast.

    The model and its inputs may be on any device, "meta" among them: sizes and dtypes count, and nothing is read,
    moved or allocated. It is called as `model(*inputs, **named_inputs)`, and compiled together with `loss_fn`, if there
    is one, which gets its output and returns one real number. `device` is the GPU by default if there is one, and has
    to be there: tracing asks its driver. A GPU that is not there is planned for by its `device_profile`: a name, or a
    file that `tencache doctor --save` has written. `options` are those of `torch.compile(..., options=...)`; budgets
    may be more than this machine has, and what is written to `dump_dir` is for `tencache dump` and `tencache plan`.

    Rates are those measured earlier (by a run, or `tencache doctor`), else fixed, low ones: `Fit.measured`. Takes
    seconds to minutes, about as long as compiling without code generation, and several times that where the budget does
    not suffice. Raises `OptionError` for what cannot be used, and `UsageError` for a model that cannot be captured.
    """
    need_model(model)
    given = (*inputs, *(named_inputs or {}).values(), *model.parameters())
    modes = (leaf.fake_mode for leaf in tree_leaves(given) if isinstance(leaf, FakeTensor))
    made = FactoryResult(model=model, inputs=inputs, named_inputs=named_inputs or {}, loss_fn=loss_fn)
    target = Target.find(device, device_profile, options)
    return _fit(made, target, next(modes, None) or HostValues())


def fit_factory(
    name: str,
    device: str | None,
    options: Mapping[str, object],
    *,
    profile: str | None = None,
    settings: Mapping[str, object] | None = None,
    inputs: Sequence[str] = (),
) -> Fit:
    """Return how the model that the factory `name` makes with these `settings` would train; see `call_factory`."""
    target = Target.find(device, profile, options)
    return _fit(call_factory(name, settings, inputs), target, HostValues())


def _fit(made: FactoryResult, target: Target, mode: FakeTensorMode) -> Fit:
    trial = Trial(made, target, mode)
    trial.capture()
    return trial.result()

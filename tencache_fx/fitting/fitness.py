"""`tencache fit`: does a model fit, in which tiers, how fast? From fake tensors, without memory for it anywhere.

The model is captured and planned by the backend itself, region by region, as if every large parameter were offloaded
by `tencache_fx.offload` and trained by `tencache_fx.optim.AdamW`. Not included: memory that the generated code holds
beyond the graphs, memory that libraries keep on the device, and the time of ops that no earlier run has measured.

A transformers model is known by its configuration. Of its layers only as many are captured as stand for all, and what
they do is repeated (`repetition.py`); of its micro-batches two are, and the fastest is searched for
(`micro_batches.py`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from tencache_fx.errors import BudgetError, OptionError
from tencache_fx.fitting import PREFIX
from tencache_fx.fitting.estimate import RegionPlan, estimate_of, least_device_bytes
from tencache_fx.fitting.fake_model import FactoryResult, call_factory
from tencache_fx.fitting.micro_batches import NotEvenError, between, divisors, find_setting
from tencache_fx.fitting.model_figures import ModelFigures
from tencache_fx.fitting.repetition import UNITS, NotRepeatedError, layer_of, repeat_layers
from tencache_fx.fitting.target import Target
from tencache_fx.fitting.transformers_model import ConfiguredModel, find_config, read_setting
from tencache_fx.fitting.trial import Trial
from tencache_fx.hardware.device_memory import external_bytes, input_bytes
from tencache_fx.model_state.arguments import need_model
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.problem import Kind, Problem
from tencache_fx.planning.search import plan_region
from tencache_fx.reporting.fit_report import Fit

__all__ = ["PREFIX", "Workload", "capture_largest", "fit", "fit_config", "fit_factory", "read_settings"]


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
    return _fit(made, target, next(modes, None) or FakeTensorMode())


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
    return _fit(call_factory(name, settings, inputs), target, FakeTensorMode())


def _fit(made: FactoryResult, target: Target, mode: FakeTensorMode) -> Fit:
    trial = Trial(made, target, mode)
    trial.capture()
    return trial.result()


def read_settings(texts: Sequence[str]) -> dict[str, object]:
    """Return the values of "name=value"; raises `OptionError` for what is none."""
    return dict(map(read_setting, texts))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a transformers model is to be trained with: `samples` or `tokens` a step, or else one micro-batch.

    `settings` are those of its configuration. Without a `micro_batch` the fastest is searched for.
    """

    config: str
    settings: Mapping[str, object] = field(default_factory=dict)
    dtype: str = "bfloat16"
    sequence: int | None = None
    micro_batch: int | None = None
    samples: int | None = None
    tokens: int | None = None


def fit_config(
    load: Workload,
    device: str | None,
    options: Mapping[str, object],
    *,
    profile: str | None = None,
    largest: Callable[[], Problem | None] | None = None,
) -> Fit:
    """Return how a model of transformers would train, with the fastest setting of micro-batch and accumulation.

    Takes seconds, as few layers stand for all of a kind: `Fit.traced` says how many. `largest` returns what
    `capture_largest` does, if it can. Raises `OptionError` for what cannot be used, among it a model that transformers
    is missing for.
    """
    depth, samples, tried = _prepare(load, Target.find(device, profile, options))
    model, target = depth.model, depth.target
    found = find_setting(_Captures(depth, tried, largest), samples, tried, target.options.policy)
    region = RegionPlan(captured=found.captured, planned=found.planned, refusal=found.setting.refusal)
    fitted = estimate_of([region], depth.figures(found.setting.micro_batch), target)
    fitted = replace(
        fitted,
        settings=found.settings,
        micro_batch=found.setting.micro_batch,
        tokens=samples * model.sequence,
        samples=samples,
        model=load.config,
        traced=depth.traced,
    )
    if region.refusal and fitted.resting_host_bytes <= target.options.host_budget:
        captured = found.captured
        least = least_device_bytes(
            functools.partial(_has_plan, captured, target), [captured], target.options, fitted.offloaded_bytes
        )
        return replace(fitted, least_device_bytes=least)
    return fitted


def capture_largest(
    load: Workload, device: str | None, options: Mapping[str, object], *, profile: str | None = None
) -> Problem:
    """Return the problem of the largest micro-batch that `fit_config` tries; raises as that does."""
    depth, _, tried = _prepare(load, Target.find(device, profile, options))
    return depth.problem(tried[-1])


def _prepare(load: Workload, target: Target) -> "tuple[_Depth, int, Sequence[int]]":
    """Return the model to capture, the samples of a step, and the micro-batches to try, the smallest first."""
    for name in ("sequence", "micro_batch", "samples", "tokens"):
        if (number := getattr(load, name)) is not None and number < 1:
            raise OptionError(f"{name} is {number}; give 1 or more.")
    model = find_config(load.config, load.settings, dtype=load.dtype, sequence=load.sequence)
    samples = _samples(load, model)
    if load.micro_batch is not None and samples % load.micro_batch:
        raise OptionError(f"{samples} samples a step are no multiple of micro_batch, {load.micro_batch}; change one.")
    return _Depth(model, target), samples, [load.micro_batch] if load.micro_batch else divisors(samples)


def _samples(load: Workload, model: ConfiguredModel) -> int:
    """Return how many samples a step has; raises `OptionError` for numbers that contradict each other."""
    if load.tokens is None:
        return load.samples or load.micro_batch or 1
    if load.samples is not None:
        raise OptionError("tokens and samples are both given, and say the same; give one of them.")
    if model.is_image:
        raise OptionError(f"{load.config} is for images, which are no tokens; give samples.")
    if load.tokens % model.sequence:
        raise OptionError(
            f"{load.tokens} tokens are no whole sequences of {model.sequence}; give a multiple, or another sequence."
        )
    return load.tokens // model.sequence


def _has_plan(captured: Problem, target: Target, device_bytes: int) -> bool:
    try:
        plan_region(captured.within(device_bytes=device_bytes), target.options.policy)
    except BudgetError:
        return False
    return True


class _Depth:
    """A model with all its layers, captured with a few of each kind, if that is possible."""

    def __init__(self, model: ConfiguredModel, target: Target) -> None:
        self.model, self.target = model, target
        self._untried = list(UNITS)
        self._short, self._unit = model.shorter(self._untried.pop(0))
        self._capturing = replace(target, options=replace(target.options, policy="none", dump_dir=None))

    @property
    def traced(self) -> str:
        """Which layers were captured, in words."""
        pairs = [f"{self._short.depths[name]} of {depth}" for name, depth in self.model.depths.items()]
        return f"{' and '.join(dict.fromkeys(pairs))} layers" if self._short is not self.model else "all layers"

    @functools.lru_cache(maxsize=8)  # noqa: B019 - lives as long as one answer is looked for
    def figures(self, micro_batch: int) -> ModelFigures:
        """Return what the whole model takes."""
        return ModelFigures.of(self.model.make(micro_batch))

    def problem(self, micro_batch: int) -> Problem:
        """Return the problem of the whole model; raises `UsageError` if it cannot be captured, or is several."""
        try:
            return self._stated(micro_batch, *self._captured(micro_batch))
        except NotRepeatedError:
            if self._short is self.model:
                raise
            units = self._untried.pop(0) if self._untried else None
            self._short = self.model if units is None else self.model.shorter(units)[0]
            return self.problem(micro_batch)

    def _captured(self, micro_batch: int) -> tuple[Problem, ModelFigures]:
        torch.compiler.reset()  # it would count as one more size of the same code
        trial = Trial(self._short.make(micro_batch), self._capturing, FakeTensorMode())
        trial.capture()
        plans = trial.plans()
        if len(plans) > 1:
            raise OptionError(
                f"{self.model.name} breaks into {len(plans)} graphs, which are planned one by one; write a factory, "
                "and name it MODULE:FUNCTION."
            )
        return plans[0].captured, trial.figures

    def _stated(self, micro_batch: int, problem: Problem, short: ModelFigures) -> Problem:
        """Return a captured problem with all layers, and the budgets that are left for it."""
        whole, options = self.figures(micro_batch), self.target.options
        captured, read = problem, _parameters_of(problem)
        for stack, missing in _missing(whole, short).items():
            if missing % self._unit:
                raise NotRepeatedError(f"{missing} layers of {stack} are no units of {self._unit}.")
            problem = repeat_layers(problem, stack, self._unit, missing // self._unit)
        if _parameters_of(problem) - read != whole.offloaded - short.offloaded:
            raise NotRepeatedError("layers that were left out are not like those that were captured.")
        beside_bytes = _external_bytes(captured, short, problem, whole, is_gpu=self.target.is_gpu)
        stored_bytes = sum(s.nbytes for s in problem.storages if s.kind is Kind.STORED)
        taken_bytes = whole.offloaded_bytes + whole.offloaded_state_bytes + stored_bytes
        return replace(problem, external_bytes=beside_bytes).within(
            device_bytes=options.device_budget,
            host_bytes=max(0, options.host_budget - taken_bytes),
            host_taken_bytes=taken_bytes,
            disk_bytes=options.spill_budget,
        )


def _missing(whole: ModelFigures, short: ModelFigures) -> dict[str, int]:
    """Return how many layers the short model lacks, by the lists they are in."""
    depths = []
    for figures in (whole, short):
        found: dict[str, int] = {}
        for name in figures.parameters:
            if (layer := layer_of(name)) is not None:
                found[layer[0]] = max(found.get(layer[0], 0), layer[1] + 1)
        depths.append(found)
    return {stack: missing for stack, depth in depths[0].items() if (missing := depth - depths[1].get(stack, 0)) > 0}


def _external_bytes(
    captured: Problem, short: ModelFigures, problem: Problem, whole: ModelFigures, *, is_gpu: bool
) -> int:
    """Return what is to be kept free on the device beside the whole model, as it was beside the captured one.

    It is what is there anyway, and a share of what the plan has to do with, for small results.
    """

    def beside_bytes(stated: Problem, figures: ModelFigures) -> int:
        return external_bytes(figures.held_bytes, input_bytes(stated.storages)) if is_gpu else 0

    def most_bytes(stated: Problem, beside: int) -> int:
        return int(live_bytes(replace(stated, external_bytes=beside)).max(initial=1))

    before, now = beside_bytes(captured, short), beside_bytes(problem, whole)
    share = (captured.external_bytes - before) / most_bytes(captured, before)
    return now + int(share * most_bytes(problem, now))


def _parameters_of(problem: Problem) -> set[str]:
    return {storage.parameter for storage in problem.storages if storage.parameter}


class _Captures:
    """The problems of one model at several micro-batches, of which two are captured if those between are alike.

    That of the largest is taken from `largest`, if there is one that returns it.
    """

    def __init__(
        self, depth: _Depth, tried: Sequence[int], largest: Callable[[], Problem | None] | None = None
    ) -> None:
        self._depth, self._largest = depth, largest
        # At 1 torch leaves out ops that others have, so it is not one of the two if there are others.
        self._ends = tuple(tried) if len(tried) < 3 else (tried[0] if tried[0] > 1 else tried[1], tried[-1])
        self._problems: dict[int, Problem] = {}

    def __call__(self, micro_batch: int) -> Problem:
        """Return the problem at a micro-batch."""
        if micro_batch in self._problems:
            return self._problems[micro_batch]
        if micro_batch in self._ends:
            elsewhere = self._largest() if self._largest is not None and micro_batch == self._ends[-1] else None
            found = elsewhere or self._depth.problem(micro_batch)
        else:
            try:
                found = between(self(self._ends[0]), self(self._ends[1]), (self._ends[0], self._ends[1]), micro_batch)
            except NotEvenError:
                found = self._depth.problem(micro_batch)
        self._problems[micro_batch] = found
        return found

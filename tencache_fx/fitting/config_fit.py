"""`tencache fit hf:CONFIG`: a transformers model, known by its configuration, with the fastest setting. No torch here.

Of the model's layers only as many are captured as stand for all, and what they do is repeated (`repetition.py`); of its
micro-batches two are (`few_layers.py`), and the fastest is searched for (`micro_batches.py`). What was captured before
is read (`captures.py`).
"""

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from tencache_fx.errors import BudgetError
from tencache_fx.fitting.captures import Capture, Sample, SeveralGraphsError, figures_between, key_of, whole_problem
from tencache_fx.fitting.estimate import RegionPlan, estimate_of, least_device_bytes
from tencache_fx.fitting.micro_batches import NotEvenError, Planner, between, divisors, find_setting
from tencache_fx.fitting.model_figures import ModelFigures
from tencache_fx.fitting.repetition import ENDS, NotRepeatedError
from tencache_fx.fitting.target import Target
from tencache_fx.fitting.workload import Request, Workload
from tencache_fx.hardware.cache import cached, kept
from tencache_fx.planning.external import least_spill_bytes
from tencache_fx.planning.host_work import HostWork
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.search import plan_region
from tencache_fx.reporting.fit_report import Fit, Setting


class Helper(Planner, Protocol):
    """Another process that does a part of the work."""

    def begin_capture(self, request: Request) -> None:
        """Begin what `capture_largest` does."""

    def captured(self) -> Capture | None:
        """Wait for what comes of it; None if nothing does."""


def fit_config(
    load: Workload,
    device: str | None,
    options: Mapping[str, object],
    *,
    profile: str | None = None,
    other: Helper | None = None,
) -> Fit:
    """Return how a model of transformers would train, with the fastest setting of micro-batch and accumulation.

    Takes seconds, as few layers stand for all of a kind: `Fit.traced` says how many. `other` does a part of the work.
    Of a model whose graph breaks each region is captured and planned by itself, at one micro-batch.
    Raises `OptionError` for what cannot be used, among it a model that transformers is missing for.
    """
    load.check()
    target = Target.find(device, profile, options)
    captures = _Captures(load, target)
    if other is not None and load.is_searched and not captures.is_kept():
        other.begin_capture(Request(load=load, device=device, options=dict(options), profile=profile))
        captures.other = other
    sequence = captures.sequence
    samples, tried = load.samples_of(sequence), captures.tried
    try:
        return _with_fastest(captures, samples, other)
    except SeveralGraphsError:
        if samples != tried[-1]:
            raise
        return _graph_by_graph(captures, samples)


def _graph_by_graph(captures: "_Captures", samples: int) -> Fit:
    """Return how a model whose graph breaks would train, all samples at once."""
    from tencache_fx.fitting.few_layers import fit_graph_by_graph  # here: needs torch

    load, found = captures.load, fit_graph_by_graph(captures.load, captures.target, samples)
    refusal = next((region.refusal for region in found.regions if region.refusal), "")
    setting = Setting(
        micro_batch=samples,
        accumulation=1,
        floor_bytes=found.floor_bytes,
        planned=not refusal,
        step_ns=found.whole_step_ns,
        peak_bytes=found.peak_bytes,
        refusal=refusal,
    )
    return replace(
        found,
        settings=(setting,),
        micro_batch=samples,
        tokens=samples * captures.sequence,
        samples=samples,
        model=load.config,
        traced=f"all layers, in {len(found.regions)} graphs",
    )


def _with_fastest(captures: "_Captures", samples: int, other: Helper | None) -> Fit:
    load, target, tried, sequence = captures.load, captures.target, captures.tried, captures.sequence
    host = HostWork(costs=target.host, trained=captures.trained_count)
    found = find_setting(captures.problem, samples, tried, target.options.policy, host, other)
    region = RegionPlan(captured=found.captured, planned=found.planned, refusal=found.setting.refusal)
    fitted = estimate_of([region], captures.figures(found.setting.micro_batch), target)
    fitted = replace(
        fitted,
        settings=found.settings,
        micro_batch=found.setting.micro_batch,
        tokens=samples * sequence,
        samples=samples,
        model=load.config,
        traced=captures.traced,
    )
    if region.refusal and fitted.resting_host_bytes <= target.options.host_budget:
        captured = found.captured
        least = least_device_bytes(
            functools.partial(_has_plan, captured, target), [captured], target.options, fitted.offloaded_bytes
        )
        return replace(fitted, least_device_bytes=least)
    return fitted


def capture_largest(request: Request) -> Capture:
    """Return what is captured at the largest micro-batch that `fit_config` tries; raises as that does."""
    captures = _Captures(request.load, Target.find(request.device, request.profile, request.options))
    return captures.at(captures.tried[-1])[0]


def _has_plan(captured: Problem, target: Target, device_bytes: int) -> bool:
    try:
        stated = replace(captured, min_spill_bytes=least_spill_bytes(device_bytes))
        plan_region(stated.within(device_bytes=device_bytes), target.options.policy)
    except BudgetError:
        return False
    return True


class _Captures:
    """The problems of one model at several micro-batches, of which two are captured if those between are alike.

    That of the largest is what `other` captures, if it does.
    """

    def __init__(self, load: Workload, target: Target) -> None:
        self.load, self.target = load, target
        self.other: Helper | None = None
        self._layers_at_ends: list[int | None] = [*ENDS, None]
        self._found: dict[int, tuple[Capture, Problem]] = {}
        self._between: dict[int, Problem] = {}

    @functools.cached_property
    def sequence(self) -> int:
        """The tokens of a sample, 0 for images."""

        def sample() -> Sample:
            from tencache_fx.fitting.transformers_model import find_config  # here: needs torch

            return Sample(sequence=find_config(self.load).sequence)

        key = key_of("fitsample", self.load, self.target)
        return (sample() if key is None else cached(key, Sample, sample)).sequence

    @functools.cached_property
    def tried(self) -> Sequence[int]:
        """The micro-batches to try, the smallest first."""
        samples = self.load.samples_of(self.sequence)
        return [self.load.micro_batch] if self.load.micro_batch else divisors(samples)

    @functools.cached_property
    def _ends(self) -> tuple[int, ...]:
        """The micro-batches that are captured; at 1 torch leaves out ops that others have."""
        tried = self.tried
        return tuple(tried) if len(tried) < 3 else (tried[0] if tried[0] > 1 else tried[1], tried[-1])

    @property
    def traced(self) -> str:
        """Which layers were captured, in words."""
        return next(reversed(self._found.values()))[0].traced

    def is_kept(self) -> bool:
        """Whether nothing has to be captured, for all that is known before."""
        key = key_of("fitsample", self.load, self.target)
        if key is None or (sample := kept(key, Sample)) is None:
            return False
        self.sequence = sample.sequence
        return all(self._kept(micro_batch, ENDS[0]) is not None for micro_batch in self._ends)

    def problem(self, micro_batch: int) -> Problem:
        """Return the problem at a micro-batch."""
        if micro_batch in self._found or micro_batch in self._ends:
            return self.at(micro_batch)[1]
        if micro_batch not in self._between:
            self._between[micro_batch] = self._interpolated(micro_batch)
        return self._between[micro_batch]

    def _interpolated(self, micro_batch: int) -> Problem:
        """Return the problem between two that are captured, if these are alike.

        Else the next largest one is captured, then the next smallest one, and so on: of OPT torch keeps other values
        for the backward at the largest, and for BERT it leaves out an op at 2. Raises what `at` does.
        """
        lows, highs = [self._ends[0]], [self._ends[1]]
        while True:
            for low, high in itertools.product(lows, highs):
                with contextlib.suppress(NotEvenError):
                    found = between(self.at(low)[1], self.at(high)[1], (low, high), micro_batch)
                    self._ends = low, high
                    return found
            inner = [each for each in self.tried if lows[-1] < each < highs[-1]]
            if inner in ([], [micro_batch]):
                return self.at(micro_batch)[1]
            if len(highs) == len(lows):
                highs.append(inner[-1])
            else:
                lows.append(inner[0])

    @property
    def trained_count(self) -> int:
        """How many parameters are trained, at any micro-batch."""
        return self.at(self._ends[0])[0].whole.trained_count

    def figures(self, micro_batch: int) -> ModelFigures:
        """Return what the whole model takes at a micro-batch."""
        if micro_batch in self._found:
            return self._found[micro_batch][0].whole
        low, high = self._ends
        return figures_between(self.at(low)[0].whole, self.at(high)[0].whole, (low, high), micro_batch)

    def at(self, micro_batch: int) -> tuple[Capture, Problem]:
        """Return what is captured at a micro-batch, with the problem of the whole model.

        Raises `UsageError` if it cannot be captured, or is several.
        """
        if micro_batch not in self._found:
            self._found[micro_batch] = self._from_other(micro_batch) or self._captured(micro_batch)
        return self._found[micro_batch]

    def _from_other(self, micro_batch: int) -> tuple[Capture, Problem] | None:
        if self.other is None or micro_batch != self._ends[-1] or (capture := self.other.captured()) is None:
            return None
        return capture, whole_problem(capture, self.target)

    def _captured(self, micro_batch: int) -> tuple[Capture, Problem]:
        while True:
            capture = self._capture(micro_batch, self._layers_at_ends[0])
            try:
                return capture, whole_problem(capture, self.target)
            except NotRepeatedError:
                if capture.is_whole:
                    raise
                self._layers_at_ends.pop(0)

    def _capture(self, micro_batch: int, ends: int | None) -> Capture:
        """Return the model captured with so many layers at each end of those that repeat, with all for None."""

        def capture() -> Capture:
            from tencache_fx.fitting.few_layers import capture_layers  # here: needs torch

            return capture_layers(self.load, self.target, micro_batch, ends)

        key = key_of("fitcapture", self.load, self.target, micro_batch, ends)
        return capture() if key is None else cached(key, Capture, capture)

    def _kept(self, micro_batch: int, ends: int) -> Capture | None:
        key = key_of("fitcapture", self.load, self.target, micro_batch, ends)
        return None if key is None else kept(key, Capture)

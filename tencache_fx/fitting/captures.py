"""What was captured of a transformers model, a few layers at one micro-batch, and the problem of all. No torch here.

What is captured for a device that is known by its profile is kept on disk (`hardware/cache.py`): it follows from the
configuration, the profile, and the versions of what captures. Budgets are no part of it, nor is the number of samples.
A second process then plans at once, and needs no torch.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
from dataclasses import dataclass, replace
from pathlib import Path

from tencache_fx.errors import OptionError
from tencache_fx.fitting.model_figures import ModelFigures
from tencache_fx.fitting.repetition import NotRepeatedError, layer_of, repeat_layers
from tencache_fx.fitting.target import Target
from tencache_fx.fitting.workload import Workload
from tencache_fx.hardware.cache import digest_sources
from tencache_fx.planning.external import external_bytes, input_bytes, least_spill_bytes
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.problem import Kind, Problem, host_shares


class SeveralGraphsError(OptionError):
    """A model breaks into several graphs, which are planned one by one."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a sample of a model is: so many tokens, or an image, for which that is 0."""

    sequence: int


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A model at one micro-batch: the problem of a `few` of its layers, and what these and all of them take.

    A unit of `unit` layers is what repeats. `traced` says which layers are captured, in words.
    """

    problem: Problem
    few: ModelFigures
    whole: ModelFigures
    unit: int
    traced: str

    @property
    def is_whole(self) -> bool:
        """Whether all layers are captured."""
        return len(self.few.parameters) == len(self.whole.parameters)


def whole_problem(capture: Capture, target: Target) -> Problem:
    """Return a captured problem with all layers, and the budgets that are left for it.

    Raises `NotRepeatedError` if the layers that were captured do not stand for all.
    """
    few, whole, options = capture.few, capture.whole, target.options
    spilled_from = least_spill_bytes(options.device_budget)
    captured = replace(capture.problem, links=target.rates.links, min_spill_bytes=spilled_from)
    problem = captured
    for stack, missing in _missing(whole, few).items():
        if missing % capture.unit:
            raise NotRepeatedError(f"{missing} layers of {stack} are no units of {capture.unit}.")
        problem = repeat_layers(problem, stack, capture.unit, missing // capture.unit)
    if _parameters_of(problem) - _parameters_of(captured) != whole.offloaded - few.offloaded:
        raise NotRepeatedError("layers that were left out are not like those that were captured.")
    beside_bytes = _external_bytes(captured, few, problem, whole, is_gpu=target.is_gpu)
    stored_bytes = sum(s.nbytes for s in problem.storages if s.kind is Kind.STORED)
    taken_bytes = whole.offloaded_bytes + whole.offloaded_state_bytes + stored_bytes
    return replace(problem, external_bytes=beside_bytes).within(
        device_bytes=options.device_budget,
        **host_shares(options.host_budget, taken_bytes),
        disk_bytes=options.spill_budget,
    )


def key_of(what: str, load: Workload, target: Target, *facts: object) -> dict[str, str] | None:
    """Return the key that what follows from these is kept under; None where measurements of this machine count, too."""
    if not target.profile:
        return None
    options = replace(
        target.options,
        device_budget=None if target.options.device_budget is None else 0,
        host_budget=0,
        spill_budget=0,
        spill_dir=(),
        dump_dir=None,
        policy="none",
    )
    settings = json.dumps(dict(load.settings), sort_keys=True, default=str)
    rates = (target.rates.roofline, target.workspace_bytes, target.compute_capability)
    stated = (load.config, settings, load.dtype, load.sequence, rates, options, facts)
    package = Path(__file__).parents[1]
    return {
        "what": what,
        "of": hashlib.sha256(repr(stated).encode()).hexdigest(),
        "source": digest_sources(package, package / "passes"),
        **{name: _version(name) for name in ("torch", "transformers")},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _missing(whole: ModelFigures, few: ModelFigures) -> dict[str, int]:
    """Return how many layers the few lack, by the lists they are in."""
    depths = []
    for figures in (whole, few):
        found: dict[str, int] = {}
        for name in figures.by_name:
            if (layer := layer_of(name)) is not None:
                found[layer[0]] = max(found.get(layer[0], 0), layer[1] + 1)
        depths.append(found)
    return {stack: missing for stack, depth in depths[0].items() if (missing := depth - depths[1].get(stack, 0)) > 0}


def _external_bytes(
    captured: Problem, few: ModelFigures, problem: Problem, whole: ModelFigures, *, is_gpu: bool
) -> int:
    """Return what is to be kept free on the device beside the whole model, as it was beside the captured one.

    It is what is there anyway, and a share of what the plan has to do with, for small results.
    """

    def beside_bytes(stated: Problem, figures: ModelFigures) -> int:
        return external_bytes(figures.held_bytes, input_bytes(stated.storages)) if is_gpu else 0

    def most_bytes(stated: Problem, beside: int) -> int:
        return int(live_bytes(replace(stated, external_bytes=beside)).max(initial=1))

    before, now = beside_bytes(captured, few), beside_bytes(problem, whole)
    share = (captured.external_bytes - before) / most_bytes(captured, before)
    return now + int(share * most_bytes(problem, now))


def _parameters_of(problem: Problem) -> set[str]:
    return {storage.parameter for storage in problem.storages if storage.parameter}


def figures_between(low: ModelFigures, high: ModelFigures, micro_batches: tuple[int, int], wanted: int) -> ModelFigures:
    """Return what a model takes at another micro-batch than the two that `low` and `high` are for."""
    first, second = micro_batches
    if first == second:
        return low
    beside_bytes = low.beside_bytes + (high.beside_bytes - low.beside_bytes) * (wanted - first) // (second - first)
    return dataclasses.replace(low, beside_bytes=beside_bytes)

"""One model as `tencache fit` sees it: captured on fake tensors, each region planned as the backend would."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tencache_fx import compat
from tencache_fx.errors import OptionError, TencacheError, UsageError
from tencache_fx.fitting.dry_run import DryRegion, DryRun, WouldBeOffloaded
from tencache_fx.fitting.estimate import RegionPlan, all_on_device_bytes, estimate_of, least_device_bytes
from tencache_fx.fitting.failed_capture import failed_capture
from tencache_fx.fitting.fake_model import FactoryResult, fake_model, figures_of
from tencache_fx.fitting.gpu_attention import attention_of_gpu
from tencache_fx.fitting.gpu_padding import padding_of_gpu
from tencache_fx.fitting.host_values import HostValues
from tencache_fx.fitting.model_figures import ParameterFigures
from tencache_fx.fitting.several_regions import plan_several
from tencache_fx.fitting.target import Target
from tencache_fx.fitting.user_code import no_logged_tracebacks
from tencache_fx.options import Options
from tencache_fx.passes.nested_regions import inline_nested_regions
from tencache_fx.planning.problem import Problem
from tencache_fx.region.environment import Environment
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.source import RegionSource
from tencache_fx.reporting.dump import write_region
from tencache_fx.reporting.fit_report import Fit
from tencache_fx.runtime.engine_registry import Usage
from tencache_fx.tensors import main_device


@dataclass(kw_only=True)
class _Region:
    """A captured region, as it was planned by itself, and how often it has run."""

    dry: DryRegion
    planned: DryRun
    calls: int = 0


class Trial:
    """One model, captured on fakes: its parameters, and a dry run of each region in the order in which they run."""

    def __init__(self, made: FactoryResult, target: Target, mode: FakeTensorMode) -> None:
        self._made, self._target, self._mode = fake_model(made, target.device, mode), target, mode
        self._settings = compat.inductor_settings(None, dict(target.options.inductor))
        self.figures = figures_of(self._made, target.workspace_bytes)
        named = self._made.model.named_parameters()
        self._names = {id(p): name for name, p in named if name in self.figures.offloaded}
        self._regions: list[_Region] = []

    def capture(self) -> None:
        """Have torch hand over the regions; raises `UsageError` if it cannot, or finds none."""
        model, loss_fn = self._made.model, self._made.loss_fn

        def whole(*inputs: Any, **named: Any) -> Any:
            return loss_fn(model(*inputs, **named)) if loss_fn else model(*inputs, **named)

        target = whole if loss_fn else model
        try:
            compiled: Any = torch.compile(target, backend=self._plan, dynamic=False)
            with (
                self._mode,
                torch.enable_grad(),
                compat.any_number_of_compilations(),
                compat.without_collecting(),
                self._as_on_target(),
                no_logged_tracebacks(),
            ):
                returned = compiled(*self._made.inputs, **self._made.named_inputs)
        except (TencacheError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the model's own code may raise anything
            with no_logged_tracebacks():
                raise failed_capture(error, self._made, self._mode) from error
        if loss_fn:
            _check_loss(returned, trains=self.figures.trains)
        if not self._regions:
            raise UsageError(
                f"torch.compile found nothing to compile for {self._target.name}; see TORCH_LOGS=graph_breaks."
            )

    def _plan(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Plan one region, and go on: the backend that `torch.compile` is given."""
        target, figures = self._target, self.figures
        if main_device(inputs) != target.device:
            return gm.forward
        names = {index: self._names[id(value)] for index, value in enumerate(inputs) if id(value) in self._names}
        offloaded = {index: _would_be_offloaded(figures.by_name[name]) for index, name in names.items()}
        elsewhere = (figures.by_name[name] for name in figures.offloaded - set(names.values()))
        state_bytes = figures.offloaded_state_bytes
        environment = Environment(
            roofline=target.rates.roofline,
            links=target.rates.links,
            # As `memory.held_bytes`: on a CPU the budget is for what a region itself holds.
            held_bytes=figures.held_bytes if target.is_gpu else 0,
            usage=Usage(
                host_acquired_bytes=figures.offloaded_bytes
                + state_bytes
                + sum(each.nbytes for each in elsewhere if each.trained),
                state_acquired_bytes=state_bytes,
            ),
            measures=False,
        )
        inline_nested_regions(gm)
        source = RegionSource(
            index=REGIONS.next_index(),
            graph=gm,
            options=target.options,
            device=target.device,
            settings=self._settings,
        )
        dry = DryRegion(source, offloaded, environment)
        region = _Region(dry=dry, planned=dry.plan(inputs))
        self._regions.append(region)
        if (record := region.planned.record) is not None and target.options.dump_dir is not None:
            write_region(target.options.dump_dir, record)

        def run(*args: Any) -> Any:
            region.calls += 1
            return region.planned.run(*args)

        return run

    def plans(self) -> list[RegionPlan]:
        """Return the problem and the plan of each region; raises `UsageError` where sizes are known only at a run."""
        return self._settled(self._target.options)

    def _by_itself(self, region: _Region) -> RegionPlan:
        record = region.planned.record
        return RegionPlan(
            captured=_captured(region.planned),
            planned=None if record is None else (record.problem, record.plan),
            refusal=region.planned.refusal,
            calls=max(1, region.calls),
        )

    def _settled(self, options: Options) -> list[RegionPlan]:
        """Return the regions, planned for these options beside each other where there are several on a GPU."""
        regions = [self._by_itself(region) for region in self._regions]
        several = len(regions) > 1 or any(region.calls > 1 for region in regions)
        return plan_several(regions, options) if several and self._target.is_gpu else regions

    def result(self) -> Fit:
        """Return the estimate; where there is no plan, with the least device budget that has one."""
        plans = self.plans()
        guessed = self._mode.guessed if isinstance(self._mode, HostValues) else 0
        found = replace(
            estimate_of(plans, self.figures, self._target),
            all_on_device_bytes=self._all_on_device_bytes(),
            guessed_conditions=guessed,
        )
        refused = any(plan.refusal for plan in plans)
        if not refused or found.resting_host_bytes > self._target.options.host_budget:
            return found
        least = least_device_bytes(
            self._has_plan, [plan.captured for plan in plans], self._target.options, found.offloaded_bytes
        )
        return replace(found, least_device_bytes=least)

    def _all_on_device_bytes(self) -> int:
        """Return what would be on the device if nothing were offloaded: all that calls leave there, too."""
        settled = self._settled(replace(self._target.options, device_budget=None))
        return all_on_device_bytes([each.captured for each in settled], self.figures)

    def _has_plan(self, device_bytes: int) -> bool:
        options = replace(self._target.options, device_budget=device_bytes)
        if len(self._regions) > 1 and self._target.is_gpu:
            return not any(region.refusal for region in self._settled(options))
        with self._as_on_target():
            return all(region.dry.plan_for(options).record is not None for region in self._regions)

    @contextlib.contextmanager
    def _as_on_target(self) -> Iterator[None]:
        """Have torch trace what it would on the target, where that is a GPU that is known by its profile only."""
        if not self._target.is_gpu or self._target.device.type != "cpu":
            yield
            return
        with attention_of_gpu(self._target.compute_capability), padding_of_gpu(self._target.rates.roofline):
            yield


def _check_loss(loss: object, *, trains: bool) -> None:
    """Raise `OptionError` for what a loss function may not return: a training step begins its backward there."""
    if not isinstance(loss, Tensor):
        raise OptionError(
            f"the loss function returned an object of type {type(loss).__name__}; return a tensor of one element."
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise OptionError(
            f"the loss function returned a tensor of size {tuple(loss.shape)} and {loss.dtype}, and backward begins "
            "with one real number; return a mean or a sum."
        )
    if trains and not loss.requires_grad:
        raise OptionError(
            "the loss function returned a tensor that depends on no parameter that is trained; return it without "
            "detach() or no_grad(), or freeze the model with requires_grad_(False)."
        )


def _captured(planned: DryRun) -> Problem:
    """Return a region's problem; raises `UsageError` where its sizes are known only when it runs."""
    if (problem := planned.captured) is None:
        raise UsageError("a region has sizes that are known only when it runs; give a device budget, to see why.")
    return problem


def _would_be_offloaded(parameter: ParameterFigures) -> WouldBeOffloaded:
    return WouldBeOffloaded(
        name=parameter.name,
        nbytes=parameter.nbytes,
        state_bytes=parameter.state_bytes,
        host_state_bytes=parameter.host_state_bytes,
    )

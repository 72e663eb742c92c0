"""`tencache fit`: does a model fit, in which tiers, how fast? From fake tensors, without memory for it anywhere.

The model is captured and planned by the backend itself, region by region, as if every large parameter were offloaded
by `tencache_fx.offload` and trained by `tencache_fx.optim.AdamW`. Not included: memory that the generated code holds
beyond the graphs, memory that libraries keep on the device, and the time of ops that no earlier run has measured.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from tencache_fx import compat
from tencache_fx.errors import OptionError, TencacheError, UsageError
from tencache_fx.fitting.dry_run import DryRegion, DryRun, WouldBeOffloaded
from tencache_fx.fitting.fake_model import FactoryResult, call_factory, fake_model
from tencache_fx.hardware.device_memory import is_input
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.hardware.rates import KnownRates, known_rates
from tencache_fx.model_state.arguments import find_device, need_model
from tencache_fx.model_state.modules import parameters_read_by, watch
from tencache_fx.model_state.offloading import is_adapted, should_offload
from tencache_fx.options import Options
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import keep_resident, step_ns
from tencache_fx.planning.plan import Plan, TransferKind
from tencache_fx.planning.problem import STATE_BYTES, Kind, Problem, Step
from tencache_fx.planning.search import policy_floor_bytes
from tencache_fx.region.environment import Environment
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.source import RegionSource
from tencache_fx.reporting.dump import write_region
from tencache_fx.reporting.fit_report import Fit, RegionFit
from tencache_fx.runtime.engine_registry import Usage
from tencache_fx.tensors import main_device
from tencache_fx.units import PAGE_BYTES, round_up

_PROBES = 5  # device budgets that are tried between one that is too small and one that suffices


def fit(
    model: nn.Module,
    *inputs: Any,
    loss_fn: Callable[..., Any] | None = None,
    named_inputs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    **options: object,
) -> Fit:
    """Return how `model` would train on `device` within the budgets: whether it fits, in which tiers, how fast.

    The model and its inputs may be on any device, "meta" among them: sizes and dtypes count, and nothing is read,
    moved or allocated. It is called as `model(*inputs, **named_inputs)`, and compiled together with `loss_fn`, if there
    is one, which gets its output and returns one real number. `device` is the GPU by default if there is one, and has
    to be there: tracing asks its driver. `options` are those of `torch.compile(..., options=...)`; budgets may be more
    than this machine has, and what is written to `dump_dir` is for `tencache dump` and `tencache plan`.

    Rates are those measured earlier (by a run, or `tencache doctor`), else fixed, low ones: `Fit.measured`. Takes
    seconds to minutes, about as long as compiling without code generation, and several times that where the budget does
    not suffice. Raises `OptionError` for what cannot be used, and `UsageError` for a model that cannot be captured.
    """
    need_model(model)
    given = (*inputs, *(named_inputs or {}).values(), *model.parameters())
    modes = (leaf.fake_mode for leaf in tree_leaves(given) if isinstance(leaf, FakeTensor))
    made = FactoryResult(model=model, inputs=inputs, named_inputs=named_inputs or {}, loss_fn=loss_fn)
    return _fit(made, _device(device), options, next(modes, None) or FakeTensorMode())


def fit_factory(name: str, device: str | None, options: Mapping[str, object]) -> Fit:
    """Return how the model that the factory `name` makes would train; see `fit` and `call_factory`."""
    target = _device(device)
    return _fit(call_factory(name), target, options, FakeTensorMode())


def _device(given: torch.device | str | None) -> torch.device:
    return resolve_device(find_device(given))


def _fit(made: FactoryResult, device: torch.device, given: Mapping[str, object], mode: FakeTensorMode) -> Fit:
    cuda = device.type == "cuda"
    total_bytes = torch.cuda.get_device_properties(device).total_memory if cuda else None
    options = Options.suppose(given, device_bytes=total_bytes)
    faked = fake_model(made, device, mode)
    has_disk = options.spill_budget > 0
    rates = known_rates(device, options.spill_dir, calibrate=options.calibrate, has_disk=has_disk)
    trial = _Trial(faked, device, options, rates)
    trial.capture(mode)
    return trial.result()


class _Trial:
    """One model, captured on fakes: its parameters, and a dry run of each region in the order in which they run."""

    def __init__(self, made: FactoryResult, device: torch.device, options: Options, rates: KnownRates) -> None:
        self._made, self._device, self._options, self._rates = made, device, options, rates
        self._settings = compat.inductor_settings(None, dict(options.inductor))
        self._parameters = {id(p): (name, p) for name, p in made.model.named_parameters()}
        adapts = is_adapted(made.model)
        self._offloaded = {key for key, (name, p) in self._parameters.items() if should_offload(p, name, adapts=adapts)}
        for module in made.model.modules():
            if any(id(p) in self._offloaded for p in parameters_read_by(module)):
                watch(module)  # its hooks decide the order of a region's inputs, by whose names the cache knows it
        beside = (*made.model.buffers(), *tree_leaves((made.inputs, made.named_inputs)))
        tensors = {id(value): value for value in beside if isinstance(value, Tensor) and value.device == device}
        on_device = [p for key, (_, p) in self._parameters.items() if key not in self._offloaded]
        self._state_here_bytes = sum(p.numel() * STATE_BYTES for p in on_device if p.requires_grad)
        self._held_bytes = sum(_nbytes(value) for value in (*on_device, *tensors.values())) + self._state_here_bytes
        self._regions: list[tuple[DryRegion, DryRun]] = []

    def capture(self, mode: FakeTensorMode) -> None:
        """Have torch hand over the regions; raises `UsageError` if it cannot, or finds none."""
        model, loss_fn = self._made.model, self._made.loss_fn

        def whole(*inputs: Any, **named: Any) -> Any:
            return loss_fn(model(*inputs, **named)) if loss_fn else model(*inputs, **named)

        target = whole if loss_fn else model
        compiled: Any = torch.compile(target, backend=self._plan, dynamic=False)
        try:
            with mode, torch.enable_grad(), compat.any_number_of_compilations():
                returned = compiled(*self._made.inputs, **self._made.named_inputs)
        except TencacheError:
            raise
        except compat.COMPILER_ERRORS as error:
            cause = getattr(error, "inner_exception", error)
            if isinstance(cause, TencacheError):
                raise cause from error
            why = f"{type(cause).__name__}: {_first_sentence(str(cause))}"
            raise UsageError(
                f"the model cannot be captured, {why}; see that it runs under torch.compile, with such inputs."
            ) from error
        if not self._regions:
            raise UsageError(f"torch.compile found nothing to compile for {self._device}; see TORCH_LOGS=graph_breaks.")
        if loss_fn:
            _check_loss(returned, trains=any(p.requires_grad for _, p in self._parameters.values()))

    def _plan(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Plan one region, and go on: the backend that `torch.compile` is given."""
        if main_device(inputs) != self._device:
            return gm.forward
        keys = {index: id(value) for index, value in enumerate(inputs) if id(value) in self._offloaded}
        offloaded = {index: _would_be_offloaded(*self._parameters[key]) for index, key in keys.items()}
        trained = [p for key, (_, p) in self._parameters.items() if key in self._offloaded and p.requires_grad]
        elsewhere_bytes = sum(_nbytes(p) for p in trained if id(p) not in keys.values())
        environment = Environment(
            roofline=self._rates.roofline,
            links=self._rates.links,
            # As `memory.held_bytes`: on a CPU the budget is for what a region itself holds.
            held_bytes=self._held_bytes if self._device.type == "cuda" else 0,
            usage=Usage(
                host_acquired_bytes=self._offloaded_bytes + self._state_bytes + elsewhere_bytes,
                state_acquired_bytes=self._state_bytes,
            ),
            measures=False,
        )
        source = RegionSource(
            index=REGIONS.next_index(), graph=gm, options=self._options, device=self._device, settings=self._settings
        )
        region = DryRegion(source, offloaded, environment)
        planned = region.plan(inputs)
        self._regions.append((region, planned))
        if (record := planned.record) is not None:
            self._held_bytes += _left_bytes(record.problem, record.plan)
            if self._options.dump_dir is not None:
                write_region(self._options.dump_dir, record)
        return planned.run

    @property
    def _offloaded_bytes(self) -> int:
        return sum(_nbytes(self._parameters[key][1]) for key in self._offloaded)

    @property
    def _state_bytes(self) -> int:
        trained = (p for key, (_, p) in self._parameters.items() if key in self._offloaded and p.requires_grad)
        return sum(p.numel() * STATE_BYTES for p in trained)

    def result(self) -> Fit:
        """Return the estimate; where there is no plan, with the least device budget that has one."""
        options = self._options
        runs = [planned for _, planned in self._regions]
        captured = [_captured(planned) for planned in runs]
        regions = tuple(
            _region_fit(index, planned, problem, options)
            for index, (planned, problem) in enumerate(zip(runs, captured, strict=True))
        )
        sizes = [(p.numel(), _nbytes(p)) for _, p in self._parameters.values()]
        plans = [planned.record.plan for planned in runs if planned.record]
        resident = {name for plan in plans for name in plan.resident}
        here = {name for plan in plans for name in plan.updated_here}
        here_bytes = sum(p.numel() * STATE_BYTES for name, p in self._parameters.values() if name in here)
        staying = [p for key, (name, p) in self._parameters.items() if key not in self._offloaded or name in resident]
        found = Fit(
            device=str(self._device),
            device_budget_bytes=options.device_budget,
            host_budget_bytes=options.host_budget,
            spill_budget_bytes=options.spill_budget,
            parameters=sum(count for count, _ in sizes),
            parameter_bytes=sum(nbytes for _, nbytes in sizes),
            device_parameter_bytes=sum(map(_nbytes, staying)),
            offloaded_bytes=self._offloaded_bytes,
            gradient_bytes=sum(
                s.nbytes
                for each in captured
                for s in each.storages
                if s.kind is Kind.STORED and s.parameter not in here
            ),
            state_bytes=self._state_bytes - here_bytes,
            device_state_bytes=here_bytes + self._state_here_bytes,
            all_on_device_bytes=self._all_on_device_bytes(captured),
            least_device_bytes=None,
            measured=self._rates.measured,
            regions=regions,
        )
        refused = any(region.refusal for region in regions)
        if not refused or found.resting_host_bytes > options.host_budget:
            return found
        return replace(found, least_device_bytes=self._least_device_bytes(found, captured))

    def _all_on_device_bytes(self, captured: Sequence[Problem]) -> int:
        """Return the bytes on the device if nothing were offloaded: at the peak, with all gradients."""
        state_bytes = sum(
            p.numel() * (8 if p.dtype is torch.float32 else STATE_BYTES)  # fp32 weights are their own masters
            for _, p in self._parameters.values()
            if p.requires_grad
        )
        most = []
        for problem in captured:
            offloaded = {s.parameter for s in problem.storages if s.parameter}
            kept = keep_resident(problem, offloaded)
            end = Step(len(kept.ops))
            storages = tuple(replace(s, death=end) if s.kind is Kind.STORED else s for s in kept.storages)
            others = [
                p for key, (name, p) in self._parameters.items() if key in self._offloaded and name not in offloaded
            ]
            others_bytes = sum(_nbytes(p) * (2 if p.requires_grad else 1) for p in others)
            most.append(int(live_bytes(replace(kept, storages=storages)).max(initial=0)) + others_bytes)
        return max(most) + state_bytes

    def _least_device_bytes(self, found: Fit, captured: Sequence[Problem]) -> int | None:
        """Return a device budget in which every region has a plan, as small as a few tries find; None if none has."""
        budget = self._options.device_budget
        assert budget is not None
        floor = round_up(max(region.floor_bytes for region in found.regions), PAGE_BYTES)
        if floor > budget and self._has_plan(floor):
            return floor
        low, high = max(floor, budget), round_up(max(int(live_bytes(each).max()) for each in captured), PAGE_BYTES)
        high = max(high + found.offloaded_bytes, low)  # with all parameters there
        if not self._has_plan(high):
            return None
        for _ in range(_PROBES):
            middle = round_up((low + high) // 2, PAGE_BYTES)
            if high - low < high // 50 or middle >= high:
                break
            low, high = (low, middle) if self._has_plan(middle) else (middle, high)
        return high

    def _has_plan(self, device_bytes: int) -> bool:
        options = replace(self._options, device_budget=device_bytes)
        return all(region.plan_for(options).record is not None for region, _ in self._regions)


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


def _first_sentence(text: str) -> str:
    """Return what an error says in its first line, or where Dynamo explains it."""
    explained = re.search(r"^ *Explanation: (.+)$", text, re.MULTILINE)
    return (explained[1] if explained else text.strip().partition("\n")[0]).rstrip(".")


def _captured(planned: DryRun) -> Problem:
    """Return a region's problem; raises `UsageError` where its sizes are known only when it runs."""
    if (problem := planned.captured) is None:
        raise UsageError("a region has sizes that are known only when it runs; give a device budget, to see why.")
    return problem


def _region_fit(index: int, planned: DryRun, captured: Problem, options: Options) -> RegionFit:
    bare = RegionFit(
        name=f"region {index}",
        steps=len(captured.ops),
        floor_bytes=policy_floor_bytes(captured, options.policy),
        refusal=planned.refusal,
    )
    if (record := planned.record) is None:
        return bare
    forecast = record.plan.forecast
    return replace(
        bare,
        steps=len(record.problem.ops),
        peak_bytes=forecast.peak_bytes,
        step_ns=step_ns(record.problem, forecast),
        ideal_ns=forecast.ideal_ns,
        buffer_bytes=forecast.host_bytes,
        disk_bytes=forecast.disk_bytes,
        out_bytes=forecast.d2h_bytes,
        in_bytes=forecast.h2d_bytes,
        disk_write_bytes=forecast.disk_write_bytes,
        disk_read_bytes=forecast.disk_read_bytes,
    )


def _left_bytes(problem: Problem, plan: Plan) -> int:
    """Return the bytes that a region holds on the device between forward and backward, without its inputs."""
    boundary = problem.boundary
    swaps = (spill for spill in plan.transfers if spill.kind is TransferKind.SWAP)
    away = {spill.name for spill in swaps if spill.freed_at <= boundary <= spill.prefetch_at}
    last = min(boundary + 1, len(problem.ops))
    left = [s for s in problem.storages if s.birth < boundary and s.death >= last and not is_input(s)]
    resident = [s for s in problem.storages if s.parameter in plan.resident and s.kind is Kind.PARAMETER]
    return sum(s.nbytes for s in (*left, *resident) if s.name not in away)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _would_be_offloaded(name: str, parameter: Tensor) -> WouldBeOffloaded:
    return WouldBeOffloaded(name=name, nbytes=_nbytes(parameter), state_bytes=STATE_BYTES * parameter.numel())

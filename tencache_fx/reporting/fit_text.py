"""How a model would fit, as text: the result of `tencache fit` on one screen. No torch here."""

from collections.abc import Iterator

from tencache_fx.reporting.fit_report import Fit, RegionFit, Setting
from tencache_fx.reporting.tables import early_updates, load_rows, show_table
from tencache_fx.units import at_least, format_bytes, format_ns


def show_fit(fit: Fit) -> str:
    """Return whether a model fits, in a sentence, then what is where in which tier, then a row per region."""
    headers: tuple[str, ...] = ("region", "steps", "floor", "peak", "step", "buffers", "out", "in")
    table = show_table([_region_cells(region) for region in fit.regions], headers=headers)
    if fit.settings:
        headers = ("micro-batch", "accumulation", "floor", "peak", "step", f"{_unit(fit)}/s", "")
        table = show_table([_setting_cells(fit, setting) for setting in fit.settings], headers=headers)
    return f"{_fit_sentence(fit)}\n\n{show_table(list(_fit_rows(fit)))}\n\n{table}"


def _fit_sentence(fit: Fit) -> str:
    """Return whether it fits, with the numbers that decide it, and if not, what to do."""
    budget = "no limit" if fit.device_budget_bytes is None else format_bytes(fit.device_budget_bytes)
    if fit.fits and not fit.needs_offloading:
        return (
            f"It fits, and needs no offloading: with gradients and AdamW's state it takes "
            f"{format_bytes(fit.all_on_device_bytes)} on the device (budget: {budget}), {_pace(fit)}; leave offload() "
            "out."
        )
    if fit.fits:
        return (
            f"It fits: at most {format_bytes(fit.peak_bytes)} of {budget} on the device, "
            f"{format_bytes(fit.host_bytes)} of {format_bytes(fit.host_budget_bytes)} in host memory, "
            f"{_pace(fit)}."
        )
    if fit.host_bytes > fit.host_budget_bytes:
        return (
            f"It does not fit: offloaded weights, gradients and AdamW's state take {format_bytes(fit.host_bytes)} of "
            f"host memory, buffers included; host_budget is {format_bytes(fit.host_budget_bytes)}. Set host_budget to "
            f"{at_least(fit.host_bytes)} or more, or train fewer parameters."
        )
    refusal = next(region.refusal for region in fit.regions if region.refusal).partition("\n")[0]
    if fit.least_device_bytes is None:
        return f"It does not fit, in no device_budget that was tried: {refusal}"
    needed = f"device_budget has to be {at_least(fit.least_device_bytes)} ({format_bytes(fit.least_device_bytes)})"
    if fit.floor_bytes > (fit.device_budget_bytes or 0):
        return f"It does not fit: {needed} or more, and is {budget}; raise it, or shrink the batch."
    return f"It does not fit: {refusal} Else {needed} or more."


def _pace(fit: Fit) -> str:
    """Return how fast it is, in a sentence."""
    if not fit.settings:
        return f"{format_ns(max(fit.step_ns, fit.host_ns))} a step"
    amount = fit.tokens or fit.samples
    return (
        f"{format_ns(fit.whole_step_ns)} a step of {amount:,} {_unit(fit)}, "
        f"{_per_second(fit, fit.whole_step_ns)} a second: {fit.accumulation} times a micro-batch of {fit.micro_batch}"
    )


def _unit(fit: Fit) -> str:
    return "tokens" if fit.tokens else "samples"


def _per_second(fit: Fit, step_ns: int) -> str:
    rate = (fit.tokens or fit.samples) * 1_000_000_000 / max(1, step_ns)
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _fit_rows(fit: Fit) -> Iterator[tuple[str, str]]:
    if fit.model:
        yield "model", f"{fit.model}, traced with {fit.traced}"
    yield "parameters", f"{fit.parameters:,}, {format_bytes(fit.parameter_bytes)}"
    yield "all on the device", f"{format_bytes(fit.all_on_device_bytes)}, with gradients and AdamW's state"
    yield "device floor", format_bytes(fit.floor_bytes)
    if not any(region.refusal for region in fit.regions):
        budget = "no limit" if fit.device_budget_bytes is None else format_bytes(fit.device_budget_bytes)
        share = fit.device_parameter_bytes / max(1, fit.parameter_bytes)
        over = fit.step_ns / max(1, sum(region.calls * region.ideal_ns for region in fit.regions))
        yield "device peak", f"{format_bytes(fit.peak_bytes)} of {budget}"
        state = f"; AdamW's state of some, {format_bytes(fit.device_state_bytes)}" if fit.device_state_bytes else ""
        yield "stay on the device", f"{share:.1%} of the parameters, {format_bytes(fit.device_parameter_bytes)}{state}"
        once = "forward and backward" if fit.settings else "graphs"
        yield once, f"{format_ns(fit.step_ns)}, {over:.3f} of the time without limits"
        out_bytes, in_bytes = (
            sum(r.calls * getattr(r, name) for r in fit.regions) for name in ("out_bytes", "in_bytes")
        )
        yield "link traffic", f"{format_bytes(out_bytes)} out, {format_bytes(in_bytes)} in"
        if early := early_updates(fit.whole_step_ns, fit.early_step_ns, fit.accumulation):
            yield "updates", f"after the last backward; {early}"
        yield from load_rows(fit.loads, fit.whole_step_ns)
    if fit.guessed_conditions:
        yield "conditions", f"{fit.guessed_conditions} depend on values of a run, and count as false"
    offloaded = (
        ("weights", fit.offloaded_bytes),
        ("gradients", fit.gradient_bytes),
        ("AdamW's fp32 state", fit.state_bytes),
    )
    yield "offloaded", ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in offloaded)
    yield "host", f"{format_bytes(fit.host_bytes)} of {format_bytes(fit.host_budget_bytes)}, with buffers for transfers"
    yield "disk", f"{format_bytes(fit.disk_bytes)} of {format_bytes(fit.spill_budget_bytes)}"
    if fit.rates_source:
        yield "rates", f"those of {fit.device}: {fit.rates_source}"
        return
    fixed = f"fixed, low ones; after `tencache doctor --device {fit.device}`, those of this machine"
    yield "rates", "those of this machine" if fit.measured else fixed


def _setting_cells(fit: Fit, setting: Setting) -> tuple[str, ...]:
    head = str(setting.micro_batch), str(setting.accumulation), format_bytes(setting.floor_bytes)
    if setting.refusal:
        return (*head, "no plan", "-", "-", "")
    chosen = "fastest" if setting.micro_batch == fit.micro_batch and len(fit.settings) > 1 else ""
    about = "" if setting.planned else "about "
    peak = format_bytes(setting.peak_bytes) if setting.planned else "-"
    pace = _per_second(fit, setting.step_ns)
    return (*head, peak, f"{about}{format_ns(setting.step_ns)}", pace, chosen)


def _region_cells(region: RegionFit) -> tuple[str, ...]:
    steps = f"{region.calls} x {region.steps}" if region.calls > 1 else str(region.steps)
    head = region.name, steps, format_bytes(region.floor_bytes)
    if region.refusal:
        return (*head, "no plan", *"----")
    sizes = map(format_bytes, (region.buffer_bytes, region.out_bytes, region.in_bytes))
    return (*head, format_bytes(region.peak_bytes), format_ns(region.step_ns), *sizes)

"""The only formatter: values in, text out. No torch here."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

from tencache_fx.planning.bounds import joint_lower_bound_ns
from tencache_fx.planning.loads import Load, bound_of, loads_of
from tencache_fx.planning.parameter_schedule import early_step_ns, exposed_update_ns, step_ns
from tencache_fx.planning.plan import Plan, PoolClass, Transfer
from tencache_fx.planning.problem import Kind, Problem, Step, Storage, Tier

if TYPE_CHECKING:
    from tencache_fx.planning.explain import Choice, Price, Reasons, TensorReason
    from tencache_fx.planning.pareto import Frontier, Outcome
    from tencache_fx.planning.ranks import Scaling
    from tencache_fx.records import Listing, NodeRow
    from tencache_fx.runtime.store import DirectoryUse
from tencache_fx.units import format_bytes, format_ns, format_rate

_RUNTIME_MARK = ">>"


def show_summary(problem: Problem, plan: Plan, captured: Problem, code_peak_bytes: int | None = None) -> str:
    """Return the costs and gains of the plan, one line per figure.

    `problem` is what the plan is for, `captured` the region before more was recomputed: "lower bound" is a time that no
    other transfers beat, "best possible" one that no choice of recomputed and transferred tensors beats.
    `code_peak_bytes` are held by the generated code, if it was looked at.
    """
    forecast, budgets = plan.forecast, problem.budgets
    device_budget = "no limit" if budgets.device_bytes is None else format_bytes(budgets.device_bytes)
    between = format_bytes(problem.boundary_bytes)
    rows = [
        ("policy", plan.policy),
        ("steps", f"{len(problem.ops)}, backward from {problem.boundary}"),
        ("device budget", f"{device_budget}, of it held outside the region {format_bytes(problem.external_bytes)}"),
        *((("held between graphs", f"{between}, by others"),) if problem.boundary_bytes else ()),
        ("device peak", f"{format_bytes(forecast.peak_bytes)} at {_step_name(problem, forecast.peak_step)}"),
        *(() if code_peak_bytes is None else (("held by the code", format_bytes(code_peak_bytes)),)),
        ("device floor", format_bytes(forecast.floor_bytes)),
    ]
    more = dict(amount_rows(problem, plan))
    after = {"spilled to nvme": ("recomputed", _recomputed(plan, captured))}
    after["lower bound"] = ("best possible", format_ns(joint_lower_bound_ns(captured)))
    for name, value in more.items():
        rows += [(name, value), *((after[name],) if name in after else ())]
    return show_table(rows)


def amount_rows(problem: Problem, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what a plan moves, and needs of host memory, disk and time: pairs of a name and a figure."""
    forecast, budgets = plan.forecast, problem.budgets
    over = forecast.makespan_ns / max(1, forecast.ideal_ns)
    yield "host", f"{format_bytes(forecast.host_bytes)} of {format_bytes(budgets.host_bytes)}"
    yield "disk", f"{format_bytes(forecast.disk_bytes)} of {format_bytes(budgets.disk_bytes)}"
    for tier in (Tier.HOST, Tier.NVME):
        yield f"spilled to {tier}", count_and_bytes([each for each in plan.transfers if each.tier is tier])
    if plan.resident:
        staying = [each for each in problem.storages if each.kind is Kind.PARAMETER and each.parameter in plan.resident]
        with_state = [each for each in staying if each.parameter in plan.updated_here]
        with_sums = [each for each in staying if each.parameter in plan.summed_here]
        sums = f"; with their gradients only {count_and_bytes(with_sums)}" if with_sums else ""
        yield "parameters here", f"{count_and_bytes(staying)}; with their state {count_and_bytes(with_state)}{sums}"
    yield "time", f"{format_ns(forecast.makespan_ns)}, {over:.3f} of the {format_ns(forecast.ideal_ns)} without limits"
    if exposed_ns := exposed_update_ns(problem, forecast):
        early = early_updates(step_ns(problem, forecast), early_step_ns(problem, forecast), problem.accumulation)
        late = f"after the last backward; {format_ns(exposed_ns)} of them do not overlap with the next forward"
        yield "updates", late + (early and f"; {early}")
    yield "lower bound", format_ns(forecast.lower_bound_ns)
    yield "stalls", f"{format_ns(forecast.stall_out_ns)} going out, {format_ns(forecast.stall_in_ns)} coming in"
    if problem.collectives:
        exposed = format_ns(forecast.stall_collective_ns)
        yield "collectives", f"{format_ns(forecast.collective_ns)} under way, {exposed} of it exposed"
    yield "link traffic", f"{format_bytes(forecast.d2h_bytes)} out, {format_bytes(forecast.h2d_bytes)} in"
    written, read = format_bytes(forecast.disk_write_bytes), format_bytes(forecast.disk_read_bytes)
    yield "disk traffic", f"{written} written, {read} read"
    yield from load_rows(loads_of(problem, plan), step_ns(problem, forecast))


def early_updates(late_ns: int, early_ns: int, accumulation: int) -> str:
    """Return what a step would gain from updates in the backward, if that is a fiftieth of it or more.

    With several backwards a step they would not be the same: each of them would update.
    """
    if accumulation > 1 or early_ns * 50 > late_ns * 49:
        return ""
    return (
        f"a step takes {format_ns(early_ns)} instead of {format_ns(late_ns)} with the optimizer's step_in_backward=True"
    )


def load_rows(loads: Sequence[Load], whole_ns: int) -> Iterator[tuple[str, str]]:
    """Yield what keeps a step of `whole_ns` from being shorter, and how long each resource is busy in it."""
    if (bound := bound_of(loads)) is None or not bound.busy_ns:
        return
    share = bound.busy_ns / max(1, whole_ns)
    yield "bound", f"{bound.name}, {format_ns(bound.busy_ns)}: {share:.1%} of the step's {format_ns(whole_ns)}"
    busy = [
        f"{load.name} {format_ns(load.busy_ns)}" + (f" ({format_bytes(load.nbytes)})" if load.nbytes else "")
        for load in loads
        if load.busy_ns
    ]
    yield "busy in a step", ", ".join(busy)


def show_reached(problem: Problem, plan: Plan, call_to_call_ns: int, host_ns: int | None = None) -> str:
    """Return, in sentences, how much of the bound is reached by a region that is all of a model.

    `host_ns` is what the host works on a call's graphs, where that is known.
    """
    bound = bound_of(loads_of(problem, plan))
    assert bound is not None
    measured_ns = problem.accumulation * call_to_call_ns
    reached = (
        f"A step takes {format_ns(measured_ns)} from call to call, all that the loop does included. Its bound is "
        f"{format_ns(bound.busy_ns)} ({bound.name}): {bound.busy_ns / max(1, measured_ns):.1%} of it is reached."
    )
    if host_ns is None:
        return reached
    host_ns *= problem.accumulation
    reached += f" The host spends {format_ns(host_ns)} of it issuing the graphs' kernels and copies."
    if host_ns > bound.busy_ns:
        reached += " That is more than the bound, and does not grow with the micro-batch."
    return reached


def show_tensors(problem: Problem, plan: Plan) -> str:
    """Return one row per storage, largest first: what it is, how long it lives, where it spends that time."""
    transfers = {transfer.name: transfer for transfer in plan.transfers}
    again = set(plan.recomputed)
    rows = []
    for storage in sorted(problem.storages, key=lambda s: (-s.nbytes, s.name)):
        transfer = transfers.get(storage.name)
        steps = () if transfer is None else transfer.steps
        indent = ("", "") if transfer is not None and transfer.out is None else ()  # a load has no offload
        kept = "recompute" if storage.name in again else "keep"
        decision = kept if transfer is None else f"spill to {transfer.tier}"
        life = f"[{storage.birth}, {storage.death})"
        times = (_step_name(problem, step) for step in steps)
        rows.append((storage.name, _size(storage), storage.kind, life, decision, *indent, *times))
    return show_table(
        rows, headers=("storage", "bytes", "kind", "lives", "decision", "offload", "gone", "fetch", "back")
    )


def show_change(problem: Problem, before: Plan, after: Plan) -> str:
    """Return how one plan differs from another: figures, then a row for each tensor that is treated otherwise."""
    old, new = before.forecast, after.forecast
    pairs = [
        ("device peak", format_bytes(old.peak_bytes), format_bytes(new.peak_bytes)),
        ("device floor", format_bytes(old.floor_bytes), format_bytes(new.floor_bytes)),
        ("time", format_ns(old.makespan_ns), format_ns(new.makespan_ns)),
        ("stalls", format_ns(old.stall_out_ns + old.stall_in_ns), format_ns(new.stall_out_ns + new.stall_in_ns)),
        ("link traffic", format_bytes(old.d2h_bytes + old.h2d_bytes), format_bytes(new.d2h_bytes + new.h2d_bytes)),
        ("disk", format_bytes(old.disk_bytes), format_bytes(new.disk_bytes)),
    ]
    first, second = _decisions(before), _decisions(after)
    tensors = sorted(problem.storages, key=lambda s: (-s.nbytes, s.name))
    rows = [
        (s.name, format_bytes(s.nbytes), first.get(s.name, "keep"), second.get(s.name, "keep"))
        for s in tensors
        if first.get(s.name) != second.get(s.name)
    ]
    times = {transfer.name: transfer.steps for transfer in before.transfers}
    moved = sum(times.get(each.name, each.steps) != each.steps for each in after.transfers)
    figures = show_table(pairs, headers=("figure", "recorded", "planned anew"))
    changes = (
        show_table(rows, headers=("storage", "bytes", "recorded", "planned anew")) if rows else "No other decision."
    )
    return f"{figures}\n\n{changes}\n{moved} of the others leave or come back at other steps."


def _decisions(plan: Plan) -> dict[str, str]:
    """Return what is done with each storage that is not just kept."""
    return dict.fromkeys(plan.recomputed, "recompute") | {s.name: f"spill to {s.tier}" for s in plan.transfers}


def show_pool(plan: Plan) -> str:
    """Return one row per size class of pinned buffers, and their sum."""
    uses = (("host swaps", plan.pool), ("disk staging", plan.staging))
    rows = [(use, format_bytes(c.nbytes), c.count, format_bytes(c.nbytes * c.count)) for use, cs in uses for c in cs]
    total = sum(c.count for _, cs in uses for c in cs), sum(_class_bytes(cs) for _, cs in uses)
    return show_table(
        [*rows, ("all", "", total[0], format_bytes(total[1]))], headers=("use", "buffer", "count", "bytes")
    )


def show_directories(uses: "Sequence[DirectoryUse]") -> str:
    """Return one row per spill directory: its share of what is dealt next, its rates, and what it has done so far."""
    rows = [
        (
            str(use.directory),
            f"{use.share:.1%}",
            format_rate(use.write_bytes_per_s),
            format_rate(use.read_bytes_per_s),
            *map(format_bytes, (use.file_bytes, use.written_bytes, use.read_bytes)),
        )
        for use in uses
    ]
    return show_table(rows, headers=("spill directory", "share", "writes", "reads", "file", "written", "read"))


def show_writes(written_bytes: int, open_ns: int, bytes_per_day: int | None) -> str:
    """Return how much is written to disks in a day if it goes on like this, and how much may be."""
    a_day = int(written_bytes / max(1, open_ns) * 86_400e9)
    limit = "no spill_write_budget" if bytes_per_day is None else f"spill_write_budget {format_bytes(bytes_per_day)}"
    return f"written to disks: {format_bytes(written_bytes)}, {format_bytes(a_day)} a day at this rate ({limit})"


def show_frontier(frontier: "Frontier") -> str:
    """Return one row per budget and policy: the predicted time, as a share of the ideal one, and where it goes."""
    named = zip(frontier.policies, frontier.floors_bytes, strict=True)
    head = [
        ("unlimited", f"{format_ns(frontier.ideal_ns)}, {format_bytes(frontier.peak_bytes)} on the device"),
        *((f"floor of {policy}", format_bytes(floor)) for policy, floor in named),
    ]
    rows: list[tuple[str, ...]] = []
    for point in frontier.points:
        budget, best = format_bytes(point.device_bytes), _times_ideal(point.best_possible_ns, frontier)
        rows.append((budget, "best possible", format_ns(point.best_possible_ns), best, "", "", "", ""))
        for policy, outcome in zip(frontier.policies, point.outcomes, strict=True):
            rows.append(("", policy, *_outcome_cells(outcome, frontier)))
    headers = ("device budget", "policy", "step", "of ideal", "recomputed", "stalls", "moved", "by disk")
    return f"{show_table(head)}\n\n{show_table(rows, headers=headers)}"


def show_scaling(scaling: "Scaling") -> str:
    """Return one row per number of ranks: how long a step takes, what collectives take of it, where the state is."""
    rows: list[tuple[str, ...]] = []
    fastest_ns = next((point.step_ns for point in scaling.points if not point.refusal), 0)
    for point in scaling.points:
        head = str(point.ranks), str(point.nodes)
        if point.refusal:
            rows.append((*head, "-", "", "", "", "", "", point.refusal.splitlines()[0]))
            continue
        rows.append(
            (
                *head,
                format_ns(point.step_ns),
                f"{fastest_ns / max(1, point.step_ns):.2f}",
                format_ns(point.collective_ns),
                format_ns(point.stall_collective_ns),
                format_bytes(point.peak_bytes),
                format_bytes(point.host_bytes),
                f"{point.updated_here} of {point.parameters}",
            )
        )
    headers = ("ranks", "nodes", "step", "a rank's speed", "collectives", "exposed", "device peak", "host, a node")
    return show_table(rows, headers=(*headers, "state on the device"))


def _outcome_cells(outcome: "Outcome | None", frontier: "Frontier") -> tuple[str, ...]:
    if outcome is None:
        return ("-",) * 6
    times = format_ns(outcome.makespan_ns), _times_ideal(outcome.makespan_ns, frontier)
    parts = format_ns(outcome.recompute_ns), format_ns(outcome.stall_ns)
    return (*times, *parts, format_bytes(outcome.link_bytes), format_bytes(outcome.disk_bytes))


def _times_ideal(makespan_ns: int, frontier: "Frontier") -> str:
    return f"{makespan_ns / max(1, frontier.ideal_ns):.3f}"


def show_reasons(reasons: "Reasons") -> str:
    """Return why the plan is what it is: a row per tensor, with what every other choice would change, and the prices.

    A choice is shown as what it adds to the step, or as the bytes by which a budget would be overrun (the device's, if
    no other is named); a recipe as the time of its steps, and the bytes that have to be held longer for it.
    """
    headers = ("storage", "bytes", "decision", "out", "in", "waited", "keep", "recompute", "host", "nvme", "recipe")
    table = show_table([_reason_cells(tensor) for tensor in reasons.tensors], headers=headers)
    left_out = f"\n{reasons.left_out} smaller ones are not shown." if reasons.left_out else ""
    prices = show_table(
        [_price_cells(price) for price in reasons.prices], headers=("resource", "change", "step", "price")
    )
    return f"{reasons.policy}, {format_ns(reasons.makespan_ns)} a step as modelled\n\n{table}{left_out}\n\n{prices}"


def _reason_cells(tensor: "TensorReason") -> tuple[str, ...]:
    choices = {choice.decision: choice for choice in tensor.choices}
    decisions = ("keep", "recompute", "host", "nvme")
    cells = ["as it is" if each == tensor.decision else _choice_cell(choices.get(each)) for each in decisions]
    recipe = "-" if tensor.recipe_ns is None else format_ns(tensor.recipe_ns)
    if tensor.held_longer:
        recipe += f", holds {format_bytes(tensor.held_longer_bytes)}"
    copies = (format_ns(tensor.out_ns), format_ns(tensor.in_ns), format_ns(tensor.stall_ns))
    return (tensor.name, format_bytes(tensor.nbytes), tensor.decision, *copies, *cells, recipe)


def _choice_cell(choice: "Choice | None") -> str:
    if choice is None:
        return "-"
    if choice.over_bytes:
        where = "" if choice.over_tier is Tier.DEVICE else f" ({choice.over_tier})"
        return f"{format_bytes(choice.over_bytes)} over{where}"
    return "no plan" if choice.change_ns is None else _signed_ns(choice.change_ns)


_RATES = ("links", "collectives")  # their prices are for so much per cent, not for bytes


def _price_cells(price: "Price") -> tuple[str, ...]:
    amount = f"{price.amount:+d} %" if price.resource in _RATES else _signed(format_bytes(price.amount))
    if price.change_ns is None:
        return price.resource, amount, "does not fit", "-"
    if price.resource in _RATES:
        worth = f"{-price.change_ns / price.copying_ns:.2f} s per link-second" if price.copying_ns else "nothing moves"
    else:
        worth = f"{format_ns(round(abs(price.change_ns) * 1e9 / abs(price.amount)))} per GB"
    return price.resource, amount, _signed_ns(price.change_ns), worth


def _signed_ns(change_ns: int) -> str:
    return _signed(format_ns(change_ns))


def _signed(text: str) -> str:
    return text if text.startswith("-") else f"+{text}"


def show_measured(measured: Mapping[str, object]) -> str:
    """Return measured figures, one per line; the unit is the end of each name ("step_ns", "peak_bytes")."""
    return show_table([(name, _by_unit(name, value)) for name, value in measured.items()])


def show_graph(listing: "Listing") -> str:
    """Return a graph as text, one node a line, the runtime's own nodes marked with ">>"."""
    lines = [f"{listing.phase}: {len(listing.nodes)} nodes, {sum(row.runtime for row in listing.nodes)} of the runtime"]
    for row in listing.nodes:
        mark = _RUNTIME_MARK if row.runtime else " " * len(_RUNTIME_MARK)
        typed = f"{row.name}: {row.type}" if row.type else row.name
        lines.append(f"{mark} {typed} = {_call(row)}" + (f"  # {row.note}" if row.note else ""))
    return "\n".join(lines)


def graph_dot(listing: "Listing") -> str:
    """Return a graph in Graphviz's language, the runtime's own nodes filled."""
    lines = [f"digraph {_quoted(listing.phase)} {{", "  node [shape=box];"]
    for row in listing.nodes:
        label = "\n".join(part for part in (row.name, row.target, row.type, row.note) if part)
        style = ", style=filled, fillcolor=lightblue" if row.runtime else ""
        lines.append(f"  {_quoted(row.name)} [label={_quoted(label)}{style}];")
        lines.extend(f"  {_quoted(source)} -> {_quoted(row.name)};" for source in row.inputs)
    return "\n".join([*lines, "}"])


def show_table(rows: Sequence[Sequence[object]], headers: Sequence[str] = ()) -> str:
    """Return rows of cells as text; without headers there are no lines between."""
    return str(tabulate(rows, headers=headers, tablefmt="simple" if headers else "plain", disable_numparse=True))


def _step_name(problem: Problem, step: Step) -> str:
    return f"{step} {problem.ops[step].name}" if step < len(problem.ops) else f"{step} (end)"


def _size(storage: Storage) -> str:
    return format_bytes(storage.nbytes) + (f" = {storage.formula}" if storage.formula else "")


def count_and_bytes(items: Sequence[Transfer] | Sequence[Storage]) -> str:
    """Return how many there are, and their bytes."""
    return f"{len(items)}, {format_bytes(sum(item.nbytes for item in items))}"


def _recomputed(plan: Plan, captured: Problem) -> str:
    again, forecast = set(plan.recomputed), plan.forecast
    nbytes = sum(storage.nbytes for storage in captured.storages if storage.name in again)
    share = forecast.recompute_ns / max(1, forecast.makespan_ns)
    return f"{len(again)}, {format_bytes(nbytes)}, in {format_ns(forecast.recompute_ns)}, {share:.1%} of the time"


def _class_bytes(classes: Iterable[PoolClass]) -> int:
    return sum(c.nbytes * c.count for c in classes)


def _by_unit(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, int) and name.endswith("_ns"):
        return format_ns(value)
    return str(value)


def _call(row: "NodeRow") -> str:
    return row.op if row.op == "placeholder" else f"{row.target}({', '.join(row.inputs)})"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

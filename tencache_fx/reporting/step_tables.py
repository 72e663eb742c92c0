"""Steps of many regions as text: their plans, and what each swap point does in each call. No torch here."""

from collections.abc import Iterator, Sequence

from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.problem import Kind, Step
from tencache_fx.planning.step import Point, SwapKey
from tencache_fx.records import StepRecord, StepRun
from tencache_fx.reporting.tables import amount_rows, count_and_bytes, show_table
from tencache_fx.units import format_bytes


def show_step(record: StepRecord) -> str:
    """Return a step's plan: its figures, then a row for each row of calls that a region has one after the other.

    Of several runs in a row the most is shown of what is held beside the plan when one begins, of what was between them
    and the runs before, and of the planned peak; what stays, is copied out, and comes back, is added up.
    """
    return f"{show_figures(record)}\n\n{_show_runs(record)}"


def name_step(record: StepRecord) -> str:
    """Return what a step consists of, with the names of its regions."""
    regions = {run.region: run.name for run in record.runs}
    calls = sum(not run.backward for run in record.runs)
    names = "\n".join(f"  region {region}: {name}" for region, name in sorted(regions.items()))
    return f"a step on {record.device}, {calls} calls of {_count(len(regions), 'region')}:\n{names}"


def show_figures(record: StepRecord) -> str:
    """Return the costs and gains of a step's plan, one line per figure."""
    problem, plan, forecast = record.problem, record.plan, record.plan.forecast
    limit, planned = record.device_budget, problem.budgets.device_bytes
    budget = "no limit"
    if limit is not None and planned is not None:
        budget = f"{format_bytes(limit)}, of it {format_bytes(limit - planned)} kept free for what grows"
    away = {transfer.name for transfer in plan.transfers}
    staying = [storage for storage in problem.storages if storage.name not in away]
    held = max(record.runs, key=lambda run: run.held_bytes)
    between = max(record.runs, key=lambda run: run.gap_bytes)
    rows = [
        ("policy", plan.policy),
        ("runs", f"{len(record.runs)}, of {_count(len(problem.ops) - len(record.runs), 'step')} in all"),
        ("device budget", budget),
        ("held beside", f"at most {format_bytes(held.held_bytes)}, when {held} begins"),
        ("between runs", f"at most {format_bytes(between.gap_bytes)}, before {between}"),
        ("device peak", f"{format_bytes(forecast.peak_bytes)} {_place(record, forecast.peak_step)}"),
        ("all on the device", format_bytes(int(live_bytes(problem).max(initial=0)))),
        ("device floor", format_bytes(forecast.floor_bytes)),
        ("stay", count_and_bytes(staying)),
        *amount_rows(problem, plan),
    ]
    return show_table(rows)


def _place(record: StepRecord, step: Step) -> str:
    """Return in which run, or before which one, a step is."""
    run = next(run for run in record.runs if step < run.end)
    if step < run.begin:
        return f"before {run}"
    return f"in {run}, at {record.problem.ops[step].name}"


def _show_runs(record: StepRecord) -> str:
    problem, transfers = record.problem, record.plan.transfers
    live = live_bytes(problem, transfers)
    away = {transfer.name for transfer in transfers}
    rows = []
    for runs in _in_a_row(record.runs):
        steps = range(runs[0].begin, runs[-1].end)
        stays = sum(s.nbytes for s in problem.storages if s.birth in steps and s.name not in away)
        goes = sum(t.nbytes for t in transfers if t.out and t.copy_out_after in steps)
        comes = sum(t.nbytes for t in transfers if t.back and t.needed_at in steps)
        amounts = (
            max(run.held_bytes for run in runs),
            max(run.gap_bytes for run in runs),
            int(live[steps.start - 1 : steps.stop].max()),
            stays,
            goes,
            comes,
        )
        rows.append((_names(runs), *map(format_bytes, amounts)))
    return show_table(rows, headers=("runs", "held beside", "between", "planned peak", "stay", "out", "in"))


def _in_a_row(runs: Sequence[StepRun]) -> list[list[StepRun]]:
    """Return the runs in groups: of one region and phase, and of calls that follow one another, up or down."""
    groups: list[list[StepRun]] = []
    for run in runs:
        last = groups[-1] if groups else []
        alike = bool(last) and (last[-1].region, last[-1].backward) == (run.region, run.backward)
        if alike and run.call - last[-1].call == (-1 if run.backward else 1):
            last.append(run)
        else:
            groups.append([run])
    return groups


def _names(runs: Sequence[StepRun]) -> str:
    return str(runs[0]) if len(runs) == 1 else f"{runs[0]} to {runs[-1].region}.{runs[-1].call}"


def list_step(record: StepRecord) -> str:
    """Return what each swap point of each run does, one a line, in the order in which they run.

    What a run does there for a storage of another call, or of another op, stands before it, marked with ">>".
    """
    told = _Telling(record)
    lines: list[str] = []
    for run in record.runs:
        lines.append(("\n" if lines else "") + f"{run}, {run.name}")
        lines.extend(told.others_at(run, 0))
        for position, op in enumerate(run.ops, 1):
            lines.extend(told.others_at(run, position))
            lines.append(f"   {op.deed:<8}  {op.label:<24}  {told.deed(run, position)}".rstrip())
        lines.extend(told.others_at(run, len(run.ops) + 1))
    return "\n".join(lines)


def tell_storage(record: StepRecord, name: str) -> str:
    """Return what becomes of the storage `name` of a step, as a sentence."""
    key = record.joined.keys[name]
    run = next(run for run in record.runs if (run.region, run.call) == (key.region, key.call))
    return f"{name}, of {run}, {run.name}: {_Telling(record).story(key)}."


_STAYING = {"fetch": "stays, and is copied on the device", "store": "stays, and is updated on the device"}


class _Telling:
    """Says what a step's schedule does, in words."""

    def __init__(self, record: StepRecord) -> None:
        self._keys, self._schedule = frozenset(record.joined.keys.values()), record.schedule
        kinds = {storage.name: storage.kind for storage in record.joined.problem.storages}
        self._kinds = {key: kinds[name] for name, key in record.joined.keys.items()}
        self._runs = {(run.region, run.call, run.backward): run for run in record.runs}
        self._freed_at = {key: point for point, keys in self._schedule.frees.items() for key in keys}
        self._back_at = {key: point for point, keys in self._schedule.prefetches.items() for key in keys}

    def others_at(self, run: StepRun, position: int) -> Iterator[str]:
        """Yield what is done at a point for storages whose own ops are not there."""
        point = Point(run.region, run.call, run.backward, position)
        yield from (f">> frees {key}" for key in self._schedule.frees.get(point, ()))
        yield from (f">> copies {key} back" for key in self._schedule.prefetches.get(point, ()))

    def story(self, key: SwapKey) -> str:
        """Return what becomes of a storage from its offload to its wait."""
        if (kept := self._kept(key)) is not None:
            return kept
        freed = self._place(self._freed_at[key]) if key in self._freed_at else "its release"
        if self._kinds[key] is Kind.STORED:
            return f"goes to host, freed at {freed}"
        if self._kinds[key] is Kind.FETCHED:
            return (
                f"comes from host, copied at {self._place(self._back_at[key])}" if key in self._back_at else "comes now"
            )
        back = self._place(self._back_at[key]) if key in self._back_at else "its prefetch"
        return f"goes to {self._schedule.away[key]}, freed at {freed}, copied back at {back}"

    def deed(self, run: StepRun, position: int) -> str:
        """Return what the op at a position does."""
        op = run.ops[position - 1]
        key = SwapKey(run.region, run.call, op.label)
        if op.deed in _STAYING and key in self._schedule.kept:
            return _STAYING[op.deed]
        if op.deed == "offload" or (op.deed in ("fetch", "store") and key in self._keys):
            return self.story(key)
        if self._kept(key) is not None or op.deed == "wait":
            return ""
        if op.deed == "release":
            return f"freed later, at {self._place(self._freed_at[key])}" if key in self._freed_at else "frees it"
        return f"was copied back at {self._place(self._back_at[key])}" if key in self._back_at else "copies it back"

    def _kept(self, key: SwapKey) -> str | None:
        """Return why the schedule has nothing done with a storage; `None` for one that it has copied."""
        if key in self._schedule.kept:
            return "stays"
        if key in self._keys:
            return None
        if (key.region, key.call, True) in self._runs:
            return "stays, for its caller keeps it"
        return "leaves at once: no backward of this call is in the step"

    def _place(self, point: Point) -> str:
        run = self._runs[point.region, point.call, point.backward]
        if point.position == 0:
            return f"the begin of {run}"
        if point.position > len(run.ops):
            return f"the end of {run}"
        op = run.ops[point.position - 1]
        return f"the {op.deed} of {op.label} in {run}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

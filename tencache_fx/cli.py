"""The command `tencache`: see if a model fits, look at dumps, try policies on a problem, examine the machine."""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from tencache_fx.errors import OptionError, TencacheError
from tencache_fx.planning.problem import Problem
from tencache_fx.records import RegionRecord
from tencache_fx.reporting.dump import read_measured, read_problem, read_regions
from tencache_fx.reporting.tables import (
    graph_dot,
    show_fit,
    show_frontier,
    show_graph,
    show_measured,
    show_pool,
    show_reasons,
    show_summary,
    show_tensors,
)
from tencache_fx.serialization import to_json

_VIEWS = ("summary", "tensors", "pool", "graphs", "all", "why")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 for a model that does not fit, or 2 with why what was asked cannot be done."""
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], str] = arguments.run
    try:
        text = run(arguments)
    except TencacheError as error:
        print(f"tencache: {error}", file=sys.stderr)
        return 2
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # keep Python from flushing into it at exit
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has seen enough
            return 1
        print(f"tencache: the output cannot be written: {error.strerror}; write it elsewhere.", file=sys.stderr)
        return 2
    return int(arguments.status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tencache", description=__doc__)
    parser.set_defaults(status=0)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    dump = commands.add_parser("dump", help="show what was decided, from the dump_dir of a run")
    dump.add_argument("dir", type=Path, metavar="DIR", help="the run's dump_dir")
    dump.add_argument("--format", choices=("text", "dot", "json"), default="text", help="dot shows the graphs only")
    dump.add_argument("--region", type=int, help="one region only, by number")
    dump.add_argument(
        "--what",
        choices=_VIEWS,
        default="summary",
        help="which part, as text (default: summary); why also plans every other choice, which takes longer",
    )
    dump.set_defaults(run=_dump)

    plan = commands.add_parser("plan", help="plan a problem again, with another policy or other budgets")
    plan.add_argument("problem", type=Path, metavar="PROBLEM.json", help="a problem, or a region's record.json")
    plan.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="none, 10cache, teraio or joint; may be given several times (default: joint; to compare, all)",
    )
    plan.add_argument(
        "--device-budget",
        nargs="+",
        metavar="SIZE",
        help='such as 12GiB, or "none" for no limit; several to compare them',
    )
    plan.add_argument("--host-budget", metavar="SIZE")
    plan.add_argument("--spill-budget", metavar="SIZE")
    plan.add_argument(
        "--sweep",
        type=int,
        nargs="?",
        const=8,
        metavar="N",
        help="compare N device budgets, from the least that fits to the most that is of use (default: 8)",
    )
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw the comparison, as .svg or .html")
    plan.add_argument("--json", action="store_true", help="print the plan, or the comparison, as JSON")
    plan.set_defaults(run=_plan)

    _describe_fit(
        commands.add_parser("fit", help="say whether a model would fit, in which tiers, and how fast it would be")
    )

    doctor = commands.add_parser("doctor", help="measure this machine, and say what looks wrong with it")
    doctor.add_argument("--device", help="cuda, cuda:1, cpu (default: the GPU if there is one)")
    doctor.add_argument("--spill-dir", type=Path, action="append", metavar="DIR", help="may be given several times")
    doctor.set_defaults(run=_doctor)

    options = commands.add_parser("options", help="list the options, their defaults and how to set them")
    options.set_defaults(run=_options)
    return parser


def _describe_fit(fit: argparse.ArgumentParser) -> None:
    fit.add_argument(
        "factory",
        metavar="MODULE:FUNCTION",
        help="what returns (model, inputs) or (model, inputs, loss_fn); also FILE.py:FUNCTION",
    )
    fit.add_argument("--device", help="cuda, cuda:1, cpu (default: the GPU if there is one)")
    for name in ("device", "host", "spill"):
        fit.add_argument(f"--{name}-budget", metavar="SIZE", help="such as 12GiB")
    fit.add_argument("--spill-dir", type=Path, action="append", metavar="DIR", help="may be given several times")
    fit.add_argument("--dump-dir", type=Path, metavar="DIR", help="write each region's plan there, for dump and plan")
    fit.add_argument("--policy", metavar="NAME", help="none, 10cache, teraio or joint (default: joint)")
    fit.add_argument("--json", action="store_true", help="print all figures as JSON")
    fit.set_defaults(run=_fit)


def _dump(arguments: argparse.Namespace) -> str:
    records = read_regions(arguments.dir)
    if arguments.region is not None:
        known = ", ".join(str(record.region) for record in records)
        records = tuple(record for record in records if record.region == arguments.region)
        if not records:
            raise OptionError(f"{arguments.dir} holds no region {arguments.region}; it holds: {known}.")
    if arguments.format == "json":
        texts = [to_json(record) for record in records]
        return texts[0] if arguments.region is not None else json.dumps([json.loads(text) for text in texts], indent=1)
    if arguments.format == "dot":
        return "\n".join(graph_dot(listing) for record in records for listing in record.listings)
    return "\n\n".join(_record_text(arguments.dir, record, arguments.what) for record in records)


def _record_text(dump_dir: Path, record: RegionRecord, what: str) -> str:
    parts = [f"region {record.region}: {record.name}, torch {record.torch_version}, {record.device}"]
    if what in ("summary", "all"):
        parts.append(show_summary(record.problem, record.plan, record.captured, record.code_peak_bytes))
        parts.extend(f"measured:\n{show_measured(row)}" for row in read_measured(dump_dir, record.region)[-1:])
    if what in ("tensors", "all"):
        parts.append(show_tensors(record.problem, record.plan))
    if what in ("pool", "all"):
        parts.append(show_pool(record.plan))
    if what in ("graphs", "all"):
        parts.extend(show_graph(listing) for listing in record.listings)
    if what == "why":
        from tencache_fx.planning.explain import find_reasons  # here: the planner is for this view only

        parts.append(show_reasons(find_reasons(record.captured, record.plan)))
    return "\n\n".join(parts)


def _plan(arguments: argparse.Namespace) -> str:
    from tencache_fx.planning.search import plan_region  # here: only this command needs the planner and what it imports

    captured = _with_tiers(read_problem(arguments.problem), arguments)
    given: list[str] = arguments.device_budget or []
    policies: list[str] = arguments.policy or []
    if arguments.sweep is not None or arguments.plot is not None or len(given) > 1 or len(policies) > 1:
        return _compare(captured, policies, given, arguments)
    device_bytes = _budget("--device-budget", given[0], None) if given else captured.budgets.device_bytes
    captured = captured.within(device_bytes=device_bytes)
    problem, plan = plan_region(captured, policies[0] if policies else "joint")
    if arguments.json:
        return to_json(plan)
    return "\n\n".join((show_summary(problem, plan, captured), show_tensors(problem, plan), show_pool(plan)))


def _with_tiers(problem: Problem, arguments: argparse.Namespace) -> Problem:
    """Return `problem` with the budgets of host memory and disk that are asked for."""
    host_bytes = _budget("--host-budget", arguments.host_budget, problem.budgets.host_bytes)
    disk_bytes = _budget("--spill-budget", arguments.spill_budget, problem.budgets.disk_bytes)
    if host_bytes is None or disk_bytes is None:
        raise OptionError("only --device-budget may be none; give --host-budget and --spill-budget a size.")
    if disk_bytes and not problem.links.has_disk:
        raise OptionError("--spill-budget is for a disk, and the problem has no rates of one; run it with spill_dir.")
    return problem.within(host_bytes=host_bytes, disk_bytes=disk_bytes)


def _compare(captured: Problem, policies: list[str], given: list[str], arguments: argparse.Namespace) -> str:
    from tencache_fx.planning.pareto import find_frontier, spread_budgets
    from tencache_fx.planning.planner import POLICIES
    from tencache_fx.reporting.plot import draw_frontier, write_chart

    if arguments.sweep is not None and given:
        raise OptionError("--sweep chooses the device budgets itself; give it or --device-budget, not both.")
    if arguments.sweep is not None and arguments.sweep < 1:
        raise OptionError(f"--sweep is {arguments.sweep}; give the number of budgets to compare, 1 or more.")
    names = tuple(policies or POLICIES)
    sizes = [_budget("--device-budget", text, None) for text in given]
    budgets = [size for size in sizes if size is not None]
    if len(budgets) < len(sizes):
        raise OptionError("--device-budget none cannot be compared: without a limit every policy keeps everything.")
    asked = sorted(budgets) or spread_budgets(captured, names, 8 if arguments.sweep is None else arguments.sweep)
    frontier = find_frontier(captured, names, tqdm(asked, unit="budget", leave=False, disable=None))
    if arguments.plot is not None:
        write_chart(arguments.plot, draw_frontier(frontier))
    return to_json(frontier) if arguments.json else show_frontier(frontier)


def _budget(name: str, text: str | None, otherwise: int | None) -> int | None:
    from tencache_fx.option_values import read_size

    if text is None:
        return otherwise
    size = read_size(name, text)
    if size is None:
        return None
    if size.nbytes is None:
        raise OptionError(f"{name}={text!r} depends on the machine; give a number of bytes, such as 12GiB.")
    return size.nbytes


def _fit(arguments: argparse.Namespace) -> str:
    if arguments.device == "cpu" and "torch" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nobody asks for a GPU, and some of torch's tracing would start one
    from tencache_fx.fitting.estimate import fit_factory  # here: it needs torch

    names = ("device_budget", "host_budget", "spill_budget", "spill_dir", "policy", "dump_dir")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    found = fit_factory(arguments.factory, arguments.device, given)
    arguments.status = 0 if found.fits else 1
    return to_json(found) if arguments.json else show_fit(found)


def _doctor(arguments: argparse.Namespace) -> str:
    from tencache_fx.doctor import examine  # here: it needs torch

    return examine(arguments.device, arguments.spill_dir)


def _options(arguments: argparse.Namespace) -> str:
    from tencache_fx import options

    return inspect.cleandoc(options.__doc__ or "")


if __name__ == "__main__":
    sys.exit(main())

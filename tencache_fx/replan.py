"""The command `tencache plan`: a recorded problem planned again, for other policies, budgets or numbers of ranks."""

import argparse
import dataclasses
from pathlib import Path

from tqdm import tqdm

from tencache_fx.errors import OptionError
from tencache_fx.planning.problem import Problem
from tencache_fx.records import StepRecord
from tencache_fx.reporting.dump import captured_of, read_planned
from tencache_fx.reporting.step_tables import show_step
from tencache_fx.reporting.tables import (
    show_change,
    show_frontier,
    show_pool,
    show_scaling,
    show_summary,
    show_tensors,
)
from tencache_fx.serialization import to_json

# What a record of one rank does not know: round numbers for GPUs, as where nothing was measured
# (`hardware/collective_rates.py`).
_LINK_BYTES_PER_S = 150_000_000_000
_LATENCY_NS = 30_000


def describe_plan(plan: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    plan.add_argument(
        "problem", type=Path, metavar="PROBLEM.json", help="a problem, or the record.json of a region or a step"
    )
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
    plan.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        metavar="N",
        help="spread the parameters over N ranks, each with a batch of its own; several to compare them",
    )
    plan.add_argument("--per-node", type=int, default=8, metavar="N", help="ranks of a node (default: 8)")
    plan.add_argument(
        "--link-rate",
        metavar="SIZE",
        help="bytes per second that a rank sends within its node (default: as recorded, or 150GB)",
    )
    plan.add_argument(
        "--network-rate", metavar="SIZE", default="50GB", help="the same between nodes, of each rank (default: 50GB)"
    )
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw the comparison, as .svg or .html")
    plan.add_argument("--json", action="store_true", help="print the plan, or the comparison, as JSON")
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> str:
    from tencache_fx.planning.search import plan_region  # here: only this command needs the planner and what it imports

    record = read_planned(arguments.problem)
    captured = _with_tiers(captured_of(record), arguments)
    given: list[str] = arguments.device_budget or []
    policies: list[str] = arguments.policy or []
    if arguments.ranks is not None:
        if isinstance(record, StepRecord):
            raise OptionError(
                "--ranks is for the record of one region, and this is the record of a step; give the record.json of a "
                "region that is a whole model."
            )
        return _scale(captured, policies, given, arguments)
    if arguments.sweep is not None or arguments.plot is not None or len(given) > 1 or len(policies) > 1:
        return _compare(captured, policies, given, arguments)
    device_bytes = _budget("--device-budget", given[0], None) if given else captured.budgets.device_bytes
    captured = captured.within(device_bytes=device_bytes)
    problem, plan = plan_region(captured, policies[0] if policies else "joint")
    if isinstance(record, StepRecord):
        from tencache_fx.planning.step import align

        plan = align(dataclasses.replace(record, problem=problem).joined, plan)
    if arguments.json:
        return to_json(plan)
    parts = [show_summary(problem, plan, captured), show_tensors(problem, plan), show_pool(plan)]
    if isinstance(record, StepRecord):
        parts[0] = show_step(dataclasses.replace(record, problem=problem, plan=plan, device_budget=device_bytes))
    if not isinstance(record, Problem):
        parts.append(f"what changes:\n\n{show_change(captured, record.plan, plan)}")
    return "\n\n".join(parts)


def _with_tiers(problem: Problem, arguments: argparse.Namespace) -> Problem:
    """Return `problem` with the budgets of host memory and disk that are asked for."""
    host_bytes = _budget("--host-budget", arguments.host_budget, problem.budgets.host_bytes)
    disk_bytes = _budget("--spill-budget", arguments.spill_budget, problem.budgets.disk_bytes)
    if host_bytes is None or disk_bytes is None:
        raise OptionError("only --device-budget may be none; give --host-budget and --spill-budget a size.")
    if disk_bytes and not problem.links.has_disk:
        raise OptionError("--spill-budget is for a disk, and the problem has no rates of one; run it with spill_dir.")
    return problem.within(host_bytes=host_bytes, host_lacking_bytes=0, disk_bytes=disk_bytes)


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


def _scale(captured: Problem, policies: list[str], given: list[str], arguments: argparse.Namespace) -> str:
    from tencache_fx.planning.ranks import Cluster, find_scaling

    if arguments.sweep is not None or arguments.plot is not None or max(len(policies), len(given)) > 1:
        raise OptionError(
            "--ranks compares numbers of ranks; give one policy and one budget, no --sweep and no --plot."
        )
    if given:
        captured = captured.within(device_bytes=_budget("--device-budget", given[0], None))
    known = next(iter(captured.collectives), None)
    link_rate = _budget("--link-rate", arguments.link_rate, known.bytes_per_s if known else _LINK_BYTES_PER_S)
    network_rate = _budget("--network-rate", arguments.network_rate, None)
    if link_rate is None or network_rate is None:
        raise OptionError("only --device-budget may be none; give --link-rate and --network-rate a number of bytes.")
    clusters = [
        Cluster(
            ranks=ranks,
            per_node=arguments.per_node,
            latency_ns=known.latency_ns if known else _LATENCY_NS,
            bytes_per_s=link_rate,
            network_bytes_per_s=network_rate,
        )
        for ranks in arguments.ranks
    ]
    progress = tqdm(clusters, unit="plan", leave=False, disable=None)
    scaling = find_scaling(captured, progress, policies[0] if policies else "joint")
    return to_json(scaling) if arguments.json else show_scaling(scaling)


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

"""The command `tencache`: see if a model fits, look at dumps, plan a problem again, examine the machine."""

import argparse
import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tencache_fx.errors import OptionError, TencacheError
from tencache_fx.fitting import PREFIX
from tencache_fx.fitting.workload import Workload, read_settings
from tencache_fx.garbage import seldom_collected
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Problem
from tencache_fx.records import RegionRecord, StepRecord
from tencache_fx.replan import describe_plan
from tencache_fx.reporting.dump import read_measured, read_regions, read_steps
from tencache_fx.reporting.fit_text import show_fit
from tencache_fx.reporting.step_tables import list_step, name_step, show_step, tell_storage
from tencache_fx.reporting.tables import (
    graph_dot,
    show_graph,
    show_measured,
    show_pool,
    show_reasons,
    show_summary,
    show_tensors,
)
from tencache_fx.serialization import to_json
from tencache_fx.units import format_bytes

_VIEWS = ("summary", "tensors", "pool", "graphs", "all", "why")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 1 for a model that does not fit.

    It is 2 where what was asked cannot be done, with why, and 130 where somebody interrupts, as shells have it.
    """
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], str] = arguments.run
    try:
        text = run(arguments)
    except TencacheError as error:
        print(f"tencache: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tencache: interrupted.", file=sys.stderr)
        return 130
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
    one = dump.add_mutually_exclusive_group()
    one.add_argument("--region", type=int, help="one region only, by number")
    one.add_argument("--step", type=int, help="one step only, of those planned as a whole, by number")
    dump.add_argument("--tensor", metavar="NAME", help="with --what why: this tensor only, such as mm_5 or 3.0:mm_5")
    dump.add_argument(
        "--what",
        choices=_VIEWS,
        default="summary",
        help="which part, as text (default: summary); why also plans every other choice, which takes longer",
    )
    dump.set_defaults(run=_dump)

    describe_plan(commands.add_parser("plan", help="plan a problem again, with another policy, other budgets or ranks"))

    _describe_view(commands.add_parser("view", help="draw a run from its dump_dir: a page of HTML, a trace"))
    _describe_fit(
        commands.add_parser("fit", help="say whether a model would fit, in which tiers, and how fast it would be")
    )

    doctor = commands.add_parser("doctor", help="measure this machine, and say what looks wrong with it")
    doctor.add_argument("--device", help="cuda, cuda:1, cpu (default: the GPU if there is one)")
    doctor.add_argument("--spill-dir", type=Path, action="append", metavar="DIR", help="may be given several times")
    doctor.add_argument("--save", type=Path, metavar="FILE", help="write the rates there, for fit --device-profile")
    doctor.set_defaults(run=_doctor)

    options = commands.add_parser("options", help="list the options, their defaults and how to set them")
    options.set_defaults(run=_options)
    return parser


def _describe_view(view: argparse.ArgumentParser) -> None:
    view.add_argument("dir", type=Path, metavar="DIR", help="the run's dump_dir")
    view.add_argument("--html", type=Path, metavar="FILE", help="where to write the page (default: DIR/view.html)")
    view.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto; a page only with --html")
    view.add_argument(
        "--snapshot", type=Path, metavar="FILE", help="write a memory snapshot for pytorch.org/memory_viz"
    )
    view.add_argument(
        "--sweep",
        type=int,
        nargs="?",
        const=8,
        default=0,
        metavar="N",
        help="plan it at N other device budgets, too (default: 8): the page has a slider for them",
    )
    view.set_defaults(run=_view)


def _describe_fit(fit: argparse.ArgumentParser) -> None:
    fit.add_argument(
        "factory",
        metavar="MODULE:FUNCTION",
        help="what returns (model, inputs) or (model, inputs, loss_fn); also FILE.py:FUNCTION, or hf:CONFIG for a "
        "model of transformers by its configuration, such as hf:LlamaConfig",
    )
    fit.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="values of the configuration, such as hidden_size=4096; of a factory its arguments",
    )
    fit.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE:DTYPE",
        help="for a module's class MODULE:CLASS: what it is called with, such as 8x512:int64, or mask=8x512:bool",
    )
    fit.add_argument("--device", help="cuda, cuda:1, cpu (default: the GPU if there is one)")
    fit.add_argument(
        "--device-profile", metavar="NAME", help="plan for a device that is not here: h100, or a file of doctor --save"
    )
    for name in ("device", "host", "spill"):
        fit.add_argument(f"--{name}-budget", metavar="SIZE", help="such as 12GiB")
    fit.add_argument("--spill-write-budget", metavar="SIZE", help="most bytes written to disk in a day, such as 2TB")
    for name, what in (
        ("tokens", "of a step: the fastest micro-batch and accumulation is found"),
        ("samples", "of a step, instead of tokens"),
        ("sequence", "tokens of a sample (default: what the model takes, at most 2048)"),
        ("micro-batch", "samples at once, instead of the fastest (default without tokens or samples: 1)"),
    ):
        fit.add_argument(f"--{name}", type=int, metavar="N", help=f"for hf:CONFIG: {what}")
    fit.add_argument("--dtype", metavar="NAME", help="for hf:CONFIG: that of the weights (default: bfloat16)")
    fit.add_argument("--spill-dir", type=Path, action="append", metavar="DIR", help="may be given several times")
    fit.add_argument("--dump-dir", type=Path, metavar="DIR", help="write each region's plan there, for dump and plan")
    fit.add_argument("--policy", metavar="NAME", help="none, 10cache, teraio or joint (default: joint)")
    fit.add_argument("--json", action="store_true", help="print all figures as JSON")
    fit.set_defaults(run=_fit)


def _dump(arguments: argparse.Namespace) -> str:
    regions = {} if arguments.step is not None else {each.region: each for each in read_regions(arguments.dir)}
    steps = {} if arguments.region is not None else read_steps(arguments.dir)
    if one := arguments.region is not None:
        regions = _only("region", arguments.region, regions, arguments.dir)
    elif one := arguments.step is not None:
        steps = _only("step", arguments.step, steps, arguments.dir)
    if arguments.tensor is not None and not (one and arguments.what == "why"):
        raise OptionError("--tensor is for --what why, and for one record: add --region or --step.")
    if arguments.format == "json":
        records: list[RegionRecord | StepRecord] = [*regions.values(), *steps.values()]
        texts = [to_json(record) for record in records]
        return texts[0] if one else json.dumps([json.loads(text) for text in texts], indent=1)
    if arguments.format == "dot":
        return "\n".join(graph_dot(listing) for record in regions.values() for listing in record.listings)
    parts = [_region_text(arguments, record) for record in regions.values()]
    return "\n\n".join([*parts, *(_step_text(arguments, number, record) for number, record in steps.items())])


_Record = TypeVar("_Record")


def _only(kind: str, number: int, found: Mapping[int, _Record], dump_dir: Path) -> dict[int, _Record]:
    """Return the record of this number alone."""
    if number not in found:
        raise OptionError(f"{dump_dir} holds no {kind} {number}; it holds: {', '.join(map(str, found)) or 'none'}.")
    return {number: found[number]}


def _region_text(arguments: argparse.Namespace, record: RegionRecord) -> str:
    what, parts = (
        arguments.what,
        [f"region {record.region}: {record.name}, torch {record.torch_version}, {record.device}"],
    )
    if what in ("summary", "all"):
        parts.append(show_summary(record.problem, record.plan, record.captured, record.code_peak_bytes))
        measured = read_measured(arguments.dir, record.region)
        parts.extend(f"measured:\n{show_measured(row)}" for row in measured[-1:])
    if what in ("graphs", "all"):
        parts.extend(show_graph(listing) for listing in record.listings)
    return "\n\n".join([*parts, *_plan_texts(arguments, record.captured, record.problem, record.plan)])


def _step_text(arguments: argparse.Namespace, number: int, record: StepRecord) -> str:
    what, parts = arguments.what, [f"step {number}, {name_step(record)}"]
    if what in ("summary", "all"):
        parts.append(show_step(record))
    if what in ("graphs", "all"):
        parts.append(list_step(record))
    if arguments.tensor is not None and arguments.tensor in record.joined.keys:
        parts.append(tell_storage(record, arguments.tensor))
    return "\n\n".join([*parts, *_plan_texts(arguments, record.problem, record.problem, record.plan)])


def _plan_texts(arguments: argparse.Namespace, captured: Problem, problem: Problem, plan: Plan) -> Iterator[str]:
    """Yield the parts that are asked for, and are the same for a region and for a step."""
    if arguments.what in ("tensors", "all"):
        yield show_tensors(problem, plan)
    if arguments.what in ("pool", "all"):
        yield show_pool(plan)
    if arguments.what == "why":
        from tencache_fx.planning.explain import find_reasons  # here: the planner is for this view only

        yield show_reasons(find_reasons(captured, plan, tensor=arguments.tensor))


def _view(arguments: argparse.Namespace) -> str:
    from tencache_fx.reporting.page import write_page  # here: only this command needs the simulator
    from tencache_fx.reporting.snapshot import write_snapshot
    from tencache_fx.reporting.trace import write_trace
    from tencache_fx.reporting.view import views_of

    regions, steps = read_regions(arguments.dir), read_steps(arguments.dir)
    measured = {each.region: rows[-1] for each in regions if (rows := read_measured(arguments.dir, each.region))}
    others = arguments.trace is not None or arguments.snapshot is not None
    if arguments.sweep < 0 or (arguments.sweep and arguments.html is None and others):
        raise OptionError("--sweep is for a page, and for a number of budgets; give 1 or more, and --html.")
    views, written = views_of(regions, steps, measured, arguments.sweep), []
    page = arguments.html
    if arguments.trace is not None:
        nbytes = write_trace(arguments.trace, views)
        written.append(f"{arguments.trace}: {format_bytes(nbytes)}; open it in ui.perfetto.dev or chrome://tracing.")
    if arguments.snapshot is not None:
        nbytes = write_snapshot(arguments.snapshot, views)
        written.append(f"{arguments.snapshot}: {format_bytes(nbytes)}; open it in pytorch.org/memory_viz.")
    if page is None and not others:
        page = arguments.dir / "view.html"
    if page is not None:
        nbytes = write_page(page, views, f"tencache: {arguments.dir.resolve().name}")
        written.append(f"{page}: {format_bytes(nbytes)}; open it in a browser.")
    return "\n".join(written)


@seldom_collected()
def _fit(arguments: argparse.Namespace) -> str:
    profile = arguments.device_profile
    if (arguments.device == "cpu" or profile is not None) and "torch" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nobody asks for a GPU, and some of torch's tracing would start one
    names = ("device_budget", "host_budget", "spill_budget", "spill_write_budget", "spill_dir", "policy", "dump_dir")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    load = {each: getattr(arguments, each) for each in ("tokens", "samples", "sequence", "micro_batch", "dtype")}
    load = {each: value for each, value in load.items() if value is not None}
    device, texts, name = arguments.device, arguments.set, arguments.factory
    if name.startswith(PREFIX):
        if arguments.input:
            raise OptionError(f"--input is for a module's class, and {name} makes its own; leave it out.")
        from tencache_fx.fitting.config_fit import fit_config  # here: the planner is for this command only
        from tencache_fx.fitting.other_process import other_process

        work = Workload(config=name.removeprefix(PREFIX), settings=read_settings(texts), **load)
        with other_process() if work.is_searched else contextlib.nullcontext() as other:
            found = fit_config(work, device, given, profile=profile, other=other)
    elif load:
        option = next(iter(load)).replace("_", "-")
        raise OptionError(f"--{option} is for {PREFIX}CONFIG; have {name} make its inputs as large as they are to be.")
    else:
        from tencache_fx.fitting.fitness import fit_factory  # here: needs torch

        settings = read_settings(texts)
        with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
            found = fit_factory(name, device, given, profile=profile, settings=settings, inputs=arguments.input)
    arguments.status = 0 if found.fits else 1
    return to_json(found) if arguments.json else show_fit(found)


def _doctor(arguments: argparse.Namespace) -> str:
    from tencache_fx.doctor import examine  # here: it needs torch

    return examine(arguments.device, arguments.spill_dir, arguments.save)


def _options(arguments: argparse.Namespace) -> str:
    from tencache_fx import options

    return inspect.cleandoc(options.__doc__ or "")


if __name__ == "__main__":
    sys.exit(main())

"""Compile a tiny model under a tight budget and look at what the compiler did to it.

    python examples/inspect_graph.py

It prints the plan in figures, the transfers of the tensors that are offloaded, the pinned buffers that they use, and
the rewritten graphs around the nodes that were inserted. Any CPU does it in a few seconds.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import tencache_fx
from tencache_fx.records import Listing
from tencache_fx.reporting.tables import show_graph, show_pool, show_summary, show_tensors


def main() -> None:
    dump_dir = Path(tempfile.mkdtemp(prefix="tencache-dump-"))
    compile_tiny_model(dump_dir)
    (record,) = tencache_fx.regions()
    problem, plan = record.problem, record.plan

    heading("The plan: what it holds, what is offloaded, what that costs")
    print(show_summary(problem, plan, record.captured))

    heading("The tensors that are offloaded, and the steps of their copies")
    title, line, *rows = show_tensors(problem, plan).splitlines()
    print("\n".join([title, line, *(row for row in rows if "spill to" in row)]))

    heading("The pinned host buffers that the transfers use in turn")
    print(show_pool(plan))

    heading('The rewritten graphs near our nodes, which are marked ">>"')
    for listing in record.listings:
        print(near_runtime_nodes(listing), "\n")
    print(f"All of it, at any time: tencache dump {dump_dir} --what all")


def compile_tiny_model(dump_dir: Path) -> None:
    """Run one training step of eight small layers in 2 MB, where it would take 3.3 MB without a plan."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
    model = torch.compile(
        nn.Sequential(*layers),
        backend="tencache",
        options={
            "device_budget": "2MB",
            "recompute": "none",  # so that there is much to save
            "compiler": "eager",  # so that no kernels need compiling
            "calibrate": False,  # so that every machine shows the same plan
            "dump_dir": dump_dir,
        },
    )
    model(torch.randn(1024, 64)).square().mean().backward()


def near_runtime_nodes(listing: Listing, *, lines_around: int = 2) -> str:
    """Return the lines of `listing` that are at most `lines_around` from a node of the runtime."""
    title, *lines = show_graph(listing).splitlines()
    ours = [number for number, row in enumerate(listing.nodes) if row.runtime]
    near = [any(abs(number - mine) <= lines_around for mine in ours) for number in range(len(lines))]
    shown = [line if keep else "   ..." for line, keep in zip(lines, near, strict=True)]
    return "\n".join([title, *(line for line, before in zip(shown, [title, *shown], strict=False) if line != before)])


def heading(text: str) -> None:
    print(f"\n{text}\n{'=' * len(text)}\n")


if __name__ == "__main__":
    main()

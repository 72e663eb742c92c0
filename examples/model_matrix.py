"""Train small models of many families with torch's own compiler and with tencache in a tight budget, and compare.

    pip install 'tencache_fx[models]'
    python examples/model_matrix.py [--device cuda] [--compiler inductor] [FAMILY ...]

Every row is a model of transformers, timm, diffusers or torch with random weights. The numbers must be the same:
to the last bit on the same graphs (`--compiler eager`), within rounding on a GPU, which may add up in any order, and
where Inductor fuses them in other ways. Those whose library is not installed are left out. The models are the tests'
own: run it in a clone.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "models"))

from families import FAMILIES, family
from matrix import CPU, EAGER, INDUCTOR, Row, make_row

from tencache_fx.errors import TencacheError
from tencache_fx.units import format_bytes

HEADERS = ("model", "equal", "plain", "budget", "ours", "regions", "transfers", "recomputed", "breaks", "seconds")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare training with and without tencache, model by model.")
    parser.add_argument("families", nargs="*", choices=[*(each.name for each in FAMILIES), []], metavar="FAMILY")
    parser.add_argument("--device", type=torch.device, default=CPU, help="such as cuda (default: cpu)")
    parser.add_argument("--compiler", choices=("eager", "inductor"), default="eager")
    parser.add_argument(
        "--share", type=float, default=0.25, help="of what a region can do without, how much it may keep"
    )
    return parser.parse_args()


def describe(row: Row, seconds: float) -> tuple[object, ...]:
    return (
        row.family.name,
        "yes" if not row.differences else f"no: {len(row.differences)} differ",
        format_bytes(row.theirs.peak_bytes),
        format_bytes(row.budget_bytes) if row.ours.regions else "no region",
        format_bytes(row.ours.peak_bytes),
        len(row.ours.regions),
        row.transfers,
        row.recomputed,
        f"{row.theirs.graph_breaks} / {row.ours.graph_breaks}",
        f"{seconds:.0f}",
    )


def main() -> int:
    arguments = read_arguments()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    chosen = [family(name) for name in arguments.families] or [each for each in FAMILIES if each.installed]
    options = EAGER if arguments.compiler == "eager" else INDUCTOR
    lines: list[tuple[object, ...]] = []
    failed = False
    for each in chosen:
        start = time.monotonic()
        try:
            row = make_row(each, options, share=arguments.share, device=arguments.device)
        except (TencacheError, torch._dynamo.exc.TorchDynamoException) as error:
            failed = True
            lines.append((each.name, f"failed: {str(error).splitlines()[0]}"))
        else:
            failed |= bool(row.differences) or row.ours.graph_breaks != row.theirs.graph_breaks
            lines.append(describe(row, time.monotonic() - start))
        print(f"{each.name} done", file=sys.stderr, flush=True)
    print(tabulate(lines, headers=HEADERS))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""One rank of two: collectives that are begun early and waited for late, in a budget in which something has to leave.

`python late_waits.py RANK FILE` prints the largest error of three calls, the transfers and the collectives of the plan,
and their time, with room and without.

They are all_reduces: torch's own bookkeeping of several all_gathers at once over gloo corrupts the heap (torch 2.11 to
2.14: `ProcessGroupGloo.cpp: runLoop` writes `lastCompletedWorkName` from both of its threads, without a lock; a name of
more than 15 letters, such as theirs, is then freed twice).
"""

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import tencache_fx
from tencache_fx.planning.planner import floor_bytes

RANKS, WIDTH, ROWS = 2, 256, 512


def between(x: Tensor) -> Tensor:
    """Hold much for a while: what is under way meanwhile would be the first to go."""
    for _ in range(3):
        x = x + torch.tanh(torch.cat([x @ x.t()] * 4) @ x)[:ROWS] * 0.01
    return x


def program(x: Tensor, waited: Tensor, *shares: Tensor) -> Tensor:
    group = dist.group.WORLD.group_name
    collectives = torch.ops._c10d_functional
    coming = [collectives.all_reduce(share * 2, "sum", group) for share in shares]
    early = collectives.wait_tensor(collectives.all_reduce(waited * 2, "sum", group))
    x = between(torch.tanh(x @ early))  # read at once, so that it is waited for here, and may leave until the end
    for whole in coming:
        x = torch.tanh(x @ collectives.wait_tensor(whole))
    return x @ early


def main(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH) / 16 for _ in range(4)]
    x = torch.randn(ROWS, WIDTH)
    shares = [weight * (0.25, 0.75)[rank] for weight in weights]
    wanted = between(torch.tanh(x @ (weights[0] * 2)))
    for weight in weights[1:]:
        wanted = torch.tanh(wanted @ (weight * 2))
    wanted = wanted @ (weights[0] * 2)

    def run(device_budget: int) -> dict[str, object]:
        options = {"compiler": "eager", "calibrate": False, "host_budget": 1 << 26, "device_budget": device_budget}
        compiled = torch.compile(program, backend="tencache", options=options, fullgraph=True)
        error = 0.0
        with torch.no_grad():
            for _ in range(3):
                dist.barrier()
                if rank:
                    time.sleep(0.2)  # whatever the other one has begun is under way until then
                error = max(error, float((compiled(x, *shares) - wanted).abs().nan_to_num(nan=9.0).max()))
        record = tencache_fx.regions()[-1]
        names = [op.name for op in record.problem.ops]
        return {
            "error": error,
            "transfers": [transfer.name for transfer in record.plan.transfers],
            "collectives": [
                [each.name, each.kind, each.ranks, each.nbytes, names[each.begin], names[each.needed_at]]
                for each in record.problem.collectives
            ],
            "under way": record.plan.forecast.collective_ns,
            "exposed": record.plan.forecast.stall_collective_ns,
        }

    free = run(1 << 30)
    least = floor_bytes(tencache_fx.regions()[-1].problem)
    torch.compiler.reset()
    print(json.dumps({"free": free, "tight": run(least)}), flush=True)
    tencache_fx.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

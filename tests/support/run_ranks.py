"""Two ranks: `python run_ranks.py FOLDER KIND`. Each writes what came of each case, by group, to `outRANK`, as JSON.

Both are forked from a process that has loaded torch and its compiler, which takes longer than many a case.
"""

import datetime
import json
import multiprocessing
import os
import sys
from multiprocessing import connection
from pathlib import Path

import agreeing_ranks
import rank_training
import ranks
import shard_training
import torch
import torch.distributed as dist

import tencache_fx

GROUPS = {
    "quick": {**ranks.GROUPS, "training": rank_training.QUICK},
    "slow": {"training": rank_training.SLOW},
    "spread": {"training": shard_training.QUICK, "others": shard_training.OTHERS},
    "agreement": {"training": agreeing_ranks.QUICK, "others": agreeing_ranks.OTHERS},
    "agreement, slow": {"training": agreeing_ranks.SLOW},
    "spread, slow": {"training": shard_training.SLOW},
}


def train(rank: int, folder: Path, kind: str) -> None:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    tencache_fx.configure(host_budget="128MB", calibrate=False)
    limit = datetime.timedelta(seconds=110)  # a rank may wait for the other one to compile
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks.WORLD, timeout=limit)
    found: dict[str, dict[str, dict[str, object]]] = {}
    for group, cases in GROUPS[kind].items():
        found[group] = {}
        for name, case in cases.items():
            print(name, file=sys.stderr, flush=True)  # the last one, if a rank ends here
            found[group][name] = case()
            ranks.fresh()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found))


def main(folder: Path, kind: str) -> None:
    """Start the ranks; end as the first of them that fails, or well when all have."""
    torch._dynamo.lookup_backend("tencache")  # what compiling imports is loaded by now, too
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=begin, args=(rank, folder, kind)) for rank in range(ranks.WORLD)]
    for each in started:
        each.start()
    left = {each.sentinel: each for each in started}
    while left:
        for sentinel in connection.wait([*left]):
            each = left.pop(sentinel)
            each.join()
            if each.exitcode != 0:
                os._exit(1)  # whoever has started this ends the others


def begin(rank: int, folder: Path, kind: str) -> None:
    """Be one of the ranks, with files of its own for what it prints."""
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644), stream)
    train(rank, folder, kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

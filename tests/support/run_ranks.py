"""One rank: `python run_ranks.py RANK MEETING_FILE KIND` prints what came of each case, by group, as JSON."""

import datetime
import json
import sys

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
    "spread, slow": {"training": shard_training.SLOW},
}


def main(rank: int, meeting_file: str, kind: str) -> None:
    torch.set_num_threads(1)
    tencache_fx.configure(host_budget="128MB", calibrate=False)
    limit = datetime.timedelta(seconds=110)  # a rank may wait for the other one to compile
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_file}", rank=rank, world_size=ranks.WORLD, timeout=limit
    )
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


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])

"""A process that watches other ranks ends well."""

import os
import subprocess
import sys

from started_ranks import LIMIT_S, ROOT

PROGRAM = """
import atexit
import threading
import torch.distributed as dist
from tencache_fx.runtime.rank_watch import RankWatch

@atexit.register  # before the watch: it runs behind all that the watch does at the end
def tell():
    print("left", [each.name for each in threading.enumerate() if each.name == "tencache-ranks"])

dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
watch = RankWatch()
print("began", watch._thread.is_alive())
"""


def test_the_thread_has_ended_when_the_interpreter_is_taken_down() -> None:
    """Python would unwind it, maybe within a call of the store, and the process would abort."""
    command, settings = [sys.executable, "-c", PROGRAM], {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "began True\nleft []\n"), ran.stderr

"""Two ranks, each in a process of its own: `run_ranks.py` is what they run."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
LIMIT_S = 900  # on a machine that does much else

Found = dict[str, dict[str, object]]


def run_ranks(folder: Path, kind: str) -> list[dict[str, Found]]:
    """Return what came of all cases, by group, on each of two ranks; both have ended by then, however that went."""
    settings = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    settings |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with contextlib.ExitStack() as ends:
        started = []
        for rank in range(2):
            command = [sys.executable, str(SUPPORT / "run_ranks.py"), str(rank), str(folder / "meeting"), kind]
            printed, errors = (ends.enter_context((folder / f"{name}{rank}").open("w")) for name in ("out", "err"))
            started.append(
                subprocess.Popen(command, env=os.environ | settings, cwd=folder, stdout=printed, stderr=errors)
            )
            ends.callback(started[-1].wait)
            ends.callback(started[-1].kill)
        until = time.monotonic() + LIMIT_S
        codes = [rank.wait(timeout=max(0.0, until - time.monotonic())) for rank in started]
    assert codes == [0, 0], "\n".join((folder / f"err{rank}").read_text()[-3000:] for rank in range(2))
    return [json.loads((folder / f"out{rank}").read_text().splitlines()[-1]) for rank in range(2)]

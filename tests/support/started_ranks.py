"""Two ranks, each in a process of its own: `run_ranks.py` starts them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
LIMIT_S = 900  # on a machine that does much else

Found = dict[str, dict[str, object]]


def run_ranks(folder: Path, kind: str) -> list[dict[str, Found]]:
    """Return what came of all cases, by group, on each of two ranks; both have ended by then, however that went."""
    settings = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    settings |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(SUPPORT / "run_ranks.py"), str(folder), kind]
    with (folder / "err").open("w") as errors:
        started = subprocess.Popen(
            command, env=os.environ | settings, cwd=folder, stderr=errors, start_new_session=True
        )
    try:
        code = started.wait(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # ranks that wait for one that has ended
        started.wait()
    assert code == 0, "\n".join(each.read_text()[-3000:] for each in sorted(folder.glob("err*")))
    return [json.loads((folder / f"out{rank}").read_text().splitlines()[-1]) for rank in range(2)]

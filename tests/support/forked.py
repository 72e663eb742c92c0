"""Children forked from a test's process: each does one thing, and is waited for no longer than it may take."""

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from conftest import collect

LIMIT_S = 60.0


def forked(deed: Callable[[], int]) -> int:
    """Return the process id of a child that does `deed` and ends with what that returns; with 255 if it raises.

    Garbage of other tests is collected before: what its destructors do in a child is not what a test is about.
    """
    collect()
    child = os.fork()
    if child == 0:
        code = 255
        try:
            code = deed()
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    return child


def exit_code(child: int, limit_s: float = LIMIT_S) -> int:
    """Wait for a child; return what it has ended with, which is negative for a signal. Fails if it does not end.

    Then the child is made to write where it hangs, to the stderr of all tests, if that is where crashes are written to.
    """
    until = time.monotonic() + limit_s
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            os.kill(child, signal.SIGABRT if faulthandler.is_enabled() else signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the forked process {child} did not end within {limit_s:g} s.")
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

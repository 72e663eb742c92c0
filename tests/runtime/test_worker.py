"""A worker serves whoever comes, at any time: signals are handled between any two lines."""

import itertools
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from types import FrameType

import pytest
from conftest import eventually

from tencache_fx.errors import InvariantError
from tencache_fx.runtime import worker
from tencache_fx.runtime.worker import Worker

OURS = {worker.__file__}
ALL = OURS | {threading.__file__}


def wait(worker: Worker, done: list[str]) -> None:
    worker.wait()


def submit(worker: Worker, done: list[str]) -> None:
    worker.start()
    worker.submit(lambda: done.append("handler"))
    worker.wait()
    assert done == ["handler"]


def interrupt(worker: Worker, done: list[str]) -> None:
    raise KeyboardInterrupt


def started(worker: Worker, at: int, files: set[str], handler: Callable[[], object]) -> bool:
    """Start the worker, and handle a signal at a line of that, in these files; return whether there is such a line."""
    lines = 0

    def handle_at_line(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        if event == "line" and lines == at:
            handler()
        return handle_at_line

    sys.settrace(handle_at_line)
    try:
        worker.start()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return lines >= at


@pytest.mark.parametrize(
    ("how", "files", "least"),
    [(wait, ALL, 20), (submit, OURS, 7), (interrupt, OURS, 7)],
    ids=["wait", "submit", "interrupt"],
)
def test_a_signal_may_come_at_each_line_of_a_start(
    how: Callable[[Worker, list[str]], None], files: set[str], least: int
) -> None:
    """Within `threading` itself it can only wait: Python starts no thread while it starts one."""
    for at in itertools.count(1):
        worker, done = Worker("tencache-test"), []
        found: list[bool] = []

        def body() -> None:
            found.append(started(worker, at, files, lambda: how(worker, done)))  # noqa: B023 - it is called in this round only
            worker.start()  # noqa: B023
            worker.submit(lambda: done.append("after"))  # noqa: B023
            worker.stop()  # noqa: B023

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), at
        assert done[-1] == "after"
        if not found[0]:
            break
    assert at > least


def test_the_thread_ends_with_the_last_that_could_give_it_work() -> None:
    worker, done = Worker("tencache-dropped"), threading.Event()
    worker.start()
    worker.submit(done.set)
    del worker
    assert done.wait(20)
    assert eventually(lambda: not any(thread.name.startswith("tencache-dropped") for thread in threading.enumerate()))


def test_several_threads_share_the_work_and_all_of_them_end() -> None:
    worker, together = Worker("tencache-both", 2), threading.Barrier(2)
    assert sorted(each.result(20) for each in [worker.begin(together.wait, 20) for _ in range(2)]) == [0, 1]
    failing = worker.begin(lambda: 1 // 0)
    assert isinstance(failing.exception(20), ZeroDivisionError)
    worker.stop()
    assert not any(thread.name.startswith("tencache-both") for thread in threading.enumerate())
    with pytest.raises(InvariantError, match="was given work after its end"):
        worker.begin(together.wait)


def test_what_has_not_begun_can_be_cancelled_one_by_one_or_at_the_end() -> None:
    worker, begun, gate = Worker("tencache-cancelled"), threading.Event(), threading.Event()
    first = worker.begin(lambda: begun.set() or gate.wait(20))
    assert begun.wait(20)
    one, other = (worker.begin(gate.is_set) for _ in range(2))
    assert one.cancel()
    stopping = threading.Thread(target=worker.stop, kwargs={"cancel": True})
    stopping.start()
    assert eventually(other.cancelled)
    gate.set()
    stopping.join(20)
    assert not stopping.is_alive()
    assert first.result() is True


class StoppedMeanwhile(Worker):
    """A worker that another thread stops between the start of its threads and the submission of work."""

    def submit(self, work: Callable[[], object]) -> None:
        self.stop()
        super().submit(work)


def test_work_that_comes_as_a_worker_is_stopped_is_refused_and_not_waited_for() -> None:
    done: list[str] = []
    with pytest.raises(InvariantError, match="after its end"):
        StoppedMeanwhile("tencache-stopped").begin(done.append, "done")
    assert not done


def ends(worker: Worker, *, cancel: bool) -> bool:
    """Return whether a wait ends that begins before a worker is stopped, and whose turn has not come by then."""
    gate, begun = threading.Event(), threading.Event()
    worker.begin(lambda: begun.set() or gate.wait(20))
    assert begun.wait(20)
    waiting = threading.Thread(target=worker.wait, daemon=True)
    waiting.start()
    stopping = threading.Thread(target=worker.stop, kwargs={"cancel": cancel}, daemon=True)
    threading.Timer(0.2, stopping.start).start()
    waiting.join(0.6)
    assert waiting.is_alive(), "it ended before the work that it waits for"
    gate.set()
    waiting.join(20)
    return not waiting.is_alive()


def test_a_wait_ends_with_the_work_if_a_worker_is_stopped_meanwhile() -> None:
    assert ends(Worker("tencache-cancelled"), cancel=True)
    assert ends(Worker("tencache-finished"), cancel=False)
    late = StoppedMeanwhile("tencache-late")
    late.start()
    waiting = threading.Thread(target=late.wait, daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()


def test_who_waits_for_several_hears_of_what_is_cancelled_at_the_end() -> None:
    worker, begun, gate = Worker("tencache-cancelled"), threading.Event(), threading.Event()
    worker.begin(lambda: begun.set() or gate.wait(20))
    assert begun.wait(20)
    other = worker.begin(gate.is_set)
    stopping = threading.Thread(target=worker.stop, kwargs={"cancel": True})
    stopping.start()
    assert eventually(other.cancelled)
    assert not futures.wait([other], timeout=5).not_done
    gate.set()
    stopping.join(20)

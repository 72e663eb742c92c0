"""Pieces that pass through the device, and two threads that share the work: nothing is lost, mixed up, or left."""

import concurrent.futures.thread
import gc
import itertools
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from hypothesis import given, settings
from hypothesis import strategies as st
from one_part_update import OnePart
from torch import Tensor

from tencache_fx.errors import InvariantError
from tencache_fx.model_state import update_queue
from tencache_fx.model_state.update_queue import Updates
from tencache_fx.model_state.update_room import Begun, Room
from tencache_fx.runtime import worker
from tencache_fx.runtime.streams import Event


@pytest.fixture
def streams() -> Iterator[FaultyCpuStreams]:
    made = FaultyCpuStreams(delay_s=0.001)
    yield made
    made.close()


@settings(max_examples=15)
@given(count=st.integers(1, 4000), room_bytes=st.integers(3 * 128 * 10, 30_000), seed=st.integers(0, 100))
def test_what_streams_through_is_what_was_computed_in_one_piece(count: int, room_bytes: int, seed: int) -> None:
    streams = FaultyCpuStreams(delay_s=0.0005, seed=seed)
    try:
        generator = torch.Generator().manual_seed(seed)
        change = torch.randn(count, generator=generator).bfloat16()
        total, rounded = torch.randn(count, generator=generator), torch.full((count,), -1.0).bfloat16()
        expected = total + change

        def work(pieces: list[Tensor]) -> None:
            given, kept, result = pieces
            kept.add_(given)
            result.copy_(kept)

        Room(streams, room_bytes).stream(count, [change, total], [total, rounded], work).synchronize()
        assert torch.equal(total, expected)
        assert torch.equal(rounded, expected.bfloat16())
    finally:
        streams.close()


@pytest.mark.parametrize("failing", range(14))
def test_each_copy_that_fails_is_told(failing: int) -> None:
    """Those of seven pieces: copies in, and copies out, of which nobody waits for each."""
    streams = FaultyCpuStreams(failing=[failing])
    change, total = torch.ones(4000), torch.zeros(4000)

    def work(pieces: list[Tensor]) -> None:
        pieces[1].add_(pieces[0])

    with pytest.raises(InvariantError, match="a copy between device and host memory failed"):
        Room(streams, 3 * 128 * 10 * 4).stream(4000, [change, total], [total], work).synchronize()
    assert streams.copies <= 14
    streams.close()


class ComputeBehind(FaultyCpuStreams):
    """Compute waits for copies and the host does not, as on a GPU."""

    last: Event | None = None

    def wait_compute(self, event: Event) -> None:
        self.last = event

    def record_compute(self) -> Event:
        return self.last or super().record_compute()


def test_the_copy_in_of_a_piece_that_fails_is_over_when_that_is_told() -> None:
    """Whoever is told may free the gradient."""
    streams = ComputeBehind()
    room, streams.gate = Room(streams, 3 * 128 * 10 * 4), threading.Event()
    threading.Timer(0.05, streams.gate.set).start()

    def work(pieces: list[Tensor]) -> None:
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        room.stream(100, [torch.ones(100)], [torch.ones(100)], work)
    assert streams.last is not None
    assert streams.last.query()
    streams.close()


class Noted(OnePart):
    """An update that says where it ran."""

    def __init__(self, name: str, done: list[str], gate: threading.Event | None = None) -> None:
        self.name, self.done, self.gate, self.begun = name, done, gate, threading.Event()

    def on_host(self, part: int) -> None:
        self.begun.set()
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.name == "broken":
            raise RuntimeError("injected")
        time.sleep(0.001)
        self.done.append(f"{self.name} on host")

    def on_device(self, part: int, room: Room) -> Begun:
        if self.name == "broken":
            raise RuntimeError("injected")
        time.sleep(0.001)
        return Begun(lambda: False, lambda: self.done.append(f"{self.name} on device"))

    def on_disk(self) -> Begun:
        return Begun(lambda: False, lambda: self.done.append(f"{self.name} on disk"))


def test_the_most_urgent_that_can_begin_goes_first(streams: FaultyCpuStreams) -> None:
    updates, done, gate = Updates(streams), [], threading.Event()
    holding = Noted("first", done, gate)
    first = updates.submit(holding, 9, lambda: True)
    assert holding.begun.wait(30)
    landed = threading.Event()
    others = [updates.submit(Noted(name, done), urgency, lambda: True) for name, urgency in (("b", 2), ("a", 1))]
    late = updates.submit(Noted("late", done), 0, landed.is_set)
    gate.set()
    for each in (first, *others):
        each.result(30)
    landed.set()
    late.result(30)
    updates.stop()
    assert done == ["first on host", "a on host", "b on host", "late on host"]


@pytest.mark.parametrize("on_device", [False, True])
def test_what_is_submitted_together_is_done_even_if_an_error_ends_it(
    streams: FaultyCpuStreams,
    on_device: bool,  # noqa: FBT001
) -> None:
    """A reader waits for the future of an update that was submitted, whatever came of the others."""
    updates, done = Updates(streams), []
    if on_device:
        updates.open_room(8 << 20)
    futures = []

    def submit_some() -> None:
        with updates.together() as submit:
            futures.extend(submit(Noted(name, done), 0, lambda: True) for name in ("0", "broken", "1", "2"))
            time.sleep(0.02)
            assert not done, "threads begin when all of them are there"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit_some()
    assert [type(future.exception(30)) for future in futures] == [type(None), RuntimeError, type(None), type(None)]
    updates.stop()
    assert sorted(line.split()[0] for line in done) == ["0", "1", "2"]


def test_whoever_waits_before_all_are_submitted_has_the_others_done(streams: FaultyCpuStreams) -> None:
    """A signal's handler that saves a checkpoint runs in the thread that submits."""
    updates, done = Updates(streams), []
    with updates.together() as submit:
        first, second = (submit(Noted(name, done), 0, lambda: True) for name in ("0", "1"))
        assert second.exception(30) is None
        last = submit(Noted("2", done), 0, lambda: True)
    assert last.result(30) is first.exception(30) is None
    updates.stop()
    assert done == ["0 on host", "1 on host", "2 on host"]


def test_a_handler_may_wait_at_each_line_of_a_submission(streams: FaultyCpuStreams) -> None:
    """Signals are handled between any two lines: here, at one after the other."""
    files = {module.__file__ for module in (update_queue, worker, queue, threading, concurrent.futures.thread)}
    waited = lines = 0
    for at in itertools.count(1):
        updates, done, futures, lines = Updates(streams), [], [], 0

        def wait_at_line(frame: FrameType, event: str, argument: object) -> object:
            nonlocal lines, waited
            if frame.f_code.co_filename not in files:
                return None
            lines += event == "line"
            if event == "line" and lines == at and futures:  # noqa: B023 - it is called in this round only
                waited += 1
                assert all(future.exception(30) is None for future in futures)  # noqa: B023
            return wait_at_line

        sys.settrace(wait_at_line)
        try:
            with updates.together() as submit:
                futures += [submit(Noted("0", done), 0, lambda: True)]
                futures += [submit(Noted("1", done), 0, lambda: True, on_disk=True)]
                futures += [submit(Noted("2", done), 0, lambda: True)]
        finally:
            sys.settrace(None)
        assert all(future.exception(30) is None for future in futures)
        updates.stop()
        assert sorted(line.split()[0] for line in done) == ["0", "1", "2"]
        if lines < at:
            break
    assert waited > 20


def test_both_threads_take_from_one_queue_and_one_failure_stops_nothing(streams: FaultyCpuStreams) -> None:
    updates, done = Updates(streams), []
    updates.open_room(8 << 20)
    assert updates.streams_through_device
    begin = threading.Event()
    names = [*map(str, range(30)), "broken", *map(str, range(30, 60))]
    futures = {name: updates.submit(Noted(name, done), 0, begin.is_set) for name in names}
    begin.set()
    with pytest.raises(RuntimeError, match="injected"):
        futures.pop("broken").result(30)
    for future in futures.values():
        future.result(30)
    updates.stop()
    assert sorted(int(line.split()[0]) for line in done) == list(range(60))
    assert {line.split()[-1] for line in done} == {"host", "device"}
    assert not any(thread.name.startswith("tencache-update") for thread in threading.enumerate())


def test_a_failure_beside_others_leaves_nothing_unfinished(streams: FaultyCpuStreams) -> None:
    """Also where the device was given to updates only after some had been handed in."""
    updates, done = Updates(streams), []
    begin = threading.Event()
    early = [updates.submit(Noted(f"{index}", done), 0, begin.is_set) for index in range(3)]
    updates.open_room(8 << 20)
    names = ["3", "broken", "4", "broken", "5"]
    late = [updates.submit(Noted(name, done), 0, begin.is_set) for name in names]
    begin.set()
    for future in (*early, *late):
        assert future.exception(30) is None or "injected" in str(future.exception())
    updates.stop()
    assert sorted(line.split()[0] for line in done) == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("on_device", [False, True])
def test_whoever_waits_finds_all_done_and_let_go(streams: FaultyCpuStreams, on_device: bool) -> None:  # noqa: FBT001
    updates, done = Updates(streams), []
    if on_device:
        updates.open_room(8 << 20)
    begin = threading.Event()
    noted = [Noted(f"{index}", done) for index in range(20)]
    held = [weakref.ref(each) for each in noted]
    for each in noted:
        updates.submit(each, 0, begin.is_set)
    del each, noted
    threading.Timer(0.05, begin.set).start()
    updates.wait()
    assert len(done) == 20
    gc.collect()
    assert not any(each() for each in held)
    updates.stop()


class Parts:
    """An update in parts that notes where each ran; some of them `fail`."""

    def __init__(self, parts: int, failing: frozenset[int]) -> None:
        self.parts, self.failing = parts, failing
        self.ran: list[tuple[int, str]] = []
        self.running, self.ended = 0, []

    def run(self, part: int, where: str) -> None:
        self.ran.append((part, where))
        time.sleep(0.0005)
        if part in self.failing:
            raise RuntimeError(f"injected in {part}")

    def on_host(self, part: int) -> None:
        assert not self.ended
        self.running += 1
        try:
            self.run(part, "host")
        finally:
            self.running -= 1

    def on_device(self, part: int, room: Room) -> Begun:
        assert not self.ended
        self.running += 1

        def finish() -> None:
            try:
                self.run(part, "device")
            finally:
                self.running -= 1

        return Begun(lambda: False, finish)

    def end(self, error: BaseException | None) -> None:
        assert not self.running, "none is under way"
        self.ended.append(error)


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.frozensets(st.integers(0, 8), max_size=1)), min_size=1, max_size=6),
    st.booleans(),
)
def test_each_part_runs_once_and_the_last_one_ends_the_update(
    all_parts: list[tuple[int, frozenset[int]]],
    on_device: bool,  # noqa: FBT001
) -> None:
    streams = FaultyCpuStreams()
    updates, made = Updates(streams), [Parts(count, failing) for count, failing in all_parts]
    if on_device:
        updates.open_room(8 << 20)
    begin = threading.Event()
    futures = [updates.submit(each, 0, begin.is_set) for each in made]
    begin.set()
    errors = [future.exception(30) for future in futures]
    updates.wait()
    updates.stop()
    streams.close()
    for each, error in zip(made, errors, strict=True):
        ran = [part for part, _ in each.ran]
        assert each.ended == [error]
        assert sorted(ran) == list(range(len(ran))), "the first ones first, each once"
        failed = sorted(each.failing & set(ran))
        assert (str(error) if error else None) == (f"injected in {failed[0]}" if failed else None)
        assert failed or len(ran) == each.parts


class Meeting(Parts):
    """An update of which each thread waits until the other one has begun a part."""

    def __init__(self, parts: int) -> None:
        super().__init__(parts, frozenset())
        self.on_host_begun, self.on_device_begun = threading.Event(), threading.Event()

    def on_host(self, part: int) -> None:
        self.on_host_begun.set()
        assert self.on_device_begun.wait(30)
        super().on_host(part)

    def on_device(self, part: int, room: Room) -> Begun:
        self.on_device_begun.set()
        assert self.on_host_begun.wait(30)
        return super().on_device(part, room)


def test_both_threads_share_one_update(streams: FaultyCpuStreams) -> None:
    updates, update = Updates(streams), Meeting(40)
    updates.open_room(8 << 20)
    updates.submit(update, 0, lambda: True).result(30)
    updates.stop()
    assert {where for _, where in update.ran} == {"host", "device"}
    assert len(update.ran) == 40


def test_room_that_is_too_small_to_be_of_use_is_not_taken(streams: FaultyCpuStreams) -> None:
    updates = Updates(streams)
    updates.open_room(1 << 20)
    assert not updates.streams_through_device


class Streamed(OnePart):
    """An update of so many pieces that passes through the device."""

    def __init__(self, pieces: int, ended: list[int], before: Callable[[], object] = lambda: None) -> None:
        self.pieces, self.ended, self.before = pieces, ended, before
        self.change, self.total = torch.ones(pieces * PIECE), torch.zeros(pieces * PIECE)
        self.issued = 0

    def on_device(self, part: int, room: Room) -> Begun:
        def work(pieces: list[Tensor]) -> None:
            self.issued += 1
            if self.issued == self.pieces:
                self.before()
            pieces[1].add_(pieces[0])

        last = room.stream(len(self.total), [self.change, self.total], [self.total], work)

        def finish() -> None:
            last.synchronize()
            self.ended.append(self.pieces)

        return Begun(last.query, finish)


PIECE = 1 << 18
ROOM_BYTES = 3 * PIECE * 8


def test_what_is_done_ends_while_a_long_one_is_still_issued() -> None:
    streams = FaultyCpuStreams(delay_s=0.002)
    updates, gate, ended = Updates(streams), threading.Event(), []
    updates.open_room(ROOM_BYTES)
    updates._on_host.start()
    updates._on_host.submit(lambda: gate.wait(30))  # busy with another one
    seen: list[list[int]] = []
    begin = threading.Event()
    small = updates.submit(Streamed(1, ended), 0, begin.is_set)
    large = updates.submit(Streamed(12, ended, lambda: seen.append(list(ended))), 1, begin.is_set)
    begin.set()
    small.result(30)
    large.result(30)
    gate.set()
    updates.stop()
    streams.close()
    assert seen == [[1]]  # before the last piece of the large one was issued
    assert ended == [1, 12]


def test_a_failed_copy_fails_one_update_only() -> None:
    streams = FaultyCpuStreams(failing=[3])
    room, right = Room(streams, ROOM_BYTES), []
    for _ in range(6):
        update = Streamed(2, [])
        try:
            update.on_device(0, room).finish()
        except InvariantError:
            right.append(False)
        else:
            right.append(bool((update.total == 1).all()))
    streams.close()
    assert right == [False, *[True] * 5]


@pytest.mark.parametrize("waits", [True, False], ids=["somebody waits", "nobody waits"])
def test_updates_that_are_handed_in_as_the_threads_are_stopped_are_done(
    streams: FaultyCpuStreams,
    waits: bool,  # noqa: FBT001
) -> None:
    """Another thread closes the engine in the midst of a step, and then waits for each parameter's update."""
    updates, done = Updates(streams), list[str]()
    with updates.together() as submit:
        works = [submit(Noted("first", done), 0, lambda: True)]
        works[0].exception(20)
        stopping = threading.Thread(target=updates.stop)
        stopping.start()
        stopping.join(20)
        assert not stopping.is_alive()
        works += [submit(Noted(name, done), 1, lambda: True) for name in ("second", "third")]
        if waits:
            assert works[1].exception(20) is None
    assert [work.exception(20) for work in works] == [None] * 3
    assert sorted(name.split()[0] for name in done) == ["first", "second", "third"]

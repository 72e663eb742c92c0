"""Objects that Python's collector knows are found while other threads make objects."""

import gc
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import tencache_fx
from tencache_fx.garbage import living
from tencache_fx.model_state.parameter_readers import modules_beside
from tencache_fx.region.optimizer_forecast import expected_state_bytes


class Kind:
    """What the tests look for."""


class Special(Kind):
    """One of its classes."""


class Pretender:
    """Says that it is something else, and cannot be asked."""

    @property
    def __class__(self):
        raise AssertionError("it was asked for its class")


def test_living_ones_are_found_whether_made_in_full_or_not():
    found = [Kind(), Special(), Special.__new__(Special)]
    pretender = Pretender()
    assert {id(each) for each in living(Kind)} == {id(each) for each in found}
    del found, pretender
    assert living(Kind) == []


def test_nothing_is_held_behind_it_and_the_collector_is_as_before():
    marker = ("one of all objects", [])
    references = sys.getrefcount(marker)
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            living(Kind)
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
    assert sys.getrefcount(marker) == references


@pytest.mark.parametrize("look", ["living", "expected_state_bytes", "modules_beside"])
def test_tuples_that_another_thread_makes_meanwhile_are_made(look):
    """Python gives a tuple its length at the end, and refuses to if anybody but its maker refers to it."""
    module = nn.Linear(2, 2)
    ways = {
        "living": lambda: living(Kind),
        "expected_state_bytes": lambda: expected_state_bytes(torch.device("cpu")),
        "modules_beside": lambda: modules_beside(module),
    }
    refused: list[SystemError] = []
    made, done = [0], threading.Event()

    def make() -> None:
        while not done.is_set():
            try:
                made[0] += len(tuple(int("1") for _ in range(30)))  # the iterator's bytecode lets other threads run
            except SystemError as error:
                refused.append(error)

    maker = threading.Thread(target=make)
    maker.start()
    try:
        until, looks = time.monotonic() + 1, 0
        while time.monotonic() < until or looks < 5:
            ways[look]()
            looks += 1
    finally:
        done.set()
        maker.join()
    assert made[0] > 30 * looks
    assert not refused


def test_the_list_of_all_objects_is_asked_for_in_one_place():
    package = Path(tencache_fx.__file__).parent
    asking = {file.name for file in package.rglob("*.py") if "get_objects" in file.read_text()}
    assert asking == {"garbage.py"}

"""Which parameters go to disk: as few as will do, and those that cost least there."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_fx.errors import BudgetError
from tencache_fx.model_state.disk_choice import Candidate, Room, choose_for_disk
from tencache_fx.model_state.passing_buffers import passing_bytes
from tencache_fx.units import PAGE_BYTES

MB = 256 * PAGE_BYTES


def candidate(name: str, nbytes: int, *, trained: bool = False, in_file: bool = False) -> Candidate:
    return Candidate(name=name, nbytes=nbytes, state_bytes=6 * nbytes, trained=trained, in_file=in_file)


def room(host_bytes: int, disk_bytes: int | None = 1 << 40) -> Room:
    return Room(
        host_budget_bytes=host_bytes, host_bytes=host_bytes, gradient_bytes=0, disk_bytes=disk_bytes, passing_bytes=0
    )


def test_what_fits_stays_in_host_memory() -> None:
    some = [candidate(str(k), MB) for k in range(8)]
    assert choose_for_disk(some, room(8 * MB)) == frozenset()
    assert choose_for_disk(some, room(8 * MB, None)) == frozenset()


def test_frozen_ones_go_before_trained_ones_and_those_in_files_before_others() -> None:
    frozen = [candidate(f"f{k}", MB) for k in range(20)]
    in_files = [candidate(f"w{k}", MB, in_file=True) for k in range(20)]
    trained = [candidate(f"t{k}", MB, trained=True) for k in range(10)]
    chosen = choose_for_disk([*trained, *frozen, *in_files], room(48 * MB))
    assert {name[0] for name in chosen} == {"w", "f"}
    assert {f"w{k}" for k in range(20)} <= chosen
    more = choose_for_disk([*trained, *frozen, *in_files], room(20 * MB))
    assert {f"{sort}{k}" for sort in "wf" for k in range(20)} < more


def test_a_large_one_stays_if_its_buffers_would_take_more_than_it_leaves() -> None:
    some = [candidate("large", 40 * MB), *(candidate(f"small{k}", MB) for k in range(80))]
    chosen = choose_for_disk(some, room(100 * MB))
    assert "large" not in chosen
    assert len(chosen) >= 20


def test_only_what_is_in_files_goes_to_disk_without_a_store() -> None:
    some = [*(candidate(f"w{k}", MB, in_file=True) for k in range(20)), *(candidate(f"f{k}", MB) for k in range(20))]
    chosen = choose_for_disk(some, room(35 * MB, None))
    assert chosen
    assert {name[0] for name in chosen} == {"w"}


def test_it_says_what_there_is_no_room_for() -> None:
    some = [candidate(str(k), MB) for k in range(40)]
    with pytest.raises(BudgetError, match=r"take 41\.9 MB; host memory has 10\.5 MB.*disk 5\.24 MB of spill_budget"):
        choose_for_disk(some, room(10 * MB, 5 * MB))


@given(
    st.lists(st.tuples(st.integers(1, 6 * PAGE_BYTES), st.booleans(), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 50),
)
def test_it_fits_wherever_any_choice_does(drawn: list[tuple[int, bool, bool]], host_pages: int) -> None:
    some = [
        candidate(str(k), nbytes, trained=trained, in_file=in_file and not trained)
        for k, (nbytes, trained, in_file) in enumerate(drawn)
    ]
    there = room(host_pages * PAGE_BYTES)

    def fits(on_disk: frozenset[str]) -> bool:
        staying = sum(-(-each.nbytes // PAGE_BYTES) * PAGE_BYTES for each in some if each.name not in on_disk)
        largest = max((each.nbytes for each in some if each.name in on_disk), default=0)
        return staying + passing_bytes(largest) <= there.host_bytes

    names = [each.name for each in some]
    choices = (frozenset(each) for count in range(len(names) + 1) for each in itertools.combinations(names, count))
    if any(map(fits, choices)):
        assert fits(choose_for_disk(some, there))
    else:
        with pytest.raises(BudgetError):
            choose_for_disk(some, there)

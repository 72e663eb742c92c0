"""What a user meets who reads an attribute by its old name: an error with the new one, as CHANGELOG lists them."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tencache_fx import optim
from tencache_fx.planning.plan import Plan, Transfer
from tencache_fx.planning.problem import Problem
from tencache_fx.renames import Renamed
from tencache_fx.reporting.fit_report import Fit, RegionFit
from tencache_fx.runtime.stats import Counts
from tencache_fx.serialization import from_json, to_json

CLASSES = (Fit, RegionFit, Plan, Problem, Transfer)
CHANGELOG = (Path(__file__).resolve().parents[1] / "CHANGELOG.md").read_text()


def old_names() -> Iterator[tuple[type, str]]:
    return ((cls, name) for cls in CLASSES for name, value in vars(cls).items() if isinstance(value, Renamed))


@pytest.mark.parametrize(("cls", "old"), list(old_names()), ids=lambda each: getattr(each, "__name__", each))
def test_an_old_attribute_names_the_new_one(cls: type, old: str) -> None:
    made = object.__new__(cls)
    with pytest.raises(
        AttributeError, match=rf"^{cls.__name__}\.{old} has a new name: {cls.__name__}\.(\w+)\.$"
    ) as error:
        getattr(made, old)
    new = str(error.value).split(".")[-2]
    assert hasattr(cls, new)
    assert not hasattr(made, old), "as for any attribute that is not there"
    assert old not in {field.name for field in dataclasses.fields(cls)}
    assert f"`{new}`" in CHANGELOG or f".{new}`" in CHANGELOG


def test_all_that_the_changelog_renames_is_here() -> None:
    rows = re.findall(r"^  \| (.*) \| .* \|$", CHANGELOG, re.MULTILINE)
    listed = {
        tuple(name.split(".")) for row in rows for name in re.findall(r"`((?:Fit|RegionFit|Plan|Problem)\.\w+)`", row)
    }
    assert listed == {(cls.__name__, old) for cls, old in old_names() if cls is not Transfer}
    assert len(listed) == 6
    assert {old for cls, old in old_names() if cls is Transfer} == {"offload", "gone", "fetch", "way"}


def test_old_names_outside_of_classes() -> None:
    with pytest.raises(AttributeError, match="HomeOptimizer has a new name: tencache_fx.optim.OffloadedOptimizer"):
        _ = optim.HomeOptimizer
    with pytest.raises(KeyError, match=r"trips has a new name: stats\(\).transfers"):
        _ = Counts(transfers=0)["trips"]


def test_values_with_old_names_are_values_as_before() -> None:
    fit = RegionFit(name="region", steps=1, floor_bytes=1, buffer_bytes=5)
    assert from_json(RegionFit, to_json(fit)) == fit
    assert dataclasses.replace(fit, steps=2).buffer_bytes == 5

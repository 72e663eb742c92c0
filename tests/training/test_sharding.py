"""Two ranks over gloo train a model that `offload(model, shard=True)` spreads over them."""

import re
from pathlib import Path

import pytest
from started_ranks import Found, run_ranks
from torch import nn

import tencache_fx
from tencache_fx.errors import OptionError
from tencache_fx.hardware.collective_rates import FIXED_RATES

NEAR = 2e-5  # what three steps of AdamW, at a rate of 1e-3, make of sums in another order


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_ranks(tmp_path_factory.mktemp("spread"), "spread")


@pytest.fixture(scope="module")
def others(ranks: list[dict[str, Found]]) -> list[Found]:
    return [found["others"] for found in ranks]


def test_ranks_train_as_one_process_would(ranks):
    assert_trained([found["training"] for found in ranks], 5)


@pytest.mark.slow
def test_ranks_train_as_one_process_would_in_every_way(tmp_path: Path):
    assert_trained([found["training"] for found in run_ranks(tmp_path, "spread, slow")], 10)


def assert_trained(ranks: list[Found], count: int) -> None:
    """Fail for what came out otherwise than in one process, or otherwise on one rank, or was not spread."""
    first, second = ranks
    assert len(first) == len(second) == count
    for name, found in first.items():
        assert 0 <= found["off by"] < NEAR, (name, found)
        assert found["digest"] == second[name]["digest"], name
        assert found["gradients in host memory"] is True, name
        assert (found["gathers in a backward"] > 0) == ("uncompiled" not in name), name
        moved = found["transfers"] > 0 or second[name]["transfers"] > 0  # a rank may have room for all
        assert moved == ("uncompiled" not in name), name
        here = found["updated on the device"] + second[name]["updated on the device"]
        assert here > 0 or "room for state" not in name, name
        assert found["bytes"] / 2 <= found["host bytes"] < found["bytes"] / 2 * 1.01, name


def test_no_rank_has_a_model_on_meta_whole(others):
    for found in (each["meta"] for each in others):
        assert found["off by"] == 0
        assert found["most"] < found["all"] * 0.7, "what is made, and what is spread already"
    assert others[0]["meta"]["digest"] == others[1]["meta"]["digest"]


def test_summon_has_all_of_a_parameter(others):
    for found in (each["summon"] for each in others):
        assert found == {"size": [641, 161], "off by": 0.0, "part": [321, 161]}


def test_collectives_are_in_the_plan_at_the_rates_of_their_group(others):
    """Both ranks plan with the same rates; one that does not calibrate makes both take the fixed ones."""
    first, second = (found["in the plan"] for found in others)
    fixed = [FIXED_RATES["cpu"].latency_ns, FIXED_RATES["cpu"].bytes_per_s]
    assert first["rates"] == second["rates"]
    measured, unmeasured, kept = first["rates"]
    assert unmeasured == fixed != measured == kept
    for found in (first, second):
        assert 0 <= found["off by"] < NEAR
        assert found["rates in the plan"] == [kept]
        assert found["ranks"] == [2]
        assert found["kinds"] == {"all gather": 12, "reduce scatter": 6, "all reduce": 9}
        assert found["under way"] == 0
        exposed_ns, busy_ns = found["exposed"]
        assert exposed_ns == busy_ns > 0, "over gloo, each is waited for at once"
        assert re.search(r"collectives +\S+ \S+ under way, \S+ \S+ of it exposed", found["report"])


def test_a_tied_parameter_is_spread_once(others):
    for found in (each["tied"] for each in others):
        assert 0 <= found["off by"] < 1e-6
        assert found["parts"] == 1


def test_frozen_integers_are_spread(others):
    for found in (each["frozen integers"] for each in others):
        assert found == {"off by": 0, "part": [321, 161]}


def test_no_rank_takes_a_step_that_overflows_on_one(others):
    first, second = (each["scaled"] for each in others)
    assert first == second
    assert first["changed"] == [True, False, True]
    assert first["scales"] == [1024.0, 512.0, 512.0]


def test_checkpoints_are_for_any_number_of_ranks(others):
    for found in (each["checkpoints"] for each in others):
        assert found.pop("kinds") == ["DTensor", "Tensor"]
        assert found.pop("padding") == 0.0
        assert len(found) == 7
        for name, off_by in found.items():
            assert 0 <= off_by < (NEAR if "later" in name else 1e-30), (name, found)


def test_state_in_8_bits_goes_on_to_the_last_bit(others):
    for found in (each["8 bits"] for each in others):
        assert found == {"off by": 0.0, "kept in": ["torch.float32", "torch.uint8"]}


def test_split_masters_go_on_to_the_last_bit(others):
    for found in (each["split masters"] for each in others):
        assert found == {"off by": 0.0, "masters off by": 0.0, "split": 6}


@pytest.mark.parametrize(
    ("name", "start"),
    [
        (
            "two dimensions",
            "OptionError: shard= is a DeviceMesh of 2 dimensions; give one of one dimension, such as mesh",
        ),
        ("no ranks", "OptionError: shard='all' names no ranks"),
        ("whole already", "OptionError: 0.wide.weight is offloaded to host memory as a whole already"),
        ("LSTM", "OptionError: module 0 (LSTM) passes its parameters"),
        ("max_norm", "OptionError: module 0 (Embedding) writes to its parameter"),
        ("read", "UsageError: 0.wide.weight is spread over 2 ranks, and nothing has loaded this rank's part"),
        ("read for a checkpoint", "For a checkpoint take model.state_dict() and optimizer.state_dict(); get"),
        ("pickle", "UsageError: a Linear whose parameters are spread over ranks cannot be copied or pickled"),
        ("backward inside summon", "UsageError: 2.narrow.weight got a gradient inside summon"),
        ("other norm, compiled", "UsageError: a gradient of size (321, 161) is this rank's part of one"),
        ("other norm, uncompiled", "UsageError: a gradient of size (321, 161) is this rank's part of one"),
    ],
)
def test_what_cannot_be_spread_is_refused(others, name, start):
    for found in (each["refusals"] for each in others):
        assert found[name].startswith(start), found[name]
        assert found["rows of a mesh of one dimension"] == 321


def test_without_ranks_nothing_can_be_spread():
    with pytest.raises(OptionError, match="spreads a model over ranks, and there are none; call init_process_group"):
        tencache_fx.offload(nn.Linear(256, 256), "cpu", shard=True)

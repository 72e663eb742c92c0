"""Two ranks agree on which matrix products run again, and so on the order of their collectives."""

from pathlib import Path

import pytest
from started_ranks import Found, run_ranks

NEAR = 2e-5  # what two steps of AdamW, at a rate of 1e-3, make of sums in another order


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return trained(tmp_path_factory.mktemp("agreement"), "agreement")


def trained(folder: Path, kind: str) -> list[Found]:
    return [found["training"] for found in run_ranks(folder, kind)]


def assert_trained(ranks: list[Found], count: int) -> None:
    """Fail for what came out otherwise than in one process, or in another order on one rank."""
    first, second = ranks
    assert len(first) == len(second) == count
    for name, found in first.items():
        other = second[name]
        assert 0 <= found["off by"] < NEAR, (name, found)
        assert found["digest"] == other["digest"], name
        assert found["order"] == other["order"], name
        assert sum("gather" in each for each in found["order"]) == 12, name


def test_ranks_train_as_one_process_would_in_one_order(ranks: list[Found]):
    assert_trained(ranks, 4)


def test_both_run_the_same_products_again(ranks: list[Found]):
    first, second = (found["other sizes"]["products again"] for found in ranks)
    assert first == second > 0


def test_who_comes_later_runs_as_many_products_again_and_chooses_all_else(ranks: list[Found]):
    roomy, tight = (found["roomy first"] for found in ranks)
    assert roomy["products again"] == tight["products again"] == 0
    assert roomy["runs again"] == []
    assert tight["runs again"] != []
    assert tight["peak"] < 4.4e6 < roomy["peak"]
    roomy, tight = (found["tight first"] for found in ranks)
    assert roomy["products again"] == tight["products again"] > 0
    assert roomy["runs again"] == [], "of its own choice"
    assert tight["peak"] < 4.4e6 < roomy["peak"]


def test_who_has_other_nodes_keeps_to_the_order(ranks: list[Found]):
    assert ranks[0]["other nodes"]["products again"] > 0
    assert ranks[1]["other nodes"]["products again"] == 0


@pytest.mark.slow
def test_ranks_agree_in_every_way(tmp_path: Path):
    first, second = ranks = trained(tmp_path, "agreement, slow")
    assert_trained(ranks, 4)
    products = {name: (first[name]["products again"], second[name]["products again"]) for name in first}
    assert products["Inductor"][0] == products["Inductor"][1] > 0
    assert products["both tight"][0] == products["both tight"][1] > 0
    assert products["Inductor, roomy first"] == (0, 0)
    assert products["other nodes first"][0] == 0 < products["other nodes first"][1]

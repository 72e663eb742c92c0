"""Two ranks agree on which matrix products run again, and so on the order of their collectives."""

from pathlib import Path

import pytest
from started_ranks import Found, run_ranks

NEAR = 2e-5  # what two steps of AdamW, at a rate of 1e-3, make of sums in another order


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_ranks(tmp_path_factory.mktemp("agreement"), "agreement")


@pytest.fixture(scope="module")
def ranks(found: list[dict[str, Found]]) -> list[Found]:
    return [each["training"] for each in found]


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


def test_both_run_the_same_products_again_for_sizes_that_change(ranks: list[Found]):
    for found in (each["other sizes"] for each in ranks):
        assert found["compilations"] == 2, "the second one with symbols"
        assert found["products again"] == ranks[0]["other sizes"]["products again"] > 0


def test_what_runs_other_collectives_is_agreed_on_by_itself(found: list[dict[str, Found]]):
    for each in (rank["others"]["gradient of the input"] for rank in found):
        assert each["gathers"] == [3, 4]
        assert each["off by"] < NEAR


def test_products_behind_gathers_of_others_do_not_run_again(found: list[dict[str, Found]]):
    first, second = (each["others"]["own gathers"] for each in found)
    assert first["order"] == second["order"]
    assert first["runs again"] == [] != second["runs again"]
    assert max(first["off by"], second["off by"]) < NEAR


def test_who_comes_later_runs_as_many_products_again_and_chooses_all_else(ranks: list[Found]):
    roomy, tight = (found["roomy first"] for found in ranks)
    assert roomy["products again"] == tight["products again"] == 0
    assert roomy["runs again"] == []
    assert tight["runs again"] != []
    assert tight["peak"] <= 4.0e6 < roomy["peak"]
    roomy, tight = (found["tight first"] for found in ranks)
    assert roomy["products again"] == tight["products again"] > 0
    assert roomy["runs again"] == [], "of its own choice"
    assert tight["peak"] <= 4.0e6 < roomy["peak"]


def test_who_has_other_nodes_keeps_to_the_order(ranks: list[Found]):
    assert ranks[0]["other nodes"]["products again"] > 0
    assert ranks[1]["other nodes"]["products again"] == 0


def test_what_a_backward_gathers_does_not_depend_on_sizes(found: list[dict[str, Found]]):
    first, second = (each["others"]["indexed"] for each in found)
    assert first["order"] == second["order"]
    assert sum("gather" in each for each in first["order"]) == 3
    assert max(first["off by"], second["off by"]) < NEAR


@pytest.mark.slow
def test_ranks_agree_in_every_way(tmp_path: Path):
    first, second = ranks = [each["training"] for each in run_ranks(tmp_path, "agreement, slow")]
    assert_trained(ranks, 5)
    assert all("BudgetError" in found["after a failure"]["refusal"] for found in ranks)
    products = {name: (first[name]["products again"], second[name]["products again"]) for name in first}
    assert products["Inductor"][0] == products["Inductor"][1] > 0
    assert products["both tight"][0] == products["both tight"][1] > 0
    assert products["after a failure"][0] == products["after a failure"][1] > 0, "nothing was agreed on without a plan"
    assert products["Inductor, roomy first"] == (0, 0)
    assert products["other nodes first"][0] == 0 < products["other nodes first"][1]

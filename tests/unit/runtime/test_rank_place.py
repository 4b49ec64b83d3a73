"""The place of a process among the ranks that share a model, as torchrun tells it."""

from __future__ import annotations

import pytest

from services.runtime.config import SettingsError
from services.runtime.rank_place import RankPlace, rank_place, rank_variables

VARIABLES = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_what_torchrun_sets() -> None:
    assert rank_place(VARIABLES) == RankPlace(5, 8, 1, 4, "10.0.0.1")


def test_one_process_of_a_host_need_not_say_so() -> None:
    variables = {name: value for name, value in VARIABLES.items() if not name.startswith("LOCAL")}
    assert rank_place(variables) == RankPlace(5, 8, 0, 1, "10.0.0.1")


@pytest.mark.parametrize("variables", [{}, {"RANK": "3"}, {"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": ""}])
def test_a_process_that_is_alone(variables: dict[str, str]) -> None:
    assert rank_place(variables) is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"RANK": "8"}, "RANK 8 must be less than WORLD_SIZE 8"),
        ({"RANK": ""}, "RANK must be a whole number, not ''"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, not 'two'"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK 4 must be less than LOCAL_WORLD_SIZE 4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE 9, at most 8"),
        ({"MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT do not say"),
    ],
)
def test_variables_that_cannot_be_are_named(changes: dict[str, str], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        rank_place(VARIABLES | changes)


def test_what_the_launcher_sets_is_read_back() -> None:
    assert rank_place(rank_variables(1, 2, 4000)) == RankPlace(1, 2, 1, 2, "127.0.0.1")

"""How many processes can share a model, by the fields of its configuration that are there."""

from __future__ import annotations

import pytest

from services.model_files.rank_limits import sharing_problem

FIELDS: dict[str, object] = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}


@pytest.mark.parametrize(
    ("changes", "most", "scarce"),
    [
        ({}, 9, "num_attention_heads 9 with num_key_value_heads 3"),
        ({"num_key_value_heads": None}, 9, "num_attention_heads 9"),
        ({"intermediate_size": 5}, 5, "intermediate_size 5"),
        ({"vocab_size": 2}, 2, "vocab_size 2"),
    ],
)
def test_the_field_that_allows_fewest_ranks_is_named_and_how_many(
    changes: dict[str, object], most: int, scarce: str
) -> None:
    assert sharing_problem(FIELDS | changes, most) == ""
    problem = sharing_problem(FIELDS | changes, most + 1)
    assert problem == (
        f"--tp-size {most + 1}: {scarce} can be shared by at most {most} ranks; set --tp-size {most} or less"
    )


@pytest.mark.parametrize("config", [{}, {"num_attention_heads": "9", "vocab_size": 0}])
def test_what_a_configuration_does_not_say_is_left_to_the_worker(config: dict[str, object]) -> None:
    assert sharing_problem(config, 64) == ""

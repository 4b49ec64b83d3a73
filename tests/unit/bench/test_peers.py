"""The bench of peers: which of them counts, what a line says, and that a peer that does not start is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.peers import LOADS, Load, best_peer, llama_server, summary, workload_of
from services.launcher.errors import CommandError

RATE, FIRST_TOKEN = LOADS[0], LOADS[-1]
FOUND = {
    "tokenway": [20.0, 30.0, 40.0],
    "a.gguf": [10.0, 15.0, 10.0],
    "b.gguf": [9.0, 9.0, 99.0],
    "transformers": [99.0, 99.0, 99.0],
}


def test_the_best_of_the_files_counts_by_its_median() -> None:
    assert best_peer(RATE, FOUND) == "a.gguf"
    assert best_peer(FIRST_TOKEN, FOUND) == "b.gguf"


def test_a_ratio_is_the_median_of_those_within_a_round() -> None:
    name, unit, ours, others, ratio = summary(RATE, FOUND)
    assert (name, unit, ours) == (RATE.name, "output tok/s", "30.0")
    assert others == "a.gguf 10.0, b.gguf 9.0, transformers 99.0"
    assert ratio == "2.00 (a.gguf)"


@pytest.mark.parametrize("chosen", LOADS)
def test_prompts_are_as_long_as_said_and_share_what_they_are_to_share(chosen: Load) -> None:
    first, second = (list(workload_of(chosen, 5).session(number).turns[0].prompt) for number in (0, 1))
    assert len(first) == len(second) == chosen.shared + chosen.prompt
    assert first[: chosen.shared] == second[: chosen.shared]
    assert first[chosen.shared :] != second[chosen.shared :]
    assert len(first) + chosen.output < chosen.tokens_of_a_slot


def test_a_peer_that_ends_at_once_is_told() -> None:
    program = Path(sys.executable)  # it knows none of these flags
    with pytest.raises(CommandError, match="llama-server ended with status"), llama_server(program, program, 1, RATE):
        pass

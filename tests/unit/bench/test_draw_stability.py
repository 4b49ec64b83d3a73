"""The bench of draws under rounding: both computations are of the same tokens, and what differs is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.draw_stability import Logits, compute_logits, count_changes
from bench.random_checkpoints import write_checkpoint
from services.gpu_worker.weights import load_model
from services.model_files.source import open_model

NUM_TOKENS = 5
PROMPTS = [[3, 1, 4], [1] * 20, [7]]


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> Logits:
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")
    said: list[str] = []
    found = compute_logits(load_model(open_model(folder), torch.device("cpu")), PROMPTS, NUM_TOKENS, said.append)
    assert len(said) == len(PROMPTS) + 1
    return found


def test_a_text_alone_and_in_the_batch_has_the_same_logits_to_within_rounding(logits: Logits) -> None:
    assert logits.alone.shape == logits.together.shape == (len(PROMPTS) * NUM_TOKENS, logits.alone.shape[1])
    assert logits.positions.tolist() == [len(prompt) + index for prompt in PROMPTS for index in range(NUM_TOKENS)]
    assert logits.largest_difference < 1e-3
    assert float((logits.alone[0] - logits.alone[-1]).abs().max()) > 1e-2


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_draws_that_differ_are_counted(logits: Logits, top_p: float) -> None:
    same = count_changes(replace(logits, together=logits.alone), top_p, 4)
    assert (same.num_draws, same.num_changed) == (len(PROMPTS) * NUM_TOKENS * 4, 0)
    other = count_changes(replace(logits, together=-logits.alone), top_p, 4)
    assert other.num_changed > other.num_draws / 2

"""The bench of a step's cost: what it compares runs the same rows, and the wishes that it leaves out are left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.random_checkpoints import write_checkpoint
from bench.step_cost import SAMPLING, DecodingRows, PlainRows, measure
from services.gpu_worker.weights import RunnableModel, load_model
from services.model_files.source import open_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RunnableModel:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")
    loaded = load_model(open_model(folder), torch.device("cpu"))
    return RunnableModel(loaded.config, loaded.weights, loaded.report)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_steps_with_and_without_wishes_go_on_with_the_same_rows(model: RunnableModel, sampling: str) -> None:
    rows = DecodingRows(model, 3, 20, 20, sampling)
    times = measure(rows, 2)
    assert len(times.whole) == len(times.plain) == len(times.forward) == 2
    assert rows.runner.newest.context_lengths == (30, 30, 30)  # two tokens a round, three rounds to warm up


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_step_without_wishes_picks_what_the_whole_one_picks(model: RunnableModel, sampling: str) -> None:
    whole, plain = (DecodingRows(model, 3, 20, 8, sampling) for _ in range(2))
    plain.state.options = PlainRows(plain.state.options)
    for _ in range(5):
        whole.decode()
        plain.decode()
        assert torch.equal(whole.runner.newest.input_ids, plain.runner.newest.input_ids)


def test_steps_with_proposals_are_steps_of_the_same_row(model: RunnableModel) -> None:
    """Whatever stands of the proposals by chance, the row goes on as it does without."""
    verified, plain = (DecodingRows(model, 1, 20, 40, "greedy") for _ in range(2))
    for _ in range(4):
        assert verified.verify(3) > 0
        verified.decode()
    length = verified.runner.newest.context_lengths[0]
    while plain.decode() and plain.runner.newest.context_lengths[0] < length:
        pass
    assert torch.equal(verified.runner.newest.input_ids, plain.runner.newest.input_ids)

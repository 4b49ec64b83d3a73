"""The bench of fast numerics: what it compares are the same positions, and differences are told."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch

from bench.numerics_agreement import Writer, agreement_of, compare, joined
from bench.random_checkpoints import write_checkpoint
from services.gpu_worker.weights import load_model
from services.launcher.running_status import RunningStatus
from services.launcher.terminal import Terminal
from services.model_files.source import open_model


def test_a_text_has_the_same_logits_as_it_is_written_and_as_a_whole(tmp_path: Path) -> None:
    model = load_model(open_model(write_checkpoint(tmp_path / "llama", "llama")), torch.device("cpu"))
    writer = Writer(model.config, model.weights, 1, 12, is_exact=True)
    text = writer.continuation([3, 1, 4], 9)
    assert len(text) == 12
    likeliest = writer.logits(text).argmax(-1).tolist()
    assert likeliest[2:-1] == text[3:]


def test_texts_that_join_one_after_another_are_what_they_are_alone_where_nothing_rounds(tmp_path: Path) -> None:
    model = load_model(open_model(write_checkpoint(tmp_path / "llama", "llama")), torch.device("cpu"))
    writer = Writer(model.config, model.weights, 3, 20, is_exact=True)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
    together = writer.continuations(prompts, 15)
    assert together == [writer.continuation(prompt, 15) for prompt in prompts]


class Told(RunningStatus):
    """What is shown, all of it; only the newest of a terminal's lines is certain to be seen."""

    def __init__(self) -> None:
        super().__init__(Terminal(io.StringIO()))
        self.shown: list[str] = []

    def show(self, text: str) -> None:
        self.shown.append(text)


def test_a_comparison_tells_what_it_computes_and_each_text_that_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(open_model(write_checkpoint(tmp_path / "llama", "llama")), torch.device("cpu"))
    writer = Writer(model.config, model.weights, 2, 9, is_exact=True)
    status = Told()
    found = compare(writer, writer, [[3, 1, 4], [5]], 6, status)
    assert (found.num_same, found.num_same_together) == (2, 2)
    assert [text.partition(":")[0] for text in status.shown] == [
        *["text 1 of 2"] * 3, *["text 2 of 2"] * 3, "2 texts written together",
    ]  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": divergence ")[0] for line in lines] == ["text 1 of 2", "text 2 of 2"]


def test_a_divergence_is_that_of_two_distributions() -> None:
    exact = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    same = agreement_of(exact, exact + 5)
    assert same.mean == pytest.approx(0, abs=1e-9)
    assert same.same_share == 1
    other = agreement_of(exact[:1], torch.tensor([[math.log(3), 0.0]]))  # 1/2, 1/2 against 3/4, 1/4
    assert other.mean == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    both = joined([same, agreement_of(exact, -exact)])
    assert (len(both.divergences), both.same_share) == (4, 0.75)

"""What tests of a group share: the steps that every model runs, and two processes that are its ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.launcher.port import free_ports
from services.runtime.rank_place import rank_variables
from tests.integration.server import environment

PAGE_SIZE = 4
_FIRST, _SECOND = list(range(1, 24)), [7, 3, 90, 55, 7]
_PAGES = {"first": [5, 2, 9, 0, 7, 11], "second": [1, 3]}
RANK_TIMEOUT_S = 110.0


def is_exact(name: str) -> bool:
    """Whether a model's products are computed in float32, by its folder's name."""
    return not name.endswith("-fast")


def run_steps(runner: ModelRunner) -> Tensor:
    """A prompt in two chunks beside another one's decode, a step of recorded shape: logits of every token."""
    with torch.inference_mode():
        return torch.cat(
            [
                _logits(runner, StepRow(_FIRST[:9], 0, _PAGES["first"], True)),
                _logits(
                    runner,
                    StepRow(_FIRST[9:22], 9, _PAGES["first"], True),
                    StepRow(_SECOND[:4], 0, _PAGES["second"], True),
                ),
                _decode(runner, StepRow(_FIRST[22:], 22, _PAGES["first"], True), StepRow(_SECOND[4:], 4, [1, 3], True)),
            ]
        )


def start_ranks(command: list[str], **settings: object) -> list[subprocess.Popen[str]]:
    """Two processes that run this command of Python, each with its place in a group."""
    (port,) = free_ports(1)
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment(**settings) | rank_variables(rank, 2, port) | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def logits_of_two_ranks(directory: Path) -> None:
    """Has two ranks go through the models of a directory; see `rank_process`."""
    ranks = start_ranks(["-m", "tests.unit.gpu_worker.parallel.rank_process", str(directory)])
    try:
        outputs = [rank.communicate(timeout=RANK_TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)


def _logits(runner: ModelRunner, *rows: StepRow) -> Tensor:
    inputs = build_step_inputs(rows, PAGE_SIZE, torch.device("cpu"))
    hidden = runner.hidden(inputs)
    return runner.logits(runner.normed(hidden, torch.arange(inputs.num_tokens)))


def _decode(runner: ModelRunner, *rows: StepRow) -> Tensor:
    inputs = build_step_inputs(rows, PAGE_SIZE, torch.device("cpu"))
    return runner.logits(runner.states(inputs)[1])

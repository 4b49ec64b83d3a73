"""What is told while weights are read by a process without a terminal, such as a child of the launcher."""

from __future__ import annotations

import logging

import pytest

from services.gpu_worker.load_progress import LoadProgress


def test_a_log_tells_every_five_seconds_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    seconds = iter([0.0, 4.9, 5.0, 7.0, 10.5])
    pumped: list[int] = []
    caplog.set_level(logging.INFO)
    with LoadProgress("model", lambda: pumped.append(1), lambda: next(seconds)) as progress:
        for num_bytes in (1, 2_000_000, 3_000_000, 8_000_000):
            progress(num_bytes, 10_000_000)
    assert caplog.messages == ["loading model: 2 of 10 MB", "loading model: 8 of 10 MB"]
    assert len(pumped) == 4

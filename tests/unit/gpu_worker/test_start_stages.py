"""Where the time of a start goes: each moment to one stage, and compilation apart wherever it happens."""

from __future__ import annotations

import logging
from time import perf_counter

import pytest

from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.start_stages import StartStage, StartStages


def test_each_moment_is_that_of_the_innermost_stage(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seconds = iter([0.0, 1.0, 3.0, 3.5, 10.0, 12.0])
    with StartStages(2.5, lambda: next(seconds)) as stages:
        with stages.within(StartStage.WEIGHTS), stages.within(StartStage.FORMS):
            pass
        stages.log()
    assert stages.seconds == {
        StartStage.LIBRARIES: 2.5 + 1.0 + 2.0, StartStage.WEIGHTS: 2.0 + 6.5, StartStage.FORMS: 0.5,
    }  # fmt: skip
    assert caplog.messages == ["start: 14.5 s (libraries 5.5 s, weights 8.5 s, forms 0.5 s)"]


def test_a_stage_ends_with_an_error_too() -> None:
    seconds = iter([0.0, 1.0, 2.0, 5.0])
    stages = StartStages(clock=lambda: next(seconds))
    with pytest.raises(ValueError, match="no model"), stages.within(StartStage.WEIGHTS):
        raise ValueError("no model")
    stages.begin(StartStage.LIMITS)
    assert stages.seconds == {StartStage.LIBRARIES: 1.0 + 3.0, StartStage.WEIGHTS: 1.0}


@pytest.mark.skipif(loops_problem() is not None, reason="nothing is compiled here")
def test_what_is_compiled_within_a_stage_is_a_stage_of_its_own_until_the_start_is_over() -> None:
    from numba import njit

    def compile_one() -> float:
        began_s = perf_counter()
        assert njit(lambda number: number * 3 + 1)(5) == 16
        return perf_counter() - began_s

    with StartStages() as stages:
        stages.watch_compilation()
        known_s = stages.seconds[StartStage.COMPILE]
        with stages.within(StartStage.WARM_UP):
            took_s = compile_one()
    compile_s = stages.seconds[StartStage.COMPILE] - known_s
    assert 0 < compile_s <= took_s
    assert compile_s + stages.seconds[StartStage.WARM_UP] >= took_s
    before = dict(stages.seconds)
    compile_one()
    assert stages.seconds == before

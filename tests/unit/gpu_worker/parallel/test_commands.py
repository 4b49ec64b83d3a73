"""Commands of rank 0: what is packed is unpacked, however many numbers there are."""

from __future__ import annotations

import sys
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.parallel.commands import (
    HEAD_NUMBERS,
    Command,
    Operation,
    first_frame,
    packed,
    packed_length,
    rest_of,
    step_sizes,
    unpacked,
    whole_command,
)
from services.gpu_worker.parallel.network_interface import interface_of
from services.gpu_worker.step_inputs import StepInputs, StepRow, build_step_inputs

PAGE_SIZE = 4


@pytest.mark.parametrize("count", [0, 1, HEAD_NUMBERS - 2, HEAD_NUMBERS - 1, 3 * HEAD_NUMBERS])
@pytest.mark.parametrize("operation", Operation)
def test_a_command_of_any_length(operation: Operation, count: int) -> None:
    command = Command(operation, list(range(-1, count - 1)))
    first, rest = first_frame(command), rest_of(command)
    assert first.shape == (HEAD_NUMBERS,)
    expected = rest_of(first)
    assert (expected is None) == (rest is None)
    if rest is not None and expected is not None:
        assert expected.shape == rest.shape
    assert whole_command(first, rest) == command


@st.composite
def steps(draw: st.DrawFn) -> StepInputs:
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        computed, count = draw(st.integers(0, 9)), draw(st.integers(1, 6))
        pages = draw(st.lists(st.integers(0, 99), min_size=-(-(computed + count) // PAGE_SIZE), max_size=6))
        ids = draw(st.lists(st.integers(0, 10**6), min_size=count, max_size=count))
        rows.append(StepRow(ids, computed, pages, draw(st.booleans())))
    return build_step_inputs(rows, PAGE_SIZE, torch.device("cpu"))


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_step_is_the_same_on_the_other_side(step: StepInputs) -> None:
    sizes, tensor = step_sizes(step), packed(step)
    assert tensor.shape == (packed_length(sizes),)
    found = unpacked(sizes, tensor)
    for field in fields(StepInputs):
        own, other = getattr(step, field.name), getattr(found, field.name)
        assert torch.equal(own, other) if isinstance(own, torch.Tensor) else own == other, field.name


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")
def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None

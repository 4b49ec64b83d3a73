"""Every kernel, interpreted, gives what the plain way gives."""

from __future__ import annotations

import pytest
import torch

from bench.device import kernel_cases
from bench.device.kernel_cases import TOLERANCES, AttentionCase, RotaryCase, difference

# The interpreter makes Python numbers of arrays with one element, which the next numpy refuses.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", list(kernel_cases.attention_cases()), ids=str)
def test_attention_is_that_of_the_reference(case: AttentionCase) -> None:
    found, expected = kernel_cases.attention_results(case, CPU)
    assert difference(found, expected) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", list(kernel_cases.rotary_cases()), ids=str)
def test_rotation_and_write_are_the_plain_ones(case: RotaryCase) -> None:
    for found, expected in kernel_cases.rotary_results(case, CPU):
        assert difference(found, expected) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (3, 576), (2, 1000)])
def test_sum_norm_and_gate_are_the_plain_ones(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    for found, expected in kernel_cases.norm_results(num_tokens, width, dtype, CPU):
        assert difference(found, expected) < TOLERANCES[dtype]
    assert difference(*kernel_cases.gated_results(num_tokens, width, dtype, CPU)) < TOLERANCES[dtype]

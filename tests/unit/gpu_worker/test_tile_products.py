"""Products on a processor's registers for tiles, against plain products of numbers that were rounded before."""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.models.projection import DenseProjection
from services.gpu_worker.products import forms as forms_module
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.products.tiles import FEW_ROWS, TileProjection, fits_tile_loop, has_tile_loop
from services.gpu_worker.products.two_forms import TwoForms
from services.gpu_worker.weight_grid import GROUP, WeightGrid

needs_loops = pytest.mark.skipif(bool(loops_problem()), reason=str(loops_problem()))
needs_tiles = pytest.mark.skipif(not has_tile_loop(), reason="this processor has no registers for tiles")
DTYPES = (torch.float32, torch.bfloat16)


def random(seed: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@needs_tiles
@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(0, 70) | st.sampled_from([130, 255, 256, 257, 300]),
    columns=st.sampled_from([32, 96, 576]),
    out=st.sampled_from([16, 32, 48, 80, 320]),
    has_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_a_product_on_tiles_rounds_weights_and_inputs_and_nothing_else(
    rows: int, columns: int, out: int, has_bias: bool, dtype: torch.dtype, spread: float, seed: int
) -> None:
    weight, x = random(seed, out, columns), (spread * random(seed + 1, rows, columns)).to(dtype)
    bias = spread * random(seed + 2, out) if has_bias else None
    product = TileProjection(weight, bias)(x)
    assert product.dtype == dtype
    rounded = weight.bfloat16().double(), x.bfloat16().double()
    expected = functional.linear(rounded[1], rounded[0], None if bias is None else bias.double())
    result = 2**-8 if dtype == torch.bfloat16 else 0.0  # which is rounded too
    torch.testing.assert_close(product.double(), expected, rtol=1e-5 + result, atol=1e-6 * spread * columns)


@needs_tiles
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("num_threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_whatever_others_there_are_and_however_many_threads(dtype: torch.dtype) -> None:
    projection, x = TileProjection(random(1, 80, 96), random(2, 80)), random(3, FEW_ROWS, 96).to(dtype)
    together = projection(x)
    assert torch.equal(together, torch.cat([projection(row[None]) for row in x]))
    assert torch.equal(together[5:42], projection(x[5:42]))


@needs_tiles
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_lie_apart_are_read_where_they_are(dtype: torch.dtype) -> None:
    projection, x = TileProjection(random(1, 32, 64), None), random(2, 9, 128).to(dtype)
    assert torch.equal(projection(x[:, 64:]), projection(x[:, 64:].contiguous()))


@needs_tiles
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_rows", [6, FEW_ROWS + 6])
def test_smp_02_a_broken_input_breaks_its_own_row_only(broken: float, num_rows: int) -> None:
    projection, x = TileProjection(random(1, 32, 64), None), random(2, num_rows, 64)
    clean = projection(x)
    x[3, 40] = broken
    computed = projection(x)
    assert not computed[3].isfinite().any()
    others = [row for row in range(num_rows) if row != 3]
    assert torch.equal(computed[others], clean[others])


@needs_tiles
def test_a_product_on_tiles_is_recorded_as_it_is_launched() -> None:
    from services.gpu_worker.cpu_loops.recording import record
    from services.gpu_worker.cpu_loops.team import TEAM

    assert TEAM is not None
    projection, x = TileProjection(random(1, 48, 64), random(2, 48)), random(3, 7, 64)
    recording, result = record(TEAM, lambda: projection(x))
    for seed in (4, 5):
        x.copy_(random(seed, 7, 64))
        recording.replay()
        assert torch.equal(result, projection(x))


@needs_tiles
def test_a_matrix_that_is_not_of_whole_tiles_is_told_from_one_that_is() -> None:
    assert fits_tile_loop(torch.zeros(16, 32))
    assert not fits_tile_loop(torch.zeros(24, 32))
    assert not fits_tile_loop(torch.zeros(16, 48))


@needs_loops
@pytest.mark.parametrize(
    ("system", "features", "answer", "expected"),
    [
        ("Linux", {"amx-tile": True, "amx-bf16": True}, 0, True),
        ("Linux", {"amx-tile": True, "amx-bf16": True}, -1, False),  # a system or a container that forbids it
        ("Linux", {"amx-tile": True}, 0, False),
        ("Linux", {}, 0, False),
        ("Darwin", {"amx-tile": True, "amx-bf16": True}, 0, False),
    ],
)
def test_registers_are_used_where_the_processor_has_them_and_the_system_lends_them(
    system: str, features: dict[str, bool], answer: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llvmlite.binding

    from services.gpu_worker.cpu_loops import tile_registers

    asked: list[tuple[int, ...]] = []

    def syscall(*numbers: int) -> int:
        asked.append(numbers)
        return answer

    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: SimpleNamespace(syscall=syscall))
    assert tile_registers.has_tiles.__wrapped__() is expected
    assert asked == ([(158, 0x1023, 18)] if system == "Linux" and len(features) == 2 else [])


@needs_tiles
def test_the_form_for_many_rows_is_on_tiles_where_a_matrix_is_of_whole_ones() -> None:
    forms = CpuForms(is_exact=False)
    tiled = forms.lay_out(DenseProjection(random(1, 32, 64)), None)
    other = forms.lay_out(DenseProjection(random(1, 24, 64)), None)
    assert isinstance(tiled, TileProjection)
    assert not isinstance(other, TileProjection)
    assert forms.description == "1 matrices bfloat16 tiles, 1 matrices packed bfloat16"
    exact = CpuForms(is_exact=True).lay_out(DenseProjection(random(1, 32, 64)), None)
    assert not isinstance(exact, TileProjection)


@needs_tiles
def test_codes_need_not_be_as_fast_where_the_other_form_is_recorded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step of loops saves is no reason to stay with codes where both forms are loops."""
    asked: list[float] = []

    def noted(_shapes: object, _pump: Callable[[], None], worth: float) -> int:
        asked.append(worth)
        return 4

    monkeypatch.setattr(forms_module, "crossover", noted)
    for is_tiled in (True, False):
        if not is_tiled:
            monkeypatch.setattr(forms_module, "fits_tile_loop", lambda _weight: False)
        forms = CpuForms(is_exact=False)
        pairs = [forms.lay_out(DenseProjection(grid.values()), grid) for grid in map(codes, range(2))]
        forms.settle()
        assert all(isinstance(pair, TwoForms) for pair in pairs)
    assert asked == [1.0, 1.2]


def codes(seed: int) -> WeightGrid:
    """Of 4 bits, [32, 64]."""
    numbers = torch.randint(0, 16, (32, 64), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return WeightGrid(numbers, torch.ones(32, 64 // GROUP), torch.zeros(32, 64 // GROUP))

"""4-bit grids of GGUF files: taken apart as the gguf package decodes them, kept, multiplied by, chosen by rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from torch import Tensor

from services.gpu_worker.models.projection import DenseProjection
from services.gpu_worker.products.forms import Compared, CpuForms, crossover
from services.gpu_worker.products.four_bit import FourBitProjection, fits_four_bit, has_four_bit_products
from services.gpu_worker.products.grid import GridProjection, has_grid_loop
from services.gpu_worker.products.kernels import has_packed_float32
from services.gpu_worker.products.two_forms import TwoForms
from services.gpu_worker.weight_grid import GROUP, WeightGrid, grid_bits, read_grid, stacked
from services.gpu_worker.weights import grids_in, laid_out_bytes, load_laid_out, load_model
from services.model_files.source import open_model
from tests.unit.gpu_worker.step_bench import CPU

FORMATS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q8_0": (32, 34)}


def random_blocks(name: str, num_blocks: int, seed: int) -> np.ndarray:
    """Blocks of any codes and scales; the half precision numbers at their beginning are finite."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_blocks, FORMATS[name][1]), dtype=np.uint8)
    num_halves = 1 if name in ("Q4_0", "Q8_0") else 2
    blocks[:, : 2 * num_halves] = generator.normal(size=(num_blocks, num_halves)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_a_grid_has_the_values_that_the_gguf_package_decodes(name: str, seed: int) -> None:
    blocks = random_blocks(name, 12, seed)
    expected = quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).reshape(-1)
    grid = read_grid(name, torch.from_numpy(blocks).flatten(), 4 * FORMATS[name][0])
    assert grid.codes.shape == (3, 4 * FORMATS[name][0])
    assert grid.scales.shape == grid.minimums.shape == (3, 4 * FORMATS[name][0] // GROUP)
    assert int(grid.codes.max()) < 2**grid.num_bits == 2 ** (8 if name == "Q8_0" else 4)
    np.testing.assert_allclose(grid.values().flatten().numpy(), expected, rtol=1e-6, atol=1e-6)


def test_other_formats_are_no_grids() -> None:
    names = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q6_K", "Q8_0", "F16", "IQ4_NL")
    assert [grid_bits(name) for name in names] == [4, 4, 4, None, None, 8, None, None]


def random_grid(num_rows: int, num_columns: int, seed: int = 0) -> WeightGrid:
    generator = torch.Generator().manual_seed(seed)
    groups = (num_rows, num_columns // GROUP)
    codes = torch.randint(0, 16, (num_rows, num_columns), generator=generator, dtype=torch.uint8)
    scales = torch.randn(groups, generator=generator) / 64
    return WeightGrid(codes, scales, torch.randn(groups, generator=generator) / 8)


def test_rows_are_stacked_and_put_in_another_order() -> None:
    first, second = random_grid(16, 64, 1), random_grid(32, 64, 2)
    both = stacked([first, second])
    assert both is not None
    assert torch.equal(both.values(), torch.cat((first.values(), second.values())))
    assert torch.equal(first.map_rows(lambda rows: rows.flip(0)).values(), first.values().flip(0))
    assert stacked([first, replace(second, num_bits=8)]) is None


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_with_codes_rounds_inputs_scales_and_results_and_nothing_else(rows: int, has_bias: bool) -> None:
    grid, generator = random_grid(48, 96), torch.Generator().manual_seed(rows)
    bias = torch.randn(48, generator=generator) if has_bias else None
    x = torch.randn(rows, 96, generator=generator)
    product = FourBitProjection(grid, bias)(x)
    middles = (grid.minimums + 8 * grid.scales).bfloat16().float()
    rounded = WeightGrid(grid.codes, grid.scales.bfloat16().float(), middles - 8 * grid.scales.bfloat16().float())
    expected = DenseProjection(rounded.values(), bias)(x.bfloat16().float())
    assert product.dtype == torch.float32
    torch.testing.assert_close(product, expected, rtol=2**-6, atol=2**-6)


def test_a_matrix_whose_rows_the_operator_cannot_take_is_kept_otherwise() -> None:
    grid = random_grid(24, 32)
    assert not fits_four_bit(grid)
    dense = DenseProjection(grid.values())
    projection = CpuForms(is_exact=False).lay_out(dense, grid)
    x = torch.randn(3, 32)
    torch.testing.assert_close(projection(x), dense(x), rtol=0.05, atol=0.05)


def test_a_build_without_the_operators_keeps_matrices_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __getattr__(self, name: str) -> None:
            raise AttributeError(name)

    for found in (has_four_bit_products, has_packed_float32):
        found.cache_clear()
    with monkeypatch.context() as without:
        without.setattr(torch.ops, "aten", Nothing())
        without.setattr(torch.ops, "mkldnn", Nothing())
        without.setattr("services.gpu_worker.products.grid.has_grid_loop", lambda: False)
        grid = random_grid(32, 64)
        dense = DenseProjection(grid.values())
        assert CpuForms(is_exact=False).lay_out(dense, grid) is dense
        assert CpuForms(is_exact=True).lay_out(dense, None) is dense
    for found in (has_four_bit_products, has_packed_float32):
        found.cache_clear()
    assert has_four_bit_products() == hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")


class Counted:
    """A projection that counts its calls."""

    num_bytes = 8

    def __init__(self, calls: list[int]) -> None:
        self._calls = calls

    def __call__(self, x: Tensor) -> Tensor:
        self._calls.append(x.shape[0])
        return x


def test_few_rows_go_one_way_and_many_the_other() -> None:
    few: list[int] = []
    many: list[int] = []
    both = TwoForms(Counted(few), Counted(many), 4)
    for rows in (1, 4, 5, 64):
        both(torch.zeros(rows, 2))
    assert (few, many) == ([1, 4], [5, 64])
    assert both.num_bytes == 16
    both.settle(64, is_always=256)
    both(torch.zeros(64, 2))
    assert few == [1, 4, 64]


@pytest.mark.parametrize(("most", "kept"), [(0, "many"), (256, "few")])
def test_a_form_that_is_never_used_is_given_up(most: int, kept: str) -> None:
    calls: dict[str, list[int]] = {"few": [], "many": []}
    both = TwoForms(Counted(calls["few"]), Counted(calls["many"]))
    both.settle(most, is_always=256)
    for rows in (1, 500):
        both(torch.zeros(rows, 2))
    assert calls == {"few": [], "many": []} | {kept: [1, 500]}
    assert both.num_bytes == both.bytes_read(1) == both.bytes_read(500) == 8


def test_the_crossover_is_where_the_form_for_few_rows_becomes_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(projections: Sequence[object], rows: int, width: int) -> float:
        return float(rows) if projections[0] is fast_for_few else 5.0

    fast_for_few, other = Counted([]), Counted([])
    pumped: list[int] = []
    monkeypatch.setattr("services.gpu_worker.products.forms._seconds", seconds)
    assert crossover([Compared([fast_for_few], [other], 2, 3)], lambda: pumped.append(1), 1.0) == 4
    assert crossover([Compared([other], [fast_for_few], 2, 1)], lambda: pumped.append(1), 1.0) == 0
    assert len(pumped) == 4 + 1  # 1, 2, 4 and 8 rows; 1 row
    assert crossover([Compared([fast_for_few], [other], 2, 1)], lambda: None, 1.7) == 8  # 8 rows take 1.6 times as long


@pytest.mark.skipif(not has_grid_loop(), reason="no loop for codes here")
def test_a_single_row_goes_through_codes_whatever_was_measured_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.gpu_worker.products.forms.crossover", lambda *_: 0)
    forms = CpuForms(is_exact=False)
    grid = read_grid("Q4_1", torch.from_numpy(random_blocks("Q4_1", 32, 1)).view(16, -1), 64)
    matrix = forms.lay_out(DenseProjection(grid.values()), grid)
    forms.settle()
    assert isinstance(matrix, TwoForms)
    x = torch.randn(1, 64)
    assert torch.equal(matrix(x), GridProjection(grid, None)(x))
    assert "in 4 bits for few rows" in forms.description


@pytest.mark.parametrize("copy_bytes", [0, 2**40])
def test_the_real_model_on_codes(smollm2_path: Path, copy_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gpu_worker.products.forms.crossover", lambda *_: 4)
    forms = CpuForms(is_exact=False, copy_bytes=copy_bytes)
    model = load_laid_out(open_model(smollm2_path), forms)
    plain = load_model(open_model(smollm2_path), CPU, torch.float32)
    assert ("in 4 bits for few rows" in forms.description) == bool(copy_bytes)
    codes_bytes = sum(
        matrix.weight.numel() * 5 // 8
        for layer in plain.weights.layers
        for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
        if matrix is not None
    )
    outside = model.weights.num_bytes - sum(layer.num_bytes for layer in model.weights.layers)
    if not copy_bytes:
        norms = 2 * plain.config.hidden_size * 4 * plain.config.num_layers
        assert model.weights.num_bytes - outside == codes_bytes + norms
    grids = grids_in(open_model(smollm2_path))
    expected_bytes = laid_out_bytes(model.config, CpuForms(is_exact=False, copy_bytes=copy_bytes), grids)
    assert model.weights.num_bytes <= expected_bytes <= 1.05 * model.weights.num_bytes
    generator = torch.Generator().manual_seed(1)
    for mine, theirs in zip(model.weights.layers[::7], plain.weights.layers[::7], strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            x = torch.randn(2, getattr(theirs, name).weight.shape[1], generator=generator)
            expected = getattr(theirs, name)(x)
            error = (getattr(mine, name)(x) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
            assert float(error) < 0.01

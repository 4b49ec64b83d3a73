"""`--quantization`: matrices rounded at load, products with them, whole models, and what stands against it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.random_checkpoints import Shape, write_checkpoint
from services.gpu_worker.fit_check import Machine, fit
from services.gpu_worker.integer_weights import rounded as rounded_forms
from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.projection import DenseProjection
from services.gpu_worker.products.eight_bit import EightBitProjection, has_eight_bit_products
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.products.grid import GridProjection, fits_grid_loop, has_grid_loop
from services.gpu_worker.products.quantized_forms import QuantizedForms
from services.gpu_worker.products.rounding import (
    rounded_to_eight_bits,
    rounded_to_four_bits,
    rounded_to_groups_of_eight_bits,
)
from services.gpu_worker.start_up import forms_of
from services.gpu_worker.weight_grid import GROUP
from services.gpu_worker.weights import check_model, load_laid_out, load_model
from services.model_files.source import open_model
from services.runtime.config import Settings
from tests.unit.gpu_worker.packed_writers import FORMS, write_forms
from tests.unit.gpu_worker.step_bench import CPU
from tests.unit.gpu_worker.test_products import logits_of

needs_eight_bits = pytest.mark.skipif(not has_eight_bit_products(), reason="no exact int8 products here")
needs_int8 = pytest.mark.skipif(not has_grid_loop() and not has_eight_bit_products(), reason="no products with 8 bits")
needs_four_bits = pytest.mark.skipif(not CpuForms(False).reads_grid(4), reason="no products with 4-bit codes here")
SHAPE = Shape(hidden_size=128, intermediate_size=192, num_layers=2, head_dim=32)


def random(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([1e-6, 0.02, 1.0, 300.0]), shift=st.sampled_from([0.0, 5.0]))
def test_four_bits_are_the_nearest_on_a_grid_that_the_operator_has(seed: int, spread: float, shift: float) -> None:
    weight = random(16, 96, seed=seed, spread=spread) + shift * spread
    grid = rounded_to_four_bits(weight)
    middles = grid.minimums + 8 * grid.scales
    assert torch.equal(grid.scales.bfloat16().float(), grid.scales)
    torch.testing.assert_close(middles.bfloat16().float(), middles, rtol=1e-6, atol=0)
    assert int(grid.codes.max()) <= 15
    # Half a step, and at the ends what rounding scale and middle to 8 bits takes away.
    largest = weight.view(16, -1, GROUP).abs().amax(-1)
    allowed = 0.5 * grid.scales + 2**-7 * (largest + 8 * grid.scales)
    error = (grid.values() - weight).view(16, -1, GROUP).abs().amax(-1)
    assert bool((error <= allowed).all())


def test_groups_of_equal_numbers_have_a_grid_too() -> None:
    weight = torch.cat((torch.zeros(1, GROUP), torch.full((1, GROUP), 0.5), torch.full((1, GROUP), -3.0)), dim=1)
    assert torch.equal(rounded_to_four_bits(weight.expand(16, -1)).values()[3], weight[0])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([1e-6, 0.02, 1.0, 300.0]))
def test_eight_bits_are_half_a_step_off_at_most(seed: int, spread: float) -> None:
    weight = random(5, 33, seed=seed, spread=spread)
    weight[2] = 0
    codes, scales = rounded_to_eight_bits(weight)
    assert codes.dtype == torch.int8
    assert int(codes.abs().max()) == 127
    error = (codes * scales[:, None] - weight).abs()
    assert bool((error <= 0.5001 * scales[:, None]).all())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([1e-9, 0.02, 1.0, 300.0, 1e9]))
def test_groups_of_eight_bits_are_half_a_step_off_at_most(seed: int, spread: float) -> None:
    weight = random(16, 96, seed=seed, spread=spread)
    weight[2, 32:64] = 0
    grid = rounded_to_groups_of_eight_bits(weight)
    error = (grid.values() - weight).view(16, -1, GROUP).abs().amax(-1)
    assert bool((error <= 0.56 * grid.scales).all())  # and at the ends what rounding the scale takes away
    is_half = torch.equal(grid.scales, grid.scales.half().float())
    assert is_half == (spread in (0.02, 1.0, 300.0))
    assert fits_grid_loop(grid) == (is_half and has_grid_loop())


@needs_eight_bits
@pytest.mark.parametrize("rows", [1, 2, 33, 130])
@pytest.mark.parametrize(("out", "width"), [(48, 96), (7, 33), (1, 1), (100, 64)])
def test_a_product_in_8_bits_rounds_inputs_to_15_bits_and_nothing_else(rows: int, out: int, width: int) -> None:
    codes, scales = rounded_to_eight_bits(random(out, width, seed=rows))
    bias = random(out, seed=1) if rows > 1 else None
    x = random(rows, width, seed=2) * 10.0 ** (torch.arange(rows) % 7 - 3)[:, None]
    x[0, 0] = 1000.0  # one among many small ones
    x[-1] = 0 if rows > 2 else x[-1]
    product = EightBitProjection(codes, scales, bias)(x)
    values = codes * scales[:, None]
    expected = DenseProjection(values, bias)(x)
    allowed = 2**-14 * x.abs().amax(1)[:, None] * values.abs().sum(1) / 2 + 1e-5 * expected.abs() + 1e-6
    assert product.dtype == torch.float32
    assert bool(((product - expected).abs() <= allowed).all())


@needs_eight_bits
def test_a_row_in_8_bits_does_not_depend_on_its_neighbours() -> None:
    matrix = EightBitProjection(*rounded_to_eight_bits(random(48, 96)), None)
    x = random(40, 96, seed=5) * 10.0 ** (torch.arange(40) % 9)[:, None]
    together = matrix(x)
    for row in (0, 7, 39):
        assert torch.equal(matrix(x[row : row + 1])[0], together[row])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("quantized") / "qwen2", "qwen2", SHAPE)


def rounded(weights: DecoderWeights[DenseProjection], quantization: str) -> DecoderWeights[DenseProjection]:
    """The same model with plain matrices of the values that rounding leaves."""

    def eight(dense: DenseProjection) -> DenseProjection:
        if has_grid_loop():
            return DenseProjection(rounded_to_groups_of_eight_bits(dense.weight).values(), dense.bias)
        codes, scales = rounded_to_eight_bits(dense.weight)
        return DenseProjection(codes * scales[:, None], dense.bias)

    def four(dense: DenseProjection) -> DenseProjection:
        return DenseProjection(rounded_to_four_bits(dense.weight).values(), dense.bias)

    layers = (layer.with_projections(four if quantization == "int4" else eight) for layer in weights.layers)
    return replace(weights, layers=tuple(layers), head=eight(weights.head))


@needs_four_bits
@needs_int8
@pytest.mark.parametrize(("quantization", "largest_error"), [("int8", 0.02), ("int4", 0.25)])
def test_a_model_rounded_at_load(
    quantization: str, largest_error: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gpu_worker.products.forms.crossover", lambda *_: 4)
    chosen = Settings(model=str(folder), quantization=quantization, cpu_copies_gb=0.0, kv_cache_tokens=64)
    pumped: list[int] = []
    plain = load_model(open_model(folder), CPU)
    forms = rounded_forms(forms_of(chosen), chosen, plain.config, lambda: pumped.append(1))
    assert isinstance(forms, QuantizedForms)
    model = load_laid_out(open_model(folder), forms)
    num_layers = SHAPE.num_layers
    told = {"int8": f"{4 * num_layers + 1} matrices rounded to int8", "int4": f"{4 * num_layers} matrices rounded to"}
    assert told[quantization] in forms.description
    assert f"weights {100 * forms.error:.2f} % off on average" in forms.description
    assert 0.001 < forms.error < largest_error
    eight, down = GridProjection if has_grid_loop() else EightBitProjection, model.weights.layers[0].down
    assert isinstance(model.weights.head, eight)
    assert isinstance(down, eight) == (quantization == "int8" or has_grid_loop())
    assert ("in 4 bits" in forms.description) == (quantization == "int4")
    expected, found = logits_of(plain, rounded(plain.weights, quantization)), logits_of(plain, model.weights)
    assert float((found - expected).norm() / expected.norm()) < {"int8": 1e-3, "int4": 0.04}[quantization]
    counted = fit(chosen, CPU, Machine("2.13", "", "", 2, int(16e9), int(8e9)), is_config_only=False)
    assert counted.problem == ""
    assert model.weights.num_bytes <= counted.weight_bytes <= 1.05 * model.weights.num_bytes
    assert counted.weight_bytes < plain.weights.num_bytes / 2


@needs_four_bits
@pytest.mark.parametrize("num_bits", [4, 8])
def test_what_lies_on_a_4_bit_grid_is_kept(num_bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gpu_worker.products.forms.crossover", lambda *_: 4)
    packed, _ = write_forms(tmp_path, FORMS["awq"])
    chosen = Settings(quantization=f"int{num_bits}", cpu_copies_gb=0.0)
    forms = rounded_forms(forms_of(chosen), chosen, check_model(open_model(packed)))
    load_laid_out(open_model(packed), forms)
    assert forms.description.startswith("1 matrices rounded to int8, ")  # the head
    assert "4 matrices in 4 bits" in forms.description


@pytest.mark.parametrize("shape", [(24, 64), (32, 40)])
def test_shapes_that_no_operator_takes_are_left_and_told(shape: tuple[int, int], folder: Path) -> None:
    chosen = Settings(quantization="int4")
    forms = rounded_forms(forms_of(chosen), chosen, check_model(open_model(folder)))
    assert isinstance(forms, QuantizedForms)
    dense = DenseProjection(random(*shape))
    projection = forms.lay_out(dense, None)
    x = random(3, shape[1], seed=1)
    torch.testing.assert_close(projection(x), dense(x), rtol=0.05, atol=0.1)
    assert forms.description.startswith("1 left as they were: no operator here takes their shape, 1 matrices ")
    assert forms.error == 0


@pytest.mark.parametrize(("quantization", "shape"), [("int8", (24, 64)), ("int8", (32, 40)), ("int4", (32, 40))])
def test_int8_is_left_alone_where_products_of_bytes_are_not_exact(
    quantization: str, shape: tuple[int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gpu_worker.products.quantized_forms.has_eight_bit_products", lambda: False)
    chosen = Settings(quantization=quantization)
    forms = rounded_forms(forms_of(chosen), chosen, check_model(open_model(folder)))
    dense, x = DenseProjection(random(*shape)), random(3, shape[1], seed=1)
    torch.testing.assert_close(forms.lay_out(dense, None)(x), dense(x), rtol=0.05, atol=0.1)
    assert forms.description.startswith("1 left as they were: no operator here takes their shape, ")


def test_products_of_bytes_are_asked_whether_they_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    class Saturated(EightBitProjection):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) / 2

    monkeypatch.setattr("services.gpu_worker.products.eight_bit.EightBitProjection", Saturated)
    assert not has_eight_bit_products.__wrapped__()

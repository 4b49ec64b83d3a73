"""Products with weights laid out for the CPU, against the plain ones; whole models laid out, against themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.random_checkpoints import write_checkpoint
from services.gpu_worker.attention import attention_for
from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.choices import choose_dtype
from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.models.decoder import Decoder
from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.projection import DenseProjection, Projection, rounds_from
from services.gpu_worker.products import forms as forms_module
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.products.kernels import PackedProjection, has_fast_bfloat16, has_packed_float32
from services.gpu_worker.products.tiles import FEW_ROWS, has_tile_loop
from services.gpu_worker.products.two_forms import TwoForms
from services.gpu_worker.weights import LoadedModel, RunnableModel, load_laid_out, load_model
from services.model_files.source import open_model
from services.runtime.config import Settings
from tests.unit.gpu_worker.step_bench import CPU

needs_packing = pytest.mark.skipif(not has_packed_float32(), reason="this build of torch has no oneDNN")
needs_bfloat16 = pytest.mark.skipif(not has_fast_bfloat16(), reason="this processor multiplies no bfloat16")
needs_tiles = pytest.mark.skipif(not has_tile_loop(), reason="this processor has no registers for tiles")


@needs_packing
@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 3, 16, 63, 64, 65, 130]),
    width=st.sampled_from([1, 8, 33, 64, 96]),
    out=st.sampled_from([1, 7, 16, 48, 100]),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_packed_float32_is_the_plain_product_but_for_the_order_of_sums(
    rows: int, width: int, out: int, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dense = DenseProjection(
        torch.randn(out, width, generator=generator), torch.randn(out, generator=generator) if has_bias else None
    )
    x = torch.randn(rows, width, generator=generator)
    product = PackedProjection(dense.weight, dense.bias, torch.float32)(x)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product, dense(x), rtol=1e-5, atol=1e-4)


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 3, 64, 130])
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_bfloat16_rounds_weights_inputs_and_results_and_nothing_else(rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(96, 64, generator=generator), torch.randn(rows, 64, generator=generator)
    bias = torch.randn(96, generator=generator).bfloat16().float() if has_bias else None
    product = PackedProjection(weight, bias, torch.bfloat16)(x)
    rounded = DenseProjection(weight.bfloat16().float(), bias)(x.bfloat16().float())
    assert product.dtype == torch.float32
    torch.testing.assert_close(product, rounded, rtol=2**-7, atol=2**-7)


@pytest.fixture(params=["llama", "mistral", "qwen2", "qwen3"], scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def family(folder: Path) -> LoadedModel:
    return load_model(open_model(folder), CPU, torch.float32)


def logits_of(model: LoadedModel, weights: DecoderWeights[Projection], num_tokens: int = 40) -> Tensor:
    """[num_tokens, vocab_size] after a prompt of random ids."""
    config = model.config
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, weights.embedding.dtype)
    runner = ModelRunner(config, weights, KvCache(shape, 3, CPU), attention_for(CPU, shape.dtype))
    ids = torch.randint(0, config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(5))
    inputs = replace(
        runner.dummy_inputs(num_tokens, 1),
        input_ids=ids,
        slot_mapping=torch.arange(num_tokens),
        page_table=torch.arange(3)[None],
    )
    hidden = runner.hidden(inputs)
    return runner.logits(runner.normed(hidden, torch.arange(num_tokens)))


def test_exact_numerics_change_logits_by_rounding_alone(folder: Path, family: LoadedModel) -> None:
    pumped: list[int] = []
    forms = CpuForms(is_exact=True, pump=lambda: pumped.append(1))
    laid_out = load_laid_out(open_model(folder), forms)
    expected = logits_of(family, family.weights)
    torch.testing.assert_close(logits_of(family, laid_out.weights), expected, rtol=1e-4, atol=1e-4)
    assert len(pumped) == 1 + 4 * family.config.num_layers
    assert laid_out.report.num_bytes_placed == family.report.num_bytes_placed
    assert forms.description


@needs_bfloat16
def test_fast_numerics_change_logits_less_than_a_model_in_bfloat16(folder: Path, family: LoadedModel) -> None:
    laid_out = load_laid_out(open_model(folder), CpuForms(is_exact=False))
    plain, fast = logits_of(family, family.weights), logits_of(family, laid_out.weights)
    half = load_model(open_model(folder), CPU, torch.bfloat16)
    allowed = (logits_of(half, half.weights) - plain).square().mean()
    assert 0 < float((plain - fast).square().mean()) < float(allowed)
    assert laid_out.weights.num_bytes < family.weights.num_bytes


@needs_bfloat16
@pytest.mark.skipif(bool(loops_problem()), reason=str(loops_problem()))
@pytest.mark.parametrize("is_tiled", [False, pytest.param(True, marks=needs_tiles)])
def test_what_is_multiplied_may_stay_in_bfloat16_between_products(
    folder: Path, is_tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products round inputs anyway: without going to float32 between them, sums are the same."""
    if not is_tiled:
        monkeypatch.setattr(forms_module, "fits_tile_loop", lambda _weight: False)
    model = load_laid_out(open_model(folder), CpuForms(is_exact=False))
    assert model.weights.rounds_from == (FEW_ROWS + 1 if is_tiled else 0)
    inputs = ModelRunner(model.config, model.weights, *_pool_and_attention(model)).dummy_inputs(40, 1)
    pool, attention = _pool_and_attention(model)
    decoder = Decoder(model.config, model.weights, operators_for(CPU), rounds_from=0)
    states = [
        replace(decoder, rounds_from=number).layers(inputs, attention.begin_step(inputs, pool)) for number in (0, 41)
    ]
    assert states[0].dtype == states[1].dtype == torch.float32
    torch.testing.assert_close(*states, rtol=2**-6, atol=2**-6 * float(states[1].abs().max()))
    assert torch.equal(states[1], replace(decoder, rounds_from=None).layers(inputs, attention.begin_step(inputs, pool)))


def _pool_and_attention(model: RunnableModel) -> tuple[KvCache, AttentionBackend]:
    config = model.config
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32)
    return KvCache(shape, 3, CPU), attention_for(CPU, shape.dtype)


@needs_bfloat16
def test_products_round_from_where_their_codes_end_and_only_if_all_do() -> None:
    weight = torch.randn(32, 64)
    dense, packed = DenseProjection(weight), PackedProjection(weight, None, torch.bfloat16)
    pair = TwoForms(dense, packed)
    pair.settle(24, 256)
    assert (pair.rounds_from, packed.rounds_from) == (25, 0)
    assert rounds_from([pair, packed]) == 25
    assert rounds_from([pair, packed, dense]) is None
    assert rounds_from([PackedProjection(weight, None, torch.float32)]) is None
    assert rounds_from([]) is None
    pair.settle(256, 256)  # codes for any number of rows
    assert pair.rounds_from is None


def test_memory_is_counted_once_where_the_head_is_the_embedding(family: LoadedModel) -> None:
    assert family.weights.num_bytes == family.report.num_bytes_placed


def test_exact_numerics_are_float32_and_nothing_else() -> None:
    assert choose_dtype(Settings(numerics="exact")) == torch.float32
    assert choose_dtype(Settings(numerics="exact", dtype="float32")) == torch.float32
    assert choose_dtype(Settings(numerics="fast", dtype="bfloat16")) == torch.bfloat16
    assert choose_dtype(Settings()) is None

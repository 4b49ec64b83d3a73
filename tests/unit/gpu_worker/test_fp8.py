"""Numbers of 8 bits: in the KV pool, which all ways of attention read alike, and in weights and products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.random_checkpoints import write_checkpoint
from services.gpu_worker.attention import attention_for
from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.attention.paged_cpu import PagedCpuAttention, reads_halves
from services.gpu_worker.attention.paged_cuda import PagedCudaAttention
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.eight_bits import check_fp8_weights
from services.gpu_worker.fit_check import Machine, fit
from services.gpu_worker.fp8 import E4M3, E5M2, to_fp8
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.kv_dtype import choose_kv_dtype
from services.gpu_worker.models.parse_config import parse_model_config
from services.gpu_worker.models.projection import DenseProjection
from services.gpu_worker.products.fp8 import Fp8Forms, Fp8Projection, round_rows
from services.gpu_worker.weights import LoadedModel, RunnableModel, laid_out_bytes, load_laid_out, load_model
from services.model_files.source import open_model
from services.runtime.config import Settings
from services.runtime.service import StartError
from tests.unit.gpu_worker.step_bench import CPU
from tests.unit.gpu_worker.step_driver import Row, StepDriver

pytestmark = pytest.mark.usefixtures("one_thread")

CUDA = torch.device("cuda", 0)
FP8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
BACKENDS: dict[str, Callable[[torch.dtype], AttentionBackend]] = {
    "paged_cpu": PagedCpuAttention,
    "padded_blocks": lambda dtype: PagedCudaAttention(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("fp8") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(open_model(folder), CPU)


def all_numbers(dtype: torch.dtype) -> Tensor:
    """Every finite number of the type, in order, float32."""
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    return numbers[numbers.isfinite()].unique(sorted=True)  # type: ignore[no-untyped-call,no-any-return]


@FP8
def test_rounding_is_to_nearest_even_and_ends_at_the_largest(dtype: torch.dtype) -> None:
    numbers = all_numbers(dtype)
    assert torch.equal(to_fp8(numbers, dtype).float(), numbers)
    low, high = numbers[:-1], numbers[1:]
    assert torch.equal(to_fp8(low * 0.75 + high * 0.25, dtype).float(), low)
    assert torch.equal(to_fp8(low * 0.25 + high * 0.75, dtype).float(), high)
    is_even = to_fp8(low, dtype).view(torch.uint8) % 2 == 0
    assert torch.equal(to_fp8((low + high) / 2, dtype).float(), torch.where(is_even, low, high))
    beyond = torch.tensor([1e9, -1e9, float("inf"), float("nan")])
    kept = to_fp8(beyond, dtype).float()
    assert kept[:3].tolist() == [float(high[-1]), float(low[0]), float(high[-1])]
    assert kept[3].isnan()


@FP8
def test_the_pool_rounds_what_is_written_and_clears_what_failed(dtype: torch.dtype) -> None:
    cache = KvCache(KvCacheShape(2, 1, 4, 2, dtype), 3, CPU)
    assert cache.num_bytes == 4 * 2 * 2 * 2 * 4
    keys, values = torch.randn(3, 1, 4), torch.full((3, 1, 4), float("nan"))
    cache.write(1, torch.tensor([5, 0, 2]), keys, values)
    assert torch.equal(cache.key_slots(1)[[5, 0, 2]].float(), keys.to(dtype).float())
    assert cache.values[1, :3].float().isnan().sum() == 3 * 4
    cache.zero_slots([0, 5])
    assert [slot for slot in range(6) if cache.value_slots(1)[slot].float().isnan().any()] == [2]
    cache.zero_pages([0, 1, 2])
    assert not cache.keys.float().any()
    assert not cache.values.float().any()


def course(model: LoadedModel | RunnableModel, backend: AttentionBackend, kv_dtype: torch.dtype | None) -> Tensor:
    """Logits of a chunk, a chunk on top beside a decode, and decodes."""
    driver = StepDriver(model, backend, 4, 80, kv_dtype=kv_dtype)
    rows: list[Row] = [driver.add([(7 * i + j) % 160 for j in range(30)]) for i in range(2)]
    driver.step((rows[0], 20), (rows[1], 3))
    driver.step((rows[0], 8), (rows[1], 1))
    driver.step((rows[0], 1), (rows[1], 1))
    return torch.cat([row.all_logits() for row in rows])


@FP8
@pytest.mark.parametrize("name", BACKENDS)
def test_attention_reads_8_bits_as_the_reference_does(name: str, dtype: torch.dtype, model: LoadedModel) -> None:
    expected = course(model, ReferenceAttention(), dtype)
    torch.testing.assert_close(course(model, BACKENDS[name](dtype), dtype), expected, rtol=1e-3, atol=1e-3)
    exact = course(model, ReferenceAttention(), None)
    off = (expected - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < float(off) < 0.2


def test_a_pool_in_8_bits_takes_a_quarter_of_float32(folder: Path) -> None:
    host = Machine("2", "", "", 2, int(16e9), int(8e9))
    plain = fit(Settings(model=str(folder), kv_cache_dtype="float32"), CPU, host, is_config_only=False)
    eight = fit(Settings(model=str(folder), kv_cache_dtype="fp8"), CPU, host, is_config_only=False)
    assert 4 * eight.kv_bytes_per_token == plain.kv_bytes_per_token
    assert eight.pool_tokens == pytest.approx(4 * plain.pool_tokens, rel=0.01)
    no_device = fit(Settings(model=str(folder), quantization="fp8"), CPU, host, is_config_only=True)
    assert no_device.problem == "--quantization fp8 needs a CUDA device that multiplies such numbers, not a CPU"


def test_where_a_pool_in_8_bits_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(name: str, device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16, **more: str) -> torch.dtype:
        return choose_kv_dtype(replace(Settings(), kv_cache_dtype=name, **more), device, dtype, 16)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert choose("auto") == torch.bfloat16
    assert choose("auto", CPU, torch.float32) == (torch.float16 if reads_halves(16) else torch.float32)
    assert choose("auto", CPU, torch.float32, numerics="exact") == torch.float32
    assert choose("float32", CPU, torch.float32, numerics="exact") == choose("float32", CPU, torch.float32)
    with pytest.raises(StartError, match="--kv-cache-dtype float16 does not go with a model in bfloat16 here"):
        choose("float16")
    assert choose("fp8") == choose("fp8_e4m3") == choose("fp8", CPU, torch.float32) == E4M3
    assert choose("fp8_e5m2") == E5M2
    with pytest.raises(StartError, match="--kv-cache-dtype fp8 goes with half precision on a CUDA device"):
        choose("fp8", dtype=torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(
        StartError, match=r"--kv-cache-dtype fp8 needs a device of compute capability 8\.9, this one has 8\.6"
    ):
        choose("fp8")


def test_where_weights_in_8_bits_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, experts = (
        parse_model_config(open_model(write_checkpoint(tmp_path / family, family))) for family in ("llama", "qwen3_moe")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_fp8_weights(CUDA, dense, torch.bfloat16)
    for device, config, dtype, problem in (
        (CPU, dense, torch.bfloat16, "needs a CUDA device"),
        (CUDA, dense, torch.float16, "gives results in bfloat16"),
        (CUDA, experts, torch.bfloat16, r"is not built for experts \(qwen3_moe\)"),
    ):
        with pytest.raises(StartError, match=problem):
            check_fp8_weights(device, config, dtype)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        StartError, match=r"--quantization fp8 needs a device of compute capability 8\.9, this one has 8\.0"
    ):
        check_fp8_weights(CUDA, dense, torch.bfloat16)


def test_each_row_has_a_scale_of_its_own() -> None:
    x = torch.randn(4, 64) * torch.tensor([1.0, 1e4, 0.0, 1e-6])[:, None]
    codes, scales = round_rows(x)
    assert codes.dtype == E4M3
    assert scales.shape == (4, 1)
    error = (codes.float() * scales - x).abs()
    assert (error <= x.abs() / 16 + scales * 2**-10).all()
    assert codes.float().abs().amax(1).tolist() == [448.0, 448.0, 0.0, 448.0]


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_in_8_bits_is_that_of_the_rounded_numbers(rows: int, has_bias: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(48, 64).bfloat16(), torch.randn(rows, 64).bfloat16()
    bias = torch.randn(48).bfloat16() if has_bias else None
    product = Fp8Projection(weight, bias, round_rows)(x)
    (left, left_scales), (right, right_scales) = round_rows(x), round_rows(weight)
    expected = (left.float() * left_scales) @ (right.float() * right_scales).T
    assert product.dtype == torch.bfloat16
    if bias is not None:
        expected = expected.bfloat16().float() + bias.float()
    torch.testing.assert_close(product.float(), expected, rtol=1e-2, atol=1e-2)
    exact = torch.nn.functional.linear(x.float(), weight.float())
    assert float((expected - exact - (0 if bias is None else bias)).square().mean().sqrt()) < 0.06 * 8


def test_a_token_is_the_same_alone_and_in_a_batch() -> None:
    weight, x = torch.randn(48, 64).bfloat16(), torch.randn(6, 64).bfloat16()
    projection = Fp8Projection(weight, None, round_rows)
    assert torch.equal(projection(x)[3:4], projection(x[3:4]))


def test_a_model_in_8_bits_keeps_its_head_and_is_as_large_as_expected(folder: Path) -> None:
    config = parse_model_config(open_model(folder))
    forms = Fp8Forms(config, round_rows)
    laid_out = load_laid_out(open_model(folder), forms, place=(torch.bfloat16, CPU))
    plain = load_model(open_model(folder), CPU, torch.bfloat16)
    assert forms.description == "12 matrices in 8 bits, 1 matrices plain"
    assert isinstance(laid_out.weights.head, DenseProjection)
    assert torch.equal(laid_out.weights.head.weight, plain.weights.head.weight)
    expected = laid_out_bytes(config, Fp8Forms(config, round_rows), dtype=torch.bfloat16)
    assert laid_out.weights.num_bytes == pytest.approx(expected, rel=0.03)
    exact = course(load_model(open_model(folder), CPU), attention_for(CPU, torch.float32), None)
    again = Fp8Forms(config, round_rows).of_all(plain.weights)
    found, dummy_way = (
        course(RunnableModel(config, weights, plain.report), ReferenceAttention(), None)
        for weights in (laid_out.weights, again)
    )
    assert torch.equal(found, dummy_way)
    off = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < float(off) < 0.25

"""Quantized checkpoints as they are published: the same numbers as the plain model of the same values, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.weights import check_model, grids_in, laid_out_bytes, load_laid_out, load_model
from services.model_files.errors import ModelFileError
from services.model_files.source import open_model
from tests.unit.gpu_worker.packed_writers import FORMS, SHAPE, compressed_config, groups_of, write_forms
from tests.unit.gpu_worker.step_bench import CPU
from tests.unit.gpu_worker.step_driver import StepDriver

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
FIRST = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    known: dict[str, tuple[Path, Path]] = {}

    def folders(name: str) -> tuple[Path, Path]:
        if name not in known:
            known[name] = write_forms(tmp_path_factory.mktemp("packed"), FORMS[name])
        return known[name]

    return folders


def matrices(folder: Path, dtype: torch.dtype) -> list[Tensor]:
    weights = load_model(open_model(folder), CPU, dtype).weights
    return [matrix.weight for layer in weights.layers for matrix in (*layer.projections, weights.head)]


def num_bytes_of(folder: Path) -> dict[str, int]:
    """Of the tensors in the file, but for biases that say nothing."""
    tensors = load_file(folder / "model.safetensors")
    meaningless = ("bias", "input_scale")
    return {name: tensor.nbytes for name, tensor in tensors.items() if not name.endswith(meaningless)}


def logits(folder: Path) -> Tensor:
    driver = StepDriver(load_model(open_model(folder), CPU, torch.float32), ReferenceAttention(), 16, 4)
    row = driver.add(IDS)
    driver.step((row, len(IDS)))
    return row.all_logits()


@pytest.mark.parametrize("name", FORMS)
def test_a_packed_model_is_the_plain_model_of_its_values(
    name: str, written: Callable[[str], tuple[Path, Path]]
) -> None:
    packed, plain = written(name)
    for mine, expected in zip(matrices(packed, torch.float32), matrices(plain, torch.float32), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-9)
    assert float((logits(packed) - logits(plain)).abs().max()) <= 1e-3


@pytest.mark.parametrize("name", ["awq", "gptq reordered", "compressed int8", "fp8 blocks"])
def test_any_dtype_is_rounded_once(name: str, written: Callable[[str], tuple[Path, Path]]) -> None:
    packed, plain = written(name)
    for mine, expected in zip(matrices(packed, torch.bfloat16), matrices(plain, torch.bfloat16), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


@pytest.mark.skipif(not CpuForms(is_exact=False).reads_grid(4), reason="there are no products with 4-bit codes here")
@pytest.mark.parametrize("name", FORMS)
def test_matrices_on_a_grid_stay_in_4_bits(
    name: str, written: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gpu_worker.products.forms.crossover", lambda *_: 4)
    packed, plain = written(name)
    forms = CpuForms(is_exact=False, copy_bytes=0)
    model = load_laid_out(open_model(packed), forms)
    assert ("4 matrices in 4 bits" in forms.description) == FORMS[name].is_on_grid
    grids = grids_in(open_model(packed))
    expected_bytes = laid_out_bytes(model.config, CpuForms(is_exact=False, copy_bytes=0), grids)
    assert model.weights.num_bytes <= expected_bytes
    assert bool(grids) == FORMS[name].is_on_grid
    assert model.report.num_bytes_read == sum(num_bytes_of(packed).values())
    reference = load_model(open_model(plain), CPU, torch.float32).weights.layers[0].gate_up
    packed_form = model.weights.layers[0].gate_up
    assert reference is not None
    assert packed_form is not None
    x = torch.randn(2, SHAPE.hidden_size, generator=torch.Generator().manual_seed(3))
    expected = reference(x)
    error = (packed_form(x) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) < 0.01


def refusal(folder: Path) -> str:
    with pytest.raises(ModelFileError) as error:
        load_model(open_model(folder), CPU, torch.float32)
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method: 'bitsandbytes' is not supported"),
        ({}, "quantization_config.quant_method: '' is not supported"),
        ("awq", "quantization_config: must be an object"),
        ({"quant_method": "awq", "bits": 3}, "quantization_config.bits: AWQ with 3 bits"),
        ({"quant_method": "awq", "version": "gemv"}, "quantization_config.version: 'gemv'"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "quantization_config.backend"),
        ({"quant_method": "awq", "zero_point": False}, "quantization_config.zero_point"),
        ({"quant_method": "awq", "group_size": 0}, "quantization_config.group_size: must be -1 or at least 1"),
        ({"quant_method": "awq", "group_size": 48}, "inputs are not whole groups of 48"),
        ({"quant_method": "gptq"}, "quantization_config.bits: is missing"),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits: GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "quantization_config.checkpoint_format"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "quantization_config.pack_dtype"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:x": {"bits": 8}}}, "quantization_config.dynamic"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt: 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "quantization_config.weight_block_size: must be two"),
        ({"quant_method": "compressed-tensors"}, "quantization_config.format: ''"),
        (compressed_config("marlin-24", num_bits=4), "quantization_config.format: 'marlin-24'"),
        (compressed_config("pack-quantized", num_bits=3), "config_groups.group_0.weights.num_bits: 3 bits"),
        (compressed_config("float-quantized", num_bits=4, type="float"), "weights.num_bits: 4 bits of type 'float'"),
        (compressed_config("pack-quantized") | {"config_groups": {}}, "config_groups: is missing or empty"),
        (compressed_config("pack-quantized") | {"config_groups": {"a": {"weights": None}}}, "a: says nothing"),
        (
            compressed_config("pack-quantized")
            | {"config_groups": groups_of(num_bits=4) | {"b": {"weights": {"num_bits": 8}}}},
            "config_groups: weights of several forms are not supported (num_bits differs)",
        ),
        (
            compressed_config("pack-quantized", num_bits=4) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format",
        ),
        (compressed_config("pack-quantized", num_bits=4) | {"transform_config": {"R1": {}}}, "transform_config"),
    ],
)
def test_forms_that_cannot_be_read_are_refused_by_the_field(
    config: object, problem: str, written: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    packed, _ = written("awq")
    fields = json.loads((packed / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(load_file(packed / "model.safetensors"), tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert problem in message
    assert "\n" not in message


def cut(tensor: Tensor) -> Tensor:
    return tensor[:-1].contiguous()


@pytest.mark.parametrize(
    ("name", "part", "change", "problem"),
    [
        ("awq", "scales", None, f"tensor {FIRST}.qweight: has no {FIRST}.scales beside it"),
        ("awq", "qzeros", cut, "qzeros: has shape [1, 8], [2, 8] is expected"),
        ("awq", "scales", lambda scales: scales.to(torch.int32), "scales: is in int32, bfloat16 or float16 or float32"),
        ("awq", "scales", lambda scales: scales * float("nan"), "holds a value that is not finite"),
        ("awq", "bias", lambda _: torch.ones(64), f"tensor {FIRST}.bias: is not part of a llama model"),
        ("awq", "weight", lambda _: torch.ones(64, 64), f"tensor {FIRST}.weight: stands beside {FIRST}.qweight"),
        ("awq", "g_idx", lambda _: torch.ones(64, dtype=torch.int32), "g_idx: is part of no matrix of AWQ"),
        ("gptq", "g_idx", lambda g_idx: g_idx + 2, "qweight: g_idx: names a group that is not one of 2"),
        ("gptq reordered", "g_idx", None, "qweight: has no g_idx beside it, which desc_act asks for"),
        ("compressed 4 bits", "weight_shape", lambda _: torch.tensor([64, 63]), "weight_shape: says [64, 63]"),
        ("compressed 4 bits", "weight_scale", lambda scale: scale[:, :0], "inputs are not 0 groups of one size"),
        ("compressed 4 bits, reordered", "weight_g_idx", lambda index: index + 9, "weight_g_idx: names a group"),
        ("compressed int8", "weight", lambda weight: weight[:, :63], "weight: has shape [64, 63], the configuration"),
        ("fp8 blocks", "weight_scale_inv", None, "is in FP8 with 0 of weight_scale and weight_scale_inv"),
        ("fp8 blocks", "weight_scale_inv", cut, "weight_scale_inv: has shape [1, 2], [2, 2] is expected"),
        ("fp8 blocks", "weight", lambda weight: weight.float().mul(float("nan")).to(weight.dtype), "is not finite"),
    ],
)
def test_damaged_parts_are_named(
    name: str,
    part: str,
    change: Callable[[Tensor], Tensor] | None,
    problem: str,
    written: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    packed, _ = written(name)
    tensors = load_file(packed / "model.safetensors")
    whole = f"{FIRST}.{part}"
    if change is None:
        del tensors[whole]
    else:
        tensors[whole] = change(tensors.get(whole, torch.empty(0))).contiguous()
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    assert problem in refusal(tmp_path)


def test_packed_files_that_config_json_does_not_mention_are_refused(
    written: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    packed, plain = written("awq")
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    save_file(load_file(packed / "model.safetensors"), tmp_path / "model.safetensors")
    assert "dtype 'I32' is not supported" in refusal(tmp_path)


def test_a_packed_model_is_checked_without_reading_it(written: Callable[[str], tuple[Path, Path]]) -> None:
    packed, plain = written("fp8 blocks")
    assert check_model(open_model(packed)) == check_model(open_model(plain))

"""What a start decides before it reads a weight: what the model or the device cannot take is refused there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.random_checkpoints import Shape, write_checkpoint
from services.gpu_worker.choices import UnfitSettingError, choose
from services.gpu_worker.fit_check import Machine, fit
from services.gpu_worker.models.parse_config import parse_model_config
from services.gpu_worker.start_stages import StartStages
from services.gpu_worker.start_up import load_parts
from services.model_files.source import open_model
from services.runtime.config import Settings
from tests.unit.gpu_worker.step_bench import CPU

CUDA = torch.device("cuda")
HOST = Machine("2.13", "", "", 2, int(16e9), int(8e9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's configuration, and no weights."""
    path = write_checkpoint(tmp_path_factory.mktemp("choices") / "model", "llama", Shape(max_positions=512))
    (path / "model.safetensors").unlink()
    return path


@pytest.mark.parametrize(
    ("chosen", "problem", "remedy"),
    [
        ({"max_model_len": 513}, "--max-model-len 513 is more than the 512 positions", "set --max-model-len 512 or"),
        ({"tp_size": 64}, "--tp-size 64: ", "set a lower --tp-size"),
        ({"quantization": "fp8"}, "--quantization fp8 needs a CUDA device", "leave --quantization"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float16"}, "--kv-cache-dtype float16 does not go", "leave --quantiz"),
        ({"attention_backend": "varlen"}, "--attention-backend varlen: it needs a CUDA device", "leave it out"),
        (
            {"chunked_prefill_size": -1, "kv_cache_tokens": 4096, "max_num_batched_tokens": 600},
            "without chunks a step must hold a whole prompt beside all running requests, 512 + 256 tokens",
            "leave --max-num-batched-tokens or",
        ),
    ],
)
def test_what_does_not_go_is_refused_with_a_remedy_and_without_weights(
    folder: Path, chosen: dict[str, Any], problem: str, remedy: str
) -> None:
    settings = Settings(model=str(folder), device="cpu", **chosen)
    config = parse_model_config(open_model(settings.model))
    with pytest.raises(UnfitSettingError) as refused:
        choose(settings, config, CPU, 0, max(1, settings.tp_size))
    assert str(refused.value).startswith(problem)
    assert refused.value.remedy.startswith(remedy)
    found = fit(settings, CPU, HOST, is_config_only=True)
    assert (found.problem, found.remedy) == (str(refused.value), refused.value.remedy)
    if not settings.tp_size:
        with pytest.raises(UnfitSettingError) as at_start:  # no word of the weights that are missing
            load_parts(settings, lambda: None, None, StartStages())
        assert str(at_start.value) == str(refused.value)


def test_whole_numbers_are_for_a_cpu(folder: Path) -> None:
    config = parse_model_config(open_model(str(folder)))
    settings = Settings(quantization="int4")
    assert choose(settings, config, CPU).dtype == torch.float32
    with pytest.raises(UnfitSettingError, match=r"--quantization int4 is for a CPU \(--device cpu\)"):
        choose(settings, config, CUDA)


def test_what_is_chosen_is_what_the_settings_and_the_model_say(folder: Path) -> None:
    config = parse_model_config(open_model(str(folder)))
    alone = choose(Settings(numerics="exact", page_size=8), config, CPU)
    assert (alone.max_model_len, alone.dtype, alone.shape.dtype) == (512, torch.float32, torch.float32)
    assert (alone.shape.page_size, alone.shape.num_kv_heads) == (8, config.num_kv_heads)
    half = choose(Settings(dtype="bfloat16", max_model_len=100), config, CPU, 1, 2)
    assert (half.max_model_len, half.dtype, half.shape.dtype) == (100, torch.bfloat16, torch.bfloat16)
    assert half.shape.num_kv_heads * 2 == config.num_kv_heads
    assert half.attention.num_heads * 2 == config.num_heads

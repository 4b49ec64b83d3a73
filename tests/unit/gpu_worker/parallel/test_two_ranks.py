"""Two ranks over gloo compute what one process computes: every family, plain and 4-bit matrices, uneven parts."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from bench.random_checkpoints import Shape, write_checkpoint
from services.gpu_worker.attention import attention_for
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.projection import Projection
from services.gpu_worker.products.forms import CpuForms
from services.gpu_worker.weights import load_laid_out, load_model
from services.model_files.source import open_model
from tests.unit.gpu_worker.parallel.two_ranks import PAGE_SIZE, is_exact, logits_of_two_ranks, run_steps
from tests.unit.gpu_worker.step_bench import CPU
from tests.unit.gpu_worker.test_weights_gguf import write_as_gguf
from tests.unit.gpu_worker.tiny_models import CONFIGS, make_tiny_model

Q4_1, F32 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.F32
GGUF = {"gguf": F32, "gguf-q4_1": Q4_1, "gguf-q4_1-fast": Q4_1}
DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
DENSE_CONFIGS = [name for name in CONFIGS if "moe" not in name]
# Three key/value heads, a feed-forward part and a vocabulary that do not divide by two.
UNEVEN = Shape(vocab_size=99, intermediate_size=91, num_heads=9, num_kv_heads=3, head_dim=8)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each family, and beside it what two ranks make of it: one pair of processes for all of them."""
    directory = tmp_path_factory.mktemp("ranks")
    for family in DENSE_FAMILIES:
        write_checkpoint(directory / family, family)
    write_checkpoint(directory / "uneven", "qwen2", UNEVEN)
    logits_of_two_ranks(directory)
    return directory


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Likewise of every kind of configuration and of GGUF files."""
    directory, whole = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("whole")
    for name in DENSE_CONFIGS:
        make_tiny_model(name, directory / name)
    for name, kind in GGUF.items():
        (directory / name).mkdir()
        write_as_gguf(make_tiny_model("llama", whole / name), directory / name / "model.gguf", kind)
    logits_of_two_ranks(directory)
    return directory


@pytest.mark.parametrize("name", [*DENSE_FAMILIES, "uneven"])
def test_logits_of_a_family_are_those_of_one_process(families: Path, name: str) -> None:
    alone, together = both(families, name)
    assert float((together - alone).abs().max()) < 1e-4


@pytest.mark.slow
@pytest.mark.surface
@pytest.mark.parametrize("name", [*DENSE_CONFIGS, *GGUF])
def test_logits_of_a_variant_are_those_of_one_process(variants: Path, name: str) -> None:
    alone, together = both(variants, name)
    if is_exact(name):
        assert float((together - alone).abs().max()) < 1e-4
    else:  # inputs of products are rounded to bfloat16: a sum in another order is seen in the third digit
        assert float((together - alone).norm() / alone.norm()) < 0.03


def both(directory: Path, name: str) -> tuple[Tensor, Tensor]:
    config, weights = whole_model(directory / name)
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, torch.float32)
    runner = ModelRunner(config, weights, KvCache(shape, 16, CPU), attention_for(CPU, torch.float32))
    return run_steps(runner), torch.from_numpy(np.load(directory / f"{name}.npy"))


def whole_model(folder: Path) -> tuple[ModelConfig, DecoderWeights[Projection]]:
    files = open_model(folder)
    if files.gguf is None:
        dense = load_model(files, CPU)
        return dense.config, dense.weights
    model = load_laid_out(files, CpuForms(is_exact(folder.name)))
    return model.config, model.weights

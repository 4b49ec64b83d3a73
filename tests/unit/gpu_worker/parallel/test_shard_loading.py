"""A rank reads its part of each tensor from the files, and nothing else: together they are the whole model."""

from __future__ import annotations

import functools
from pathlib import Path

import gguf
import pytest
import torch

from bench.random_checkpoints import Shape, write_checkpoint
from services.gpu_worker.dummy_weights import dummy_model
from services.gpu_worker.models.checkpoint_layout import placements
from services.gpu_worker.models.projection import DenseProjection, Projection
from services.gpu_worker.parallel.shards import split_model
from services.gpu_worker.weight_grid import WeightGrid
from services.gpu_worker.weights import load_laid_out, load_model
from services.model_files.source import open_model
from tests.unit.gpu_worker.packed_writers import FORMS, write_forms
from tests.unit.gpu_worker.step_bench import CPU
from tests.unit.gpu_worker.test_weights_gguf import write_as_gguf
from tests.unit.gpu_worker.tiny_models import make_tiny_model

DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
UNEVEN = Shape(vocab_size=99, intermediate_size=91, num_heads=9, num_kv_heads=3, head_dim=8)
WIDE = Shape(hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=1, head_dim=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [Shape(), UNEVEN, WIDE], ids=["even", "uneven", "one key/value head"])
@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_each_rank_has_its_part(family: str, shape: Shape, dtype: torch.dtype, tmp_path: Path) -> None:
    check_parts(write_checkpoint(tmp_path / "model", family, shape), dtype)


@pytest.mark.parametrize("name", FORMS)
def test_each_rank_has_its_part_of_packed_matrices(name: str, tmp_path: Path) -> None:
    packed, _ = write_forms(tmp_path, FORMS[name])
    check_parts(packed, torch.float32)
    whole = grids(packed, 0, 1)
    for rank in range(2 if whole else 0):
        assert len(grids(packed, rank, 2)) == len(whole)


def check_parts(folder: Path, dtype: torch.dtype) -> None:
    files = open_model(folder)
    whole = load_model(files, CPU, dtype)
    expected = {item.name: item.target for item in placements(whole.config, whole.weights)}
    for rank in range(2):
        split = functools.partial(split_model, rank=rank, size=2)
        own, shard = load_model(files, CPU, dtype, split=split), split(whole.config)
        assert own.config == shard.config
        assert own.report.num_bytes_placed < 0.75 * whole.report.num_bytes_placed
        for item in placements(shard.layout, own.weights):
            part, of_whole = shard.part(item.name), expected[item.name]
            if part is None:
                assert not item.target.any()
                continue
            of_whole = of_whole[part.first_row : part.first_row + item.target.shape[0]]
            if item.target.dim() == 2:
                of_whole = of_whole[:, part.first_column : part.first_column + item.target.shape[1]]
            assert torch.equal(item.target, of_whole), item.name


def grids(folder: Path, rank: int, size: int) -> list[WeightGrid]:
    """What a rank keeps on a grid; each is held against the plain matrix."""
    forms = _Kept()
    load_laid_out(open_model(folder), forms, split=functools.partial(split_model, rank=rank, size=size))
    return forms.grids


def test_parts_of_4_bit_matrices_stay_on_their_grid(tmp_path: Path) -> None:
    tiny = make_tiny_model("llama", tmp_path / "folder")
    files = open_model(write_as_gguf(tiny, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_1))
    whole = load_model(files, CPU)
    for rank in range(2):
        forms = _Kept()
        split = functools.partial(split_model, rank=rank, size=2)
        own, shard = load_laid_out(files, forms, split=split), split(whole.config)
        # The head, and of each layer all but the down matrix: 48 columns of it are no whole groups.
        assert len(forms.grids) == 1 + 3 * len(own.weights.layers)
        columns = slice(shard.queries.first * 16, shard.queries.end * 16)
        output, of_whole = own.weights.layers[0].output, whole.weights.layers[0].output
        assert isinstance(output, DenseProjection)
        torch.testing.assert_close(output.weight, of_whole.weight[:, columns])


class _Kept:
    """`Forms` that keep matrices as they are, and look at their grids."""

    def __init__(self) -> None:
        self.grids: list[WeightGrid] = []

    def reads_grid(self, num_bits: int) -> bool:
        return num_bits == 4

    def settle(self) -> None:
        """Nothing was put off."""

    def expect(self, num_weights: int, grid_bits: int | None) -> int:
        return 4 * num_weights

    def lay_out(self, dense: DenseProjection, grid: WeightGrid | None) -> Projection:
        if grid is not None:
            self.grids.append(grid)
            torch.testing.assert_close(grid.values(), dense.weight)
        return dense


def test_random_weights_of_a_part(tmp_path: Path) -> None:
    files = open_model(write_checkpoint(tmp_path / "model", "llama"))
    own = dummy_model(files, CPU, split=functools.partial(split_model, rank=1, size=2))
    assert own.config.num_heads == 2
    assert own.weights.embedding.shape[0] < own.config.vocab_size

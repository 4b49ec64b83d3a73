"""gpu_worker: loads a model: configuration, then every tensor of the checkpoint, exactly once, to its place.

What a checkpoint must hold follows from the configuration; names and shapes are compared with the headers of the files
before any data is read, so that a wrong file is refused at once. Only JSON, safetensors and GGUF files are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from services.gpu_worker.models.checkpoint_layout import (
    Placement,
    allocate_layer,
    allocate_outside,
    allocate_weights,
    layer_placements,
    outside_placements,
    placements,
)
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.layer_weights import DecoderWeights, LayerWeights
from services.gpu_worker.models.parse_config import packed_format, parse_model_config
from services.gpu_worker.models.projection import DenseProjection, Projection
from services.gpu_worker.models.registry import FAMILIES
from services.gpu_worker.parallel.shards import Shard, undivided
from services.gpu_worker.weight_grid import WeightGrid, stacked
from services.gpu_worker.weight_sources.packed_files import PackedFiles
from services.gpu_worker.weight_sources.safetensors_files import SafetensorsFiles
from services.gpu_worker.weight_sources.source import LoadMeter, WeightSource
from services.model_files.errors import ModelFileError
from services.model_files.source import ModelFiles

Split = Callable[[ModelConfig], Shard]
"""Which part of a model, by its configuration, this process holds."""

Place = tuple[torch.dtype, torch.device]
CPU_FLOAT32: Place = (torch.float32, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How loading went.

    Attributes:
        num_bytes_read: bytes that came from disk (or the system's file cache).
        disk_s: seconds spent reading them.
        decode_s: seconds spent turning quantized blocks into numbers.
        num_bytes_placed: bytes of weights on the device.
        place_s: seconds spent converting and copying them there; 0 where they were read in place.
        total_s: seconds from the first check to the last.
    """

    num_bytes_read: int
    disk_s: float
    decode_s: float
    num_bytes_placed: int
    place_s: float
    total_s: float

    @property
    def disk_gb_per_s(self) -> float:
        """Disk to memory, 10^9 bytes a second."""
        return _rate(self.num_bytes_read, self.disk_s)

    @property
    def device_gb_per_s(self) -> float:
        """Memory to device, 10^9 bytes a second."""
        return _rate(self.num_bytes_placed, self.place_s)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as plain matrices, the reference of all other forms."""

    config: ModelConfig
    weights: DecoderWeights[DenseProjection]
    report: LoadReport


@dataclass(frozen=True, slots=True)
class RunnableModel:
    """A model in whatever form runs."""

    config: ModelConfig
    weights: DecoderWeights[Projection]
    report: LoadReport


class Forms(Protocol):
    """Decides in what form each matrix is kept."""

    def reads_grid(self, num_bits: int) -> bool:
        """Whether matrices on a grid of so many bits are of use as such."""

    def expect(self, num_weights: int, grid_bits: int | None) -> int:
        """Bytes that a matrix of so many weights will take at most; asked for one matrix after another."""

    def lay_out(self, dense: DenseProjection, grid: WeightGrid | None) -> Projection:
        """The projection that runs; `grid` is where the file holds the matrix on one. May keep `dense`."""

    def settle(self) -> None:
        """Decides what could not be decided matrix by matrix, once all are laid out."""


def load_model(
    files: ModelFiles,
    device: torch.device,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] = lambda num_bytes, num_bytes_total: None,
    split: Split = undivided,
) -> LoadedModel:
    """Loads a model as plain matrices.

    Args:
        files: the model on disk.
        device: where the weights go.
        dtype: of the weights; None: float32 on the CPU, elsewhere what the checkpoint says it is in (bfloat16 where it
            does not say).
        progress: called with (bytes read, bytes to read) as reading goes on.
        split: which part of the model this process holds; no more than it is kept in memory.

    Raises:
        StartError: of `split`.
        ModelFileError: the configuration is not supported; a tensor is missing, left over, misshapen or holds a value
            that is not finite; a file is missing, damaged or truncated. Names the file and the field or tensor.
    """
    reader = _Reader(files, progress, split)
    layout = reader.shard.layout
    weights = allocate_weights(layout, dtype or default_dtype(layout, device), device)
    with torch.inference_mode():
        for item in placements(layout, weights):
            reader.load(item)
    return LoadedModel(reader.shard.config, weights, reader.report())


def load_laid_out(
    files: ModelFiles,
    forms: Forms,
    progress: Callable[[int, int], None] = lambda num_bytes, num_bytes_total: None,
    place: Place = CPU_FLOAT32,
    split: Split = undivided,
) -> RunnableModel:
    """Loads a model, each matrix in the form in which it runs.

    Layer by layer: beside what is kept, no more than one layer's plain matrices (and those outside of layers) are in
    memory at a time.

    Args:
        files: the model on disk.
        forms: what becomes of each matrix.
        progress: see `load_model`.
        place: dtype and device of the plain matrices that forms are made of.
        split: see `load_model`.

    Raises:
        StartError, ModelFileError: see `load_model`.
    """
    reader = _Reader(files, progress, split)
    config = reader.shard.layout
    outside = allocate_outside(config, *place)
    with torch.inference_mode():
        items = list(outside_placements(config, outside))
        grids = [reader.load_form(item, forms) for item in items]
        head = forms.lay_out(outside.head, _grid_of(outside.head, items, grids))
        layers = []
        for index in range(config.num_layers):
            layer = allocate_layer(config, *place, index)
            layers.append(_laid_out(reader, layer, list(layer_placements(config, layer, index)), forms))
        forms.settle()
    weights = DecoderWeights(outside.embedding, tuple(layers), outside.final_norm, head, outside.rotary_frequencies)
    return RunnableModel(reader.shard.config, weights, reader.report())


def grids_in(files: ModelFiles) -> dict[str, int]:
    """The tensors that a model's files hold on a grid, by checkpoint name: bits of a code. Raises ModelFileError."""
    source = _open_source(files, parse_model_config(files))
    bits = {name: source.grid_bits(name) for name in source.tensors}
    return {name: num_bits for name, num_bits in bits.items() if num_bits is not None}


def laid_out_bytes(
    config: ModelConfig, forms: Forms, grids: Mapping[str, int] | None = None, dtype: torch.dtype = torch.float32
) -> int:
    """About what a model takes in memory once `load_laid_out` has loaded it in a dtype; `grids`: see `grids_in`."""

    def expected(item: Placement) -> int:
        num_bits = (grids or {}).get(item.name)
        is_read = num_bits is not None and forms.reads_grid(num_bits)
        return forms.expect(item.target.numel(), num_bits if is_read else None)

    meta = (dtype, torch.device("meta"))
    outside = allocate_outside(config, *meta)
    heads = [item for item in outside_placements(config, outside) if item.target is outside.head.weight]
    num_bytes = outside.embedding.nbytes + sum(expected(item) for item in heads)
    for index in range(config.num_layers):
        layer = allocate_layer(config, *meta, index)
        for item in layer_placements(config, layer, index):
            is_router = layer.experts is not None and item.target is layer.experts.router
            if item.target.dim() == 2 and not is_router:
                num_bytes += expected(item)
            else:
                num_bytes += item.target.nbytes
    return num_bytes + outside.final_norm.nbytes


class _Reader:
    """Reads the tensors of one model, and knows how that went."""

    def __init__(self, files: ModelFiles, progress: Callable[[int, int], None], split: Split) -> None:
        """Reads the configuration and the headers, and compares them; see `load_model`."""
        self._started = perf_counter()
        config = parse_model_config(files)
        self._source = _open_source(files, config)
        _check_tensors(self._source, config)
        self.shard = split(config)
        self._meter = LoadMeter(sum(self._num_bytes(item) for item in _expected(self.shard.layout)), progress)

    def _num_bytes(self, item: Placement) -> int:
        """Bytes that will be read for it."""
        part = self.shard.part(item.name)
        return part.num_bytes(self._source.tensors[item.name], tuple(item.target.shape)) if part else 0

    def load(self, item: Placement) -> None:
        """Fills a tensor's place."""
        part = self.shard.part(item.name)
        if part is None:
            item.target.zero_()
            return
        self._source.load(item.name, item.target, self._meter, part)
        self._require_finite(item)

    def load_form(self, item: Placement, forms: Forms) -> WeightGrid | None:
        """Likewise; the grid, where the file holds the tensor on one that is of use."""
        num_bits = self._source.grid_bits(item.name)
        part = self.shard.part(item.name)
        grid = None
        if part is not None and num_bits is not None and forms.reads_grid(num_bits):
            grid = self._source.load_grid(item.name, item.target, self._meter, part)
        if grid is None:
            self.load(item)
        else:
            self._require_finite(item)
        return grid

    def _require_finite(self, item: Placement) -> None:
        if not _is_finite(item.target):
            problem = f"holds a value that is not finite in {_name(item.target.dtype)}"
            raise self._source.tensors[item.name].error(problem)

    def report(self) -> LoadReport:
        """How it went so far."""
        return LoadReport(
            num_bytes_read=self._meter.num_bytes_read,
            disk_s=self._meter.disk_s,
            decode_s=self._meter.decode_s,
            num_bytes_placed=self._meter.num_bytes_placed,
            place_s=self._meter.place_s,
            total_s=perf_counter() - self._started,
        )


def _laid_out(
    reader: _Reader, layer: LayerWeights[DenseProjection], items: list[Placement], forms: Forms
) -> LayerWeights[Projection]:
    grids = [reader.load_form(item, forms) for item in items]
    return layer.with_projections(lambda dense: forms.lay_out(dense, _grid_of(dense, items, grids)))


def _grid_of(
    dense: DenseProjection, items: Sequence[Placement], grids: Sequence[WeightGrid | None]
) -> WeightGrid | None:
    """The grid of a matrix, if all of its parts lie on one. They are views of it, in the order of its rows."""
    begin = dense.weight.data_ptr()
    memory = range(begin, begin + dense.weight.nbytes)
    parts = [grid for item, grid in zip(items, grids, strict=True) if item.target.data_ptr() in memory]
    known = [part for part in parts if part is not None]
    return stacked(known) if parts and len(known) == len(parts) else None


def check_model(files: ModelFiles) -> ModelConfig:
    """Checks all that `load_model` checks before it reads a weight: configuration, tensors, their shapes, files' ends.

    Raises:
        ModelFileError: as `load_model`, but for values that are not finite.
    """
    config = parse_model_config(files)
    _check_tensors(_open_source(files, config), config)
    return config


def default_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """What weights and activations are where nobody says: see `load_model`."""
    return torch.float32 if device.type == "cpu" else config.dtype or torch.bfloat16


def _open_source(files: ModelFiles, config: ModelConfig) -> WeightSource:
    if files.gguf is None:
        form = packed_format(files)
        return SafetensorsFiles(files.path) if form is None else PackedFiles(files.path, form)
    # Needs the gguf package, which a machine that serves safetensors can do without.
    from services.gpu_worker.weight_sources.gguf_file import GgufFile

    interleaves = FAMILIES[config.model_type].gguf_interleaves_heads
    return GgufFile(files.gguf, config.head_dim if interleaves else None)


def _expected(config: ModelConfig) -> list[Placement]:
    """The tensors that the checkpoint must hold, with their shapes and no memory behind them."""
    return list(placements(config, allocate_weights(config, torch.float32, torch.device("meta"))))


def _check_tensors(source: WeightSource, config: ModelConfig) -> None:
    expected = {item.name: tuple(item.target.shape) for item in _expected(config)}
    for name, shape in expected.items():
        stored = source.tensors.get(name)
        if stored is None:
            raise ModelFileError(source.path, f"tensor {name} is missing")
        if stored.shape != shape:
            raise stored.error(f"has shape {list(stored.shape)}, the configuration asks for {list(shape)}")
    for name, stored in source.tensors.items():
        if name not in expected and not stored.may_be_left and not _may_be_left(name, config):
            raise stored.error(f"is not part of a {config.model_type} model with this configuration")


def _may_be_left(name: str, config: ModelConfig) -> bool:
    """Tensors that say nothing new: frequencies that follow from the configuration, a copy of the tied embedding."""
    is_frequencies = name.endswith(".rotary_emb.inv_freq") or name == "rope_freqs.weight"
    return is_frequencies or (name == "lm_head.weight" and config.tie_word_embeddings)


def _is_finite(tensor: Tensor) -> bool:
    # One pass without a mask as large as the tensor; a NaN makes both ends NaN.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _rate(num_bytes: int, seconds: float) -> float:
    return num_bytes / seconds / 1e9 if seconds > 0 else 0.0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""gpu_worker: loads a model: configuration, then every tensor of the checkpoint, exactly once, to its place.

What a checkpoint must hold follows from the configuration; names and shapes are compared with the headers of the files
before any data is read, so that a wrong file is refused at once. Only JSON, safetensors and GGUF files are opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from services.gpu_worker.models.checkpoint_layout import Placement, allocate_weights, placements
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.layer_weights import DecoderWeights
from services.gpu_worker.models.parse_config import parse_model_config
from services.gpu_worker.models.registry import FAMILIES
from services.gpu_worker.weight_sources.safetensors_files import SafetensorsFiles
from services.gpu_worker.weight_sources.source import LoadMeter, WeightSource
from services.model_files.errors import ModelFileError
from services.model_files.source import ModelFiles


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
    """A model that is ready to run."""

    config: ModelConfig
    weights: DecoderWeights
    report: LoadReport


def load_model(
    files: ModelFiles,
    device: torch.device,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] = lambda num_bytes, num_bytes_total: None,
) -> LoadedModel:
    """Loads a model.

    Args:
        files: the model on disk.
        device: where the weights go.
        dtype: of the weights; None: float32 on the CPU, elsewhere what the checkpoint says it is in (bfloat16 where it
            does not say).
        progress: called with (bytes read, bytes to read) as reading goes on.

    Raises:
        ModelFileError: the configuration is not supported; a tensor is missing, left over, misshapen or holds a value
            that is not finite; a file is missing, damaged or truncated. Names the file and the field or tensor.
    """
    started = perf_counter()
    config = parse_model_config(files)
    dtype = dtype or default_dtype(config, device)
    source = _open_source(files, config)
    _check_tensors(source, config)
    wanted = [source.tensors[item.name] for item in _expected(config)]
    meter = LoadMeter(sum(tensor.num_bytes for tensor in wanted), progress)
    weights = allocate_weights(config, dtype, device)
    with torch.inference_mode():
        for item in placements(config, weights):
            source.load(item.name, item.target, meter)
            if not _is_finite(item.target):
                raise source.tensors[item.name].error(f"holds a value that is not finite in {_name(dtype)}")
    report = LoadReport(
        num_bytes_read=meter.num_bytes_read,
        disk_s=meter.disk_s,
        decode_s=meter.decode_s,
        num_bytes_placed=meter.num_bytes_placed,
        place_s=meter.place_s,
        total_s=perf_counter() - started,
    )
    return LoadedModel(config, weights, report)


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
        return SafetensorsFiles(files.path)
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
        if name not in expected and not _may_be_left(name, config):
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

"""gpu_worker: reads safetensors files, one or several with an index, straight to where the weights belong.

The format (github.com/huggingface/safetensors, "Format"): 8 bytes, little-endian, the length of a JSON header; the
header, name -> {dtype, shape, data_offsets}; then the data without gaps. Reading it here instead of mapping it shows a
short file as an error rather than a crash, and lets a tensor go to its place without a copy.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from services.gpu_worker.weight_grid import WeightGrid
from services.gpu_worker.weight_sources.source import BLOCK_BYTES, WHOLE, LoadMeter, Part, StoredTensor
from services.model_files.errors import ModelFileError
from services.model_files.source import read_json_object

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PACKED_DTYPES = _PLAIN_DTYPES | {
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Names of types in files: those that packed matrices are made of, and the plain ones."""

_MAX_HEADER_BYTES = 100 * 1024 * 1024


class SafetensorsFiles:
    """A `WeightSource` over the safetensors files of a model's folder."""

    def __init__(self, folder: Path, dtypes: Mapping[str, torch.dtype] = _PLAIN_DTYPES) -> None:
        """Reads the headers of all files.

        Args:
            folder: of the model.
            dtypes: types that tensors may have, by their names in files.

        Raises:
            ModelFileError: no file, a missing shard, a damaged header, a file shorter or longer than its header says, a
                tensor in two files or not where the index says; the message names the file and the tensor.
        """
        self.path = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._known_dtypes = dtypes
        self._dtypes: dict[str, torch.dtype] = {}
        single = folder / _SINGLE_FILE
        if single.is_file():
            self._add_file(single)
        elif (folder / _INDEX_FILE).is_file():
            self._add_shards(folder / _INDEX_FILE)
        else:
            raise ModelFileError(folder, _nothing_to_read(folder))

    def load(self, name: str, target: Tensor, meter: LoadMeter, part: Part = WHOLE) -> None:
        """See `WeightSource.load`. Same dtype, on the CPU: read in place; else through a buffer of bounded size."""
        tensor = self.tensors[name]
        row_length = math.prod(tensor.shape[1:])
        if target[0].numel() == row_length:
            self._load_rows(name, target, meter, part.first_row * row_length)
            return
        dtype, (num_rows, num_columns) = self._dtypes[name], target.shape
        rows_at_once = max(1, BLOCK_BYTES // (row_length * dtype.itemsize))
        buffer = torch.empty(min(rows_at_once, num_rows), row_length, dtype=dtype)
        for start in range(0, num_rows, rows_at_once):
            rows = target[start : start + rows_at_once]
            block = buffer[: len(rows)]
            meter.read(tensor, (part.first_row + start) * row_length * dtype.itemsize, block.view(-1).view(torch.uint8))
            meter.place(block[:, part.first_column : part.first_column + num_columns], rows)

    def _load_rows(self, name: str, target: Tensor, meter: LoadMeter, first: int) -> None:
        """Numbers from the one numbered `first` on: whole rows lie one after another."""
        tensor, dtype = self.tensors[name], self._dtypes[name]
        flat = target.view(-1)
        if flat.dtype == dtype and flat.device.type == "cpu":
            meter.read(tensor, first * dtype.itemsize, flat.view(torch.uint8))
            meter.num_bytes_placed += flat.nbytes
            return
        block_length = BLOCK_BYTES // dtype.itemsize
        on_cuda = flat.device.type == "cuda"
        buffer = torch.empty(min(block_length, len(flat)), dtype=dtype, pin_memory=on_cuda)
        for start in range(0, len(flat), block_length):
            part = flat[start : start + block_length]
            block = buffer[: len(part)]
            meter.read(tensor, (first + start) * dtype.itemsize, block.view(torch.uint8))
            meter.place(block, part)

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor is stored in."""
        return self._dtypes[name]

    def read(self, name: str, meter: LoadMeter) -> Tensor:
        """A tensor as it is stored, in memory of its own on the CPU. Raises ModelFileError."""
        tensor = self.tensors[name]
        values = torch.empty(math.prod(tensor.shape), dtype=self._dtypes[name])
        meter.read(tensor, 0, values.view(torch.uint8))
        return values.view(tensor.shape)

    def grid_bits(self, name: str) -> int | None:
        """See `WeightSource.grid_bits`: these files hold plain numbers."""
        return None

    def load_grid(self, name: str, target: Tensor, meter: LoadMeter, part: Part = WHOLE) -> WeightGrid | None:
        """See `WeightSource.load_grid`: these files hold plain numbers."""
        return None

    def _add_shards(self, index_path: Path) -> None:
        weight_map = read_json_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(index_path, "field weight_map is missing or empty")
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise ModelFileError(index_path, f"field weight_map.{name}: {file_name!r} is not a file name")
            if not file_name.endswith(".safetensors"):
                raise ModelFileError(index_path, f"field weight_map.{name}: {file_name!r} is not a safetensors file")
        for file_name, num_tensors in Counter(weight_map.values()).items():
            shard = index_path.parent / file_name
            if not shard.is_file():
                raise ModelFileError(shard, f"is missing: {index_path.name} names it for {num_tensors} tensors")
        for file_name in dict.fromkeys(weight_map.values()):
            self._add_file(index_path.parent / file_name)
        for name, file_name in weight_map.items():
            if name not in self.tensors or self.tensors[name].file.name != file_name:
                raise ModelFileError(
                    index_path.parent / file_name, f"has no tensor {name}, which {index_path.name} names"
                )

    def _add_file(self, path: Path) -> None:
        header, data_start, data_length = _read_header(path)
        end = 0
        known = self._known_dtypes
        entries = {name: _entry(path, name, value, known) for name, value in header.items() if name != "__metadata__"}
        for name, (dtype, shape, begin, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
            if begin != end:
                raise ModelFileError(path, f"tensor {name}: data does not start where the one before ends")
            if name in self.tensors:
                raise ModelFileError(path, f"tensor {name} is in {self.tensors[name].file.name} as well")
            end = stop
            self.tensors[name] = StoredTensor(name, path, shape, data_start + begin, stop - begin)
            self._dtypes[name] = dtype
        if end != data_length:
            problem = (
                "is truncated or still being written" if end > data_length else "has bytes that belong to no tensor"
            )
            raise ModelFileError(path, f"{problem}: {data_length} bytes of data, the header describes {end}")


def _nothing_to_read(folder: Path) -> str:
    others = sorted(
        file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.safetensors") for file in folder.glob(pattern)
    )
    found = f" (found {', '.join(others[:5])})" if others else ""
    return f"holds no weights: neither {_SINGLE_FILE} nor {_INDEX_FILE}{found}; only safetensors and GGUF are read"


def _read_header(path: Path) -> tuple[dict[str, object], int, int]:
    """The header, the first byte of the data and the bytes of data that the file has."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ModelFileError(path, "is not a safetensors file: shorter than 8 bytes")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise ModelFileError(path, f"has a damaged header, or is truncated: a header of {length} bytes")
            raw = file.read(length)
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from None
    return _parse_header(path, raw), 8 + length, size - 8 - length


def _parse_header(path: Path, raw: bytes) -> dict[str, object]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ModelFileError(path, "has a damaged header: it is not JSON") from None
    if not isinstance(header, dict):
        raise ModelFileError(path, "has a damaged header: it is not a JSON object")
    return header


def _unique(path: Path, pairs: list[tuple[str, object]]) -> dict[str, object]:
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ModelFileError(path, f"tensor {name} appears {count} times in the header")
    return dict(pairs)


def _entry(
    path: Path, name: str, value: object, dtypes: Mapping[str, torch.dtype]
) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Checks one entry of a header: dtype, shape, first byte and end within the data."""
    if not isinstance(value, dict):
        raise ModelFileError(path, f"tensor {name}: its header entry is not an object")
    dtype_name, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ModelFileError(path, f"tensor {name}: its shape or data_offsets are damaged")
    dtype = dtypes.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise ModelFileError(path, f"tensor {name}: dtype {dtype_name!r} is not supported ({', '.join(dtypes)})")
    begin, stop = offsets
    if stop - begin != math.prod(shape) * dtype.itemsize:
        raise ModelFileError(path, f"tensor {name}: {stop - begin} bytes for shape {shape} of {dtype_name}")
    return dtype, tuple(shape), begin, stop


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)

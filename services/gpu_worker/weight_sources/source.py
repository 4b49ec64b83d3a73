"""gpu_worker: what a file of weights offers, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from services.gpu_worker.weight_grid import WeightGrid
from services.model_files.errors import ModelFileError

# Largest piece that is read at once; also what a progress bar moves by.
BLOCK_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it.

    Attributes:
        name_in_file: its name there.
        file: the file that holds it.
        shape: rows first.
        start: first byte in the file.
        num_bytes: bytes in the file.
        may_be_left: whether a model may do without it, because it says nothing about weights.
        is_read_whole: whether all of it is read, however little of it is wanted.
    """

    name_in_file: str
    file: Path
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    may_be_left: bool = False
    is_read_whole: bool = False

    def left_out(self) -> StoredTensor:
        """The same, as one that a model may do without."""
        return replace(self, may_be_left=True)

    def error(self, problem: str) -> ModelFileError:
        """An error that names the file and the tensor."""
        return ModelFileError(self.file, f"tensor {self.name_in_file}: {problem}")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stored matrix or vector: as many rows and columns as its target has, from these on.

    Attributes:
        first_row: of a vector the first element; in a matrix of heads the first row of a head.
        first_column: 0 in a vector.
    """

    first_row: int = 0
    first_column: int = 0

    def num_bytes(self, tensor: StoredTensor, shape: tuple[int, ...]) -> int:
        """Bytes that are read for a target of this shape: whole rows, whatever columns of them it wants."""
        if tensor.is_read_whole:
            return tensor.num_bytes
        return tensor.num_bytes // tensor.shape[0] * shape[0]


WHOLE = Part()
"""All of it."""


@dataclass(slots=True)
class LoadMeter:
    """Counts what has been loaded and where the time went; reports each step.

    Attributes:
        num_bytes_total: bytes to read in all.
        report: called with (bytes read, bytes to read) as reading goes on.
        num_bytes_read: bytes that came from disk.
        disk_s: seconds spent reading them.
        decode_s: seconds spent turning quantized blocks into numbers.
        num_bytes_placed: bytes written to the model's weights.
        place_s: seconds spent converting and copying to the device.
    """

    num_bytes_total: int
    report: Callable[[int, int], None]
    num_bytes_read: int = field(default=0, init=False)
    disk_s: float = field(default=0.0, init=False)
    decode_s: float = field(default=0.0, init=False)
    num_bytes_placed: int = field(default=0, init=False)
    place_s: float = field(default=0.0, init=False)

    def read(self, tensor: StoredTensor, offset: int, buffer: Tensor) -> None:
        """Fills `buffer` ([num_bytes] uint8, on the CPU) from byte `offset` of the tensor.

        Raises:
            ModelFileError: the file cannot be read or ends too early.
        """
        view = memoryview(buffer.numpy().data)
        try:
            with tensor.file.open("rb", buffering=0) as file:
                file.seek(tensor.start + offset)
                while view:
                    started = perf_counter()
                    num_bytes = file.readinto(view[:BLOCK_BYTES])
                    if not num_bytes:
                        raise tensor.error("the file ends before it does: it is truncated")
                    view = view[num_bytes:]
                    self._count(num_bytes, perf_counter() - started)
        except OSError as error:
            raise tensor.error(f"cannot be read: {error.strerror}") from None

    def _count(self, num_bytes: int, seconds: float) -> None:
        self.disk_s += seconds
        self.num_bytes_read += num_bytes
        self.report(self.num_bytes_read, self.num_bytes_total)

    def place(self, block: Tensor, target: Tensor) -> None:
        """Copies a block into the model's weights, converted to their dtype; returns when it is there."""
        started = perf_counter()
        target.copy_(block)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        self.place_s += perf_counter() - started
        self.num_bytes_placed += target.nbytes


class WeightSource(Protocol):
    """Weights on disk, under the names of a Hugging Face checkpoint."""

    @property
    def path(self) -> Path:
        """The folder or file, for messages."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What there is, by checkpoint name; read from headers only."""

    def load(self, name: str, target: Tensor, meter: LoadMeter, part: Part = WHOLE) -> None:
        """Fills `target`, of the tensor's shape or that of a part of it, in any float dtype, on any device.

        Raises:
            ModelFileError: the file ends too early or cannot be read.
        """

    def grid_bits(self, name: str) -> int | None:
        """Bits of a code, of a matrix that the file holds on a grid; None: of no other tensor."""

    def load_grid(self, name: str, target: Tensor, meter: LoadMeter, part: Part = WHOLE) -> WeightGrid | None:
        """As `load`, of a matrix in float32 on the CPU that the file holds on a grid; returns the grid.

        Where the file does not hold it so, or the part cuts through groups, nothing is read and None is returned.
        """

"""Reads the header of a GGUF file: its metadata and the names and shapes of its tensors, never a weight.

The gguf package's own reader builds a numpy view of each of some 150,000 strings and needs seconds where this needs a
fraction of one; three kinds of process read the header at start. The worker reads the weights through the package.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from services.model_files.errors import ModelFileError

GgufValue: TypeAlias = "int | float | bool | str | list[int] | list[float] | list[str]"
_Kind = TypeVar("_Kind", int, float, bool, str)

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
# GGUF value types by their number in the file, as struct codes.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_LENGTH = struct.Struct("<Q")  # stands before each string


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the header lists it.

    `shape` is in GGUF order, the fastest varying dimension first: a matrix of [rows, columns] reads (columns, rows).
    `offset` counts bytes from `GgufHeader.data_start`.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything of a GGUF file that comes before its tensor data; the accessors check types and name the field."""

    path: Path
    metadata: dict[str, GgufValue]
    tensors: dict[str, TensorEntry]
    data_start: int

    def text(self, key: str) -> str | None:
        """Return a string field, None if the file has none."""
        return self._scalar(key, str)

    def integer(self, key: str) -> int | None:
        """Return an integer field, None if the file has none."""
        return self._scalar(key, int)

    def number(self, key: str) -> float | None:
        """Return a numeric field as a float, None if the file has none."""
        value = self.metadata.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        return self._scalar(key, float)

    def flag(self, key: str) -> bool | None:
        """Return a boolean field, None if the file has none."""
        return self._scalar(key, bool)

    def texts(self, key: str) -> list[str] | None:
        """Return a list of strings, None if the file has none."""
        return self._list(key, str)

    def integers(self, key: str) -> list[int] | None:
        """Return a list of integers, None if the file has none."""
        return self._list(key, int)

    def floats(self, key: str) -> list[float] | None:
        """Return a list of floats, None if the file has none."""
        return self._list(key, float)

    def _scalar(self, key: str, kind: type[_Kind]) -> _Kind | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        if type(value) is not kind:
            raise ModelFileError(self.path, f"field {key}: expected {kind.__name__}, found {type(value).__name__}")
        return value

    def _list(self, key: str, kind: type[_Kind]) -> list[_Kind] | None:
        values = self.metadata.get(key)
        if values is None:
            return None
        if not isinstance(values, list):
            raise ModelFileError(self.path, f"field {key}: expected a list, found {type(values).__name__}")
        found = [value for value in values if type(value) is kind]
        if len(found) != len(values):
            raise ModelFileError(self.path, f"field {key}: expected a list of {kind.__name__}")
        return found


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and tensor list of the GGUF file at `path`.

    Raises:
        ModelFileError: the file cannot be read, is no GGUF file, has an unsupported version, or its header is cut off
            or contradicts itself. The message names the field at which reading stopped.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ModelFileError(path, "the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data).read()
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from None


class _HeaderReader:
    """A cursor over the mapped file; every read is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 0
        self._reading = "the beginning"

    def read(self) -> GgufHeader:
        beginning = self._data[: len(_MAGIC)]
        if not _MAGIC.startswith(beginning):
            raise ModelFileError(self._path, f"is not a GGUF file: it begins with {beginning!r}, not with {_MAGIC!r}")
        self._take(len(_MAGIC))
        self._reading = "version"
        version = self._unpack("I")
        if version not in _SUPPORTED_VERSIONS:
            kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise self._error(f"{kind} GGUF is not supported, only little-endian versions 2 and 3")
        self._reading = "tensor count"
        num_tensors = self._unpack("Q")
        self._reading = "metadata count"
        num_fields = self._unpack("Q")
        metadata = self._read_metadata(num_fields)
        tensors = self._read_tensors(num_tensors)
        return GgufHeader(self._path, metadata, tensors, self._data_start(metadata))

    def _data_start(self, metadata: dict[str, GgufValue]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._error("field general.alignment is not a power of two")
        return -(-self._position // alignment) * alignment

    def _read_metadata(self, num_fields: int) -> dict[str, GgufValue]:
        fields: dict[str, GgufValue] = {}
        for index in range(num_fields):
            self._reading = f"metadata field {index} of {num_fields}"
            key = self._string()
            self._reading = f"field {key}"
            if key in fields:
                raise self._error("appears twice")
            fields[key] = self._value(self._unpack("I"))
        return fields

    def _read_tensors(self, num_tensors: int) -> dict[str, TensorEntry]:
        tensors: dict[str, TensorEntry] = {}
        for index in range(num_tensors):
            self._reading = f"tensor {index} of {num_tensors}"
            name = self._string()
            self._reading = f"tensor {name}"
            num_dimensions = self._unpack("I")
            if num_dimensions > _MAX_DIMENSIONS:
                raise self._error(f"has {num_dimensions} dimensions")
            if name in tensors:
                raise self._error("appears twice")
            shape = tuple(self._unpack("Q") for _ in range(num_dimensions))
            tensors[name] = TensorEntry(name, shape, self._unpack("I"), self._unpack("Q"))
        return tensors

    def _value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._unpack("I"), self._unpack("Q"))
        if kind not in _SCALARS:
            raise self._error(f"has the unknown value type {kind}")
        value = struct.unpack("<" + _SCALARS[kind], self._take(struct.calcsize("<" + _SCALARS[kind])))[0]
        # 1e-05 kept in 32 bits reads 9.999999747378752e-06 as a Python float; the shortest decimal is what was meant.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _array(self, kind: int, length: int) -> list[int] | list[float] | list[str]:
        if kind == _STRING:
            return self._strings(length)
        if kind not in _SCALARS:
            raise self._error(f"is an array of the unsupported element type {kind}")
        code = _SCALARS[kind]
        return list(struct.unpack(f"<{length}{code}", self._take(length * struct.calcsize("<" + code))))

    def _string(self) -> str:
        raw = self._take(self._unpack("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error("is not valid UTF-8") from None

    def _strings(self, count: int) -> list[str]:
        """The same `count` times, in a loop that calls little: a vocabulary and its merges are 100,000 and more."""
        self._check_room(count * _LENGTH.size)
        data, end, position = self._data, self._size, self._position
        texts: list[str] = []
        try:
            for _ in range(count):
                start = position + _LENGTH.size
                position = start + _LENGTH.unpack_from(data, position)[0] if start <= end else start
                if position > end:
                    self._check_room(position - self._position)
                texts.append(data[start:position].decode("utf-8"))
        except UnicodeDecodeError:
            raise self._error("is not valid UTF-8") from None
        self._position = position
        return texts

    def _unpack(self, code: str) -> int:
        value: int = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]
        return value

    def _take(self, num_bytes: int) -> bytes:
        self._check_room(num_bytes)
        start = self._position
        self._position = start + num_bytes
        return self._data[start : self._position]

    def _check_room(self, num_bytes: int) -> None:
        if num_bytes > self._size - self._position:
            raise self._error("runs over the end of the file: it is truncated or damaged")

    def _error(self, problem: str) -> ModelFileError:
        return ModelFileError(self._path, f"{self._reading} {problem}")

"""gpu_worker: reads the safetensors files of a checkpoint whose matrices are packed, as if they held plain ones.

A packed matrix is shown under the name that a plain checkpoint has it by, with the shape of the plain one; what it is
made of is not shown. Tensors that say nothing about weights are marked as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from services.gpu_worker.packed_checkpoints.codes import GRID_BITS, Decoded, keeps_neighbours
from services.gpu_worker.packed_checkpoints.packed_format import FLOATS, PackedFormat, StoredPart
from services.gpu_worker.weight_grid import GROUP, WeightGrid
from services.gpu_worker.weight_sources.safetensors_files import PACKED_DTYPES, SafetensorsFiles
from services.gpu_worker.weight_sources.source import WHOLE, LoadMeter, Part, StoredTensor

Parts = Mapping[str, StoredPart]


class PackedFiles:
    """A `WeightSource` over the safetensors files of a model's folder, in one form."""

    def __init__(self, folder: Path, form: PackedFormat) -> None:
        """Reads the headers of all files and finds the packed matrices.

        Raises:
            ModelFileError: see `SafetensorsFiles`; a part of a packed matrix is missing or misshapen, or a tensor is
                of a type that no weights have. Names the file and the tensor.
        """
        self.path = folder
        self._files = SafetensorsFiles(folder, PACKED_DTYPES)
        self._form = form
        self._packed: dict[str, Parts] = {}
        self.tensors: dict[str, StoredTensor] = {}
        used: set[str] = set()
        for name in self._files.tensors:
            stem, _, part = name.rpartition(".")
            if part == form.marker and self._files.dtype(name) in form.marker_dtypes:
                used |= self._add_packed(stem)
        rest = {name: tensor for name, tensor in self._files.tensors.items() if name not in used}
        self.tensors |= {name: self._as_plain(name, tensor) for name, tensor in rest.items()}

    def load(self, name: str, target: Tensor, meter: LoadMeter, part: Part = WHOLE) -> None:
        """See `WeightSource.load`. A packed matrix is decoded as a whole, even where a part of it is wanted."""
        if name not in self._packed:
            self._files.load(name, target, meter, part)
            return
        decoded = self._decoded(name, meter)
        started = perf_counter()
        values = decoded.values()
        meter.decode_s += perf_counter() - started
        num_rows, num_columns = target.shape
        rows = values[part.first_row : part.first_row + num_rows]
        meter.place(rows[:, part.first_column : part.first_column + num_columns], target)

    def grid_bits(self, name: str) -> int | None:
        """See `WeightSource.grid_bits`."""
        parts = self._packed.get(name)
        if parts is None or not self._form.may_have_grid(parts):
            return None
        index = parts.get(self._form.index)
        if index is not None and not keeps_neighbours(self._files.read(index.tensor.name_in_file, _uncounted())):
            return None
        return GRID_BITS

    def load_grid(self, name: str, target: Tensor, meter: LoadMeter, part: Part = WHOLE) -> WeightGrid | None:
        """See `WeightSource.load_grid`."""
        num_rows, num_columns = target.shape
        if self.grid_bits(name) is None or part.first_column % GROUP or num_columns % GROUP:
            return None
        decoded = self._decoded(name, meter)
        started = perf_counter()
        grid = decoded.grid()
        assert grid is not None
        grid = grid.map_rows(lambda rows: rows[part.first_row : part.first_row + num_rows])
        grid = grid.columns(part.first_column, num_columns)
        values = grid.values()
        meter.decode_s += perf_counter() - started
        meter.place(values, target)
        return grid

    def _decoded(self, name: str, meter: LoadMeter) -> Decoded:
        parts = self._packed[name]
        read = {part: self._files.read(stored.tensor.name_in_file, meter) for part, stored in parts.items()}
        started = perf_counter()
        try:
            decoded = self._form.decode(read, _shape(self.tensors[name]))
        except ValueError as error:
            raise self.tensors[name].error(str(error)) from None
        meter.decode_s += perf_counter() - started
        return decoded

    def _add_packed(self, stem: str) -> set[str]:
        """Puts a packed matrix together; returns the names of the tensors that it is made of."""
        form = self._form
        marker = self._files.tensors[f"{stem}.{form.marker}"]
        parts: dict[str, StoredPart] = {}
        for part in (form.marker, *form.required, *form.optional):
            name = f"{stem}.{part}"
            if name in self._files.tensors:
                parts[part] = StoredPart(self._files.tensors[name], self._files.dtype(name))
            elif part in form.required:
                raise marker.error(f"has no {name} beside it")
        num_bytes = sum(stored.tensor.num_bytes for stored in parts.values())
        shape = form.shape(parts)
        self._packed[f"{stem}.weight"] = parts
        self.tensors[f"{stem}.weight"] = StoredTensor(
            marker.name_in_file, marker.file, shape, marker.start, num_bytes, is_read_whole=True
        )
        return {f"{stem}.{part}" for part in parts}

    def _as_plain(self, name: str, tensor: StoredTensor) -> StoredTensor:
        """A tensor that is no part of a packed matrix."""
        stem, _, ending = name.rpartition(".")
        if name in self._packed:
            raise tensor.error(f"stands beside {self.tensors[name].name_in_file}: which of the two is meant is unknown")
        if ending in self._form.without_meaning:
            return tensor.left_out()
        if self._files.dtype(name) not in FLOATS:
            raise tensor.error(f"is part of no matrix of {self._form.name}")
        if ending == "bias" and f"{stem}.weight" in self._packed and self._is_zero(name):
            return tensor.left_out()  # some writers give all their modules one, whether the model has it or not
        return tensor

    def _is_zero(self, name: str) -> bool:
        return not bool(torch.count_nonzero(self._files.read(name, _uncounted())))


def _uncounted() -> LoadMeter:
    """For what is read before the model is."""
    return LoadMeter(0, lambda num_bytes, num_bytes_total: None)


def _shape(tensor: StoredTensor) -> tuple[int, int]:
    num_rows, num_columns = tensor.shape
    return num_rows, num_columns

"""gpu_worker: reads the weights of a GGUF file, decoding whatever type the gguf package can decode.

Three things differ from a Hugging Face checkpoint: the names; one tensor [num_experts, rows, columns] holds a matrix of
all experts of a layer, whose parts have the names of their own here; and, in files of the architecture llama (Mistral's
too), the rows of the query and key projections. There a head keeps the two halves of each rotary pair side by side:

    checkpoint  a0 a1 a2 .. b0 b1 b2 ..      GGUF  a0 b0 a1 b1 a2 b2 ..
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from services.gpu_worker.quantization import BlockFormat, block_format
from services.gpu_worker.weight_grid import GROUP, WeightGrid, grid_bits, read_grid
from services.gpu_worker.weight_sources.source import WHOLE, LoadMeter, Part, StoredTensor
from services.model_files.errors import ModelFileError
from services.model_files.gguf_metadata import GgufHeader, TensorEntry

# Weights decoded at a time: small enough that the decoder's intermediate arrays stay in the cache.
_BLOCK_WEIGHTS = 1024 * 1024

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")
_INTERLEAVED = re.compile(r"\.self_attn\.[qk]_proj\.(weight|bias)$")


class GgufFile:
    """A `WeightSource` over one GGUF file."""

    def __init__(self, header: GgufHeader, interleaved_head_dim: int | None) -> None:
        """Checks the types and the extent of all tensors.

        Args:
            header: of the file.
            interleaved_head_dim: width of a head where the file interleaves queries and keys, else None.

        Raises:
            ModelFileError: a type that cannot be decoded, rows that are not whole blocks, or a tensor that runs over
                the end of the file.
        """
        self.path = header.path
        self._interleaved_head_dim = interleaved_head_dim
        self.tensors: dict[str, StoredTensor] = {}
        self._formats: dict[str, BlockFormat] = {}
        size = header.path.stat().st_size
        formats = {kind: block_format(kind) for kind in {entry.ggml_type for entry in header.tensors.values()}}
        for entry in header.tensors.values():
            layout, tensor = _describe(header, entry, formats[entry.ggml_type], size)
            for name, part in _parts(tensor):
                self._formats[name], self.tensors[name] = layout, part

    def load(self, name: str, target: Tensor, meter: LoadMeter, part: Part = WHOLE) -> None:
        """See `WeightSource.load`. A few rows at a time are read, decoded and put in their place."""
        tensor, layout = self.tensors[name], self._formats[name]
        head_dim = self._interleaved_head_dim if _INTERLEAVED.search(name) else None
        if target.dim() == 1:  # short, and a part of it need not be whole blocks
            vector = self._decode(tensor, layout, 0, tensor.shape[0], meter)
            vector = _deinterleave(vector, head_dim) if head_dim else vector
            meter.place(vector[part.first_row : part.first_row + len(target)], target)
            return
        row_length, num_columns = tensor.shape[1], target.shape[1]
        rows_at_once = max(1, _BLOCK_WEIGHTS // row_length)
        if head_dim:
            rows_at_once = -(-rows_at_once // head_dim) * head_dim
        for start in range(0, len(target), rows_at_once):
            rows = target[start : start + rows_at_once]
            first = (part.first_row + start) * row_length
            block = self._decode(tensor, layout, first, len(rows) * row_length, meter).view(len(rows), row_length)
            block = _deinterleave(block, head_dim) if head_dim else block
            meter.place(block[:, part.first_column : part.first_column + num_columns], rows)

    def grid_bits(self, name: str) -> int | None:
        """See `WeightSource.grid_bits`."""
        return grid_bits(self._formats[name].name) if len(self.tensors[name].shape) == 2 else None

    def load_grid(self, name: str, target: Tensor, meter: LoadMeter, part: Part = WHOLE) -> WeightGrid | None:
        """See `WeightSource.load_grid`."""
        tensor, layout = self.tensors[name], self._formats[name]
        if self.grid_bits(name) is None or part.first_column % GROUP or target.shape[1] % GROUP:
            return None
        row_bytes = tensor.num_bytes // tensor.shape[0]
        raw = torch.empty(row_bytes * len(target), dtype=torch.uint8)
        meter.read(tensor, part.first_row * row_bytes, raw)
        started = perf_counter()
        grid = read_grid(layout.name, raw, tensor.shape[1]).columns(part.first_column, target.shape[1])
        head_dim = self._interleaved_head_dim
        if head_dim and _INTERLEAVED.search(name):
            grid = grid.map_rows(lambda rows: _deinterleave(rows, head_dim))
        values = grid.values()
        meter.decode_s += perf_counter() - started
        meter.place(values, target)
        return grid

    @staticmethod
    def _decode(tensor: StoredTensor, layout: BlockFormat, first: int, num_weights: int, meter: LoadMeter) -> Tensor:
        """Weights [first, first + num_weights) of a tensor, whole blocks, as float32."""
        num_bytes = num_weights // layout.block_length * layout.block_bytes
        raw = torch.empty(num_bytes, dtype=torch.uint8)
        meter.read(tensor, first // layout.block_length * layout.block_bytes, raw)
        started = perf_counter()
        values = layout.decode(raw)
        meter.decode_s += perf_counter() - started
        return values


def checkpoint_name(gguf_name: str) -> str:
    """The name that a Hugging Face checkpoint gives this tensor; unknown names stay as they are."""
    in_layer = _IN_LAYER.fullmatch(gguf_name)
    if in_layer and in_layer[2] in _LAYER_NAMES:
        return f"model.layers.{in_layer[1]}.{_LAYER_NAMES[in_layer[2]]}.{in_layer[3]}"
    outside = _OUTSIDE.fullmatch(gguf_name)
    if outside and outside[1] in _NAMES:
        return f"{_NAMES[outside[1]]}.{outside[2]}"
    return gguf_name


def _parts(tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """A tensor under its checkpoint name; a matrix of all experts as one for each, whole blocks like its rows."""
    found = _IN_LAYER.fullmatch(tensor.name_in_file)
    part = _EXPERT_NAMES.get(found[2]) if found else None
    # Experts without a byte are no matrices, and the file could name any number of them.
    if found is None or part is None or len(tensor.shape) != 3 or tensor.num_bytes < tensor.shape[0]:
        yield checkpoint_name(tensor.name_in_file), tensor
        return
    num_bytes = tensor.num_bytes // tensor.shape[0]
    for expert in range(tensor.shape[0]):
        name = f"model.layers.{found[1]}.mlp.experts.{expert}.{part}.{found[3]}"
        start = tensor.start + expert * num_bytes
        yield name, replace(tensor, shape=tensor.shape[1:], start=start, num_bytes=num_bytes)


def _describe(
    header: GgufHeader, entry: TensorEntry, layout: BlockFormat | None, file_size: int
) -> tuple[BlockFormat, StoredTensor]:
    def error(problem: str) -> ModelFileError:
        return ModelFileError(header.path, f"tensor {entry.name}: {problem}")

    if layout is None:
        raise error(f"type {entry.ggml_type} cannot be decoded")
    shape = tuple(reversed(entry.shape))
    num_bytes = layout.num_bytes(shape)
    if num_bytes is None:
        raise error(f"rows of {shape} are not whole blocks of {layout.block_length} ({layout.name})")
    start = header.data_start + entry.offset
    if start + num_bytes > file_size:
        raise error("runs over the end of the file: it is truncated or still being written")
    return layout, StoredTensor(entry.name, header.path, shape, start, num_bytes)


def _deinterleave(rows: Tensor, head_dim: int) -> Tensor:
    """Undoes GGUF's order: [num_heads * head_dim, ...], pairs side by side, to first halves before second halves."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)

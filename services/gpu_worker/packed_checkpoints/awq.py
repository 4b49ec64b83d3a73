"""gpu_worker: AWQ checkpoints, in the order that their matrix kernels ("gemm") want.

    qweight [in, out / 8] int32, qzeros [groups, out / 8] int32, scales [groups, out]

A word holds 4-bit codes of 8 neighbouring outputs, the even ones in its lower half and the odd ones in its upper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.gpu_worker.models.config_fields import ConfigFields
from services.gpu_worker.packed_checkpoints.codes import GroupedCodes, in_order, unpacked
from services.gpu_worker.packed_checkpoints.packed_format import FLOATS, StoredPart
from services.gpu_worker.weight_grid import GROUP

_BITS = 4
_PER_WORD = 32 // _BITS
_PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)  # which of a word's codes, the lowest first, is of its first output, ...
_WHOLE_ROWS = -1


@dataclass(frozen=True, slots=True)
class Awq:
    """A `PackedFormat`; `group_size` is in inputs, None for all of them."""

    group_size: int | None
    name = "AWQ, 4 bits"
    marker = "qweight"
    marker_dtypes = frozenset({torch.int32})
    required = ("qzeros", "scales")
    optional = ()
    index = ""
    without_meaning = ()

    def shape(self, parts: Mapping[str, StoredPart]) -> tuple[int, int]:
        """See `PackedFormat.shape`."""
        num_inputs, num_words = parts["qweight"].require_matrix(torch.int32)
        group_size = self.group_size or num_inputs
        if num_inputs == 0 or num_inputs % group_size:
            raise parts["qweight"].tensor.error(f"{num_inputs} inputs are not whole groups of {group_size}")
        num_groups = num_inputs // group_size
        parts["qzeros"].require({torch.int32}, (num_groups, num_words))
        parts["scales"].require(FLOATS, (num_groups, num_words * _PER_WORD))
        return num_words * _PER_WORD, num_inputs

    def may_have_grid(self, parts: Mapping[str, StoredPart]) -> bool:
        """See `PackedFormat.may_have_grid`."""
        num_inputs = parts["qweight"].shape[0]
        return (self.group_size or num_inputs) % GROUP == 0

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> GroupedCodes:
        """See `PackedFormat.decode`."""
        num_inputs = shape[1]
        return GroupedCodes(
            codes=_by_output(parts["qweight"]),
            scales=parts["scales"].to(torch.float32).T.contiguous(),
            zeros=_by_output(parts["qzeros"]).to(torch.float32),
            group_of=in_order(num_inputs, self.group_size or num_inputs),
            bits=_BITS,
        )


def read_awq(fields: ConfigFields) -> Awq:
    """The form that a `quantization_config` of AWQ describes. Raises ModelFileError naming the field."""
    bits = fields.integer("bits", fields.integer("w_bit", _BITS))
    if bits != _BITS:
        raise fields.error("bits", f"AWQ with {bits} bits is not supported (supported: {_BITS})")
    for name in ("version", "format", "checkpoint_format"):
        version = fields.text(name, "gemm")
        if version.lower() != "gemm":
            raise fields.error(name, f"{version!r} is not supported (supported: gemm)")
    backend = fields.text("backend", "auto")
    if backend == "llm-awq":
        raise fields.error("backend", f"the packing of {backend!r} is not supported")
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point", "AWQ without zero points is not supported")
    return Awq(group_size(fields))


def group_size(fields: ConfigFields) -> int | None:
    """Inputs that share a scale, None for all of them."""
    size = fields.integer("group_size", 128, minimum=_WHOLE_ROWS)
    if size == 0:
        raise fields.error("group_size", "must be -1 or at least 1, not 0")
    return None if size == _WHOLE_ROWS else size


def _by_output(words: Tensor) -> Tensor:
    """[num_outputs, num_rows] codes from [num_rows, num_outputs / 8] words."""
    by_word = unpacked(words, _BITS).view(*words.shape, _PER_WORD)
    return by_word[:, :, _PLACE_OF_OUTPUT].reshape(len(words), -1).T.contiguous()

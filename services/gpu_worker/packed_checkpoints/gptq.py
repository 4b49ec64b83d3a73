"""gpu_worker: GPTQ checkpoints of 4 and 8 bits.

    qweight [in * bits / 32, out] int32, qzeros [groups, out * bits / 32] int32, scales [groups, out], g_idx [in] int32

Words hold codes of neighbouring inputs (qweight) or outputs (qzeros). With `desc_act` the group of an input is what
g_idx says. The older form stores zeros less one, modulo 2^bits; files of either form call themselves "gptq". What a
symmetric file means is known all the same: its zeros are the middle of the codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.gpu_worker.models.config_fields import ConfigFields
from services.gpu_worker.packed_checkpoints.awq import group_size
from services.gpu_worker.packed_checkpoints.codes import GroupedCodes, in_order, unpacked
from services.gpu_worker.packed_checkpoints.packed_format import FLOATS, StoredPart
from services.gpu_worker.weight_grid import GROUP

_ZEROS_AS_THEY_ARE = {"gptq": False, "gptq_v2": True}
_NOT_CONVERTED = "-:"  # begins a pattern of modules that were left as they were: their tensors show it


@dataclass(frozen=True, slots=True)
class Gptq:
    """A `PackedFormat`.

    Attributes:
        bits: 4 or 8.
        group_size: in inputs, None for all of them.
        is_reordered: whether inputs of a group need not be neighbours.
        is_symmetric: whether every zero is the middle of the codes.
        has_plain_zeros: whether zeros are stored as they are, not less one.
    """

    bits: int
    group_size: int | None
    is_reordered: bool
    is_symmetric: bool
    has_plain_zeros: bool
    marker = "qweight"
    marker_dtypes = frozenset({torch.int32})
    required = ("qzeros", "scales")
    optional = ("g_idx",)
    index = "g_idx"
    without_meaning = ()

    @property
    def name(self) -> str:
        """See `PackedFormat.name`."""
        return f"GPTQ, {self.bits} bits"

    def shape(self, parts: Mapping[str, StoredPart]) -> tuple[int, int]:
        """See `PackedFormat.shape`."""
        per_word = 32 // self.bits
        num_words, num_outputs = parts["qweight"].require_matrix(torch.int32)
        num_inputs = num_words * per_word
        num_groups = -(-num_inputs // (self.group_size or num_inputs)) if num_inputs else 0
        parts["qzeros"].require({torch.int32}, (num_groups, -(-num_outputs // per_word)))
        parts["scales"].require(FLOATS, (num_groups, num_outputs))
        if "g_idx" in parts:
            parts["g_idx"].require({torch.int32, torch.int64}, (num_inputs,))
        elif self.is_reordered:
            raise parts["qweight"].tensor.error("has no g_idx beside it, which desc_act asks for")
        return num_outputs, num_inputs

    def may_have_grid(self, parts: Mapping[str, StoredPart]) -> bool:
        """See `PackedFormat.may_have_grid`."""
        num_inputs = parts["qweight"].shape[0] * 32 // self.bits
        return self.bits == 4 and (self.group_size or num_inputs) % GROUP == 0

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> GroupedCodes:
        """See `PackedFormat.decode`."""
        num_outputs, num_inputs = shape
        scales = parts["scales"].to(torch.float32).T.contiguous()
        group_of = in_order(num_inputs, self.group_size or num_inputs)
        if "g_idx" in parts:
            group_of = parts["g_idx"].to(torch.int64)
            if int(group_of.min()) < 0 or int(group_of.max()) >= scales.shape[1]:
                raise ValueError(f"g_idx: names a group that is not one of {scales.shape[1]}")
        zeros = unpacked(parts["qzeros"], self.bits)[:, :num_outputs].T.contiguous()
        return GroupedCodes(
            codes=unpacked(parts["qweight"].T, self.bits),
            scales=scales,
            zeros=self._zeros(zeros).to(torch.float32),
            group_of=group_of,
            bits=self.bits,
        )

    def _zeros(self, stored: Tensor) -> Tensor:
        middle = 1 << (self.bits - 1)
        if self.has_plain_zeros or (self.is_symmetric and bool((stored == middle).all())):
            return stored
        return (stored + 1) & ((1 << self.bits) - 1)


def read_gptq(fields: ConfigFields) -> Gptq:
    """The form that a `quantization_config` of GPTQ describes. Raises ModelFileError naming the field."""
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise fields.error("bits", f"GPTQ with {bits} bits is not supported (supported: 4, 8)")
    for name in ("checkpoint_format", "format"):
        if fields.text(name, "gptq") not in _ZEROS_AS_THEY_ARE:
            supported = ", ".join(_ZEROS_AS_THEY_ARE)
            raise fields.error(name, f"{fields.text(name, '')!r} is not supported (supported: {supported})")
    form = fields.text("checkpoint_format", fields.text("format", "gptq"))
    if fields.text("pack_dtype", "int32") != "int32":
        raise fields.error("pack_dtype", "codes packed in anything but int32 are not supported")
    rules = fields.group("dynamic")
    for pattern in rules.names() if rules else []:
        if not pattern.startswith(_NOT_CONVERTED):
            raise fields.error("dynamic", f"modules in a form of their own ({pattern!r}) are not supported")
    return Gptq(
        bits=bits,
        group_size=group_size(fields),
        is_reordered=fields.flag("desc_act", False),
        is_symmetric=fields.flag("sym", True),
        has_plain_zeros=_ZEROS_AS_THEY_ARE[form],
    )

"""gpu_worker: checkpoints of the compressed-tensors library whose matrices are integers, packed or not.

    pack-quantized    weight_packed [out, in * bits / 32] int32, 4 or 8 bits; weight_shape [2]
    int-quantized     weight [out, in] int8
    both              weight_scale [out, groups] or one; weight_zero_point, where there are such, of the same shape in
                      int8, or packed by outputs; weight_g_idx [in], where inputs of a group need not be neighbours

weight = (number - zero point) * scale. Packed are codes: signed numbers, less the lowest of their range. Groups follow
from the scales' shape. Forms of floating point are in `fp8`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.gpu_worker.packed_checkpoints.codes import GroupedCodes, in_order, unpacked
from services.gpu_worker.packed_checkpoints.packed_format import FLOATS, StoredPart
from services.gpu_worker.weight_grid import GROUP

_INDEX_DTYPES = frozenset({torch.int32, torch.int64})
_NO_GROUP = -1
ACTIVATION_SCALES = (
    "input_scale", "input_zero_point", "output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale",
    "k_zero_point", "v_zero_point",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """A `PackedFormat`: pack-quantized; `bits` is 4 or 8."""

    bits: int
    marker = "weight_packed"
    marker_dtypes = frozenset({torch.int32})
    required = ("weight_scale", "weight_shape")
    optional = ("weight_zero_point", "weight_g_idx")
    index = "weight_g_idx"
    without_meaning = ACTIVATION_SCALES

    @property
    def name(self) -> str:
        """See `PackedFormat.name`."""
        return f"compressed-tensors, {self.bits} bits"

    def shape(self, parts: Mapping[str, StoredPart]) -> tuple[int, int]:
        """See `PackedFormat.shape`. What `weight_shape` says is held against it as the matrix is decoded."""
        per_word = 32 // self.bits
        num_outputs, num_words = parts["weight_packed"].require_matrix(torch.int32)
        parts["weight_shape"].require(_INDEX_DTYPES, (2,))
        shape = (num_outputs, num_words * per_word)
        num_groups = _require_scales(parts, "weight_packed", shape)
        if "weight_zero_point" in parts:
            packed = (-(-num_outputs // per_word), num_groups)
            zero_point = parts["weight_zero_point"]
            if zero_point.dtype == torch.int32:
                zero_point.require({torch.int32}, packed)
            else:
                zero_point.require({torch.int8}, parts["weight_scale"].shape)
        return shape

    def may_have_grid(self, parts: Mapping[str, StoredPart]) -> bool:
        """See `PackedFormat.may_have_grid`."""
        num_inputs = parts["weight_packed"].shape[1] * 32 // self.bits
        group_size = num_inputs // _num_groups(parts)
        return self.bits == 4 and group_size % GROUP == 0

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> GroupedCodes:
        """See `PackedFormat.decode`."""
        if tuple(parts["weight_shape"].tolist()) != shape:
            raise ValueError(f"weight_shape: says {parts['weight_shape'].tolist()}, packed is {list(shape)}")
        zero_point = parts.get("weight_zero_point")
        if zero_point is not None and zero_point.dtype == torch.int32:
            codes = unpacked(zero_point.T, self.bits)[:, : shape[0]].T
            zero_point = codes.to(torch.int16) - (1 << (self.bits - 1))
        codes = unpacked(parts["weight_packed"], self.bits)
        return _grouped(codes, self.bits, parts, zero_point)


@dataclass(frozen=True, slots=True)
class PlainIntegers:
    """A `PackedFormat`: int-quantized."""

    name = "compressed-tensors, int8"
    marker = "weight"
    marker_dtypes = frozenset({torch.int8})
    required = ("weight_scale",)
    optional = ("weight_zero_point", "weight_g_idx")
    index = "weight_g_idx"
    without_meaning = ACTIVATION_SCALES

    def shape(self, parts: Mapping[str, StoredPart]) -> tuple[int, int]:
        """See `PackedFormat.shape`."""
        shape = parts["weight"].require_matrix(torch.int8)
        _require_scales(parts, "weight", shape)
        if "weight_zero_point" in parts:
            parts["weight_zero_point"].require({torch.int8}, parts["weight_scale"].shape)
        return shape

    def may_have_grid(self, parts: Mapping[str, StoredPart]) -> bool:
        """See `PackedFormat.may_have_grid`."""
        return False

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> GroupedCodes:
        """See `PackedFormat.decode`."""
        codes = parts["weight"].view(torch.uint8) ^ 0x80  # the sign's bit turned over is 128 added
        return _grouped(codes, 8, parts, parts.get("weight_zero_point"))


def _grouped(codes: Tensor, bits: int, parts: Mapping[str, Tensor], zero_point: Tensor | None) -> GroupedCodes:
    num_outputs, num_inputs = codes.shape
    scales = _by_output(parts["weight_scale"], num_outputs)
    zeros = torch.full_like(scales, 1 << (bits - 1))
    if zero_point is not None:
        zeros += _by_output(zero_point, num_outputs)
    num_groups = scales.shape[1]
    group_of = parts.get("weight_g_idx")
    if group_of is None or bool((group_of == _NO_GROUP).any()):
        group_of = in_order(num_inputs, num_inputs // num_groups)
    elif int(group_of.min()) < 0 or int(group_of.max()) >= num_groups:
        raise ValueError(f"weight_g_idx: names a group that is not one of {num_groups}")
    return GroupedCodes(codes, scales, zeros, group_of.to(torch.int64), bits)


def _by_output(numbers: Tensor, num_outputs: int) -> Tensor:
    """[num_outputs, num_groups] float32, of [num_outputs, num_groups] or of one number for all."""
    wide = numbers.to(torch.float32)
    return wide.view(1, 1).expand(num_outputs, 1).contiguous() if wide.numel() == 1 else wide


def _num_groups(parts: Mapping[str, StoredPart]) -> int:
    shape = parts["weight_scale"].shape
    return shape[1] if len(shape) == 2 else 1


def _require_scales(parts: Mapping[str, StoredPart], marker: str, shape: tuple[int, int]) -> int:
    """Checks scales and groups; returns how many groups a row has."""
    num_outputs, num_inputs = shape
    num_groups = _num_groups(parts)
    parts["weight_scale"].require(FLOATS, (num_outputs, num_groups), (1,), ())
    if num_groups == 0 or num_inputs % num_groups:
        raise parts[marker].tensor.error(f"{num_inputs} inputs are not {num_groups} groups of one size")
    if "weight_g_idx" in parts:
        parts["weight_g_idx"].require(_INDEX_DTYPES, (num_inputs,))
    return num_groups

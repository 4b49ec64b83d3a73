"""gpu_worker: checkpoints whose matrices are in 8-bit floating point (4 bits of exponent, 3 of mantissa).

weight [out, in] float8_e4m3fn, and a scale to multiply by: one, one an output, or one for each block of rows and
columns; called weight_scale, or weight_scale_inv where it comes in blocks (Qwen, DeepSeek), for all its name
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.gpu_worker.models.config_fields import ConfigFields
from services.gpu_worker.packed_checkpoints.codes import ScaledNumbers
from services.gpu_worker.packed_checkpoints.compressed_tensors import ACTIVATION_SCALES
from services.gpu_worker.packed_checkpoints.packed_format import FLOATS, StoredPart

_SCALES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True, slots=True)
class Fp8:
    """A `PackedFormat`; `block` is rows and columns that share a scale, None where scales are not in blocks."""

    block: tuple[int, int] | None
    name = "FP8"
    marker = "weight"
    marker_dtypes = frozenset({torch.float8_e4m3fn})
    required = ()
    optional = _SCALES
    index = ""
    without_meaning = (*ACTIVATION_SCALES, "activation_scale", "input_scale_ub")

    def shape(self, parts: Mapping[str, StoredPart]) -> tuple[int, int]:
        """See `PackedFormat.shape`."""
        shape = parts["weight"].require_matrix(torch.float8_e4m3fn)
        scales = [name for name in _SCALES if name in parts]
        if len(scales) != 1:
            raise parts["weight"].tensor.error(f"is in FP8 with {len(scales)} of {' and '.join(_SCALES)}, not with one")
        if self.block is None:
            parts[scales[0]].require(FLOATS, (shape[0], 1), (shape[0],), (1, 1), (1,), ())
        else:
            rows, columns = (-(-size // step) for size, step in zip(shape, self.block, strict=True))
            parts[scales[0]].require(FLOATS, (rows, columns))
        return shape

    def may_have_grid(self, parts: Mapping[str, StoredPart]) -> bool:
        """See `PackedFormat.may_have_grid`."""
        return False

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> ScaledNumbers:
        """See `PackedFormat.decode`."""
        scales = next(parts[name] for name in _SCALES if name in parts).to(torch.float32)
        if self.block is not None:
            return ScaledNumbers(parts["weight"], scales, self.block)
        scales = scales.reshape(-1, 1)
        return ScaledNumbers(parts["weight"], scales, (1 if len(scales) == shape[0] else shape[0], shape[1]))


def read_fp8(fields: ConfigFields) -> Fp8:
    """The form that a `quantization_config` of FP8 describes. Raises ModelFileError naming the field."""
    kind = fields.text("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise fields.error("fmt", f"{kind!r} is not supported (supported: e4m3)")
    return Fp8(fields.pair("weight_block_size"))

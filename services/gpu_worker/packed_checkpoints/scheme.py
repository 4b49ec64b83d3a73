"""gpu_worker: which form of packed checkpoint a model's configuration says that its files are in.

`quantization_config` of config.json decides (older files call it `compression_config`). Which matrices are packed is
not read there: the files show it. Fields about how the numbers were found, and about kernels, say nothing here.
"""

from __future__ import annotations

from collections.abc import Callable

from services.gpu_worker.models.config_fields import ConfigFields
from services.gpu_worker.packed_checkpoints.awq import read_awq
from services.gpu_worker.packed_checkpoints.compressed_tensors import PackedIntegers, PlainIntegers
from services.gpu_worker.packed_checkpoints.fp8 import Fp8, read_fp8
from services.gpu_worker.packed_checkpoints.gptq import read_gptq
from services.gpu_worker.packed_checkpoints.packed_format import PackedFormat

_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_WEIGHT_FIELDS = ("num_bits", "type", "strategy", "group_size", "block_structure")


def read_scheme(fields: ConfigFields) -> PackedFormat | None:
    """The form of a checkpoint, by its configuration; None: plain numbers.

    Raises:
        ModelFileError: a form that cannot be read; names the file and the field.
    """
    for name in ("quantization_config", "compression_config"):
        group = fields.group(name)
        if group is not None:
            return _read(group)
    return None


def _read(fields: ConfigFields) -> PackedFormat:
    method = fields.text("quant_method", "")
    reader = _READERS.get(method)
    if reader is None:
        raise fields.error("quant_method", f"{method!r} is not supported (supported: {', '.join(_READERS)})")
    return reader(fields)


def _read_compressed(fields: ConfigFields) -> PackedFormat:
    form = fields.text("format", "")
    if form not in _COMPRESSED:
        raise fields.error("format", f"{form!r} is not supported (supported: {', '.join(_COMPRESSED)})")
    if (transforms := fields.group("transform_config")) and transforms.names():
        raise fields.error("transform_config", "transformed weights are not supported")
    sparsity = fields.group("sparsity_config")
    if sparsity and sparsity.text("format", "dense") != "dense":
        raise sparsity.error("format", f"{sparsity.text('format', '')!r} is not supported (supported: dense)")
    weights = _weights_of_groups(fields)
    bits, kind = weights.integer("num_bits", 8), weights.text("type", "int")
    if kind == "float" and form in ("float-quantized", "naive-quantized") and bits == 8:
        is_in_blocks = weights.text("strategy", "") == "block"
        return Fp8(weights.pair("block_structure") if is_in_blocks else None)
    if kind == "int" and form in ("int-quantized", "naive-quantized") and bits == 8:
        return PlainIntegers()
    if kind == "int" and form == "pack-quantized" and bits in (4, 8):
        return PackedIntegers(bits)
    raise weights.error("num_bits", f"{bits} bits of type {kind!r} in the format {form} are not supported")


def _weights_of_groups(fields: ConfigFields) -> ConfigFields:
    """What `config_groups` says of weights, which must be the same in each of them."""
    groups = fields.group("config_groups")
    names = groups.names() if groups else []
    if groups is None or not names:
        raise fields.error("config_groups", "is missing or empty")
    found: list[ConfigFields] = []
    for name in names:
        group = groups.group(name)
        weights = group.group("weights") if group else None
        if group is None or weights is None:
            raise groups.error(name, "says nothing of weights")
        if group.has("format") and group.text("format", "") != fields.text("format", ""):
            raise group.error("format", "differs from that of the whole checkpoint")
        found.append(weights)
    for field in _WEIGHT_FIELDS:
        if any(not weights.has_same(field, found[0]) for weights in found):
            raise fields.error("config_groups", f"weights of several forms are not supported ({field} differs)")
    return found[0]


_READERS: dict[str, Callable[[ConfigFields], PackedFormat]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": _read_compressed,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
}

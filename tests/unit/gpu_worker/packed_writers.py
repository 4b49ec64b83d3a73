"""Writes quantized checkpoints as they are published: code by code, with nothing of the worker's own.

Each form makes random numbers for a matrix, packs them into tensors, and says what they are worth in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.random_checkpoints import Shape, write_checkpoint

SHAPE = Shape(num_layers=1, num_kv_heads=2)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a matrix, by what follows its stem; and its values, [num_rows, num_columns] float32."""


@dataclass(frozen=True)
class Form:
    """A form of checkpoints: its `quantization_config`, how a matrix is made, whether that lies on a 4-bit grid."""

    config: dict[str, object]
    pack: Callable[[int, int, torch.Generator], Packed]
    is_on_grid: bool = False


@dataclass(frozen=True)
class Grouped:
    """How integers of some bits are quantized; `zero` None: any. `group_of` tells the group of a column."""

    bits: int = 4
    group_size: int = 32
    zero: int | None = None
    is_shuffled: bool = False
    float_type: torch.dtype = torch.float16
    group_of: list[int] = field(default_factory=list)

    def numbers(self, rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Codes [rows, columns], scales and zeros [rows, groups], and the group of each column."""
        size = columns if self.group_size == -1 else self.group_size
        groups = columns // size
        group_of = [column // size for column in range(columns)]
        if self.is_shuffled:
            group_of = [group_of[int(index)] for index in torch.randperm(columns, generator=generator)]
        codes = torch.randint(0, 1 << self.bits, (rows, columns), generator=generator)
        scales = (torch.rand(rows, groups, generator=generator) / (1 << self.bits)).to(self.float_type)
        zeros = torch.randint(0, 1 << self.bits, (rows, groups), generator=generator)
        return codes, scales, zeros if self.zero is None else torch.full_like(zeros, self.zero), group_of


def values_of(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: list[int]) -> Tensor:
    """(code - zero) * scale, column by column."""
    columns = [(codes[:, c] - zeros[:, g]).float() * scales[:, g].float() for c, g in enumerate(group_of)]
    return torch.stack(columns, dim=1)


def words(codes: Tensor, bits: int, order: Sequence[int] = IN_ORDER) -> Tensor:
    """Packs along rows: the k-th code of a word, from the lowest bits on, is the `order[k]`-th of its neighbours."""
    per_word = 32 // bits
    packed = []
    for row in codes.tolist():
        for start in range(0, len(row), per_word):
            chunk = row[start : start + per_word] + [0] * (start + per_word - len(row))
            word = sum(chunk[order[k] if bits == 4 else k] << (bits * k) for k in range(per_word))
            packed.append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(packed, dtype=torch.int32).view(len(codes), -1)


def awq(how: Grouped) -> Callable[[int, int, torch.Generator], Packed]:
    def pack(rows: int, columns: int, generator: torch.Generator) -> Packed:
        codes, scales, zeros, group_of = how.numbers(rows, columns, generator)
        parts = {
            "qweight": words(codes.T, 4, AWQ_ORDER),
            "qzeros": words(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
        return parts, values_of(codes, scales, zeros, group_of)

    return pack


def gptq(
    how: Grouped, *, stored_less: int = 1, has_index: bool = True, has_zero_bias: bool = False
) -> Callable[[int, int, torch.Generator], Packed]:
    def pack(rows: int, columns: int, generator: torch.Generator) -> Packed:
        codes, scales, zeros, group_of = how.numbers(rows, columns, generator)
        parts = {
            "qweight": words(codes, how.bits).T.contiguous(),
            "qzeros": words((zeros.T - stored_less) % (1 << how.bits), how.bits),
            "scales": scales.T.contiguous(),
        }
        if has_index:
            parts["g_idx"] = torch.tensor(group_of, dtype=torch.int32)
        if has_zero_bias:
            parts["bias"] = torch.zeros(rows, dtype=torch.float16)
        return parts, values_of(codes, scales, zeros, group_of)

    return pack


def compressed(
    how: Grouped, *, zero_points: str = "", is_packed: bool = True
) -> Callable[[int, int, torch.Generator], Packed]:
    """`zero_points`: "" for none, "packed" by rows, "plain" for int8."""
    lowest = 1 << (how.bits - 1)

    def pack(rows: int, columns: int, generator: torch.Generator) -> Packed:
        codes, scales, zeros, group_of = how.numbers(rows, columns, generator)
        parts = {"weight_scale": scales}
        if is_packed:
            parts |= {"weight_packed": words(codes, how.bits), "weight_shape": torch.tensor([rows, columns])}
        else:
            parts["weight"] = (codes - lowest).to(torch.int8)
        if zero_points == "packed":
            parts["weight_zero_point"] = words(zeros.T, how.bits).T.contiguous()
        elif zero_points == "plain":
            parts["weight_zero_point"] = (zeros - lowest).to(torch.int8)
        if how.is_shuffled:
            parts["weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
        return parts, values_of(codes, scales, zeros, group_of)

    return pack


def fp8(
    scale_name: str, block: tuple[int, int] | None, scale_dims: int = 2, *, has_input_scale: bool = False
) -> Callable[[int, int, torch.Generator], Packed]:
    """`block` None: a scale a row, or with `scale_dims` 0 or 1 a single one."""

    def pack(rows: int, columns: int, generator: torch.Generator) -> Packed:
        numbers = (torch.randn(rows, columns, generator=generator) * 20).to(torch.float8_e4m3fn)
        step = block or ((1, columns) if scale_dims == 2 else (rows, columns))
        scales = torch.rand(-(-rows // step[0]), -(-columns // step[1]), generator=generator) / 100
        values = numbers.float()
        for row in range(rows):
            for first in range(0, columns, step[1]):
                values[row, first : first + step[1]] *= scales[row // step[0], first // step[1]]
        parts = {"weight": numbers, scale_name: scales if scale_dims == 2 else scales.view([1] * scale_dims)}
        return parts | ({"input_scale": torch.tensor(0.5)} if has_input_scale else {}), values

    return pack


def groups_of(**weights: object) -> dict[str, object]:
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}


def compressed_config(form: str, **weights: object) -> dict[str, object]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups_of(**weights)}


def gptq_config(**fields: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False} | fields


def awq_config(**fields: object) -> dict[str, object]:
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "GEMM"} | fields


def fp8_config(**fields: object) -> dict[str, object]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | fields


BF16 = torch.bfloat16
FORMS: dict[str, Form] = {
    "awq": Form(awq_config(), awq(Grouped()), True),
    "awq whole rows": Form(awq_config(group_size=-1), awq(Grouped(group_size=-1)), True),
    "awq small groups": Form(awq_config(group_size=16), awq(Grouped(group_size=16))),
    "gptq": Form(gptq_config(), gptq(Grouped(group_size=32), has_zero_bias=True), True),
    "gptq large groups": Form(gptq_config(group_size=64), gptq(Grouped(group_size=64), has_index=False), True),
    "gptq symmetric": Form(gptq_config(sym=True), gptq(Grouped(zero=8)), True),
    "gptq symmetric, zeros as they are": Form(gptq_config(sym=True), gptq(Grouped(zero=8), stored_less=0), True),
    "gptq v2": Form(gptq_config(checkpoint_format="gptq_v2"), gptq(Grouped(), stored_less=0), True),
    "gptq reordered": Form(gptq_config(desc_act=True), gptq(Grouped(is_shuffled=True))),
    "gptq reordered, unsaid": Form(gptq_config(), gptq(Grouped(is_shuffled=True))),
    "gptq 8 bits": Form(gptq_config(bits=8), gptq(Grouped(bits=8))),
    "compressed 4 bits": Form(
        compressed_config("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        compressed(Grouped(zero=8, float_type=BF16)), True),
    "compressed 4 bits, zero points": Form(
        compressed_config("pack-quantized", num_bits=4, type="int", symmetric=False),
        compressed(Grouped(group_size=64, float_type=BF16), zero_points="packed"), True),
    "compressed 4 bits, plain zero points": Form(
        compressed_config("pack-quantized", num_bits=4, type="int", symmetric=False),
        compressed(Grouped(), zero_points="plain"), True),
    "compressed 4 bits, reordered": Form(
        compressed_config("pack-quantized", num_bits=4, type="int", actorder="group"),
        compressed(Grouped(zero=8, is_shuffled=True))),
    "compressed 8 bits": Form(
        compressed_config("pack-quantized", num_bits=8, type="int", strategy="channel"),
        compressed(Grouped(bits=8, group_size=-1, zero=128))),
    "compressed int8": Form(
        compressed_config("int-quantized", num_bits=8, type="int", strategy="channel"),
        compressed(Grouped(bits=8, group_size=-1, zero=128), is_packed=False)),
    "compressed int8, zero points": Form(
        compressed_config("int-quantized", num_bits=8, type="int", symmetric=False),
        compressed(Grouped(bits=8, group_size=-1), zero_points="plain", is_packed=False)),
    "compressed fp8": Form(
        compressed_config("float-quantized", num_bits=8, type="float", strategy="channel"),
        fp8("weight_scale", None)),
    "compressed fp8, blocks": Form(
        compressed_config("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
        fp8("weight_scale", (16, 32))),
    "fp8 blocks": Form(fp8_config(weight_block_size=[48, 40]), fp8("weight_scale_inv", (48, 40))),
    "fp8 one scale": Form(
        fp8_config(activation_scheme="static"), fp8("weight_scale", None, 0, has_input_scale=True)),
    "fp8 a scale a row": Form({"quant_method": "fbgemm_fp8"}, fp8("weight_scale", None)),
}  # fmt: skip


def write_forms(folder: Path, form: Form) -> tuple[Path, Path]:
    """Writes the same model twice, matrices packed and matrices in float32; returns both folders."""
    packed, plain = folder / "packed", folder / "plain"
    write_checkpoint(packed, "llama", SHAPE)
    tensors = load_file(packed / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    dense, parts = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            num_rows, num_columns = tensor.shape
            found, dense[name] = form.pack(num_rows, num_columns, generator)
            del parts[name]
            parts |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in found.items()}
    save_file(parts, packed / "model.safetensors")
    plain.mkdir()
    config = json.loads((packed / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, plain / "model.safetensors")
    return packed, plain

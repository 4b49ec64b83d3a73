"""gpu_worker: reads a model's configuration, strictly.

A field that changes what the model computes is understood or refused by name; one that does not (training, tokenizer)
is left alone. Defaults of absent fields are those of the model type's published configuration class.
"""

from __future__ import annotations

import torch

from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.config_fields import ConfigFields
from services.gpu_worker.models.family import Family
from services.gpu_worker.models.registry import FAMILIES
from services.gpu_worker.models.rotary import parse_rotary
from services.gpu_worker.packed_checkpoints.packed_format import PackedFormat
from services.gpu_worker.packed_checkpoints.scheme import read_scheme
from services.model_files.source import ModelFiles

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def parse_model_config(files: ModelFiles) -> ModelConfig:
    """Reads the configuration of a model.

    Raises:
        ModelFileError: unknown model type, activation or position embedding, packed weights of an unknown form, experts
            in a family without such, a missing or impossible value; the message names the file and the field.
    """
    fields = _fields(files)
    family = _family(fields)
    _refuse_unsupported(fields)
    num_heads = fields.integer("num_attention_heads")
    head_dim = _head_dim(fields, family, num_heads)
    num_layers = fields.integer("num_hidden_layers")
    max_positions = fields.integer("max_position_embeddings", family.default_max_positions)
    biases = family.read_biases(fields)
    return ModelConfig(
        model_type=family.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, family, num_heads),
        head_dim=head_dim,
        has_qk_norm=family.has_qk_norm,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rotary=parse_rotary(fields, head_dim, max_positions),
        windows=family.read_windows(fields, num_layers),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=biases.qkv,
        output_bias=biases.output,
        mlp_bias=biases.mlp,
        experts=family.read_experts(fields, num_layers),
        dtype=_dtype(fields),
    )


def packed_format(files: ModelFiles) -> PackedFormat | None:
    """The form that a model's matrices are packed in, None where they are not.

    Raises:
        ModelFileError: a form that cannot be read.
    """
    return read_scheme(_fields(files))


def _fields(files: ModelFiles) -> ConfigFields:
    return ConfigFields(files.path / "config.json" if files.kind == "folder" else files.path, files.config)


def _family(fields: ConfigFields) -> Family:
    model_type = fields.text("model_type", "")
    family = FAMILIES.get(model_type)
    if family is None:
        raise fields.error("model_type", f"{model_type!r} is not supported (supported: {', '.join(FAMILIES)})")
    return family


def _refuse_unsupported(fields: ConfigFields) -> None:
    read_scheme(fields)
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", f"{activation!r} is not supported (supported: silu)")


def _head_dim(fields: ConfigFields, family: Family, num_heads: int) -> int:
    if fields.has("head_dim") or family.default_head_dim is not None:
        head_dim = fields.integer("head_dim", family.default_head_dim)
    else:
        hidden_size = fields.integer("hidden_size")
        if hidden_size % num_heads:
            raise fields.error("hidden_size", f"{hidden_size} is not a multiple of num_attention_heads ({num_heads})")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd; rotary positions need pairs")
    return head_dim


def _num_kv_heads(fields: ConfigFields, family: Family, num_heads: int) -> int:
    # An explicit null means one key/value head for each query head in every family; absent means the type's default.
    absent = num_heads if fields.is_null("num_key_value_heads") else family.default_num_kv_heads or num_heads
    num_kv_heads = fields.integer("num_key_value_heads", absent)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads ({num_heads})")
    return num_kv_heads


def _dtype(fields: ConfigFields) -> torch.dtype | None:
    # `dtype` is the newer name of `torch_dtype`; older files say "torch.float16" now and then.
    for name in ("dtype", "torch_dtype"):
        if fields.has(name):
            text = fields.text(name, "").removeprefix("torch.")
            if text not in _DTYPES:
                raise fields.error(name, f"{text!r} is not supported (supported: {', '.join(_DTYPES)})")
            return _DTYPES[text]
    return None

"""Reading config.json: what transformers reads, in both spellings, and refusing by name what is not understood."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from services.gpu_worker.models.config import ExpertConfig, ModelConfig
from services.gpu_worker.models.parse_config import parse_model_config
from services.gpu_worker.models.registry import FAMILIES
from services.gpu_worker.models.rotary import rotary_cos_sin, rotate
from services.model_files.errors import ModelFileError
from services.model_files.source import ModelFiles

MINIMAL: dict[str, object] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}
LLAMA3: dict[str, object] = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: dict[str, object] = {"factor": 4.0, "original_max_position_embeddings": 32768}


def parse(model_type: str = "llama", /, **fields: object) -> ModelConfig:
    config = {"model_type": model_type, **MINIMAL, **fields}
    return parse_model_config(ModelFiles("folder", Path("some/model"), config, {}))


def test_the_families() -> None:
    assert list(FAMILIES) == ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]


def test_wgt_04_head_dim_is_a_field_of_its_own() -> None:
    config = parse("qwen3", hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    assert (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim) == (4096, 1024)
    assert config.has_qk_norm


@pytest.mark.parametrize(("model_type", "head_dim"), [("llama", 8), ("mistral", 8), ("qwen2", 8), ("qwen3", 128)])
def test_wgt_04_head_dim_where_the_key_is_absent_or_null(model_type: str, head_dim: int) -> None:
    fields = {"num_key_value_heads": 2}
    assert parse(model_type, **fields).head_dim == head_dim
    assert parse(model_type, **fields, head_dim=None).head_dim == head_dim
    assert parse(model_type, **fields, head_dim=16).head_dim == 16


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_absent_fields_have_the_defaults_of_transformers(model_type: str) -> None:
    fields = {**MINIMAL, "num_attention_heads": 32, "hidden_size": 512}
    theirs = transformers.AutoConfig.for_model(model_type, **fields)
    ours = parse(model_type, **fields)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", 512 // 32)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings is False
    window = theirs.sliding_window if model_type == "mistral" else None
    assert ours.windows == (window,) * 3
    if model_type == "qwen3_moe":
        assert ours.experts == ExpertConfig(
            num_experts=theirs.num_experts,
            num_chosen=theirs.num_experts_per_tok,
            intermediate_size=theirs.moe_intermediate_size,
            normalizes_shares=theirs.norm_topk_prob,
            in_layers=(True,) * 3,
        )


@pytest.mark.parametrize(
    ("fields", "in_layers"),
    [
        ({"decoder_sparse_step": 2}, (False, True, False)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0]}, (False, True, True)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, None),
        ({"num_experts": 0}, None),
        ({"num_experts": None, "num_local_experts": 16}, (True, True, True)),
    ],
)
def test_which_layers_have_experts(fields: dict[str, object], in_layers: tuple[bool, ...] | None) -> None:
    experts = parse("qwen3_moe", num_key_value_heads=2, **{"num_experts": 16} | fields).experts
    assert (experts and experts.in_layers) == in_layers
    assert experts is None or experts.num_experts == 16


@pytest.mark.parametrize(("flag", "window"), [(False, None), (True, 9)])
def test_a_window_of_qwen3_moe_is_that_of_all_layers(flag: bool, window: int | None) -> None:
    config = parse("qwen3_moe", use_sliding_window=flag, sliding_window=9, max_window_layers=2)
    assert config.windows == (window,) * 3


def test_null_key_value_heads_means_one_for_each_query_head() -> None:
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        assert parse(model_type, num_key_value_heads=None).num_kv_heads == 8


def test_wgt_05_biases_by_type() -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
        return config.qkv_bias, config.output_bias, config.mlp_bias

    kv = {"num_key_value_heads": 2}
    assert biases(parse("qwen2", **kv)) == (True, False, False)
    assert biases(parse("qwen3", **kv)) == (False, False, False)
    assert biases(parse("qwen3", **kv, attention_bias=True)) == (True, True, False)
    assert biases(parse("llama")) == (False, False, False)
    assert biases(parse("llama", attention_bias=True, mlp_bias=True)) == (True, True, True)
    assert biases(parse("mistral", **kv)) == (False, False, False)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (4096,) * 3),
        ({"sliding_window": None}, (None,) * 3),
        ({"sliding_window": 9}, (9,) * 3),
        ({"sliding_window": 9, "layer_types": ["sliding_attention"] * 3}, (9,) * 3),
    ],
)
def test_windows_of_mistral(fields: dict[str, object], windows: tuple[int | None, ...]) -> None:
    assert parse("mistral", num_key_value_heads=2, **fields).windows == windows


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 9, "max_window_layers": 1}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (None, 9, 9)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, (9, 9, 9)),
        ({"use_sliding_window": True, "sliding_window": 9}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None, None, None)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 9, None),
        ),
    ],
)
def test_windows_of_qwen(model_type: str, fields: dict[str, object], windows: tuple[int | None, ...]) -> None:
    assert parse(model_type, num_key_value_heads=2, **fields).windows == windows


def both_spellings(kind: str, theta: float, fields: dict[str, object]) -> list[dict[str, object]]:
    return [
        {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **fields}},
        {"rope_theta": theta, "rope_scaling": {"type": kind, **fields}},
        {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **fields}},
    ]


@pytest.mark.parametrize("spelling", both_spellings("llama3", 500000.0, LLAMA3))
def test_wgt_06_llama3_frequencies(spelling: dict[str, object]) -> None:
    rotary = parse(head_dim=64, **spelling).rotary
    expected = [1.0, 3.211446e-3, 1.290548e-3, 4.295567e-4, 1.946164e-5, 9.418306e-8]
    assert [rotary.inverse_frequencies[i] for i in (0, 14, 15, 16, 18, 31)] == pytest.approx(expected, rel=1e-6)
    assert rotary.attention_scale == 1.0


@pytest.mark.parametrize("spelling", both_spellings("yarn", 1e6, YARN))
def test_wgt_06_yarn_frequencies(spelling: dict[str, object]) -> None:
    rotary = parse(head_dim=128, **spelling).rotary
    expected = [1.0, 5.375321e-3, 6.029411e-4, 4.445699e-5, 3.102344e-7]
    assert [rotary.inverse_frequencies[i] for i in (0, 24, 32, 40, 63)] == pytest.approx(expected, rel=1e-6)
    assert rotary.attention_scale == pytest.approx(1.138629, rel=1e-6)


def test_wgt_06_theta_in_either_spelling() -> None:
    for fields in ({"rope_theta": 100000}, {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}):
        rotary = parse(head_dim=64, **fields).rotary
        assert rotary.inverse_frequencies[16] == pytest.approx(100000.0**-0.5)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("default", {}),
        ("linear", {"factor": 3.0}),
        ("llama3", LLAMA3),
        ("yarn", YARN),
        ("yarn", {**YARN, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 0.7}),
        ("yarn", {**YARN, "mscale": 0.8, "mscale_all_dim": 0.4}),
    ],
)
def test_wgt_06_frequencies_of_transformers(kind: str, fields: dict[str, object]) -> None:
    parameters = {"rope_type": kind, "rope_theta": 50000.0, **fields}
    theirs = transformers.LlamaConfig(
        **MINIMAL, head_dim=32, max_position_embeddings=4096, rope_parameters=dict(parameters)
    )
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    ours = parse(head_dim=32, max_position_embeddings=4096, rope_parameters=parameters).rotary
    torch.testing.assert_close(torch.tensor(ours.inverse_frequencies), embedding.inv_freq, rtol=1e-6, atol=0)
    assert ours.attention_scale == pytest.approx(embedding.attention_scaling)


def test_rotation_turns_each_pair_by_its_angle() -> None:
    rotary = parse(head_dim=8, rope_scaling={"rope_type": "yarn", **YARN}).rotary
    frequencies = torch.tensor(rotary.inverse_frequencies)
    heads = torch.randn(5, 3, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 100, 4000])
    turned = rotate(heads, *rotary_cos_sin(frequencies, rotary.attention_scale, positions, torch.float64))
    first, second = torch.complex(heads[..., :4], heads[..., 4:]), torch.complex(turned[..., :4], turned[..., 4:])
    angles = positions[:, None, None].double() * frequencies.double()
    expected = first * torch.polar(torch.full_like(angles, rotary.attention_scale), angles)
    torch.testing.assert_close(second, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "torch.float32"}, torch.float32),
        ({}, None),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
    ],
)
def test_wgt_09_dtype_in_either_spelling(fields: dict[str, object], dtype: torch.dtype | None) -> None:
    assert parse(**fields).dtype == dtype


NESTED: dict[str, object] = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"model_type": "qwen2_moe"}, "model_type"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"model_type": "qwen3_moe", "n_routed_experts": 4}, "n_routed_experts"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0, -1]}, "mlp_only_layers"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 1}, "mlp_only_layers"),
        ({"moe_intermediate_size": 8}, "moe_intermediate_size"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"num_experts": 8}, "num_experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.bits"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"dtype": "float8_e4m3fn"}, "dtype"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 63}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": -8}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": NESTED}, "rope_parameters.full_attention"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "new": 1}}, "rope_scaling.new"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "rope_scaling.high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "yarn"}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"model_type": "qwen2", "attention_bias": False}, "attention_bias"),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": [1, 2, 3]}, "layer_types"),
    ],
)
def test_wgt_06_what_is_not_understood_is_refused_by_name(fields: dict[str, object], field: str) -> None:
    config = {"model_type": "llama", **MINIMAL, "num_key_value_heads": 2, **fields}
    with pytest.raises(ModelFileError, match=f"some/model/config.json: field {field}:") as error:
        parse_model_config(ModelFiles("folder", Path("some/model"), config, {}))
    assert "\n" not in str(error.value)

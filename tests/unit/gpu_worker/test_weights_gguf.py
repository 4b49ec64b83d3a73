"""Loading GGUF: the same model as from safetensors, every type that the gguf package decodes, faults named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from gguf import quants
from safetensors.torch import load_file
from torch import Tensor

from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.quantization import block_format
from services.gpu_worker.weight_sources import gguf_file
from services.gpu_worker.weight_sources.gguf_file import checkpoint_name
from services.gpu_worker.weights import LoadedModel, load_model
from services.model_files.errors import ModelFileError
from services.model_files.source import open_model
from tests.unit.gpu_worker.step_driver import StepDriver
from tests.unit.gpu_worker.tiny_models import TinyModel, make_tiny_model

CPU = torch.device("cpu")
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
F32 = gguf.GGMLQuantizationType.F32

# The names of llama.cpp's files, spelled out by hand; {} is the layer.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
    "model.layers.{}.mlp.gate": "blk.{}.ffn_gate_inp",
}
GGUF_NAMES = {
    theirs.format(layer) + kind: ours.format(layer) + kind
    for theirs, ours in NAMES.items()
    for layer in range(3)
    for kind in (".weight", ".bias")
}

LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

Array = npt.NDArray[np.float32]
Change = Callable[[dict[str, Array]], None]


def interleaved(rows: Array, num_heads: int) -> Array:
    """As llama.cpp's converter lays out the query and key rows of its architecture llama."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def stack_experts(tensors: dict[str, Array]) -> None:
    """As llama.cpp's converter does: one tensor of all experts for each of their matrices."""
    parts: dict[str, dict[int, Array]] = {}
    for name in list(tensors):
        if found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name):
            parts.setdefault(f"blk.{found[1]}.ffn_{found[3]}_exps.weight", {})[int(found[2])] = tensors.pop(name)
    tensors.update({name: np.stack([part for _, part in sorted(found.items())]) for name, found in parts.items()})


def write_as_gguf(
    tiny: TinyModel, path: Path, kind: gguf.GGMLQuantizationType = F32, change: Change = lambda tensors: None
) -> Path:
    """Writes a tiny model the way llama.cpp's converter does: matrices in `kind`, vectors in float32."""
    config = tiny.model.config
    arch = {"llama": "llama", "mistral": "llama", "qwen3_moe": "qwen3moe"}.get(config.model_type, config.model_type)
    tensors: dict[str, Array] = {}
    for name, tensor in load_file(tiny.folder / "model.safetensors").items():
        array = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            array = interleaved(array, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            array = interleaved(array, config.num_key_value_heads)
        tensors[GGUF_NAMES.get(name, name)] = array
    stack_experts(tensors)
    change(tensors)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if not config.norm_topk_prob:
            writer.add_expert_weights_norm(False)
    if config.model_type in ("qwen3", "qwen3_moe"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type == "mistral":
        writer.add_sliding_window(config.sliding_window)
    for name, array in tensors.items():
        as_kind = kind if array.ndim > 1 and array.shape[-1] % 32 == 0 else F32
        writer.add_tensor(name, quants.quantize(array, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, dtype: torch.dtype | None = None) -> LoadedModel:
    return load_model(open_model(path), CPU, dtype)


def logits_of(model: LoadedModel) -> Tensor:
    driver = StepDriver(model, ReferenceAttention(), 16, 16)
    row = driver.add(IDS)
    driver.step((row, len(IDS)))
    return row.all_logits()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe-dense-layer"])
def test_the_same_model_as_from_safetensors(name: str, tmp_path: Path) -> None:
    tiny = make_tiny_model(name, tmp_path / "folder")
    model = load(write_as_gguf(tiny, tmp_path / "model.gguf"))
    assert model.config.model_type == name.removesuffix("-dense-layer")
    assert float((logits_of(model) - tiny.logits(IDS)).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_large_tensors_are_read_piece_by_piece(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = make_tiny_model(name, tmp_path / "folder")
    path = write_as_gguf(tiny, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    whole = load(path)
    monkeypatch.setattr(gguf_file, "_BLOCK_WEIGHTS", 256)
    pieces = load(path)
    assert torch.equal(logits_of(pieces), logits_of(whole))
    assert pieces.report.num_bytes_read == whole.report.num_bytes_read


def test_biases_of_the_architecture_llama_are_interleaved_too(tmp_path: Path) -> None:
    tiny = make_tiny_model("llama-biases-tied-llama3", tmp_path / "folder")
    layer = load_model(open_model(tiny.folder), CPU).weights.layers[1]
    model = load(write_as_gguf(tiny, tmp_path / "model.gguf"))
    assert model.weights.head.weight is model.weights.embedding
    for mine, theirs in (
        (model.weights.layers[1].qkv.bias, layer.qkv.bias),
        (model.weights.layers[1].qkv.weight, layer.qkv.weight),
    ):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)


def test_wgt_06_llama3_frequencies_come_from_their_tensor(llama: TinyModel, tmp_path: Path) -> None:
    """GGUF keeps no parameters for them, but the divisors of the plain frequencies (here factor 8 of Llama 3.1)."""
    theirs = transformers.LlamaConfig(head_dim=16, max_position_embeddings=8192, rope_parameters=dict(LLAMA31))
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    change = with_value("rope_freqs.weight", (plain / embedding.inv_freq).numpy())
    model = load(write_as_gguf(llama, tmp_path / "model.gguf", change=change))
    torch.testing.assert_close(model.weights.rotary_frequencies, embedding.inv_freq, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_matrices_are_those_that_the_gguf_package_decodes(
    llama: TinyModel, tmp_path: Path, kind: str
) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    path = write_as_gguf(llama, tmp_path / "model.gguf", quantization)
    stored = load_file(llama.folder / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    expected = quants.dequantize(quants.quantize(stored[name].numpy(), quantization), quantization)
    model = load(path)
    gate_up = model.weights.layers[2].gate_up
    assert gate_up is not None
    up = gate_up.weight[96:]
    assert np.array_equal(up.numpy(), expected)
    # The heads of a quantized query projection are put back in order after decoding.
    query = stored["model.layers.2.self_attn.q_proj.weight"]
    assert float((model.weights.layers[2].qkv.weight[:64] - query).abs().max()) < 0.2 * float(query.abs().max())


DECODABLE = [
    kind for kind in gguf.GGMLQuantizationType if kind in gguf.GGML_QUANT_SIZES and block_format(kind) is not None
]


def test_every_type_that_matters_can_be_decoded() -> None:
    names = {kind.name for kind in DECODABLE}
    assert names >= {
        "F32",
        "F16",
        "BF16",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
    }
    assert names >= {"IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_XXS", "IQ1_S", "TQ1_0", "MXFP4"}


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
def test_rows_are_decoded_piece_by_piece_as_a_whole(kind: gguf.GGMLQuantizationType) -> None:
    """Any bytes whose scales are finite, cut at rows, against one call of the package over all of them."""
    layout = block_format(kind)
    assert layout is not None
    num_rows, row_length = 6, 4 * layout.block_length
    num_bytes = layout.num_bytes((num_rows, row_length))
    assert num_bytes is not None
    raw = np.random.default_rng(kind).integers(0, 60, num_bytes, dtype=np.uint8)
    whole = quants.dequantize(raw.reshape(num_rows, -1), kind).astype(np.float32)
    pieces = [layout.decode(torch.from_numpy(piece)) for piece in np.split(raw, 3)]
    assert torch.equal(torch.cat(pieces), torch.from_numpy(whole).flatten())


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.I32, gguf.GGMLQuantizationType.F64, 999])
def test_types_that_are_no_weights_are_not_decoded(kind: int) -> None:
    assert block_format(kind) is None


def test_names() -> None:
    assert checkpoint_name("blk.12.attn_k_norm.weight") == "model.layers.12.self_attn.k_norm.weight"
    assert checkpoint_name("output_norm.weight") == "model.norm.weight"
    for unknown in ("blk.0.ffn_gate_shexp.weight", "blk.x.attn_q.weight", "rope_freqs.weight", "attn_q.weight", ""):
        assert checkpoint_name(unknown) == unknown


def test_loading_in_half_precision(llama: TinyModel, tmp_path: Path) -> None:
    path = write_as_gguf(llama, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F16)
    stored = load_file(llama.folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    down = load(path, torch.float16).weights.layers[0].down
    assert down is not None
    assert torch.equal(down.weight, stored.half())


def without(name: str) -> Change:
    def change(tensors: dict[str, Array]) -> None:
        del tensors[name]

    return change


def with_value(name: str, value: Array) -> Change:
    def change(tensors: dict[str, Array]) -> None:
        tensors[name] = value

    return change


def poisoned(tensors: dict[str, Array]) -> None:
    tensors["blk.1.ffn_up.weight"][7, 7] = np.nan


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("blk.2.ffn_up.weight"), "tensor model.layers.2.mlp.up_proj.weight is missing"),
        (without("blk.0.attn_norm.weight"), "tensor model.layers.0.input_layernorm.weight is missing"),
        (with_value("blk.0.attn_q.weight", np.zeros((32, 64), np.float32)), "tensor blk.0.attn_q.weight: has shape"),
        (with_value("blk.3.attn_q.weight", np.zeros((64, 64), np.float32)), "tensor blk.3.attn_q.weight: is not part"),
        (with_value("blk.0.attn_sinks.weight", np.zeros(4, np.float32)), "tensor blk.0.attn_sinks.weight: is not part"),
        (poisoned, "tensor blk.1.ffn_up.weight: holds a value that is not finite"),
    ],
)
def test_wgt_02_wrong_tensors_are_named(llama: TinyModel, tmp_path: Path, change: Change, problem: str) -> None:
    path = write_as_gguf(llama, tmp_path / "model.gguf", change=change)
    with pytest.raises(ModelFileError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: {problem}")


@pytest.mark.parametrize("cut", [1, 5000, 100_000])
def test_wgt_02_truncated_file(llama: TinyModel, tmp_path: Path, cut: int) -> None:
    path = write_as_gguf(llama, tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    with pytest.raises(ModelFileError, match="truncated") as error:
        load(path)
    assert str(error.value).startswith(f"{path}: tensor ")


def test_wgt_02_damaged_scale_is_found(llama: TinyModel, tmp_path: Path) -> None:
    """A float16 scale of all ones bits decodes to NaN."""
    path = write_as_gguf(llama, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    header = open_model(path).gguf
    assert header is not None
    start = header.data_start + header.tensors["blk.1.ffn_gate.weight"].offset
    content = bytearray(path.read_bytes())
    content[start : start + 2] = b"\xff\xff"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"tensor blk\.1\.ffn_gate\.weight: holds a value that is not finite"):
        load(path)


def test_wgt_02_type_that_cannot_be_decoded(llama: TinyModel, tmp_path: Path) -> None:
    path = write_as_gguf(llama, tmp_path / "model.gguf")
    content = path.read_bytes()
    name = b"blk.1.ffn_gate.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    path.write_bytes(content[:at] + (26).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ModelFileError, match=r"tensor blk\.1\.ffn_gate\.weight: type 26 cannot be decoded"):
        load(path)


def test_wgt_02_rows_that_are_not_whole_blocks(llama: TinyModel, tmp_path: Path) -> None:
    path = write_as_gguf(llama, tmp_path / "model.gguf")
    content = path.read_bytes()
    name = b"blk.1.ffn_gate.weight"
    at = content.index(name) + len(name) + 4
    kind = gguf.GGMLQuantizationType.Q4_K
    path.write_bytes(content[: at + 16] + int(kind).to_bytes(4, "little") + content[at + 20 :])
    with pytest.raises(ModelFileError, match="are not whole blocks of 256"):
        load(path)

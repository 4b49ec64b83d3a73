"""Opening a model: what its configuration says, and one clear line for each way in which a model can be broken."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from services.model_files.errors import ModelFileError
from services.model_files.source import model_name, open_model
from tests.unit.model_files.gguf_files import TINY_LLAMA, write_gguf


def test_demo_model_reads_like_its_published_config(smollm2_path: Path) -> None:
    files = open_model(smollm2_path)
    assert files.kind == "gguf"
    assert files.config == {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert files.generation_config == {"eos_token_id": [2]}


def _folder(path: Path, config: object = None, **files: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    for name, text in files.items():
        (path / f"{name}.json").write_text(text)
    return path


def test_folder_gives_its_config_and_generation_config_as_they_stand(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "x": [1, None]}
    files = open_model(_folder(tmp_path, config, generation_config='{"top_k": 20}'))
    assert (files.kind, files.path, files.config, files.generation_config, files.gguf) == (
        "folder", tmp_path, config, {"top_k": 20}, None,
    )  # fmt: skip


def test_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    assert open_model(tmp_path).path == path
    write_gguf(tmp_path / "other.gguf")
    with pytest.raises(ModelFileError, match=r"model\.gguf, other\.gguf"):
        open_model(tmp_path)


def test_a_model_is_called_as_its_folder_or_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    (folder / "config.json").touch()
    (folder / "extra.gguf").touch()
    assert model_name(folder) == "Qwen3-0.6B"
    (folder / "config.json").unlink()
    assert model_name(folder) == "extra"
    assert model_name(folder / "extra.v2.gguf") == "extra.v2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: is not valid JSON: Expecting property name.* at line 1"),
        ("[]", "config.json: must hold a JSON object"),
        ('{"a": 1}', "config.json: field model_type is missing"),
        ("\x80", "config.json: is not valid JSON"),
        ("[" * 100_000, "config.json: is not valid JSON: nested too deeply"),
    ],
)
def test_damaged_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=message) as caught:
        open_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_config_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFileError, match=r"config.json: is not UTF-8 text"):
        open_model(tmp_path)


def test_prc_10_broken_model_path_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere: no such folder or file"):
        open_model(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match=r"has no config.json and no .gguf file"):
        open_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelFileError, match=r"is neither a folder nor a .gguf file"):
        open_model(tmp_path / "pytorch_model.bin")


def test_damaged_generation_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"generation_config.json: is not valid JSON"):
        open_model(_folder(tmp_path, generation_config="{]"))


def _qwen(arch: str, **more: object) -> dict[str, object]:
    fields = {key.replace("llama.", f"{arch}."): value for key, value in TINY_LLAMA.items()}
    return fields | {f"{arch}.{key}": value for key, value in more.items()}


def test_wgt_04_gguf_head_dim_is_key_length_not_hidden_over_heads(tmp_path: Path) -> None:
    fields = _qwen("qwen3", **{"attention.key_length": 32, "attention.value_length": 32})
    config = open_model(write_gguf(tmp_path / "m.gguf", "qwen3", fields)).config
    assert (config["model_type"], config["head_dim"], config["num_key_value_heads"]) == ("qwen3", 32, 2)
    without = open_model(write_gguf(tmp_path / "n.gguf", "qwen3", _qwen("qwen3"))).config
    assert without["head_dim"] == 8


def test_wgt_05_gguf_bias_is_seen_from_the_tensors(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": np.zeros((10, 32), np.float32), "blk.0.attn_q.bias": np.zeros(32, np.float32)}
    config = open_model(write_gguf(tmp_path / "m.gguf", "qwen2", _qwen("qwen2"), tensors)).config
    assert (config["attention_bias"], config["mlp_bias"]) == (True, False)


def test_wgt_01_gguf_is_tied_when_it_has_no_output_matrix(tmp_path: Path) -> None:
    tied = open_model(write_gguf(tmp_path / "tied.gguf")).config
    tensors = {name: np.zeros((120, 32), np.float32) for name in ("token_embd.weight", "output.weight")}
    untied = open_model(write_gguf(tmp_path / "untied.gguf", tensors=tensors)).config
    assert (tied["tie_word_embeddings"], tied["vocab_size"]) == (True, 100)
    assert (untied["tie_word_embeddings"], untied["vocab_size"]) == (False, 120)


def test_mistral_is_a_llama_file_with_a_window(tmp_path: Path) -> None:
    config = open_model(
        write_gguf(tmp_path / "m.gguf", metadata=TINY_LLAMA | {"llama.attention.sliding_window": 64})
    ).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


def test_wgt_06_gguf_rope_scaling_in_the_spelling_of_config_json(tmp_path: Path) -> None:
    yarn = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32768,
    }
    files = open_model(write_gguf(tmp_path / "y.gguf", "qwen2", _qwen("qwen2") | yarn))
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert files.config["rope_scaling"] == expected
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    files = open_model(write_gguf(tmp_path / "l.gguf", metadata=TINY_LLAMA | linear))
    assert files.config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_wgt_06_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    """GGUF keeps Llama 3's scaling as one divisor a frequency; the reference values are those of failures WGT-06."""
    num_frequencies, factor = 32, 32.0
    frequencies = 500000.0 ** (-np.arange(num_frequencies) / num_frequencies)
    scaled = {0: 1.0, 14: 3.211446e-3, 15: 1.290548e-3, 16: 4.295567e-4, 18: 1.946164e-5, 31: 9.418306e-8}
    smooth = np.clip((8192 / (2 * np.pi / frequencies) - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    for index, value in scaled.items():
        assert frequencies[index] / divisors[index] == pytest.approx(value, rel=1e-5)
    fields = TINY_LLAMA | {"llama.embedding_length": 256}
    tensors = {"token_embd.weight": np.zeros((9, 256), np.float32), "rope_freqs.weight": divisors}
    config = open_model(write_gguf(tmp_path / "m.gguf", metadata=fields, tensors=tensors)).config
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tensors["rope_freqs.weight"] = divisors[::-1].copy()
    with pytest.raises(ModelFileError, match=r"rope_freqs.weight does not follow"):
        open_model(write_gguf(tmp_path / "odd.gguf", metadata=fields, tensors=tensors))


@pytest.mark.parametrize(
    ("arch", "change", "message"),
    [
        ("gptj", {}, "field general.architecture: 'gptj' is not supported"),
        ("llama", {"llama.block_count": None}, "field llama.block_count is missing"),
        ("llama", {"llama.block_count": "two"}, "field llama.block_count: expected int, found str"),
        ("llama", {"llama.attention.head_count": 0}, "field llama.attention.head_count: 0 is not a positive number"),
        ("llama", {"llama.expert_count": 8}, "field llama.expert_count: mixtures"),
        ("llama", {"llama.rope.dimension_count": 4}, "field llama.rope.dimension_count: 4 differs from the head dim"),
        ("llama", {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope' is not supp"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "field llama.rope.scaling.factor is missing"),
        ("llama", {"split.count": 3}, "field split.count: one of 3 parts"),
        ("llama", {"llama.embedding_length": 64}, "tensor token_embd.weight: shape"),
    ],
)
def test_unsupported_or_contradictory_gguf_names_the_field(
    tmp_path: Path, arch: str, change: dict[str, object], message: str
) -> None:
    fields = {key: value for key, value in (TINY_LLAMA | change).items() if value is not None}
    with pytest.raises(ModelFileError, match=message) as caught:
        open_model(write_gguf(tmp_path / "m.gguf", arch, fields))
    assert str(caught.value).startswith(str(tmp_path / "m.gguf"))

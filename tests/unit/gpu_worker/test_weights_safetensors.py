"""Loading safetensors: every tensor once, to its place; what is wrong is named and refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.weight_sources import safetensors_files, source
from services.gpu_worker.weights import LoadedModel, load_model
from services.model_files.errors import ModelFileError
from services.model_files.source import open_model
from tests.unit.gpu_worker.step_driver import StepDriver
from tests.unit.gpu_worker.tiny_models import CONFIGS, make_tiny_model

CPU = torch.device("cpu")
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in CONFIGS:
        folders[name] = tmp_path_factory.mktemp(name)
        make_tiny_model(name, folders[name])
    return folders


@pytest.fixture
def copy_of(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A private copy of a tiny model's folder."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(originals[name], tmp_path / name))

    return copy


def load(folder: Path, dtype: torch.dtype | None = None) -> LoadedModel:
    return load_model(open_model(folder), CPU, dtype)


def logits_of(model: LoadedModel) -> Tensor:
    driver = StepDriver(model, ReferenceAttention(), 16, 16)
    row = driver.add(IDS)
    driver.step((row, len(IDS)))
    return row.all_logits()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **fields: object) -> None:
    """Sets fields of config.json; ... removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def split_in_shards(folder: Path, num_shards: int = 2) -> list[Path]:
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    paths = []
    for shard in range(num_shards):
        names = sorted(tensors)[shard::num_shards]
        path = folder / f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, path)
        weight_map |= dict.fromkeys(names, path.name)
        paths.append(path)
    write_index(folder, weight_map)
    return paths


def write_index(folder: Path, weight_map: object) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refusal(folder: Path, dtype: torch.dtype | None = None) -> str:
    with pytest.raises(ModelFileError) as error:
        load(folder, dtype)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_shards_give_what_one_file_gives(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen3")
    expected = logits_of(load(folder))
    split_in_shards(folder, 3)
    assert torch.equal(logits_of(load(folder)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_are_read_piece_by_piece(
    copy_of: Callable[[str], Path], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of("qwen2")
    expected = logits_of(load(folder, dtype))
    monkeypatch.setattr(safetensors_files, "BLOCK_BYTES", 400)
    monkeypatch.setattr(source, "BLOCK_BYTES", 136)
    assert torch.equal(logits_of(load(folder, dtype)), expected)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [None, torch.float32, torch.float16, torch.bfloat16])
def test_wgt_09_every_stored_dtype_loads_as_every_dtype(
    copy_of: Callable[[str], Path], stored: torch.dtype, wanted: torch.dtype | None
) -> None:
    folder = copy_of("llama")
    tensors = {name: tensor.to(stored) for name, tensor in tensors_of(folder).items()}
    write_tensors(folder, tensors)
    model = load(folder, wanted)
    dtype = wanted or torch.float32
    down = model.weights.layers[1].down
    assert down is not None
    assert torch.equal(down.weight, tensors["model.layers.1.mlp.down_proj.weight"].to(dtype))
    assert torch.equal(model.weights.embedding, tensors["model.embed_tokens.weight"].to(dtype))
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    assert model.report.num_bytes_placed == num_parameters * dtype.itemsize
    assert logits_of(model).dtype == torch.float32


def test_wgt_05_biases_of_qwen2_land_in_the_right_place(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen2")
    tensors = tensors_of(folder)
    layer = load(folder).weights.layers[2]
    prefix = "model.layers.2.self_attn"
    parts = [tensors[f"{prefix}.{name}_proj.bias"] for name in "qkv"]
    assert layer.qkv.bias is not None
    assert torch.equal(layer.qkv.bias, torch.cat(parts))
    assert layer.output.bias is None
    with_biases = logits_of(load(folder))
    write_tensors(folder, {name: t * 0 if name.endswith("bias") else t for name, t in tensors.items()})
    assert (logits_of(load(folder)) - with_biases).abs().max() > 0.1


def test_wgt_04_shapes_of_a_model_whose_head_dim_is_its_own(copy_of: Callable[[str], Path]) -> None:
    model = load(copy_of("qwen3"))
    layer = model.weights.layers[0]
    assert layer.qkv.weight.shape == (128 + 64 + 64, 64)
    assert layer.output.weight.shape == (64, 128)
    assert layer.query_norm is not None
    assert layer.query_norm.shape == (32,)


def test_wgt_01_tied_without_a_head(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama-biases-tied-llama3")
    assert "lm_head.weight" not in tensors_of(folder)
    model = load(folder)
    assert model.weights.head.weight is model.weights.embedding
    assert logits_of(model).isfinite().all()


def test_wgt_01_tied_with_a_head_beside_it(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama-biases-tied-llama3")
    expected = logits_of(load(folder))
    tensors = tensors_of(folder)
    write_tensors(folder, tensors | {"lm_head.weight": torch.zeros_like(tensors["model.embed_tokens.weight"])})
    assert torch.equal(logits_of(load(folder)), expected)


def test_wgt_01_untied_without_a_head_is_refused(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    tensors = tensors_of(folder)
    del tensors["lm_head.weight"]
    write_tensors(folder, tensors)
    assert refusal(folder) == f"{folder}: tensor lm_head.weight is missing"


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_wgt_01_key_absent_follows_the_default_of_the_type(copy_of: Callable[[str], Path], name: str) -> None:
    """Transformers' default is untied for all four: the head is wanted."""
    folder = copy_of(name)
    change_config(folder, tie_word_embeddings=...)
    expected = logits_of(load(folder))
    tensors = tensors_of(folder)
    assert (expected - logits_of(load(folder))).abs().max() == 0
    del tensors["lm_head.weight"]
    write_tensors(folder, tensors)
    assert "lm_head.weight is missing" in refusal(folder)


def test_wgt_02_missing_shard(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    shards = split_in_shards(folder)
    shards[1].unlink()
    message = refusal(folder)
    assert message.startswith(f"{shards[1]}: is missing")


@pytest.mark.parametrize("kept", [0, 4, 8, 300, -1, -1000])
def test_wgt_02_truncated_shard(copy_of: Callable[[str], Path], kept: int) -> None:
    folder = copy_of("llama")
    shard = split_in_shards(folder)[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:kept])
    assert str(shard) in refusal(folder)


def test_wgt_02_no_weights_at_all(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "holds no weights" in message
    assert "pytorch_model.bin" in message


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        (None, "weight_map is missing"),
        ({}, "weight_map is missing"),
        ({"a": "../model-00001-of-00002.safetensors"}, "is not a file name"),
        ({"a": "/etc/passwd"}, "is not a file name"),
        ({"a": ""}, "is not a safetensors file"),
        ({"a": 5}, "is not a file name"),
        ({"a": "weights.bin"}, "is not a safetensors file"),
        ({"extra.weight": "model-00001-of-00002.safetensors"}, "has no tensor extra.weight"),
    ],
)
def test_wgt_02_damaged_index(copy_of: Callable[[str], Path], weight_map: object, problem: str) -> None:
    folder = copy_of("llama")
    split_in_shards(folder)
    write_index(folder, weight_map)
    assert problem in refusal(folder)


def test_wgt_02_index_that_is_not_json(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    split_in_shards(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    assert "model.safetensors.index.json: is not valid JSON" in refusal(folder)


def test_wgt_02_tensor_in_two_shards(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    first, second = split_in_shards(folder)
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    assert refusal(folder) == f"{second}: tensor {name} is in {first.name} as well"


def test_wgt_02_left_over_tensor(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    write_tensors(folder, tensors_of(folder) | {"model.layers.3.mlp.up_proj.weight": torch.zeros(96, 64)})
    message = refusal(folder)
    assert f"{folder / 'model.safetensors'}: tensor model.layers.3.mlp.up_proj.weight:" in message
    assert "is not part of a llama model" in message


def test_wgt_02_frequencies_beside_the_weights_are_no_weights(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    expected = logits_of(load(folder))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_tensors(folder, tensors_of(folder) | {name: torch.full((8,), float("nan"))})
    assert torch.equal(logits_of(load(folder)), expected)


@pytest.mark.parametrize(
    ("fields", "tensor"),
    [
        ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight"),
        ({"vocab_size": 97}, "model.embed_tokens.weight"),
        ({"intermediate_size": 97}, "model.layers.0.mlp.gate_proj.weight"),
        ({"head_dim": 32}, "model.layers.0.self_attn.q_proj.weight"),
        ({"num_hidden_layers": 2}, "model.layers.2"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight"),
        ({"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_wgt_02_shapes_are_checked_before_data_is_read(
    copy_of: Callable[[str], Path], fields: dict[str, object], tensor: str
) -> None:
    folder = copy_of("llama")
    change_config(folder, **fields)
    seen: list[int] = []
    with pytest.raises(ModelFileError, match=tensor):
        load_model(open_model(folder), CPU, progress=lambda done, total: seen.append(done))
    assert seen == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_wgt_02_value_that_is_not_finite(copy_of: Callable[[str], Path], value: float) -> None:
    folder = copy_of("llama")
    tensors = tensors_of(folder)
    tensors["model.layers.1.mlp.up_proj.weight"][90, 3] = value
    write_tensors(folder, tensors)
    assert "tensor model.layers.1.mlp.up_proj.weight: holds a value that is not finite" in refusal(folder)


def test_wgt_09_value_that_the_chosen_dtype_cannot_hold(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    tensors = tensors_of(folder)
    tensors["model.norm.weight"][5] = 1e6
    write_tensors(folder, tensors)
    load(folder, torch.bfloat16)
    assert "tensor model.norm.weight: holds a value that is not finite in float16" in refusal(folder, torch.float16)


def raw_file(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\xff" * 100, "damaged header, or is truncated"),
        (struct.pack("<Q", 2**63) + b"{}", "damaged header, or is truncated"),
        (raw_file(b"{nope"), "not JSON"),
        (raw_file(b"\xff\xfe\xfd"), "not JSON"),
        (raw_file(b"[" * 100_000), "not JSON"),
        (raw_file([1]), "not a JSON object"),
        (raw_file({"t": 5}), "tensor t: its header entry is not an object"),
        (raw_file({"t": {}}), "tensor t: its shape or data_offsets are damaged"),
        (raw_file({"t": {**GOOD, "shape": [-2]}}), "tensor t: its shape"),
        (raw_file({"t": {**GOOD, "shape": [True]}}), "tensor t: its shape"),
        (raw_file({"t": {**GOOD, "data_offsets": [0]}}), "tensor t: its shape or data_offsets"),
        (raw_file({"t": {**GOOD, "data_offsets": [8, 0]}}), "tensor t: -8 bytes for shape"),
        (raw_file({"t": {**GOOD, "dtype": "F8_E4M3"}}), "tensor t: dtype 'F8_E4M3' is not supported"),
        (raw_file({"t": {**GOOD, "dtype": None}}), "tensor t: dtype None is not supported"),
        (raw_file({"t": {**GOOD, "shape": [2**40, 2**40]}}), "tensor t: 8 bytes for shape"),
        (raw_file({"t": GOOD}, b"1234567"), "truncated"),
        (raw_file({"t": GOOD}, b"123456789"), "bytes that belong to no tensor"),
        (raw_file({"t": {**GOOD, "data_offsets": [4, 12]}}, bytes(12)), "tensor t: data does not start where"),
        (raw_file({"t": GOOD, "u": {**GOOD, "data_offsets": [4, 12]}}, bytes(12)), "tensor u: data does not start"),
        (raw_file(b'{"t": {"dtype": "F32"}, "t": {"dtype": "F32"}}'), "tensor t appears 2 times"),
    ],
)
def test_wgt_02_damaged_header(copy_of: Callable[[str], Path], content: bytes, problem: str) -> None:
    folder = copy_of("llama")
    (folder / "model.safetensors").write_bytes(content)
    message = refusal(folder)
    assert str(folder / "model.safetensors") in message
    assert problem in message


def test_wgt_02_file_that_shrinks_while_it_is_read(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    path = folder / "model.safetensors"

    def cut(done: int, total: int) -> None:
        path.write_bytes(path.read_bytes()[:2000])

    with pytest.raises(ModelFileError, match="the file ends before it does"):
        load_model(open_model(folder), CPU, progress=cut)


def test_a_folder_is_never_run(copy_of: Callable[[str], Path]) -> None:
    """Code beside the weights, named by the configuration, is left alone, and pickles are not opened."""
    folder = copy_of("llama")
    (folder / "modeling_evil.py").write_text("raise SystemExit('imported')")
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    assert logits_of(load(folder)).isfinite().all()


def test_progress_and_report(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    seen: list[tuple[int, int]] = []
    model = load_model(open_model(folder), CPU, torch.bfloat16, lambda done, total: seen.append((done, total)))
    num_bytes = sum(tensor.nbytes for tensor in tensors_of(folder).values())
    assert seen[-1] == (num_bytes, num_bytes)
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {num_bytes}
    report = model.report
    assert report.num_bytes_read == num_bytes
    assert report.num_bytes_placed == num_bytes // 2
    assert report.disk_gb_per_s > 0
    assert report.device_gb_per_s > 0
    assert 0 < report.disk_s + report.place_s <= report.total_s

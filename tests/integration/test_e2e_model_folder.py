"""The demo model as a folder of the usual files, in the forms that folders come in, served by all processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.client import CHAT, HI, NUM, NUM_TEXT, TEXT, Client, Json
from tests.integration.model_folders import variant, write_model_folder, write_weights
from tests.integration.server import running, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REFUSING_TEMPLATE = """{%- if messages[0].role == 'system' -%}{{ raise_exception('no system turns here') }}{%- endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bfloat16, tied, no head of its own; its template in chat_template.jinja."""
    place = tmp_path_factory.mktemp("model") / "SmolLM2"
    write_model_folder(smollm2_path, place)
    return place


def check_text(client: Client) -> None:
    answer = client.ask(TEXT, prompt=NUM, max_tokens=20)
    assert (answer.text, answer.prompt_tokens) == (NUM_TEXT[:20], 11)


@pytest.fixture(scope="module")
def tied(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Two end ids in generation_config.json, one in config.json; the type of numbers in `dtype`."""
    changes: dict[str, Json] = {
        "config": {"eos_token_id": 2, "dtype": "bfloat16"},
        "generation_config": {"eos_token_id": [2, 30]},
    }
    place = variant(folder, tmp_path_factory.mktemp("tied") / "SmolLM2", **changes)
    with running(place, num_threads=1, kv_cache_tokens=4096) as server:
        client = Client(server)
        yield client
        client.wait_idle()
        assert "activations in float32" in server.log()


def test_wgt_01_wgt_09_a_tied_model_without_a_head_has_its_text(tied: Client) -> None:
    check_text(tied)


def test_stp_11_every_end_id_of_the_generation_config_ends(tied: Client) -> None:
    answer = tied.ask_both(TEXT, prompt="The capital of France is", max_tokens=16)
    assert (answer.text, answer.finish_reason, answer.completion_tokens) == (" Paris", "stop", 2)
    assert tied.ask_both(CHAT, messages=HI).text == "Hello! How can I assist you today?"


def test_cht_04_a_template_in_its_own_file_is_found(tied: Client) -> None:
    assert tied.ask(CHAT, messages=HI, max_tokens=1).prompt_tokens == 31


def test_wgt_01_wgt_09_cht_04_an_untied_model_without_a_template(folder: Path, tmp_path: Path) -> None:
    """float32, `torch_dtype`, a head in the file and nothing said of tying: the default of the type is untied."""
    changes = {"config": {"tie_word_embeddings": None, "dtype": None, "torch_dtype": "float32"}}
    place = variant(folder, tmp_path / "SmolLM2", **changes)
    (place / "chat_template.jinja").unlink()
    weights = load_file(folder / "model.safetensors")
    write_weights(place, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, torch.float32)
    with running(place, num_threads=1, kv_cache_tokens=4096) as server:
        client = Client(server)
        check_text(client)
        error = client.refused(CHAT, {"messages": HI})
        assert error["code"] == "no_chat_template"
        assert "template" in error["message"]


def test_wgt_01_wgt_09_cht_09_a_tied_model_with_a_head_in_half_precision(folder: Path, tmp_path: Path) -> None:
    """float16 in the file, bfloat16 asked for; a head beside tied embeddings; a template that refuses."""
    place = variant(folder, tmp_path / "SmolLM2", config={"dtype": None})
    weights = load_file(folder / "model.safetensors")
    write_weights(place, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, torch.float16)
    template = tmp_path / "template.jinja"
    template.write_text(REFUSING_TEMPLATE, "utf-8")
    settings = {"dtype": "bfloat16", "chat_template": template, "kv_cache_tokens": 4096}
    with running(place, num_threads=1, **settings) as server:
        client = Client(server)
        check_text(client)
        assert "activations in bfloat16" in server.log()
        system = {"role": "system", "content": "x"}
        for messages, words in (([system, *HI], "no system turns here"), ([*HI, *HI], "roles must alternate")):
            error = client.refused(CHAT, {"messages": messages})
            assert words in error["message"]
            assert "Traceback" not in json.dumps(error)
        assert client.ask(CHAT, messages=HI, max_tokens=4).completion_tokens == 4


def refused_start(place: Path) -> str:
    """What a server says that must refuse to start."""
    server = start(place, num_threads=1)
    try:
        output, _ = server.process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
        raise
    assert server.process.returncode == 2, output
    assert "Traceback" not in output
    return output


def test_wgt_01_an_untied_model_without_a_head_is_refused(folder: Path, tmp_path: Path) -> None:
    place = variant(folder, tmp_path / "SmolLM2", config={"tie_word_embeddings": False})
    assert "lm_head.weight" in refused_start(place)


def test_wgt_02_a_missing_shard_is_named(folder: Path, tmp_path: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weights = sorted(load_file(folder / "model.safetensors"))
    index = {"weight_map": {name: names[place >= len(weights) // 2] for place, name in enumerate(weights)}}
    place = variant(folder, tmp_path / "SmolLM2", **{"model.safetensors.index": index})
    (place / "model.safetensors").rename(place / names[0])
    assert names[1] in refused_start(place)


def test_wgt_02_a_truncated_file_is_named(folder: Path, tmp_path: Path) -> None:
    place = variant(folder, tmp_path / "SmolLM2")
    (place / "model.safetensors").unlink()
    with (folder / "model.safetensors").open("rb") as whole:
        (place / "model.safetensors").write_bytes(whole.read(50_000_000))
    assert "model.safetensors" in refused_start(place)


def test_wgt_02_a_folder_without_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    place = variant(folder, tmp_path / "SmolLM2")
    (place / "model.safetensors").unlink()
    assert str(place) in refused_start(place)

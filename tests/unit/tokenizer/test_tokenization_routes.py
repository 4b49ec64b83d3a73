"""POST /tokenize, /detokenize and /v1/chat/completions/render against a model whose tokens are bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.tokenizer.backend_peers import CONTEXT, Server
from tests.unit.tokenizer.http_client import request

Json = dict[str, Any]
HI = [{"role": "user", "content": "Hi 你好👋"}]


def post(server: Server, path: str, **body: object) -> Json:
    response = request(server.port, "POST", path, body)
    assert response.status == 200, response.body
    return response.json()


def refused(server: Server, path: str, **body: object) -> Json:
    response = request(server.port, "POST", path, body)
    assert response.status == 400, response.body
    return response.error


@pytest.mark.parametrize("text", ["hex", "你好", "👋🌍\n", "<|im_end|> 42"])
def test_a_text_and_its_ids_and_back(server: Server, text: str) -> None:
    found = post(server, "/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == CONTEXT
    assert post(server, "/detokenize", tokens=found["tokens"]) == {"prompt": text}


def test_token_strings_only_on_request(server: Server) -> None:
    assert post(server, "/tokenize", prompt="x")["token_strs"] is None


def test_an_empty_text_has_no_tokens(server: Server) -> None:
    assert post(server, "/tokenize", prompt="", add_special_tokens=False)["tokens"] == []
    assert post(server, "/detokenize", tokens=[]) == {"prompt": ""}


def test_half_a_character_shows_as_such(server: Server) -> None:
    ids = post(server, "/tokenize", prompt="你", add_special_tokens=False)["tokens"]
    assert post(server, "/detokenize", tokens=ids[:-1]) == {"prompt": "\ufffd"}


def test_a_chat_is_counted_as_it_would_be_asked(server: Server) -> None:
    rendered = post(server, "/v1/chat/completions/render", messages=HI)
    counted = post(server, "/tokenize", messages=HI)
    assert counted["tokens"] == rendered["token_ids"]
    assert rendered["count"] == len(rendered["token_ids"]) == len(rendered["token_strs"])
    assert post(server, "/detokenize", tokens=rendered["token_ids"])["prompt"] == rendered["text"]
    assert "Hi 你好👋" in rendered["text"]
    assert rendered["text"].startswith("<|im_start|>user\n")
    messages = request(server.port, "POST", "/v1/messages/count_tokens", {"messages": HI}).json()
    assert messages == {"input_tokens": rendered["count"]}


def test_tok_06_a_prompt_beyond_the_context_is_counted_all_the_same(server: Server) -> None:
    assert post(server, "/tokenize", prompt="x" * (CONTEXT + 5), add_special_tokens=False)["count"] == CONTEXT + 5


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "messages"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "nobody"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[...]"),
        ("/detokenize", {"tokens": [999_999]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (CONTEXT + 1)}, "tokens"),
        ("/v1/chat/completions/render", {"messages": []}, "messages"),
    ],
)
def test_wrong_fields_are_named(server: Server, path: str, body: Json, param: str) -> None:
    assert refused(server, path, **body)["param"] in (param, param.replace("[...]", "[0]"))


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/chat/completions/render"])
def test_another_model_is_not_found(server: Server, path: str) -> None:
    body = {"prompt": "x", "tokens": [], "messages": HI, "model": "other"}
    response = request(server.port, "POST", path, body)
    assert (response.status, response.error["code"]) == (404, "model_not_found")

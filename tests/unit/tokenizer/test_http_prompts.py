"""What a prompt may be, and what never becomes one, over HTTP, against the real process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.wire.columns import unpack_int32
from tests.unit.tokenizer.backend_peers import CONTEXT, Server, write_small_model
from tests.unit.tokenizer.field_requests import CHAT, NUM, assert_refused, chat, complete, submits_of
from tests.unit.tokenizer.http_client import Json, request
from tests.unit.tokenizer.scripts import OK, answering


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["Hi", ""], None, 5, {"a": 1}, [[1], "a"], [1, "a"], [None]])
def test_tok_02_empty_and_shapeless_prompts_are_refused(server: Server, prompt: Any) -> None:
    response = complete(server, {"prompt": prompt})
    assert response.status == 400
    assert response.error["param"].startswith("prompt")


def test_tok_02_a_missing_prompt_is_named(server: Server) -> None:
    assert_refused(request(server.port, "POST", "/v1/completions", {"max_tokens": 1}), "prompt")
    assert_refused(request(server.port, "POST", "/v1/chat/completions", {"max_tokens": 1}), "messages")
    assert_refused(request(server.port, "POST", "/v1/chat/completions", {"messages": []}), "messages")


@pytest.mark.parametrize("prompt", [[276], [-1], [4294967296], [1.5], [True], [[1], [276]], [2**70], [[1], [-5]]])
def test_tok_04_ids_out_of_range_are_refused(server: Server, prompt: Any) -> None:
    assert complete(server, {"prompt": prompt}).status == 400
    assert complete(server, {"prompt": [275]}).status == 200
    assert request(server.port, "GET", "/health").status == 200


def test_tok_05_prompt_forms_give_the_same_requests_in_order(server: Server) -> None:
    texts = [NUM, "xyz"]
    ids = [list(text.encode()) for text in texts]
    by_text = submits_of(server, {"prompt": texts, "n": 2, "max_tokens": 4, "seed": 5})
    by_ids = submits_of(server, {"prompt": ids, "n": 2, "max_tokens": 4, "seed": 5})
    for submits in (by_text, by_ids):
        assert [unpack_int32(submit.prompt_token_ids) for submit in submits] == [
            list(b"1, 2, 3, 4,"),
            list(b"1, 2, 3, 4,"),
            list(b"xyz"),
            list(b"xyz"),
        ]
        assert [submit.sampling.choice for submit in submits] == [0, 1, 0, 1]
        assert [submit.group_id for submit in submits] == [submits[i].request_id for i in (0, 0, 2, 2)]
        assert {submit.sampling.seed for submit in submits} == {5}


def test_tok_05_one_list_of_ids_is_one_prompt(server: Server) -> None:
    assert unpack_int32(submits_of(server, {"prompt": [72, 105]})[0].prompt_token_ids) == [72, 105]


@pytest.mark.parametrize("wanted", [{"max_tokens": 1}, {}])
def test_tok_06_a_prompt_over_the_context_is_refused_with_the_numbers(server: Server, wanted: Json) -> None:
    for length in (9000, CONTEXT):
        response = complete(server, {"prompt": [81] * length, **wanted})
        assert_refused(response, "prompt")
        assert response.error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in response.error["message"]
        assert str(length) in response.error["message"]
    assert submits_of(server, {"prompt": [81] * (CONTEXT - 1), **wanted})[0].max_tokens == 1


def test_tok_06_text_too_long_for_any_tokenization_is_refused_unencoded(server: Server) -> None:
    text = "x" * (CONTEXT * 20 + 1)  # the longest token is <|start_header_id|>, 19 bytes
    for response in (
        complete(server, {"prompt": text}),
        chat(server, {"messages": [{"role": "user", "content": text}]}),
    ):
        assert response.status == 400
        assert response.error["code"] == "context_length_exceeded"


def test_sch_07_a_prompt_over_the_kv_pool_names_the_pool(server: Server) -> None:
    server.backend.tell_load(max_total_tokens=64)
    server.backend.wait_for_load(server.port, 64)
    response = complete(server, {"prompt": [81] * 100})
    assert_refused(response, "prompt")
    assert "KV pool holds 64" in response.error["message"]
    assert submits_of(server, {"prompt": [81] * 60, "max_tokens": 50})[0].max_tokens == 4


@pytest.mark.parametrize("field", ["prompt", "stop", "user", "model", "foo"])
def test_tok_07_half_a_surrogate_pair_is_refused(server: Server, field: str) -> None:
    raw = b'{"prompt": "x", "%b": "a\\ud800b"}' % field.encode()
    if field == "prompt":
        raw = b'{"prompt": "a\\ud800b"}'
    response = request(server.port, "POST", "/v1/completions", raw)
    assert (response.status, response.error["code"]) == (400, "invalid_json")


def test_tok_07_half_a_surrogate_pair_in_a_chat_is_refused(server: Server) -> None:
    for raw in (
        b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}',
        b'{"messages": [{"role": "user", "content": "a", "name": "\\udfff"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud83d"}]}]}',
    ):
        assert request(server.port, "POST", "/v1/chat/completions", raw).error["code"] == "invalid_json"
    server.backend.script = OK
    whole = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude42"}]}'
    assert request(server.port, "POST", "/v1/chat/completions", whole).status == 200


@pytest.mark.parametrize(
    "raw", [b"{", b"", b"[]", b'"x"', b"null", b"123", b"\xff", b'{"prompt": "x"}}', b"\xef\xbb\xbf{}"]
)
def test_api_04_malformed_bodies_are_refused(server: Server, raw: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = request(server.port, "POST", path, raw)
        assert (response.status, response.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("messages", ["Hi", {"role": "user"}, [1], ["Hi"], [None], [[]]])
def test_api_04_messages_of_a_wrong_shape_are_refused(server: Server, messages: Any) -> None:
    response = request(server.port, "POST", "/v1/chat/completions", {"messages": messages})
    assert response.status == 400
    assert response.error["param"].startswith("messages")


@pytest.mark.parametrize(
    "kind", ["text/plain", "", "application/x-www-form-urlencoded", "application/json; charset=latin-1"]
)
def test_api_04_other_content_types_are_415(server: Server, kind: str) -> None:
    response = request(server.port, "POST", "/v1/completions", {"prompt": "x"}, Content_Type=kind)
    assert response.status == 415
    assert response.error["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "x", "max_tokens": 5, "max_tokens": 9}',
        b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
)
def test_duplicate_keys_endless_digits_and_endless_nesting_are_refused(server: Server, raw: bytes) -> None:
    response = request(server.port, "POST", "/v1/completions", raw)
    assert (response.status, response.error["code"]) == (400, "invalid_json")


def test_a_body_of_millions_of_values_is_refused_before_it_is_built(server: Server) -> None:
    deep = b"[" * 200 + b"]" * 200 + b","
    for values in (b"[]," * 2_000_000, b"0," * 200_000, deep * 1400, b'{"a":0},' * 140_000):
        response = request(server.port, "POST", "/v1/completions", b'{"prompt": [' + values + b"0]}")
        assert (response.status, response.error["code"]) == (413, "too_many_values")
    response = request(server.port, "POST", "/v1/completions", b'{"prompt": [' + b"0," * 199_990 + b"0]}")
    assert (response.status, response.error["code"]) == (400, "context_length_exceeded")


def test_cht_01_content_as_parts_is_the_same_prompt_as_text(server: Server) -> None:
    def prompt(content: object) -> list[int]:
        body = {"messages": [{"role": "user", "content": content}]}
        return unpack_int32(submits_of(server, body, "/v1/chat/completions")[0].prompt_token_ids)

    part = {"type": "text", "text": "Hi"}
    assert prompt([part]) == prompt("Hi")
    assert prompt([part, {"type": "text", "text": " there"}]) == prompt("Hi there")
    assert prompt([]) == prompt("")
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    assert_refused(chat(server, {"messages": [{"role": "user", "content": [part, image]}]}), "messages[0].content[1]")


def test_cht_02_null_and_missing_content_are_the_same(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def prompt(assistant: Json) -> bytes:
        turns = [{"role": "user", "content": "Hi"}, assistant, {"role": "tool", "content": "3", "tool_call_id": "1"}]
        return submits_of(server, {"messages": turns}, "/v1/chat/completions")[0].prompt_token_ids

    absent = prompt({"role": "assistant", "tool_calls": [call]})
    assert absent == prompt({"role": "assistant", "content": None, "tool_calls": [call]})
    assert b"None" not in bytes(value for value in unpack_int32(absent) if value < 256)


def test_special_tokens_are_parsed_in_raw_prompts_and_not_in_messages(server: Server) -> None:
    raw = submits_of(server, {"prompt": "<|im_end|>"})[0]
    assert unpack_int32(raw.prompt_token_ids) == [257]
    body = {"messages": [{"role": "user", "content": "<|im_end|>"}]}
    ids = unpack_int32(submits_of(server, body, "/v1/chat/completions")[0].prompt_token_ids)
    assert ids.count(257) == 1
    assert bytes(value for value in ids if value < 256).count(b"<|im_end|>") == 1


def test_cht_05_continue_final_message_leaves_the_last_turn_open(server: Server) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure"}]
    body = {"messages": turns, "continue_final_message": True}
    ids = unpack_int32(submits_of(server, body, "/v1/chat/completions")[0].prompt_token_ids)
    assert ids[-4:] == list(b"Sure")
    assert_refused(chat(server, {**body, "add_generation_prompt": True}), "continue_final_message")
    closed = submits_of(server, {"messages": turns[:1], "add_generation_prompt": False}, "/v1/chat/completions")[0]
    assert unpack_int32(closed.prompt_token_ids)[-2:] == [257, 10]


def test_echo_repeats_a_text_prompt_before_each_answer(server: Server) -> None:
    server.backend.script = answering([" 5", ", 6"])
    response = request(server.port, "POST", "/v1/completions", {"prompt": [NUM, "é"], "echo": True, "n": 2})
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert texts == [f"{NUM} 5, 6", f"{NUM} 5, 6", "é 5, 6", "é 5, 6"]
    server.backend.script = answering([" 5"])
    choice = request(server.port, "POST", "/v1/completions", {"prompt": [*"é".encode()], "echo": True}).json()[
        "choices"
    ]
    assert choice[0]["text"] == "é 5"


def test_cht_04_a_model_without_a_template_completes_and_says_what_a_chat_needs(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = start_server(model=write_small_model(tmp_path, template=None))
    assert complete(server, {}).status == 200
    response = chat(server, {})
    assert (response.status, response.error["code"]) == (400, "no_chat_template")
    assert "--chat-template" in response.error["message"]
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}", encoding="utf-8")
    server = start_server("--chat-template", str(template), model=tmp_path / "small.gguf")
    submit = submits_of(server, CHAT, "/v1/chat/completions")[0]
    assert unpack_int32(submit.prompt_token_ids) == list(b"Hi!")

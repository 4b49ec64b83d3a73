"""Nothing in a message is taken and ignored without a word: over HTTP, against the real process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.wire.columns import unpack_int32
from tests.unit.tokenizer.backend_peers import Server, write_small_model
from tests.unit.tokenizer.field_requests import assert_refused, chat, submits_of
from tests.unit.tokenizer.http_client import Json, Response
from tests.unit.tokenizer.small_models import THINKING

USER: Json = {"role": "user", "content": "Hi 👋"}
CALL: Json = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OLD: Json = CALL["function"]
CALLING: Json = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER: Json = {"role": "tool", "content": "三", "tool_call_id": "1"}


def ask(server: Server, *messages: Json) -> Response:
    return chat(server, {"messages": list(messages)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("audio", {"id": "a"}),
        ("refusal", "No."),
        ("reasoning", "because"),
    ],
)
def test_api_02_message_keys_that_are_not_built_are_refused_by_name(server: Server, key: str, value: Any) -> None:
    response = ask(server, USER, {"role": "assistant", "content": "a", key: value}, USER)
    assert_refused(response, f"messages[1].{key}")
    assert response.error["code"] == "unsupported_field"
    response = ask(server, USER, {"role": "assistant", "content": "a", key: None}, USER)
    assert response.status == 200
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize("key", ["name", "tool_call_id", "reasoning_content"])
@pytest.mark.parametrize("value", [5, True, ["x"], {"a": "b"}])
def test_message_keys_of_a_wrong_type_are_refused(server: Server, key: str, value: Any) -> None:
    assert_refused(ask(server, USER, {**USER, key: value}), f"messages[1].{key}")
    assert ask(server, {**USER, key: None}).status == 200


@pytest.mark.parametrize("arguments", [5, '{"city":', "[]"])
def test_arguments_of_a_call_that_are_no_object_are_refused_by_name(server: Server, arguments: Any) -> None:
    bad: Json = {"id": "2", "type": "function", "function": {"name": "f", "arguments": arguments}}
    response = ask(server, USER, {**CALLING, "tool_calls": [CALL, bad]}, ANSWER)
    assert_refused(response, "messages[1].tool_calls[1].function.arguments")
    response = ask(server, USER, {"role": "assistant", "function_call": bad["function"]})
    assert_refused(response, "messages[1].function_call.arguments")


def test_an_answer_sent_back_as_openai_gives_it_is_taken(server: Server) -> None:
    empty: Json = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, "annotations": []}
    response = ask(server, USER, {"role": "assistant", "content": "a", **empty}, {**USER, "name": "Zoë"})
    assert response.status == 200
    assert "x-ignored-fields" not in response.headers


def test_unknown_keys_of_messages_and_parts_are_named_once(server: Server) -> None:
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    response = ask(server, {"role": "user", "content": [part, part], "id": 5}, {**USER, "id": 6})
    assert response.status == 200
    assert response.headers["x-ignored-fields"] == "messages[].id, messages[].content[].cache_control"


def test_cht_02_str_07_calls_reach_a_model_whose_template_shows_none(server: Server) -> None:
    for calling in (CALLING, {"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "function_call": OLD}):
        response = ask(server, USER, calling, ANSWER)
        assert response.status == 200
        assert "x-ignored-fields" not in response.headers
        messages = {"messages": [USER, calling, ANSWER]}
        ids = unpack_int32(submits_of(server, messages, "/v1/chat/completions")[0].prompt_token_ids)
        text = bytes(value for value in ids if value < 256)
        assert b"None" not in text
        assert b'assistant\n\n{"name": "f", "arguments": {}}\n' in text  # the tags are tokens of this model
        assert "<tool_response>\n三\n</tool_response>".encode() in text
    response = ask(server, USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}, USER)
    assert response.headers["x-ignored-fields"] == "messages[].reasoning_content"
    misplaced = ask(server, {**USER, "tool_calls": [CALL]})
    assert misplaced.headers["x-ignored-fields"] == "messages[].tool_calls"


def test_cht_02_a_template_that_shows_calls_has_nothing_to_name(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = start_server(model=write_small_model(tmp_path, THINKING))
    thinking = {**CALLING, "reasoning_content": "hm"}
    response = ask(server, USER, thinking, ANSWER)
    assert response.status == 200
    assert "x-ignored-fields" not in response.headers
    response = ask(server, USER, thinking, ANSWER, USER)  # only the thoughts of the last turn are shown
    assert response.headers["x-ignored-fields"] == "messages[].reasoning_content"
    misplaced = ask(server, {**USER, "tool_calls": [CALL]})
    assert misplaced.headers["x-ignored-fields"] == "messages[].tool_calls"


def test_a_tools_answer_that_is_not_shown_is_named_and_strict_fields_refuses_it(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    template = (
        "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    model = write_small_model(tmp_path, template)
    server = start_server(model=model)
    response = ask(server, USER, ANSWER)
    assert response.headers["x-ignored-fields"] == "messages[tool].content"
    strict = start_server("--strict-fields", model=model)
    assert ask(strict, {**USER, "name": "n"}).status == 200
    for messages, place, code in (
        ([USER, ANSWER], "messages[tool].content", "unsupported_field"),
        ([USER, CALLING], "messages[].tool_calls", "unsupported_field"),
        ([{**USER, "id": 5}], "messages[].id", "unknown_field"),
    ):
        response = ask(strict, *messages)
        assert_refused(response, place)
        assert response.error["code"] == code

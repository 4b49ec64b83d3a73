"""Tools and thoughts over /v1/messages and /v1/responses: the same grammar and parsers, in those APIs' own words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from services.wire.finish import Finish
from services.wire.request_params import GrammarKind
from tests.unit.tokenizer import model_templates as templates
from tests.unit.tokenizer.backend_peers import Server, write_small_model
from tests.unit.tokenizer.http_client import Connection, Json, request
from tests.unit.tokenizer.scripts import answering

SCHEMA: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ANTHROPIC: Json = {
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"name": "get_weather", "description": "天気", "input_schema": SCHEMA}],
}
RESPONSES: Json = {"input": "Hi", "tools": [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]}
ANSWER = (
    '<think>\nhm\n</think>\n\nSo: <tool_call>\n{"name": "get_weather", "arguments": {"city": "東京"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(write_small_model(tmp_path_factory.mktemp("qwen3"), templates.QWEN3))
    yield server
    server.close()


def ask(server: Server, path: str, body: Json) -> Any:
    server.backend.script = answering(list(ANSWER), Finish.STOP_TOKEN)
    response = request(server.port, "POST", path, body)
    assert response.status == 200, response.body
    return response.json()


def test_str_03_a_call_in_anthropics_words(thinking_server: Server) -> None:
    message = ask(thinking_server, "/v1/messages", ANTHROPIC)
    assert message["stop_reason"] == "tool_use"
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert [(call["name"], call["input"]) for call in calls] == [("get_weather", {"city": "東京"})]
    texts = [block["text"] for block in message["content"] if block["type"] == "text"]
    assert texts == ["So: "]
    assert [block["thinking"] for block in message["content"] if block["type"] == "thinking"] == ["hm"]


def test_str_03_a_call_in_the_words_of_responses(thinking_server: Server) -> None:
    response = ask(thinking_server, "/v1/responses", RESPONSES)
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("get_weather", {"city": "東京"})]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {**ANTHROPIC, "tool_choice": {"type": "tool", "name": "get_weather"}}),
        ("/v1/messages", {**ANTHROPIC, "tool_choice": {"type": "any"}}),
        ("/v1/responses", {**RESPONSES, "tool_choice": "required"}),
        ("/v1/responses", {**RESPONSES, "tool_choice": {"type": "function", "name": "get_weather"}}),
    ],
)
def test_str_07_a_call_that_must_come(thinking_server: Server, path: str, body: Json) -> None:
    thinking_server.backend.forget()
    ask(thinking_server, path, body)
    grammar = thinking_server.backend.take_submits(1)[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    assert "get_weather" in grammar.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/messages", {**ANTHROPIC, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ("/v1/messages", {**ANTHROPIC, "tools": [{"name": "a b", "input_schema": {}}]}, "tools[0]"),
        ("/v1/responses", {**RESPONSES, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ("/v1/responses", {**RESPONSES, "tools": [{"type": "function", "name": ""}]}, "tools[0]"),
    ],
)
def test_str_07_what_means_nothing_is_refused(thinking_server: Server, path: str, body: Json, param: str) -> None:
    response = request(thinking_server.port, "POST", path, body)
    assert response.status == 400
    assert param in response.body.decode()


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/messages", {**ANTHROPIC, "tool_choice": {"type": "any"}}, "content"),
        ("/v1/responses", {**RESPONSES, "tool_choice": "required"}, "output"),
    ],
)
@pytest.mark.parametrize(
    "call", ["", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "京"}}\n</tool_call>']
)
def test_no_markup_is_an_item_of_an_answer_that_must_call_and_is_cut(
    thinking_server: Server, path: str, body: Json, place: str, call: str
) -> None:
    pieces = list(call + '\n<tool_call>\n{"name": "get_')
    thinking_server.backend.script = answering(pieces, Finish.LENGTH)
    answer = request(thinking_server.port, "POST", path, body).json()
    kinds = ["tool_use" if path == "/v1/messages" else "function_call"] if call else []
    assert [item["type"] for item in answer[place]] == kinds
    with Connection(thinking_server.port) as connection:
        connection.send("POST", path, {**body, "stream": True})
        events = connection.read_response().body.decode()
    assert events.count('"type":"tool_use"' if path == "/v1/messages" else "event: response.output_item.added") == len(
        kinds
    )
    assert "text_delta" not in events
    assert "output_text" not in events
    assert "tool_call>" not in events

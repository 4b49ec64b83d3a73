"""What clients read of their own requests (errors, ignored names, echoes) is in the words that they sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.api_error import ApiError
from services.tokenizer.native_schema import GenerateBody
from services.tokenizer.request_body import convert
from services.tokenizer.sampling_body import SamplingBody
from tests.unit.tokenizer.backend_peers import CONTEXT, Server, write_small_model
from tests.unit.tokenizer.http_client import Connection, Json, Response, request
from tests.unit.tokenizer.scripts import answering
from tests.unit.tokenizer.short_bodies import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, SHORT_BODIES, USER

COUNT = "/v1/messages/count_tokens"
CALL_BLOCK: Json = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
THOUGHT_BLOCK: Json = {"type": "thinking", "thinking": "hm"}
BODIES: dict[str, Json] = SHORT_BODIES | {
    COUNT: {"messages": [USER]},
    "/tokenize": {"messages": [USER]},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/score": {"prompt": "Hi", "continuations": ["!"]},
}


def ask(server: Server, path: str, **body: Any) -> Response:
    server.backend.script = answering(["x"])
    return request(server.port, "POST", path, {**BODIES[path], **body})


def refusal(server: Server, path: str, **body: Any) -> Json:
    response = ask(server, path, **body)
    assert response.status == 400, response.body
    return error_of(response)


def error_of(response: Response) -> Json:
    """The error, in OpenAI's form or in Anthropic's."""
    error: Json = response.json()["error"]
    return error


THINKING_TURN: Json = {"role": "assistant", "content": [THOUGHT_BLOCK, {"type": "text", "text": "a"}]}
REASONING_ITEM: Json = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
ANSWER_ITEM: Json = {"role": "assistant", "content": "a"}
IGNORED: list[tuple[str, Json, str]] = [
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True, "x": 1}},
     "chat_template_kwargs.enable_thinking, chat_template_kwargs.x"),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    (RESPONSES, {"input": [USER, REASONING_ITEM, ANSWER_ITEM, USER]}, "input[reasoning]"),
    (RESPONSES, {"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    (RESPONSES, {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
    (MESSAGES, {"thinking": {"type": "enabled"}}, "thinking"),
    (MESSAGES, {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
     "output_config.effort, thinking"),
    (MESSAGES, {"messages": [USER, THINKING_TURN, USER]}, "messages[].content[thinking]"),
    (COUNT, {"messages": [USER, THINKING_TURN, USER], "thinking": {"type": "adaptive"}},
     "messages[].content[thinking], thinking"),
    ("/tokenize", {"messages": [{**USER, "id": 5}, {**USER, "reasoning_content": "hm"}]},
     "messages[].id, messages[].reasoning_content"),
    ("/tokenize", {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "names"), IGNORED)
def test_api_02_what_does_nothing_is_named_as_it_was_sent(server: Server, path: str, body: Json, names: str) -> None:
    response = ask(server, path, **body)
    assert response.status == 200, response.body
    assert response.headers["x-ignored-fields"] == names


def test_api_02_strict_fields_refuses_it_by_the_same_name(start_server: Callable[..., Server]) -> None:
    strict = start_server("--strict-fields")
    for path, body, names in IGNORED:
        response = ask(strict, path, **body)
        assert response.status == 400, (path, body)
        name = names.split(", ")[0]
        assert error_of(response)["message"].startswith(f"{name}: ")
        assert error_of(response).get("param", name) == name


def test_calls_and_results_that_a_template_does_not_show_are_named_as_they_were_sent(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    template = (
        "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    server = start_server(model=write_small_model(tmp_path, template))
    items = [
        USER,
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
    ]
    told = ask(server, RESPONSES, input=items).headers["x-ignored-fields"]
    assert told == "input[function_call], input[function_call_output]"
    result = {"type": "tool_result", "tool_use_id": "1", "content": "2"}
    turns = [USER, {"role": "assistant", "content": [CALL_BLOCK]}, {"role": "user", "content": [result]}]
    told = ask(server, MESSAGES, messages=turns).headers["x-ignored-fields"]
    assert told == "messages[].content[tool_use], messages[].content[tool_result]"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (GENERATE, {"sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}},
         "sampling_params.min_new_tokens: must be at most max_new_tokens, 4"),
        (CHAT, {"min_tokens": 5, "max_tokens": 4}, "min_tokens: must be at most max_tokens, 4"),
        (CHAT, {"min_tokens": 5, "max_tokens": 9, "max_completion_tokens": 4},
         "min_tokens: must be at most max_completion_tokens, 4"),
        (CHAT, {"logit_bias": {"0": 1, "1": 101, "2": 102}}, "logit_bias.1: expected float <= 100.0"),
        (COMPLETIONS, {"logit_bias": {"1": None}}, "logit_bias.1: expected float, got null"),
        (COMPLETIONS, {"logit_bias": {"1": 1, "x": 1}}, "logit_bias.x: the key is no token id"),
        (GENERATE, {"sampling_params": {"logit_bias": {"1": 101}}},
         "sampling_params.logit_bias.1: expected float <= 100.0"),
        (GENERATE, {"sampling_params": [{"logit_bias": {"3": "y", "1": 1}}]},
         "sampling_params[0].logit_bias.3: expected float, got str"),
        (GENERATE, {"sampling_params": {"logit_bias": {"999999": 1}}}, "sampling_params.logit_bias.999999: "),
        (GENERATE, {"sampling_params": {"spaces_between_special_tokens": False}},
         "sampling_params.spaces_between_special_tokens: is not supported"),
        (GENERATE, {"sampling_params": {"stream_interval": 2}}, "sampling_params.stream_interval: is not supported"),
        (RESPONSES, {"metadata": {"k": 5}}, "metadata.k: expected str, got int"),
        (RESPONSES, {"metadata": {"k": "v" * 513}}, "metadata.k: expected str of length <= 512"),
        (RESPONSES, {"metadata": {"k" * 65: "v"}}, "metadata: a key: expected str of length <= 64"),
        (RESPONSES, {"metadata": dict.fromkeys("abcdefghijklmnopq", "")}, "metadata: expected object of length <= 16"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]},
         "tools[0].parameters: must be the schema of an object"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
         "tools[0].input_schema: must be the schema of an object"),
        ("/v1/score", {"prompt": "h", "continuations": ["i", "e"], "add_special_tokens": False},
         "continuations[1]: written behind the prompt it changes the prompt's first token"),
    ],
)  # fmt: skip
def test_api_05_errors_are_in_the_clients_words(server: Server, path: str, body: Json, message: str) -> None:
    error = refusal(server, path, **body)
    assert error["message"].startswith(message)
    assert error.get("param", "") in ("", message.split(": ")[0])


def test_what_means_the_same_as_nothing_is_taken(server: Server) -> None:
    neutral = {"spaces_between_special_tokens": True, "stream_interval": 1}
    response = ask(server, GENERATE, sampling_params=neutral)
    assert response.status == 200, response.body
    assert "x-ignored-fields" not in response.headers


def test_a_call_of_an_earlier_turn_is_named_by_its_own_item(server: Server) -> None:
    def call(arguments: str) -> Json:
        return {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}

    items = [USER, REASONING_ITEM, call("{}"), call('{"city":')]
    error = refusal(server, RESPONSES, input=items)
    assert error["param"] == "input[3].arguments"
    assert error["message"].startswith("input[3].arguments: is not valid JSON")


@pytest.mark.parametrize(
    ("path", "body", "status", "start"),
    [
        (MESSAGES, {"model": "other"}, 404, "model: the model 'other' does not exist"),
        (COUNT, {"model": "other"}, 404, "model: the model 'other' does not exist"),
        (MESSAGES, {"messages": [{**USER, "content": "x" * (CONTEXT - 1)}]}, 400, "messages: the prompt has "),
        (MESSAGES, {"messages": [{**USER, "content": "x" * 200_000}]}, 400, "messages: the text has "),
        (MESSAGES, {"max_tokens": 0}, 400, "max_tokens: "),
    ],
)
def test_api_05_the_message_names_the_field_where_the_form_has_no_place_for_it(
    server: Server, path: str, body: Json, status: int, start: str
) -> None:
    response = ask(server, path, **body)
    assert response.status == status
    assert error_of(response)["message"].startswith(start)
    assert error_of(response)["message"].count(start.split(": ")[0] + ": ") == 1


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path, body in BODIES.items() for name in body if path not in (GENERATE, "/tokenize")]
    + [(GENERATE, "text"), ("/tokenize", "messages")],
)
def test_api_03_null_is_the_same_as_leaving_a_required_field_out(server: Server, path: str, name: str) -> None:
    absent = {key: value for key, value in BODIES[path].items() if key != name}
    without, null = (request(server.port, "POST", path, body) for body in (absent, {**absent, name: None}))
    assert (without.status, null.status) == (400, 400)
    assert error_of(null) == error_of(without)
    assert error_of(null).get("code", "missing_field") == "missing_field"


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (MESSAGES, {"tools": [{"name": "f", "input_schema": None}]}, "tools[0].input_schema"),
        (MESSAGES, {"messages": [{"role": None, "content": "x"}]}, "messages[0].role"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": None, "text": "x"}]}]},
         "messages[0].content[0].type"),
        (RESPONSES, {"input": [{"role": "user", "content": None}]}, "input[0].content"),
        (RESPONSES, {"text": {"format": {"type": None}}}, "text.format.type"),
    ],
)  # fmt: skip
def test_api_03_also_inside_of_objects(server: Server, path: str, body: Json, place: str) -> None:
    assert refusal(server, path, **body)["message"] == f"{place}: is required"
    assert refusal(server, CHAT, messages=[None])["code"] == "invalid_value"


def test_metadata_is_told_back(server: Server) -> None:
    metadata = {**{f"{number:064}": "值" * 512 for number in range(15)}, "": ""}
    assert ask(server, RESPONSES, metadata=metadata).json()["metadata"] == metadata
    assert ask(server, RESPONSES, metadata=None).json()["metadata"] == {}
    with Connection(server.port) as connection:
        connection.send("POST", RESPONSES, {**BODIES[RESPONSES], "metadata": {"a": "b"}, "stream": True})
        events = connection.read_response().body.decode()
    assert events.count('"metadata":{"a":"b"}') == 3


def test_a_position_behind_the_prompt_is_refused(server: Server) -> None:
    body: Json = {"text": None, "input_ids": [1, 2, 3], "return_logprob": True}
    error = refusal(server, GENERATE, **body, logprob_start_len=3)
    assert error["message"] == "logprob_start_len: must be below the prompt's 3 tokens (input_ids)"
    lists = {**body, "input_ids": [[1, 2, 3], [1]]}
    assert refusal(server, GENERATE, **lists, logprob_start_len=1)["message"].endswith("1 tokens (input_ids[1])")
    assert ask(server, GENERATE, **{**body, "return_logprob": False}, logprob_start_len=3).status == 200


BIASES: st.SearchStrategy[Json] = st.dictionaries(
    st.text(max_size=3), st.sampled_from([0, 5, 101, -200, "x", None, [], {}]), max_size=9
)


@given(BIASES, st.booleans())
def test_the_first_wrong_entry_of_an_object_is_named(biases: Json, is_nested: bool) -> None:
    wrong = [key for key, value in biases.items() if not isinstance(value, int) or not -100 <= value <= 100]
    fields = {"sampling_params": [{}, {"logit_bias": biases, "n": 0}]} if is_nested else {"logit_bias": biases}
    kind: type[msgspec.Struct] = GenerateBody if is_nested else SamplingBody
    place = "sampling_params[1]." if is_nested else ""
    if not wrong and not is_nested:
        convert(fields, kind)
        return
    with pytest.raises(ApiError) as caught:
        convert(fields, kind)
    assert caught.value.param == (f"{place}logit_bias.{wrong[0]}" if wrong else f"{place}n")

"""Tools and thoughts over HTTP, against the real process: what the model is shown, what holds it, what clients get."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.wire.columns import unpack_int32
from services.wire.finish import Finish
from services.wire.request_params import GrammarKind
from services.wire.requests import Submit
from tests.unit.tokenizer import model_templates as templates
from tests.unit.tokenizer.backend_peers import Server, write_small_model
from tests.unit.tokenizer.field_requests import assert_refused
from tests.unit.tokenizer.http_client import Connection, EventReader, Json, Response, request
from tests.unit.tokenizer.scripts import answering

PATH = "/v1/chat/completions"
USER: Json = {"role": "user", "content": "Hi"}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER: Json = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京 🙂"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ARGUMENTS = {"city": "東京 🙂"}


def ask(server: Server, pieces: list[str], finish: Finish = Finish.STOP_TOKEN, **body: Any) -> Response:
    """A body, to what the model says in these pieces."""
    server.backend.script = answering(pieces, finish)
    return request(server.port, "POST", PATH, {"messages": [USER], **body})


def message_of(response: Response) -> Json:
    assert response.status == 200, response.body
    message: Json = response.json()["choices"][0]["message"]
    return message


def stream(server: Server, pieces: list[str], finish: Finish = Finish.STOP_TOKEN, **body: Any) -> list[Json]:
    """The choices of all chunks."""
    server.backend.script = answering(pieces, finish)
    with Connection(server.port) as connection:
        connection.send("POST", PATH, {"messages": [USER], **body, "stream": True})
        reader = EventReader(connection)
        assert reader.status == 200
        return [event["choices"][0] for event in reader.rest()]


def submitted(server: Server, **body: Any) -> Submit:
    server.backend.forget()
    assert ask(server, ["ok"], **body).status == 200
    return server.backend.take_submits(1)[0]


def prompt_text(submit: Submit) -> str:
    return bytes(value for value in unpack_int32(submit.prompt_token_ids) if value < 256).decode()


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(write_small_model(tmp_path_factory.mktemp("qwen3"), templates.QWEN3))
    yield server
    server.close()


def test_str_07_tools_are_shown_to_a_model_whose_template_shows_none(server: Server) -> None:
    for choice in (None, "auto"):
        submit = submitted(server, tools=[TOOL], tool_choice=choice)
        assert '"name": "get_weat' in prompt_text(submit)  # `he` is a token of its own
        assert submit.sampling.grammar is None
        assert submit.text.skip_special_tokens
    bodies: list[Json] = [{"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {}]
    for body in bodies:
        submit = submitted(server, **body)
        assert "get_weat" not in prompt_text(submit)


def test_str_07_a_call_that_must_come_is_held_by_a_grammar(server: Server) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    for choice, has_weather in (("required", True), (named, False)):
        grammar = submitted(server, tools=[TOOL, OTHER], tool_choice=choice).sampling.grammar
        assert grammar is not None
        assert grammar.kind is GrammarKind.LARK
        assert '{\\"name\\": \\"now\\"' in grammar.text
        assert ("get_weather" in grammar.text) is has_weather
    unknown = {"type": "function", "function": {"name": "then"}}
    assert_refused(ask(server, ["ok"], tools=[TOOL], tool_choice=unknown), "tool_choice.function.name")
    assert_refused(ask(server, ["ok"], tool_choice="required"), "tool_choice")


def test_str_01_schemas_that_no_grammar_can_hold_are_refused(server: Server) -> None:
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "notatype"}}}}}
    body: Json = {"tools": [wrong], "tool_choice": "required"}
    assert_refused(ask(server, ["ok"], **body), "tools[0].function.parameters")
    assert ask(server, ["ok"], tools=[wrong]).status == 200  # nothing but the model reads it
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
    assert_refused(ask(server, ["ok"], tools=[strict]), "tools[0].function.parameters")
    assert_refused(ask(server, ["ok"], tools=[TOOL], tool_choice="required", ignore_eos=True), "ignore_eos")


def test_str_03_a_call_in_a_body(server: Server) -> None:
    response = ask(server, [CALL, "\n", SECOND], tools=[TOOL, OTHER])
    message = message_of(response)
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "now"]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [ARGUMENTS, {}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_str_03_a_call_in_a_stream_whatever_the_pieces(server: Server, size: int) -> None:
    text = f"{CALL}\n{SECOND}"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    choices = stream(server, pieces, tools=[TOOL, OTHER])
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [call["index"] for call in deltas] == sorted(call["index"] for call in deltas)
    for index, name in enumerate(["get_weather", "now"]):
        first, *more = [call for call in deltas if call["index"] == index]
        assert set(first) == {"index", "id", "type", "function"}
        assert first["function"]["name"] == name
        assert all(set(call) == {"index", "function"} and "name" not in call["function"] for call in more)
        arguments = "".join(call["function"]["arguments"] for call in (first, *more))
        assert json.loads(arguments) == [ARGUMENTS, {}][index]
    assert not any(choice["delta"].get("content") for choice in choices)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


def test_str_06_text_around_a_call_and_text_that_only_looks_like_one(server: Server) -> None:
    message = message_of(ask(server, ["Let me check. ", CALL], tools=[TOOL]))
    assert message["content"] == "Let me check. "
    assert len(message["tool_calls"]) == 1
    for text in ("a <tool b", "<tool_cal"):
        response = ask(server, list(text), tools=[TOOL])
        assert message_of(response) == {"role": "assistant", "content": text}
        assert response.json()["choices"][0]["finish_reason"] == "stop"
        choices = stream(server, list(text), tools=[TOOL])
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text


def test_markup_is_text_where_no_tools_may_be_called(server: Server) -> None:
    for body in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": [OTHER]}):
        assert message_of(ask(server, [CALL], **body)) == {"role": "assistant", "content": CALL}


def test_one_call_where_calls_may_not_be_parallel(server: Server) -> None:
    message = message_of(ask(server, [CALL, SECOND], tools=[TOOL, OTHER], parallel_tool_calls=False))
    assert len(message["tool_calls"]) == 1


def test_a_call_cut_off_by_the_limit(server: Server) -> None:
    response = ask(server, [CALL[: CALL.index("city") + 3]], Finish.LENGTH, tools=[TOOL])
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert message_of(response)["tool_calls"][0]["function"]["arguments"] == '{"cit'


@pytest.mark.parametrize("arguments", ["", "{", '{"city": "', '{"city": "a\\"}', '{"city": {"a": "}"}'])
def test_a_call_cut_off_by_a_stop_string_is_not_told_as_one_to_run(server: Server, arguments: str) -> None:
    begun = CALL[: CALL.index('{"city')] + arguments
    for text in (begun, f"{SECOND}\n{begun}"):
        for body in ({"tools": [TOOL, OTHER]}, {"tools": [TOOL, OTHER], "tool_choice": "required"}):
            choice = ask(server, list(text), Finish.STOP_STRING, **body).json()["choices"][0]
            assert choice["message"]["tool_calls"][-1]["function"]["arguments"] == arguments
            assert choice["finish_reason"] == "stop"
            assert stream(server, list(text), Finish.STOP_STRING, **body)[-1]["finish_reason"] == "stop"
    choices = stream(server, list(begun), Finish.STOP_STRING, functions=[TOOL["function"]])
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("arguments", ['{"city": "a}{\\"{"}', '{"city": "\\ud800"}', "{}"])
def test_a_whole_call_behind_which_a_stop_string_came_is_one_to_run(server: Server, arguments: str) -> None:
    text = CALL[: CALL.index('{"city')] + arguments + "}"
    choice = ask(server, list(text), Finish.STOP_STRING, tools=[TOOL]).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("size", [9_000, 200_000, 3_000_000])  # beyond the context in tokens, in bytes, in characters
def test_tools_that_do_not_fit_the_context_are_named(server: Server, size: int) -> None:
    function = {"name": "f", "description": "z" * size}
    for fields, param in (
        ({"tools": [{"type": "function", "function": function}]}, "tools"),
        ({"functions": [function]}, "functions"),
        ({"tools": [TOOL], "messages": [{"role": "user", "content": "z" * size}]}, "messages"),
    ):
        response = ask(server, ["ok"], **fields)
        assert (response.status, response.error["code"]) == (400, "context_length_exceeded")
        assert response.error["param"] == param


def test_of_an_answer_that_must_call_no_markup_is_shown_where_it_is_cut(server: Server) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    cut_name, cut_second = '<tool_call>\n{"name": "get_', f'{CALL}\n{SECOND}\n<tool_call>\n{{"name": "'
    cases: list[tuple[str, Any, list[str]]] = [
        (cut_name, named, []),
        (cut_name, "required", []),
        (cut_second, "required", ["get_weather", "now"]),
    ]
    for text, choice, names in cases:
        body: Json = {"tools": [TOOL, OTHER], "tool_choice": choice}
        response = ask(server, list(text), Finish.LENGTH, **body)
        message = message_of(response)
        assert not message["content"]
        assert [call["function"]["name"] for call in message.get("tool_calls", [])] == names
        assert response.json()["choices"][0]["finish_reason"] == "length"
        deltas = [choice["delta"] for choice in stream(server, list(text), Finish.LENGTH, **body)]
        assert not any(delta.get("content") for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["function"]["name"] for call in calls if "name" in call["function"]] == names


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.STOP_STRING])
def test_a_call_that_may_come_and_is_cut_before_its_name_is_no_text_either(server: Server, finish: Finish) -> None:
    begun = 'Let me check.\n<tool_call>\n{"name": "get_'
    assert message_of(ask(server, list(begun), finish, tools=[TOOL]))["content"] == "Let me check.\n"
    deltas = [choice["delta"] for choice in stream(server, list(begun), finish, tools=[TOOL])]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me check.\n"
    ended = message_of(ask(server, list(begun), Finish.STOP_TOKEN, tools=[TOOL]))
    assert ended["content"] == begun  # the model meant no more than this


def test_thoughts_that_stay_in_the_content_are_all_of_it_where_a_call_must_come(thinking_server: Server) -> None:
    thoughts = "<think>\n<tool_call>?\n</think>\n\n"
    body: Json = {"tools": [TOOL], "tool_choice": "required", "separate_reasoning": False}
    message = message_of(ask(thinking_server, list(thoughts + CALL + '\n<tool_call>\n{"na'), Finish.LENGTH, **body))
    assert message["content"] == thoughts
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [ARGUMENTS]
    assert "reasoning_content" not in message


def test_every_choice_has_its_own_calls(server: Server) -> None:
    server.backend.script = lambda submit: answering([CALL if submit.sampling.choice else SECOND])(submit)
    choices = request(server.port, "POST", PATH, {"messages": [USER], "tools": [TOOL, OTHER], "n": 2}).json()["choices"]
    names = [choice["message"]["tool_calls"][0]["function"]["name"] for choice in choices]
    assert names == ["now", "get_weather"]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
    assert len(ids) == 2


def test_the_older_spelling_is_answered_in_kind(server: Server) -> None:
    function = TOOL["function"]
    response = ask(server, [CALL, SECOND], functions=[function, OTHER["function"]])
    message = message_of(response)
    assert message["function_call"]["name"] == "get_weather"
    assert json.loads(message["function_call"]["arguments"]) == ARGUMENTS
    assert message["content"] is None
    assert "tool_calls" not in message
    assert response.json()["choices"][0]["finish_reason"] == "function_call"
    choices = stream(server, list(CALL), functions=[function])
    deltas = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
    assert deltas[0] == {"name": "get_weather", "arguments": ""}
    assert json.loads("".join(delta["arguments"] for delta in deltas)) == ARGUMENTS
    assert choices[-1]["finish_reason"] == "function_call"


def test_api_02_unknown_keys_of_tools_are_named(server: Server) -> None:
    response = ask(server, ["ok"], tools=[{**TOOL, "cache_control": {}}])
    assert response.status == 200
    assert response.headers["x-ignored-fields"] == "tools[].cache_control"


def test_api_03_null_is_the_same_as_leaving_tools_out(server: Server) -> None:
    names = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "reasoning_effort")
    body = dict.fromkeys((*names, "separate_reasoning", "stream_reasoning", "include_reasoning"))
    assert submitted(server, **body).sampling.grammar is None


@pytest.mark.parametrize("place", ["name", "description", "key"])
def test_tok_07_half_a_surrogate_pair_in_a_tool_is_refused(server: Server, place: str) -> None:
    function: Json = {"name": "f", "description": "x", "parameters": {"type": "object"}}
    bad = "a\ud800b"
    function |= {"name": bad} if place == "name" else {"description": bad} if place == "description" else {}
    if place == "key":
        function["parameters"] = {bad: 1}
    raw = json.dumps({"messages": [USER], "tools": [{"type": "function", "function": function}]}).encode()
    response = request(server.port, "POST", PATH, raw)
    assert response.status == 400
    assert response.error["code"] == "invalid_json"


def test_cht_11_a_model_that_never_thinks_keeps_everything_in_content(server: Server) -> None:
    text = "<think>x</think>y"
    assert message_of(ask(server, [text])) == {"role": "assistant", "content": text}


def test_cht_11_thoughts_are_split_off_streamed_and_not(thinking_server: Server) -> None:
    pieces = ["<thi", "nk>\nhm 你", " 🙂\n</th", "ink>\n\nYes", "."]
    message = message_of(ask(thinking_server, pieces))
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm 你 🙂"}
    choices = stream(thinking_server, pieces)
    assert "".join(choice["delta"].get("reasoning_content", "") for choice in choices) == "hm 你 🙂"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Yes."
    assert choices[-1]["finish_reason"] == "stop"
    only = message_of(ask(thinking_server, ["<think>\nhm"], Finish.LENGTH))
    assert only == {"role": "assistant", "content": None, "reasoning_content": "hm"}


def test_cht_11_thinking_turned_off(thinking_server: Server) -> None:
    off: Json = {"chat_template_kwargs": {"enable_thinking": False}}
    assert prompt_text(submitted(thinking_server, **off)).endswith("assistant\n\n\n\n\n")  # the tags are tokens here
    for pieces in (["Yes", "."], ["Yes."]):
        assert message_of(ask(thinking_server, pieces, **off)) == {"role": "assistant", "content": "Yes."}
    choices = stream(thinking_server, ["Yes", "."], **off)
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Yes."
    assert not any("reasoning_content" in choice["delta"] for choice in choices)


def test_what_becomes_of_thoughts_is_the_clients_choice(thinking_server: Server) -> None:
    pieces = ["<think>\n", "a", " b", "\n</think>", "\n\nYes."]
    joined = message_of(ask(thinking_server, pieces, separate_reasoning=False))
    assert joined == {"role": "assistant", "content": "".join(pieces)}
    hidden = message_of(ask(thinking_server, pieces, include_reasoning=False))
    assert hidden == {"role": "assistant", "content": "Yes."}
    choices = stream(thinking_server, pieces, stream_reasoning=False)
    assert [choice["delta"]["reasoning_content"] for choice in choices if "reasoning_content" in choice["delta"]] == [
        "a b"
    ]


def test_thoughts_then_a_call(thinking_server: Server) -> None:
    message = message_of(ask(thinking_server, list(f"<think>\nhm\n</think>\n\n{CALL}"), tools=[TOOL]))
    assert (message["content"], message["reasoning_content"]) == (None, "hm")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    grammar = submitted(thinking_server, tools=[TOOL], tool_choice="required").sampling.grammar
    assert grammar is not None
    assert grammar.text.startswith('start: ("<think>" thoughts BLANKS?)? (call')
    off: Json = {"chat_template_kwargs": {"enable_thinking": False}}
    grammar = submitted(thinking_server, tools=[TOOL], tool_choice="required", **off).sampling.grammar
    assert grammar is not None
    assert grammar.text.startswith("start: call")


def test_the_effort_reaches_a_template_that_looks_at_it(
    thinking_server: Server, start_server: Callable[..., Server], tmp_path: Path
) -> None:
    response = ask(thinking_server, ["ok"], reasoning_effort="low")
    assert response.headers["x-ignored-fields"] == "reasoning_effort"
    off = submitted(thinking_server, reasoning_effort="none")
    assert prompt_text(off).endswith("assistant\n\n\n\n\n")
    template = templates.PLAIN + "{%- if reasoning_effort %}{{ 'effort ' + reasoning_effort }}{%- endif %}"
    server = start_server(model=write_small_model(tmp_path, template))
    assert prompt_text(submitted(server, reasoning_effort="low")).endswith("effort low")
    assert_refused(ask(server, ["ok"], reasoning_effort="much"), "reasoning_effort")


def test_a_prompt_that_opens_the_block(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server(model=write_small_model(tmp_path, templates.QWEN3_THINKING))
    message = message_of(ask(server, ["hm\n", "</think>\n\nYes."]))
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    grammar = submitted(server, tools=[TOOL], tool_choice="required").sampling.grammar
    assert grammar is not None
    assert grammar.text.startswith("start: thoughts BLANKS? (call")
    continued: Json = {"role": "assistant", "content": "<think>\nso far"}
    more: Json = {"messages": [USER, continued], "continue_final_message": True}
    message = message_of(ask(server, [" and on</think>Yes."], **more))
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "and on"}


def test_mistrals_calls(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server(model=write_small_model(tmp_path, templates.MISTRAL))
    message = message_of(ask(server, list('[TOOL_CALLS]get_weather[ARGS]{"city": "x"}'), tools=[TOOL]))
    call = message["tool_calls"][0]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    dialogue = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "3"},
    ]
    assert ask(server, ["ok"], messages=dialogue, tools=[TOOL]).status == 200


def test_tools_turned_off_by_the_operator(start_server: Callable[..., Server]) -> None:
    server = start_server("--tool-call-parser", "none")
    assert_refused(ask(server, ["ok"], tools=[TOOL]), "tools")
    assert ask(server, ["ok"], tools=[TOOL], tool_choice="none").status == 200


def test_structure_and_tools_together(server: Server) -> None:
    structure = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    grammar = submitted(server, tools=[TOOL], response_format=structure).sampling.grammar
    assert grammar is not None
    assert grammar.text.startswith('start: call ("\\n" call)* | answer\n')
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    grammar = submitted(server, tools=[strict]).sampling.grammar
    assert grammar is not None
    assert grammar.text.startswith("start: call* tail\n")

"""What a request may say beside its prompt: every field's limits, over HTTP, against the real process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.tokenizer.openai_schema import ChatBody, CompletionBody
from services.wire.columns import unpack_int32
from services.wire.request_params import PLAIN_PROMPT, GrammarKind
from tests.unit.tokenizer.backend_peers import CONTEXT, Server
from tests.unit.tokenizer.field_requests import CHAT, NUM, assert_refused, chat, complete, submits_of
from tests.unit.tokenizer.http_client import Json, request


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("max_tokens", 2**70),
        ("top_k", 2**40),
        ("n", 10**9),
        ("n", 0),
        ("n", -1),
        ("n", 10**300),
        ("max_completion_tokens", 2**31),
        ("stop_token_ids", [2**31]),
    ],
)
def test_smp_05_integers_too_large_are_refused(server: Server, field: str, value: Any) -> None:
    assert complete(server, {field: value}).error["param"].startswith(field)
    assert complete(server, {}).status == 200


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_smp_05_every_int64_is_a_seed(server: Server, seed: int) -> None:
    assert submits_of(server, {"prompt": "x", "seed": seed})[0].sampling.seed == seed


def test_a_seed_is_drawn_and_journalled_when_none_is_given(server: Server) -> None:
    seeds = {submits_of(server, {"prompt": "x"})[0].sampling.seed for _ in range(4)}
    assert len(seeds) == 4


def test_smp_06_top_p_0_is_greedy(server: Server) -> None:
    for temperature in (0, 1):
        sampling = submits_of(server, {"prompt": NUM, "top_p": 0, "temperature": temperature})[0].sampling
        assert (sampling.temperature, sampling.top_p) == (0, 1)
    for top_p in (-0.1, 1.1):
        assert_refused(complete(server, {"top_p": top_p}), "top_p")


@pytest.mark.parametrize(("top_k", "sent"), [(-1, 0), (0, 0), (1, 1), (40, 40), (49152, 0), (10**6, 0)])
def test_smp_08_top_k_conventions(server: Server, top_k: int, sent: int) -> None:
    assert submits_of(server, {"prompt": NUM, "top_k": top_k})[0].sampling.top_k == sent


@pytest.mark.parametrize("top_k", [-2, 1.5, "3", True])
def test_smp_08_wrong_top_k_is_refused(server: Server, top_k: Any) -> None:
    assert_refused(complete(server, {"top_k": top_k}), "top_k")


@pytest.mark.parametrize(
    "raw",
    [
        b'"temperature": NaN',
        b'"temperature": 1e999',
        b'"temperature": -1',
        b'"temperature": "0.7"',
        b'"temperature": true',
        b'"temperature": 10.1',
        b'"presence_penalty": -Infinity',
        b'"presence_penalty": 5',
        b'"repetition_penalty": 0',
        b'"repetition_penalty": -1',
        b'"min_p": 1.5',
        b'"frequency_penalty": Infinity',
    ],
)
def test_smp_19_odd_numbers_are_refused(server: Server, raw: bytes) -> None:
    response = request(server.port, "POST", "/v1/completions", b'{"prompt": "x", ' + raw + b"}")
    assert response.status == 400
    assert response.error["code"] in ("invalid_json", "invalid_value")
    if response.error["code"] == "invalid_value":
        assert response.error["param"] in raw.decode()


@pytest.mark.parametrize(
    ("stop", "param"),
    [
        ("", "stop"),
        ([""], "stop[0]"),
        (["", "7"], "stop[0]"),
        (["x"] * 17, "stop"),
        ([1], "stop[0]"),
        ("x" * 100_000, "stop"),
    ],
)
def test_stp_09_odd_stop_values_are_refused(server: Server, stop: Any, param: str) -> None:
    assert_refused(complete(server, {"stop": stop}), param)


@pytest.mark.parametrize(("stop", "sent"), [(None, ()), ([], ()), ("7, 8", ("7, 8",)), (["✿", "b"], ("✿", "b"))])
def test_stp_09_null_and_empty_lists_mean_no_stop(server: Server, stop: Any, sent: tuple[str, ...]) -> None:
    assert submits_of(server, {"prompt": NUM, "stop": stop})[0].text.stop == sent


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, "5", 2**31])
def test_sch_19_max_tokens_0_and_negative_are_refused(server: Server, path: str, max_tokens: Any) -> None:
    body = {**CHAT, "prompt": NUM, "max_tokens": max_tokens}
    assert_refused(request(server.port, "POST", path, body), "max_tokens")
    if max_tokens != 0:  # the prompt alone, if that is asked for
        body = {"prompt": NUM, "max_tokens": max_tokens, "echo": True}
        assert_refused(request(server.port, "POST", "/v1/completions", body), "max_tokens")


@pytest.mark.parametrize(("max_tokens", "sent"), [(1, 1), (8181, 8181), (8182, 8181), (8192, 8181), (10**6, 8181)])
def test_sch_19_more_than_fits_is_clamped(server: Server, max_tokens: int, sent: int) -> None:
    assert submits_of(server, {"prompt": NUM, "max_tokens": max_tokens})[0].max_tokens == sent


def test_sch_19_without_a_limit_completions_take_16_and_chats_the_context(server: Server) -> None:
    assert submits_of(server, {"prompt": NUM})[0].max_tokens == 16
    submit = submits_of(server, CHAT, "/v1/chat/completions")[0]
    assert submit.max_tokens == CONTEXT - len(unpack_int32(submit.prompt_token_ids))


def test_api_01_the_newer_limit_wins(server: Server) -> None:
    path = "/v1/chat/completions"
    assert submits_of(server, {**CHAT, "max_completion_tokens": 5}, path)[0].max_tokens == 5
    assert submits_of(server, {**CHAT, "max_completion_tokens": 5, "max_tokens": 9}, path)[0].max_tokens == 5
    assert_refused(chat(server, {"max_completion_tokens": 0}), "max_completion_tokens")


def test_api_02_unknown_fields_are_named_in_a_header(server: Server) -> None:
    extra = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True, "user": "u"}
    messages = [{"role": "user", "content": "Hi", "id": 5, "name": "n"}]
    response = chat(server, {**extra, "foo": 1, "b\r\nx: y": [2], "messages": messages})
    assert response.status == 200
    assert response.headers["x-ignored-fields"] == "foo, b%0D%0Ax%3A%20y, messages[].id"
    assert "x-ignored-fields" not in chat(server, extra).headers


def test_api_02_known_fields_with_effect_are_refused_by_name(server: Server) -> None:
    for field, value in {"audio": {"voice": "x"}, "prediction": {"type": "x"}, "thinking_token_budget": 5}.items():
        response = chat(server, {field: value})
        assert_refused(response, field)
        assert response.error["code"] == "unsupported_field"


def test_api_03_null_is_the_same_as_absent(server: Server) -> None:
    unbuilt = ["logit_bias", "user", "audio", "prompt_embeds", "best_of", "suffix"]
    fields = [name for name in ChatBody.__struct_fields__ if name != "messages"]
    nothing = dict.fromkeys([*fields, *unbuilt])
    (asked,) = submits_of(server, {**CHAT, **nothing, "seed": 1}, "/v1/chat/completions")
    (plain,) = submits_of(server, {**CHAT, "seed": 1}, "/v1/chat/completions")
    assert replace(asked, request_id=b"", group_id=b"") == replace(plain, request_id=b"", group_id=b"")
    assert plain.sampling.rules is None
    fields = [name for name in CompletionBody.__struct_fields__ if name != "prompt"]
    (asked,) = submits_of(server, {"prompt": NUM, **dict.fromkeys([*fields, *unbuilt]), "seed": 1})
    (plain,) = submits_of(server, {"prompt": NUM, "seed": 1})
    assert replace(asked, request_id=b"", group_id=b"") == replace(plain, request_id=b"", group_id=b"")


def test_str_01_bad_schemas_and_grammars_are_refused_by_name(server: Server) -> None:
    for schema in ({"type": "notatype"}, {"$ref": "#/nowhere"}, {"description": "x" * 1_000_000}):
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        response = chat(server, {"response_format": wanted})
        assert response.status == 400
        assert response.error["param"].startswith("response_format")


@pytest.mark.parametrize("value", [{"type": "json_schema", "schema": {}}, {"type": "xml"}, "json_object"])
def test_str_02_response_format_shapes_are_refused(server: Server, value: Any) -> None:
    response = chat(server, {"response_format": value})
    assert response.status == 400
    assert response.error["param"].startswith("response_format")


def test_str_02_a_format_becomes_a_grammar(server: Server) -> None:
    (submit,) = submits_of(server, {**CHAT, "response_format": {"type": "json_object"}}, "/v1/chat/completions")
    assert submit.sampling.grammar is not None
    assert submit.sampling.grammar.kind is GrammarKind.JSON_SCHEMA


@pytest.mark.parametrize("value", [{"type": "text"}, None])
def test_str_02_plain_text_is_a_response_format(server: Server, value: Any) -> None:
    assert chat(server, {"response_format": value}).status == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "best_of", 2),
        ("/v1/completions", "suffix", "x"),
        ("/v1/chat/completions", "length_penalty", 0.5),
        ("/v1/chat/completions", "use_beam_search", True),
        ("/v1/chat/completions", "spaces_between_special_tokens", False),
        ("/v1/chat/completions", "prompt_embeds", "AAAA"),
        ("/v1/chat/completions", "chat_template", "{{ x }}"),
    ],
)
def test_fields_that_are_not_built_are_refused_unless_neutral(
    server: Server, path: str, field: str, value: Any
) -> None:
    response = request(server.port, "POST", path, {**CHAT, "prompt": "x", field: value})
    assert_refused(response, field)
    assert response.error["code"] == "unsupported_field"


def test_neutral_values_of_fields_change_nothing(server: Server) -> None:
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "tools": [], "logprobs": False, "logit_bias": {"5": 0}}
    more = {"repetition_penalty": 1, "min_tokens": 0, "modalities": ["text"], "priority": 0, "bad_words": []}
    response = chat(server, {**neutral, **more, "length_penalty": 1, "cache_salt": "", "top_logprobs": 0})
    assert response.status == 200
    assert "x-ignored-fields" not in response.headers
    (submit,) = server.backend.take_submits()
    assert (submit.sampling.rules, submit.cache_root, submit.prompt) == (None, b"", PLAIN_PROMPT)


def test_limits_on_counts_are_kept(server: Server) -> None:
    assert_refused(complete(server, {"n": 9}), "n")
    assert_refused(complete(server, {"prompt": ["x"] * 1025}), "prompt")
    assert_refused(complete(server, {"prompt": ["x"] * 513, "n": 2}), "prompt")
    assert_refused(chat(server, {"messages": [{"role": "user", "content": "x"}] * 4097}), "messages")
    assert_refused(complete(server, {"stop_token_ids": [1] * 257}), "stop_token_ids")
    assert_refused(complete(server, {"stop_token_ids": [276]}), "stop_token_ids")


def test_parameters_reach_the_scheduler_as_they_were_meant(server: Server) -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "max_tokens": 9}
    texts = {"stop": "x", "include_stop_str_in_output": True, "skip_special_tokens": False}
    submit = submits_of(server, {"prompt": "a", **asked, **texts, "stop_token_ids": [9, 9]})[0]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 3, 0.1)
    assert (submit.text.stop, submit.text.include_stop_str_in_output) == (("x",), True)
    assert (submit.text.skip_special_tokens, submit.max_tokens, sampling.seed) == (False, 9, 7)
    assert unpack_int32(submit.stop_token_ids) == [9, 257, 264]
    assert submit.output_token_ids == b""


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/chat/completions", {**CHAT, "reasoning_effort": "x"}, "reasoning_effort", "high, low, max, medium, "),
        ("/v1/embeddings", {"input": "a", "pooling": "x"}, "pooling", "must be last or mean"),
        ("/v1/responses", {"input": [{"role": "x", "content": "a"}]}, "input[0].role", "developer, system or user"),
        ("/v1/responses", {"input": "a", "truncation": "x"}, "truncation", "must be disabled"),
        ("/v1/responses", {"input": [{"type": "x"}]}, "input[0].type", "function_call_output or reasoning"),
    ],
)
def test_a_word_that_is_none_of_a_fields_is_told_with_those_that_are(
    server: Server, path: str, body: Json, param: str, words: str
) -> None:
    response = request(server.port, "POST", path, body)
    assert (response.status, response.error["code"], response.error["param"]) == (400, "invalid_value", param)
    assert words in response.error["message"]


def test_a_message_without_a_role_lacks_a_field(server: Server) -> None:
    for message in ({}, {"content": "x"}, {"role": None, "content": "x"}):
        response = chat(server, {"messages": [message]})
        assert (response.status, response.error["code"]) == (400, "missing_field")
        assert response.error["param"] == "messages[0].role"


def test_a_field_without_a_name_is_named_too(server: Server) -> None:
    for response in (complete(server, {"": 1}), chat(server, {"": 1})):
        assert (response.status, response.headers["x-ignored-fields"]) == (200, "%22%22")


def test_ignore_eos_leaves_only_the_clients_own_stop_ids(server: Server) -> None:
    submit = submits_of(server, {"prompt": "a", "ignore_eos": True, "stop_token_ids": [9]})[0]
    assert unpack_int32(submit.stop_token_ids) == [9]


def test_the_model_is_the_served_one_or_left_out(server: Server) -> None:
    assert complete(server, {"model": "small"}).json()["model"] == "small"
    assert complete(server, {"model": None}).json()["model"] == "small"
    for name in ("other", "", "../../etc/passwd", "Small"):
        response = complete(server, {"model": name})
        assert_refused(response, "model", 404)
        assert response.error["code"] == "model_not_found"
    assert_refused(complete(server, {"model": 5}), "model")


def test_stream_options_belong_to_streams(server: Server) -> None:
    assert_refused(complete(server, {"stream_options": {"include_usage": True}}), "stream_options")
    assert_refused(
        complete(server, {"stream": True, "stream_options": {"include_usage": 1}}), "stream_options.include_usage"
    )
    wrong = {"stream": True, "stream_options": {"continuous_usage_stats": 1}}
    assert_refused(complete(server, wrong), "stream_options.continuous_usage_stats")
    response = complete(server, {"stream": True, "stream_options": {"include_obfuscation": False, "x": 1}})
    assert response.headers["x-ignored-fields"] == "stream_options.x"

"""What a request may say about how tokens are drawn and where answers end: over HTTP, against the real process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.wire.answers import TextChunks
from services.wire.columns import split_by_counts, unpack_float32, unpack_int32
from services.wire.finish import Finish
from services.wire.request_params import NO_LOGPROBS, LogitRules
from services.wire.requests import Submit
from tests.unit.tokenizer.backend_peers import Server, chunk, takes_requests
from tests.unit.tokenizer.field_requests import CHAT, NUM, assert_refused, chat, complete, submits_of
from tests.unit.tokenizer.http_client import Json, request
from tests.unit.tokenizer.scripts import answering

TEXT_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def rules_of(server: Server, body: Json, path: str = TEXT_PATH) -> LogitRules:
    """The rules that a good request has for its logits."""
    rules = submits_of(server, {"prompt": NUM, **body} if path == TEXT_PATH else {**CHAT, **body}, path)[0]
    assert rules.sampling.rules is not None
    return rules.sampling.rules


@pytest.mark.parametrize(
    "bias", [{"276": 5}, {"-1": 5}, {"abc": 1}, {"5": "x"}, {"5": 101}, {"5": -100.5}, {"05": 1}, {"5.0": 1}, [5], "x"]
)
@pytest.mark.parametrize("path", [TEXT_PATH, CHAT_PATH])
def test_smp_03_bad_ids_and_values_of_logit_bias_are_refused(server: Server, path: str, bias: Any) -> None:
    body = {**CHAT, "logit_bias": bias} if path == CHAT_PATH else {"prompt": NUM, "logit_bias": bias}
    response = request(server.port, "POST", path, body)
    assert response.status == 400
    assert response.error["param"].startswith("logit_bias")


def test_smp_03_biases_reach_the_worker_by_id(server: Server) -> None:
    rules = rules_of(server, {"logit_bias": {"39": -100, "0": 100, "5": 0.5, "7": 0}})
    assert unpack_int32(rules.bias_ids) == [39, 0, 5]
    assert unpack_float32(rules.biases) == [-100, 100, 0.5]
    assert_refused(complete(server, {"logit_bias": {str(key): 1 for key in range(1025)}}), "logit_bias")


@pytest.mark.parametrize("path", [TEXT_PATH, CHAT_PATH])
def test_smp_12_penalties_reach_the_worker(server: Server, path: str) -> None:
    asked = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 2}
    rules = rules_of(server, asked, path)
    assert (rules.frequency_penalty, rules.presence_penalty, rules.repetition_penalty) == (0.5, 0.25, 2.0)
    assert rules == LogitRules(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 2.1),
        ("frequency_penalty", True),
        ("presence_penalty", -2.1),
        ("presence_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("bad_words", "x"),
        ("bad_words", [""]),
        ("bad_words", ["x" * 1025]),
        ("bad_words", ["x"] * 257),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [276]),
        ("allowed_token_ids", [-1]),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("priority", 2**31),
        ("priority", 0.5),
        ("timeout_s", 0),
        ("timeout_s", -1),
        ("timeout_s", 1e6),
        ("cache_salt", 5),
        ("cache_salt", "x" * 257),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("return_token_ids", 1),
        ("timings", "no"),
    ],
)
def test_smp_19_values_outside_their_range_are_refused(server: Server, field: str, value: Any) -> None:
    for path in (TEXT_PATH, CHAT_PATH):
        response = request(server.port, "POST", path, {**CHAT, "prompt": NUM, field: value})
        assert response.status == 400
        assert response.error["param"].startswith(field)


def test_min_tokens_hold_nothing_open_where_only_ends_may_come(server: Server) -> None:
    """Neither behind a whole sentence of a grammar nor where all allowed ids are ends."""
    free = submits_of(server, {"prompt": NUM, "min_tokens": 3, "max_tokens": 5})[0]
    assert free.final_token_ids == b""
    bound = submits_of(server, {"prompt": NUM, "min_tokens": 3, "max_tokens": 5, "guided_choice": ["a"]})[0]
    assert bound.final_token_ids == free.stop_token_ids
    assert bound.text.min_tokens == 3
    ends = unpack_int32(free.stop_token_ids)
    only_ends = submits_of(server, {"prompt": NUM, "min_tokens": 3, "max_tokens": 5, "allowed_token_ids": ends})[0]
    assert only_ends.text.min_tokens == 0
    assert only_ends.sampling.rules is not None
    assert only_ends.sampling.rules.min_tokens == 0
    more = submits_of(server, {"prompt": NUM, "min_tokens": 3, "max_tokens": 5, "allowed_token_ids": [*ends, 7]})[0]
    assert more.text.min_tokens == 3


def test_min_tokens_forbid_every_end_and_stop_strings(server: Server) -> None:
    body = {"prompt": NUM, "min_tokens": 3, "stop_token_ids": [9], "stop": "x", "max_tokens": 5}
    (submit,) = submits_of(server, body)
    assert submit.sampling.rules is not None
    assert submit.sampling.rules.min_tokens == submit.text.min_tokens == 3
    assert submit.sampling.rules.stop_token_ids == submit.stop_token_ids
    assert unpack_int32(submit.stop_token_ids) == [9, 257, 264]
    assert_refused(complete(server, {"min_tokens": 6, "max_tokens": 5}), "min_tokens")


@pytest.mark.parametrize(("field", "value"), [("allowed_token_ids", [5]), ("bad_words", ["x"]), ("ignore_eos", True)])
def test_what_cannot_be_kept_beside_a_grammar_is_refused(server: Server, field: str, value: Any) -> None:
    for path in (TEXT_PATH, CHAT_PATH):
        held: Json = {**CHAT, "prompt": NUM, field: value, "guided_choice": ["a"]}
        assert_refused(request(server.port, "POST", path, held), field)
    function: Json = {"name": "f", "parameters": {"type": "object"}}
    tools: Json = {"tools": [{"type": "function", "function": function}]}
    strict: Json = {"tools": [{"type": "function", "function": {**function, "strict": True}}]}
    assert_refused(chat(server, {**tools, "tool_choice": "required", field: value}), field)
    assert_refused(chat(server, {**strict, field: value}), field)
    assert chat(server, {**tools, field: value}).status == 200
    assert chat(server, {"guided_choice": ["a"], "bad_words": []}).status == 200


def test_bad_words_are_runs_of_ids_with_and_without_a_blank_in_front(server: Server) -> None:
    rules = rules_of(server, {"bad_words": ["no", " é", "no"]})
    words = split_by_counts(unpack_int32(rules.bad_word_ids), unpack_int32(rules.bad_word_counts))
    assert [bytes(word).decode() for word in words] == ["no", " no", " é", "é"]


def test_allowed_ids_are_sent_once_each(server: Server) -> None:
    assert unpack_int32(rules_of(server, {"allowed_token_ids": [9, 5, 9]}).allowed_token_ids) == [5, 9]


@pytest.mark.parametrize("path", [TEXT_PATH, CHAT_PATH])
def test_a_request_that_asks_for_nothing_has_no_rules(server: Server, path: str) -> None:
    (submit,) = submits_of(server, {"prompt": NUM} if path == TEXT_PATH else CHAT, path)
    assert submit.sampling.rules is None
    assert submit.sampling.num_logprobs == NO_LOGPROBS
    assert (submit.deadline_ms, submit.priority, submit.cache_root) == (0, 0, b"")


def test_priorities_and_salts_reach_the_scheduler(server: Server) -> None:
    roots = []
    for salt in ("a", "b", "a", "é"):
        (submit,) = submits_of(server, {"prompt": NUM, "priority": -7, "cache_salt": salt})
        assert submit.priority == -7
        assert len(submit.cache_root) == 16
        roots.append(submit.cache_root)
    assert roots[0] == roots[2]
    assert len(set(roots)) == 3


def test_keys_share_no_prefix_if_the_operator_says_so(start_server: Callable[..., Server]) -> None:
    server = start_server(
        "--isolate-cache-by-key", "--api-key", "one,two", is_ready=lambda port: takes_requests(port, **bearer("one"))
    )
    server.backend.script = answering(["a"])
    roots: dict[tuple[str, str], bytes] = {}
    for key in ("one", "two", "one"):
        for salt in ("", "x"):
            body = {"prompt": NUM, "cache_salt": salt}
            answer = request(server.port, "POST", TEXT_PATH, body, **bearer(key))
            assert answer.status == 200, answer.body
            (submit,) = server.backend.take_submits()
            assert roots.setdefault((key, salt), submit.cache_root) == submit.cache_root
    assert len(set(roots.values())) == 4


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_deadline_is_the_engines_and_a_504_when_it_is_over(server: Server, is_stream: bool) -> None:
    def script(submit: Submit) -> list[TextChunks]:
        assert 0 < submit.deadline_ms <= 1500
        return [chunk(submit, 0, [], 0, "", Finish.TIMEOUT)]

    server.backend.script = script
    response = request(server.port, "POST", TEXT_PATH, {"prompt": NUM, "timeout_s": 1.5, "stream": is_stream})
    if response.status == 200:  # the status line was written before the end came
        assert is_stream
        assert b'"code":"timeout"' in response.body
        assert response.body.endswith(b"data: [DONE]\n\n")
    else:
        assert (response.status, response.error["code"]) == (504, "timeout")


def test_a_prompt_is_cut_at_its_beginning(server: Server) -> None:
    (submit,) = submits_of(server, {"prompt": NUM, "truncate_prompt_tokens": 3})
    assert bytes(unpack_int32(submit.prompt_token_ids)) == b" 4,"
    (submit,) = submits_of(server, {"prompt": list(NUM.encode()), "truncate_prompt_tokens": 100})
    assert bytes(unpack_int32(submit.prompt_token_ids)).decode() == NUM
    (submit,) = submits_of(server, {"prompt": [65] * 9000, "truncate_prompt_tokens": -1, "max_tokens": 10})
    assert (len(unpack_int32(submit.prompt_token_ids)), submit.max_tokens) == (8182, 10)
    server.backend.script = answering(["!"])
    cut = {"prompt": NUM, "truncate_prompt_tokens": 3, "echo": True}
    assert request(server.port, "POST", TEXT_PATH, cut).json()["choices"][0]["text"] == " 4,!"


def test_sch_19_nothing_but_the_prompt(server: Server) -> None:
    def script(submit: Submit) -> list[TextChunks]:
        return [chunk(submit, 0, [], 0, "", Finish.LENGTH)]

    server.backend.script = script
    answer = request(server.port, "POST", TEXT_PATH, {"prompt": NUM, "max_tokens": 0, "echo": True}).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (NUM, "length")
    assert answer["usage"]["completion_tokens"] == 0
    (submit,) = server.backend.take_submits()
    assert submit.max_tokens == 0
    server.backend.wait_for_acknowledgement(submit, 0)
    full = {"prompt": [65] * 8192, "max_tokens": 0, "echo": True}
    assert request(server.port, "POST", TEXT_PATH, full).json()["usage"]["prompt_tokens"] == 8192


def test_stp_05_the_stop_string_is_part_of_the_answer_if_asked(server: Server) -> None:
    for includes in (True, False):
        (submit,) = submits_of(server, {"prompt": NUM, "stop": ["7, 8"], "include_stop_str_in_output": includes})
        assert submit.text.include_stop_str_in_output is includes


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "last_id", "reason"),
    [
        (Finish.STOP_STRING, 3, "a stop"),
        (Finish.STOP_TOKEN, 9, 9),
        (Finish.STOP_TOKEN, 257, None),
        (Finish.LENGTH, 9, None),
    ],
)
def test_an_answer_tells_what_stopped_it(
    server: Server, finish: Finish, last_id: int, reason: str | int | None, is_stream: bool
) -> None:
    server.backend.script = lambda submit: [chunk(submit, 0, [1, last_id], 0, "a", finish)]
    for path in (TEXT_PATH, CHAT_PATH):
        body = {**CHAT, "prompt": NUM, "stop_token_ids": [9], "stream": is_stream}
        response = request(server.port, "POST", path, body)
        key = b'"stop_reason":' + (b"null" if reason is None else b'"a stop"' if reason == "a stop" else b"9")
        assert key in response.body


def test_chats_take_their_log_probabilities_in_two_fields(server: Server) -> None:
    assert_refused(chat(server, {"top_logprobs": 2}), "top_logprobs")
    assert_refused(chat(server, {"logprobs": True, "top_logprobs": 21}), "top_logprobs")
    assert_refused(chat(server, {"logprobs": 5}), "logprobs")
    assert_refused(complete(server, {"logprobs": True}), "logprobs")
    assert_refused(complete(server, {"logprobs": 21}), "logprobs")

"""POST /generate, SGLang's native route: its bodies, its names, its answers whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.model_files.vocabulary import Vocabulary
from services.runtime.config import Settings
from services.tokenizer.answer_parts import AnswerDelta, AnswerEnd, Text, TokenLogprobs
from services.tokenizer.api_error import ApiError
from services.tokenizer.native_format import NativeAnswers, NativeFormat
from services.tokenizer.native_schema import GENERATE_FORM, shared_fields
from services.wire.columns import unpack_int32
from services.wire.finish import Finish
from services.wire.request_params import PromptParams
from tests.unit.tokenizer.backend_peers import CONTEXT, Server
from tests.unit.tokenizer.http_client import Connection, EventReader, request
from tests.unit.tokenizer.scripts import answering
from tests.unit.tokenizer.small_models import small_model

Json = dict[str, Any]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}


def ask(server: Server, **body: object) -> Any:
    response = request(server.port, "POST", "/generate", body)
    assert response.status == 200, response.body
    return json.loads(response.body)


def stream(server: Server, **body: object) -> list[Json]:
    with Connection(server.port) as connection:
        connection.send("POST", "/generate", {"stream": True, **body})
        return EventReader(connection).rest()


def test_a_text_is_answered(server: Server) -> None:
    server.backend.script = answering(["你", "好👋"], Finish.LENGTH, cached=2)
    answer = ask(server, text="abc", sampling_params={"max_new_tokens": 2}, rid="mein name")
    assert answer["text"] == "你好👋"
    assert answer["output_ids"] == [1000, 1001]
    assert answer["meta_info"] == {
        "id": "mein name", "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": len(unpack_int32(server.backend.take_submits()[0].prompt_token_ids)),
        "completion_tokens": 2, "cached_tokens": 2,
    }  # fmt: skip


def test_a_stream_repeats_the_answer_so_far(server: Server) -> None:
    server.backend.script = answering(["a", "b", "c"], Finish.STOP_TOKEN)
    events = stream(server, input_ids=[1, 2, 3])
    texts = [event["text"] for event in events]
    assert texts[-1] == "abc"
    assert all(after.startswith(before) for before, after in pairwise(texts))
    last = events[-1]
    assert last["output_ids"] == [1000, 1001, 1002]
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1002}
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert all(event["meta_info"]["id"].startswith("gen-") for event in events)


def test_a_list_of_prompts_is_a_list_of_answers(server: Server) -> None:
    server.backend.script = answering(["x"])
    answers = ask(server, text=["ab", "c"], rid=["p", "q"], sampling_params={"n": 2})
    assert [answer["meta_info"]["id"] for answer in answers] == ["p", "p", "q", "q"]
    assert [answer["text"] for answer in answers] == ["x"] * 4
    events = stream(server, input_ids=[[1], [2]])
    assert {event["index"] for event in events} == {0, 1}
    assert isinstance(ask(server, input_ids=[[1]]), list)
    assert isinstance(ask(server, input_ids=[1]), dict)


def test_its_names_are_those_of_all_routes(server: Server) -> None:
    server.backend.script = answering(["x"])
    names = {"max_new_tokens": 7, "sampling_seed": 5, "no_stop_trim": True, "stop": ["a"], "temperature": 0.5,
             "ignore_eos": True, "stop_token_ids": [9], "top_k": 3}  # fmt: skip
    ask(server, input_ids=[4, 5], sampling_params=names)
    [submit] = server.backend.take_submits()
    assert unpack_int32(submit.prompt_token_ids) == [4, 5]
    drawn = (submit.sampling.seed, submit.sampling.temperature, submit.sampling.top_k)
    assert (submit.max_tokens, *drawn) == (7, 5, 0.5, 3)
    assert (submit.text.stop, submit.text.include_stop_str_in_output) == (("a",), True)
    assert unpack_int32(submit.stop_token_ids) == [9]


def test_it_makes_128_tokens_unless_told_otherwise(server: Server) -> None:
    server.backend.script = answering(["x"])
    ask(server, text="x")
    assert server.backend.take_submits()[0].max_tokens == 128


def test_logprobs_are_asked_for_from_a_position_on(server: Server) -> None:
    server.backend.script = answering(["x"])
    body = {"input_ids": [1, 2, 3, 4], "return_logprob": True, "top_logprobs_num": 3}
    request(server.port, "POST", "/generate", {**body, "sampling_params": {"max_new_tokens": 1}})
    [submit] = server.backend.take_submits()
    assert (submit.sampling.num_logprobs, submit.prompt) == (3, PromptParams())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text[1]"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids[1]"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [999_999]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": 11}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"n": 99}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [999_999]}}, "sampling_params.stop_token_ids"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": "x"}, "rid"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "x" * (CONTEXT + 1)}, "text"),
    ],
)
def test_wrong_fields_are_named(server: Server, body: Json, param: str) -> None:
    response = request(server.port, "POST", "/generate", body)
    assert response.status == 400, response.body
    assert response.error["param"] == param


# ---------------------------------------------------------------- the format alone


def whole(answers: NativeAnswers, deltas: Sequence[AnswerDelta], end: AnswerEnd) -> Json:
    """The body, and the last event of a stream, which must say the same."""
    body: Json = json.loads(NativeFormat(answers).body([deltas], [end], USAGE))
    streamed = NativeFormat(answers)
    events = [streamed.delta(0, delta) for delta in deltas] + [streamed.finish(0, end)]
    assert json.loads(events[-1].removeprefix(b"data: ")) == body
    return body


def test_smp_14_log_probabilities_of_answer_and_prompt_and_none_is_infinite() -> None:
    top = ((5, -0.5), (6, float("-inf")))
    prompt = [TokenLogprobs(1, None), TokenLogprobs(2, -1.5, top), TokenLogprobs(3, float("-inf"))]
    deltas = [AnswerDelta((), prompt_logprobs=prompt), AnswerDelta([Text("é")], [5], [TokenLogprobs(5, -0.5, top)])]
    answers = NativeAnswers(["i"], [3], is_list=False, has_logprobs=True, prompt_from=1)
    meta = whole(answers, deltas, AnswerEnd(Finish.LENGTH))["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 5, None]]
    assert meta["output_top_logprobs"] == [[[-0.5, 5, None], [-9999.0, 6, None]]]
    assert meta["input_token_logprobs"] == [[-1.5, 2, None], [-9999.0, 3, None]]
    assert meta["input_top_logprobs"] == [[[-0.5, 5, None], [-9999.0, 6, None]], None]


def test_the_texts_of_tokens_on_request(small_vocabulary: Vocabulary) -> None:
    deltas = [AnswerDelta([Text("A")], [65], [TokenLogprobs(65, -0.5)])]
    answers = NativeAnswers(["i"], [1], is_list=False, has_logprobs=True, vocabulary=small_vocabulary)
    assert whole(answers, deltas, AnswerEnd(Finish.LENGTH))["meta_info"]["output_token_logprobs"] == [[-0.5, 65, "A"]]


@pytest.fixture
def small_vocabulary(tmp_path: Path) -> Vocabulary:
    return small_model(tmp_path, None).vocabulary


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (AnswerEnd(Finish.LENGTH), {"type": "length", "length": 1}),
        (AnswerEnd(Finish.STOP_TOKEN), {"type": "stop", "matched": 7}),
        (AnswerEnd(Finish.STOP_TOKEN, stop=7), {"type": "stop", "matched": 7}),
        (AnswerEnd(Finish.STOP_STRING, stop="。"), {"type": "stop", "matched": "。"}),
        (AnswerEnd(Finish.STOP_TOKEN, rest=AnswerDelta((), [9])), {"type": "stop", "matched": 9}),
    ],
)
def test_why_an_answer_ended(end: AnswerEnd, reason: Json) -> None:
    answers = NativeAnswers(["i"], [3], is_list=False)
    assert whole(answers, [AnswerDelta([Text("x")], [7])], end)["meta_info"]["finish_reason"] == reason


def test_what_the_client_left_out_is_left_out() -> None:
    fields = {"text": "a", "sampling_params": [{"max_new_tokens": 0}, {"max_new_tokens": 0}]}
    body, _ = GENERATE_FORM.parse(fields, Settings())
    assert shared_fields(body.sampling) == {}
    with pytest.raises(ApiError):
        GENERATE_FORM.parse({"text": "a", "sampling_params": 3}, Settings())

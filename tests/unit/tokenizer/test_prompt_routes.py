"""POST /v1/embeddings and /v1/score: prompts that are computed and not answered, against a played backend."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.api_error import ApiError
from services.tokenizer.scores import shared_length, start_of
from services.wire.columns import unpack_int32
from services.wire.finish import Finish
from services.wire.request_params import Task
from services.wire.requests import Submit
from services.wire.steps import Embedding
from tests.unit.tokenizer.backend_peers import CONTEXT, Server, chunk
from tests.unit.tokenizer.http_client import Response, request
from tests.unit.tokenizer.logprob_chunks import prompt_logprobs

Json = dict[str, Any]
EMBEDDINGS, SCORE = "/v1/embeddings", "/v1/score"
VALUES = (3.0, 0.0, -4.0)


@pytest.fixture(name="pool")
def another_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def played(
    server: Server,
    pool: ThreadPoolExecutor,
    path: str,
    body: Json,
    answer: Callable[[Submit], object],
    num_prompts: int = 1,
) -> tuple[Response, Sequence[Submit]]:
    """A request whose prompts get a message each and end; the response and what was asked of the scheduler."""
    server.backend.forget()
    response = pool.submit(request, server.port, "POST", path, body)
    submits = server.backend.take_submits(num_prompts)
    for submit in submits:
        server.backend.admit(submit)
        server.backend.send(answer(submit))
        server.backend.send_text(chunk(submit, 0, [], 0, "", Finish.LENGTH, cached=1))
    return response.result(timeout=20), submits


def embed(submit: Submit) -> Embedding:
    return Embedding(submit.request_id, submit.attempt, struct.pack("<3f", *VALUES))


def test_an_embedding_has_length_one(server: Server, pool: ThreadPoolExecutor) -> None:
    response, [submit] = played(server, pool, EMBEDDINGS, {"input": "héllo 你"}, embed)
    assert response.status == 200, response.body
    [item] = response.json()["data"]
    assert item["embedding"] == pytest.approx([0.6, 0.0, -0.8])
    assert (submit.prompt.task, submit.max_tokens) == (Task.EMBED_LAST, 0)
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == len(submit.prompt_token_ids) // 4
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


def test_it_comes_as_it_is_and_as_base64(server: Server, pool: ThreadPoolExecutor) -> None:
    body = {"input": [5, 6], "normalize": False, "encoding_format": "base64", "pooling": "mean"}
    response, [submit] = played(server, pool, EMBEDDINGS, body, embed)
    [item] = response.json()["data"]
    assert struct.unpack("<3f", base64.b64decode(item["embedding"])) == VALUES
    assert (submit.prompt.task, unpack_int32(submit.prompt_token_ids)) == (Task.EMBED_MEAN, [5, 6])


def test_several_inputs_keep_their_order(server: Server, pool: ThreadPoolExecutor) -> None:
    def by_length(submit: Submit) -> Embedding:
        values = struct.pack("<2f", len(submit.prompt_token_ids) // 4, 0)
        return Embedding(submit.request_id, submit.attempt, values)

    body = {"input": [[1], [1, 2], [1, 2, 3]], "normalize": False}
    response, _ = played(server, pool, EMBEDDINGS, body, by_length, num_prompts=3)
    assert [(item["index"], item["embedding"][0]) for item in response.json()["data"]] == [(0, 1), (1, 2), (2, 3)]


def test_a_prompt_may_fill_the_context(server: Server, pool: ThreadPoolExecutor) -> None:
    assert played(server, pool, EMBEDDINGS, {"input": [1] * CONTEXT}, embed)[0].status == 200


def test_a_score_is_the_sum_over_the_continuation(server: Server, pool: ThreadPoolExecutor) -> None:
    def tell(submit: Submit) -> object:
        ids = unpack_int32(submit.prompt_token_ids)
        start = submit.prompt.logprobs_from
        entries = [[(token_id, -0.5)] for token_id in ids[start:]]
        entries[-1] = [(ids[-1], float("-inf"))] if ids[-1] == 9 else entries[-1]
        return prompt_logprobs(submit, start, entries)

    body = {"prompt": [1, 2, 3], "continuations": [[7, 8], [9]]}
    response, submits = played(server, pool, SCORE, body, tell, num_prompts=2)
    assert response.status == 200, response.body
    first, second = response.json()["data"]
    assert (first["score"], first["token_ids"], first["token_logprobs"]) == (-1.0, [7, 8], [-0.5, -0.5])
    assert (second["score"], second["token_ids"]) == (-9999.0, [9])
    assert [unpack_int32(submit.prompt_token_ids) for submit in submits] == [[1, 2, 3, 7, 8], [1, 2, 3, 9]]
    assert {(submit.prompt.num_logprobs, submit.prompt.logprobs_from, submit.max_tokens) for submit in submits} == {
        (0, 3, 0)
    }


def test_a_continuation_that_joins_a_token_of_the_prompt_is_scored_from_there(
    server: Server, pool: ThreadPoolExecutor
) -> None:
    """`h` + `e` is one token of this vocabulary: what both share ends before it."""

    def tell(submit: Submit) -> object:
        ids = unpack_int32(submit.prompt_token_ids)
        start = submit.prompt.logprobs_from
        return prompt_logprobs(submit, start, [[(token_id, -1.0)] for token_id in ids[start:]])

    body = {"prompt": "xh", "continuations": ["ey"], "add_special_tokens": False}
    response, [submit] = played(server, pool, SCORE, body, tell)
    assert submit.prompt.logprobs_from == 1
    assert len(response.json()["data"][0]["token_ids"]) == 2


@pytest.mark.parametrize(
    ("prompt", "whole", "problem"),
    [
        ([1, 2], [3, 4], "changes the prompt's first token"),
        ([1], [2], "changes the prompt's first token"),
        ([1, 2], [1, 2], "adds no token"),
        ([1, 2], [1], "adds no token"),
    ],
)
def test_a_continuation_without_a_border_is_refused(prompt: list[int], whole: list[int], problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as caught:
        start_of(prompt, whole, "continuations[3]")
    assert caught.value.param == "continuations[3]"
    assert start_of(prompt, [*prompt, 9], "") == len(prompt)


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_what_two_lists_share(common: list[int], one: list[int], other: list[int]) -> None:
    length = shared_length(common + one, common + other)
    assert length >= len(common)
    assert (common + one)[:length] == (common + other)[:length]
    assert (common + one)[: length + 1] != (common + other)[: length + 1] or length == min(
        len(common + one), len(common + other)
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input[1]"),
        (EMBEDDINGS, {"input": ["a", [1]]}, "input"),
        (EMBEDDINGS, {"input": [[1], [999_999]]}, "input[1]"),
        (EMBEDDINGS, {"input": "a", "dimensions": 7}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        (EMBEDDINGS, {"input": "a", "pooling": "cls"}, "pooling"),
        (EMBEDDINGS, {"input": [1] * (CONTEXT + 1)}, "input"),
        (SCORE, {"prompt": "a"}, "continuations"),
        (SCORE, {"prompt": "", "continuations": ["a"]}, "prompt"),
        (SCORE, {"prompt": "a", "continuations": [[1]]}, "continuations[0]"),
        (SCORE, {"prompt": [1], "continuations": ["a"]}, "continuations[0]"),
        (SCORE, {"prompt": [1], "continuations": [[1] * CONTEXT]}, "continuations[0]"),
        (SCORE, {"text_1": "a", "text_2": "b"}, "text_1"),
        (SCORE, {"prompt": "a", "continuations": ["b"], "queries": ["c"]}, "queries"),
    ],
)
def test_wrong_fields_are_named(server: Server, path: str, body: Json, param: str) -> None:
    response = request(server.port, "POST", path, body)
    assert response.status == 400, response.body
    assert response.error["param"] == param

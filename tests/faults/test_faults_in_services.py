"""A fault inside one of the four real processes costs the request that meets it, and nobody else.

All processes run with their fault at once (see faulty_service.py); eight streams of the real model go on beside each
request that strikes it, and have the text that they have alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.faults.faulty_service import NAN_MARKS, RAISE_MARK, STOP_MARK, SUBMIT_MARK, TEXT_MARK
from tests.integration.client import NUM, NUM_TEXT, TEXT, Answer, Client, Json, PatientReader, streamed
from tests.integration.role_group import running_roles

pytestmark = pytest.mark.timeout(600)
NAN_LATER, NAN_AT_ONCE = NAN_MARKS
NUM_IDS = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28]


@pytest.fixture(scope="module")
def faulty(smollm2_path: Path) -> Iterator[Client]:
    """A group in which every process has its fault; when all is over no page is lost and no process has died."""
    command = ["-m", "tests.faults.faulty_service", "{role}"]
    with running_roles(command, smollm2_path, page_size=1, kv_cache_tokens=4096, num_threads=1) as group:
        client = Client(group)
        yield client
        client.wait_idle()
        assert "InjectedError" in group.log()


@pytest.fixture
def beside(faulty: Client) -> Iterator[None]:
    """Eight streams that begin before the fault and end after it."""
    normal = partial(faulty.stream, TEXT, prompt=NUM, max_tokens=40, ignore_eos=True)
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(normal) for _ in range(8)]
        faulty.wait_until(lambda: faulty.scheduler("num_requests_running") >= 8)
        yield
        assert not all(stream.done() for stream in streams)
        answers: list[Answer] = [stream.result() for stream in streams]
    assert [answer.text for answer in answers] == [NUM_TEXT] * 8
    assert all((answer.finish_reason, answer.completion_tokens) == ("length", 40) for answer in answers)


def read_broken_stream(faulty: Client, **body: object) -> tuple[list[Json], Json]:
    """The chunks and the error of a stream that breaks; held to its end: the error, [DONE], and the connection."""
    with faulty.connect() as connection:
        connection.send("POST", TEXT, streamed(body))
        reader = PatientReader(connection)
        assert reader.status == 200
        *chunks, last = reader.rest()
        assert connection.is_closed()
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    return chunks, last["error"]


@pytest.mark.usefixtures("beside")
def test_sse_05_prc_05_a_worker_that_raises_in_the_middle_of_a_stream_ends_this_one_alone(faulty: Client) -> None:
    chunks, error = read_broken_stream(faulty, prompt=[RAISE_MARK, *NUM_IDS], max_tokens=40, ignore_eos=True)
    assert chunks
    assert error["code"] == "internal_error"


@pytest.mark.slow
@pytest.mark.usefixtures("beside")
def test_sse_05_prc_05_a_worker_that_raises_before_the_body_is_an_error_status(faulty: Client) -> None:
    error = faulty.refused(TEXT, {"prompt": [RAISE_MARK, *NUM_IDS], "max_tokens": 40, "ignore_eos": True}, 500)
    assert error["code"] == "internal_error"
    assert "Injected" not in json.dumps(error)


@pytest.mark.slow
@pytest.mark.usefixtures("beside")
def test_smp_02_a_row_without_numbers_ends_alone(faulty: Client) -> None:
    chunks, error = read_broken_stream(faulty, prompt=[NAN_LATER, *NUM_IDS], max_tokens=40, ignore_eos=True)
    assert chunks
    assert error["code"] == "numerical_error"


@pytest.mark.slow
def test_smp_02_what_a_row_without_numbers_has_computed_is_not_cached(faulty: Client) -> None:
    prompt = [NAN_AT_ONCE, *range(600, 640)]
    for _ in range(2):
        assert faulty.refused(TEXT, {"prompt": prompt, "max_tokens": 4}, 500)["code"] == "numerical_error"
    faulty.wait_idle()
    cached = faulty.scheduler("cached_tokens_total")
    assert faulty.refused(TEXT, {"prompt": [*prompt, 5], "max_tokens": 4}, 500)["code"] == "numerical_error"
    faulty.settle()
    assert faulty.scheduler("cached_tokens_total") == cached


@pytest.mark.slow
@pytest.mark.usefixtures("beside")
def test_prc_05_a_text_that_the_tokenizer_raises_at_fails_alone(faulty: Client) -> None:
    error = faulty.refused(TEXT, streamed({"prompt": TEXT_MARK}), 500)
    assert error["code"] == "internal_error"


@pytest.mark.slow
@pytest.mark.usefixtures("beside")
def test_prc_05_a_request_that_the_scheduler_raises_at_fails_alone(faulty: Client) -> None:
    error = faulty.refused(TEXT, streamed({"prompt": [SUBMIT_MARK, *NUM_IDS]}), 500)
    assert error["code"] == "internal_error"


@pytest.mark.usefixtures("beside")
def test_prc_05_an_answer_that_the_detokenizer_raises_at_fails_alone(faulty: Client) -> None:
    fields = {"prompt": NUM, "max_tokens": 40, "stop": [STOP_MARK]}
    chunks, error = read_broken_stream(faulty, **fields)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == " 5, "
    assert error["code"] == "internal_error"
    assert faulty.refused(TEXT, fields, 500)["code"] == "internal_error"


@pytest.mark.slow
def test_sse_12_a_hundred_mixed_streams_end_with_done_once_and_nothing_behind_it(faulty: Client) -> None:
    """Short and long, cut by a stop, with two choices, and broken ones, twenty at a time; every byte is kept."""
    kinds: list[Json] = [
        {"prompt": NUM, "max_tokens": 1},
        {"prompt": NUM, "max_tokens": 16},
        {"prompt": NUM, "max_tokens": 16, "stop": ["7, 8"]},
        {"prompt": NUM, "max_tokens": 6, "n": 2},
        {"prompt": [NAN_LATER, *NUM_IDS], "max_tokens": 16},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12},
    ]

    def read(number: int) -> tuple[int, bytes]:
        body = kinds[number % len(kinds)]
        path = "/v1/chat/completions" if "messages" in body else TEXT
        with faulty.connect() as connection:
            connection.send("POST", path, streamed({**body, "stream_options": {"include_usage": bool(number % 2)}}))
            status, _ = connection.read_head()
            body_bytes = b"".join(iter(connection.read_chunk, b""))
            assert not connection.pending
            return status, body_bytes

    with ThreadPoolExecutor(20) as pool:
        streams = list(pool.map(read, range(100)))
    for number, (status, body) in enumerate(streams):
        assert status == 200
        assert body.endswith(b"\n\ndata: [DONE]\n\n")
        assert body.count(b"[DONE]") == 1
        assert (b'"error"' in body) == (number % len(kinds) == 4)

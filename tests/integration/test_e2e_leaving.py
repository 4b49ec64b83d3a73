"""Clients that leave, wait, or read slowly, on a server that runs one request and lets two wait."""

from __future__ import annotations

import json

import pytest

from tests.integration.client import CHAT, HI, NUM, TEXT, Client, streamed
from tests.unit.tokenizer.http_client import EventReader

pytestmark = pytest.mark.timeout(600)
LONG = streamed({"prompt": NUM, "max_tokens": 4000, "ignore_eos": True})


def test_sse_01_who_leaves_in_the_middle_of_a_stream_makes_room_at_once(narrow: Client) -> None:
    for _ in range(2):
        with narrow.connect() as connection:
            connection.send("POST", TEXT, LONG)
            EventReader(connection).next_json()
        assert narrow.ask(TEXT, prompt=NUM, max_tokens=4).text == " 5, "  # it would wait for minutes otherwise
    narrow.wait_idle()
    num_computed = narrow.metric("worker_computed_tokens_total", "gpu_worker")
    narrow.settle()
    assert narrow.metric("worker_computed_tokens_total", "gpu_worker") == num_computed


def test_sse_01_who_leaves_while_a_body_is_awaited_makes_room_too(narrow: Client) -> None:
    with narrow.connect() as connection:
        connection.send("POST", TEXT, LONG | {"stream": False, "stream_options": None})
        narrow.wait_for_load(1, 0)
    narrow.wait_idle()


def test_sse_03_who_leaves_the_queue_is_never_computed(narrow: Client) -> None:
    narrow.settle()
    before = narrow.scheduler("prompt_tokens_total")
    with narrow.connect() as running, narrow.connect() as queued, narrow.connect() as later:
        running.send("POST", TEXT, LONG)
        EventReader(running).next_json()
        queued.send("POST", TEXT, streamed({"prompt": list(range(500, 1000)), "max_tokens": 4}))
        narrow.wait_for_load(1, 1)
        queued.sock.close()
        narrow.wait_for_load(1, 0)
        later.send("POST", CHAT, {"messages": HI, "temperature": 0, "max_tokens": 1})
        narrow.wait_for_load(1, 1)
        running.sock.close()
        assert later.read_response().json()["choices"][0]["message"]["content"] == "Hello"
    narrow.wait_idle()
    assert narrow.scheduler("prompt_tokens_total") - before == 11 + 31


def test_sse_06_a_full_queue_is_a_status_and_says_when_to_come_again(narrow: Client) -> None:
    with narrow.connect() as running, narrow.connect() as first, narrow.connect() as second:
        running.send("POST", TEXT, LONG)
        EventReader(running).next_json()
        for connection in (first, second):
            connection.send("POST", TEXT, LONG)
        narrow.wait_for_load(1, 2)
        response = narrow.request("POST", TEXT, streamed({"prompt": NUM}))
        assert response.status == 503
        assert response.error["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
    narrow.wait_idle()
    assert narrow.ask(TEXT, prompt=NUM, max_tokens=1).text == " "


def test_sse_06_a_status_is_json_also_for_a_stream(narrow: Client) -> None:
    response = narrow.request("POST", TEXT, streamed({"prompt": [81] * 9000}))
    assert response.status == 400
    assert json.loads(response.body)["error"]["code"] == "context_length_exceeded"

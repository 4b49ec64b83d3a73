"""Clients that leave, at any time, and clients that do not read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from services.wire.finish import Finish
from services.wire.requests import Submit
from tests.sockets import wait_until
from tests.unit.tokenizer.backend_peers import Server, chunk, join
from tests.unit.tokenizer.http_client import Connection, EventReader, Json, metric, request, text_of
from tests.unit.tokenizer.scripts import OK

TEXT_PATH = "/v1/completions"


def open_request(server: Server, body: Json, count: int = 1) -> tuple[Connection, list[Submit]]:
    connection = Connection(server.port)
    connection.send("POST", TEXT_PATH, {"prompt": "x", **body})
    return connection, server.backend.take_submits(count)


@pytest.mark.parametrize("is_stream", [False, True])
def test_sse_03_leaving_before_admission_aborts(server: Server, is_stream: bool) -> None:
    connection, (submit,) = open_request(server, {"stream": is_stream})
    connection.sock.close()
    server.backend.wait_for_abort(submit)
    server.backend.admit(submit)  # too late: nobody's any more
    server.backend.script = OK
    assert request(server.port, "POST", TEXT_PATH, {"prompt": "x"}).status == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_sse_03_leaving_while_queued_aborts(server: Server, is_stream: bool) -> None:
    connection, (submit,) = open_request(server, {"stream": is_stream})
    server.backend.admit(submit)
    if is_stream:
        connection.read_head()
    connection.sock.close()
    server.backend.wait_for_abort(submit)


@pytest.mark.parametrize("is_stream", [False, True])
def test_sse_01_leaving_mid_answer_aborts_every_choice_that_has_not_ended(server: Server, is_stream: bool) -> None:
    connection, submits = open_request(server, {"stream": is_stream, "n": 3}, 3)
    server.backend.admit(*submits)
    ended = chunk(submits[0], 0, [1], 0, "a", Finish.LENGTH)
    server.backend.send_text(join([ended, *(chunk(submit, 0, [1], 0, "a") for submit in submits[1:])]))
    if is_stream:
        reader = EventReader(connection)
        for _ in range(4):
            reader.next_json()
    else:
        server.backend.wait_for_acknowledgement(submits[2], 1)
    connection.sock.close()
    for submit in submits[1:]:
        server.backend.wait_for_abort(submit)
    assert server.backend.num_aborted(submits[0]) == 0
    server.backend.send_text(chunk(submits[1], 1, [2], 1, "late"))


def test_sse_01_a_half_sent_body_and_an_idle_connection_submit_nothing(server: Server) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, b'{"prompt": "x"', Content_Length="100")
        connection.sock.close()
    with Connection(server.port):
        pass
    server.backend.script = OK
    assert request(server.port, "POST", TEXT_PATH, {"prompt": "x"}).status == 200
    assert len(server.backend.arrived(Submit)) == 1


def test_met_04_gauges_are_zero_when_everyone_has_left(server: Server) -> None:
    with ExitStack() as stack:
        submits = []
        for number in range(20):
            connection, found = open_request(server, {"stream": bool(number % 3)})
            stack.enter_context(connection)
            submits += found
            if number % 3 == 1:
                server.backend.admit(*found)
                connection.read_head()
        assert metric(server.port, "tokenway:tokenizer_open_answers") == 20
        assert metric(server.port, "tokenway:tokenizer_open_streams") == 7
        assert metric(server.port, "tokenway:tokenizer_open_http_requests") == 21
    for submit in submits:
        server.backend.wait_for_abort(submit)
    wait_until(lambda: metric(server.port, "tokenway:tokenizer_open_answers") == 0, within_s=2)
    wait_until(lambda: metric(server.port, "tokenway:tokenizer_open_streams") == 0, within_s=2)
    assert metric(server.port, "tokenway:tokenizer_open_http_requests") == 1  # the scrape itself


def test_sse_16_a_slow_reader_delays_nobody_and_loses_nothing(server: Server) -> None:
    backend = server.backend
    num_tokens, piece = 4000, "0123456789" * 10
    slow = Connection(server.port, receive_buffer=2048)
    slow.send("POST", TEXT_PATH, {"prompt": "x", "stream": True})
    (slow_submit,) = backend.take_submits()
    with slow, Connection(server.port) as quick:
        quick.send("POST", TEXT_PATH, {"prompt": "x", "stream": True})
        (quick_submit,) = backend.take_submits()
        backend.admit(slow_submit, quick_submit)
        reader = EventReader(quick)
        for index in range(num_tokens):
            end = Finish.LENGTH if index == num_tokens - 1 else Finish.NONE
            rows = [chunk(submit, index, [1], index * 100, piece, end) for submit in (slow_submit, quick_submit)]
            backend.send_text(join(rows))
        assert text_of(reader.rest()) == piece * num_tokens
        events = EventReader(slow).rest()  # nothing of it was read until now
        assert text_of(events) == piece * num_tokens
        assert len(events) < num_tokens / 2


def test_sse_16_a_client_that_reads_nothing_is_cut_after_the_write_timeout(start_server: Callable[..., Server]) -> None:
    server = start_server("--write-timeout-s", "0.4")
    backend = server.backend
    with Connection(server.port, receive_buffer=2048) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": "x", "stream": True})
        (submit,) = backend.take_submits()
        backend.admit(submit)
        for index in range(20):
            backend.send_text(chunk(submit, index, [1], index * 50_000, "x" * 50_000))
        backend.wait_for_abort(submit)
    assert server.wait_for_line("read nothing")
    server.lines.clear()
    with Connection(server.port, receive_buffer=2048) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": "x", "stream": False})
        (submit,) = backend.take_submits()
        backend.admit(submit)
        backend.send_text(chunk(submit, 0, [1], 0, "x" * 2_000_000, Finish.LENGTH))
        assert request(server.port, "GET", "/live").status == 200  # it holds nobody up
        assert server.wait_for_line("read nothing")


def test_sse_16_a_client_that_leaves_too_much_lying_is_cut(server: Server) -> None:
    with Connection(server.port, receive_buffer=2048) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": "x", "stream": True})
        (submit,) = server.backend.take_submits()
        server.backend.admit(submit)
        for index in range(40):
            server.backend.send_text(chunk(submit, index, [1], index * 50_000, "x" * 50_000))
            if index == 0:  # what follows finds the first piece written, so that it is no one batch with it
                server.backend.wait_for_acknowledgement(submit, 1)
            if index == 20:  # by now the connection is full; more comes while it is
                server.backend.wait_for_acknowledgement(submit, 21)
        server.backend.wait_for_abort(submit)
    assert server.wait_for_line("too far behind")


def test_sse_16_a_slow_client_that_keeps_reading_is_not_cut(start_server: Callable[..., Server]) -> None:
    server = start_server("--write-timeout-s", "1")
    backend = server.backend
    piece = "Z" * 50_000
    with Connection(server.port, receive_buffer=4096) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": "x", "stream": True})
        (submit,) = backend.take_submits()
        backend.admit(submit)
        for index in range(20):
            end = Finish.LENGTH if index == 19 else Finish.NONE
            backend.send_text(chunk(submit, index, [1], index * len(piece), piece, end))
        received = bytearray()
        while not received.endswith(b"0\r\n\r\n"):  # in sips
            data = connection.sock.recv(1024)
            assert data, "cut"
            received += data
        assert received.count(b"Z") == 20 * len(piece)

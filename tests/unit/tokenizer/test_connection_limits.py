"""What one address, one key, one head may take: limits as settings, each with the attack that it is for."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.config import Settings
from services.tokenizer.connection_limits import ConnectionCounts, ConnectionLimits
from tests.sockets import wait_until
from tests.unit.tokenizer.backend_peers import Server, takes_requests
from tests.unit.tokenizer.http_client import Connection, Response, metric, request
from tests.unit.tokenizer.scripts import OK, answering

TEXT_PATH = "/v1/completions"
FIVE_TOKENS = answering(["a", "b", "c", "d", "e"])


def open_connection(server: Server) -> Connection:
    """One that has been answered and is kept open."""
    connection = Connection(server.port)
    connection.send("GET", "/live")
    assert connection.read_response().status == 200
    return connection


def post(port: int, key: str = "") -> Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return request(port, "POST", TEXT_PATH, {"prompt": "xx"}, **headers)


# ---------------------------------------------------------------- connections


def test_sec_16_an_address_has_so_many_connections_and_no_more(start_server: Callable[..., Server]) -> None:
    server = start_server("--max-connections-per-address", "8")
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(open_connection(server))
        with Connection(server.port) as one_more:
            response = one_more.read_response()
            assert (response.status, response.error["code"]) == (503, "too_many_connections")
            assert response.headers["retry-after"] == "1"
            assert one_more.is_closed()
        [path] = server.run_dir.glob("control-*.sock")  # the operator is let in
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(path))
            control.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            text = b"".join(iter(lambda: control.recv(65536), b"")).decode()
        assert 'tokenizer_connections{instance="' in text
    wait_until(lambda: takes_requests(server.port))
    assert metric(server.port, "tokenway:tokenizer_refused_connections_total") >= 1


def test_sec_16_a_process_has_so_many_connections_and_no_more(start_server: Callable[..., Server]) -> None:
    server = start_server("--max-connections", "3")
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(open_connection(server))
        with Connection(server.port) as one_more:
            assert one_more.read_response().error["code"] == "too_many_connections"
    wait_until(lambda: takes_requests(server.port))


@given(
    st.integers(0, 4),
    st.integers(0, 3),
    st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b", "c"])), max_size=40),
)
def test_counts_are_those_of_a_list_of_what_is_open(most: int, per_address: int, steps: list[tuple[bool, str]]) -> None:
    counts = ConnectionCounts(ConnectionLimits(1, 1, 1, 1, 1, 1, most, per_address))
    is_open: list[str] = []
    for comes, address in steps:
        if comes:
            expected = bool(most) and len(is_open) >= most
            expected = expected or (bool(per_address) and is_open.count(address) >= per_address)
            assert bool(counts.enter(address)) == expected
            is_open.append(address)  # refused or not, it is there until it has closed
        elif address in is_open:
            counts.leave(address)
            is_open.remove(address)
        assert counts.num_open == len(is_open)


def test_limits_are_the_settings() -> None:
    limits = ConnectionLimits.of(Settings(max_headers=5, max_connections=6, head_timeout_s=2.0))
    assert (limits.max_headers, limits.max_connections, limits.head_timeout_s) == (5, 6, 2.0)


# ---------------------------------------------------------------- heads


@pytest.fixture(scope="module")
def narrow(small_model_path: Path) -> Iterator[Server]:
    server = Server(
        small_model_path,
        "--max-headers", "8", "--max-header-bytes", "500", "--max-head-bytes", "1000", "--head-timeout-s", "0.5",
    )  # fmt: skip
    yield server
    server.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Long": "y" * 600},
        {f"X-{number}": "y" for number in range(10)},
        {f"X-{number}": "y" * 400 for number in range(3)},
    ],
)
def test_sec_16_heads_over_the_limits_are_431_and_end_the_connection(narrow: Server, headers: dict[str, str]) -> None:
    with Connection(narrow.port) as connection:
        connection.send("GET", "/live", **headers)
        response = connection.read_response()
        assert (response.status, response.error["code"]) == (431, "headers_too_large")
        assert connection.is_closed()
    assert request(narrow.port, "GET", "/live", **{"X-Long": "y" * 400}).status == 200


def test_sec_16_many_half_requests_hold_nobody_up_and_are_gone_in_time(narrow: Server) -> None:
    narrow.backend.script = OK
    with ExitStack() as stack:
        halves = [stack.enter_context(Connection(narrow.port)) for _ in range(200)]
        for connection in halves:
            connection.sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        started_s = time.monotonic()
        assert post(narrow.port).status == 200
        for connection in halves:
            assert connection.read_response().status == 408
        assert time.monotonic() - started_s < 20  # each had half a second; none waits for the others
    narrow.backend.script = None


# ---------------------------------------------------------------- budgets of keys


@pytest.fixture
def budgeted(start_server: Callable[..., Server]) -> Callable[..., Server]:
    """Starts a process with two keys and a limit."""

    def start(*flags: str) -> Server:
        is_ready = lambda port: takes_requests(port, Authorization="Bearer two")  # noqa: E731
        return start_server("--api-key", "one,two", *flags, is_ready=is_ready)

    return start


def test_sec_27_a_key_has_so_many_requests_at_a_time_and_others_are_not_concerned(
    budgeted: Callable[..., Server],
) -> None:
    server = budgeted("--max-requests-per-key", "2")
    with ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(Connection(server.port))
            connection.send("POST", TEXT_PATH, {"prompt": "x", "stream": True}, Authorization="Bearer one")
        submits = [server.backend.take_submits()[0] for _ in range(2)]
        response = post(server.port, "one")
        assert (response.status, response.error["code"]) == (429, "rate_limit_exceeded")
        assert int(response.headers["retry-after"]) >= 1
        assert request(server.port, "GET", "/live").status == 200
        assert request(server.port, "GET", "/metrics", Authorization="Bearer one").status == 200
        server.backend.script = OK
        assert post(server.port, "two").status == 200
        assert metric_with_key(server.port, "tokenway:tokenizer_over_budget_total") == 1
    for submit in submits:
        server.backend.wait_for_abort(submit)
    wait_until(lambda: post(server.port, "one").status == 200)


def test_sec_27_a_key_that_has_used_its_tokens_waits_until_it_is_told(budgeted: Callable[..., Server]) -> None:
    server = budgeted("--max-tokens-per-minute", "60")
    server.backend.script = FIVE_TOKENS
    statuses = [post(server.port, "one").status for _ in range(20)]
    assert statuses[0] == 200
    assert statuses[-1] == 429
    assert 60 // 7 <= statuses.count(200) <= 15  # 7 tokens each, and a token a second comes back
    response = post(server.port, "one")
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert post(server.port, "two").status == 200


def test_one_key_s_flood_leaves_the_other_served(budgeted: Callable[..., Server]) -> None:
    server = budgeted("--max-requests-per-key", "4")
    server.backend.script = OK
    with ThreadPoolExecutor(16) as pool:
        flood = [pool.submit(post, server.port, "one") for _ in range(64)]
        assert [post(server.port, "two").status for _ in range(10)] == [200] * 10
        assert {future.result().status for future in flood} <= {200, 429}


def metric_with_key(port: int, name: str) -> float:
    text = request(port, "GET", "/metrics", Authorization="Bearer two").body.decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))

"""GET /trace/{id} and spans: a request's way through the processes, told to those whom it concerns."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from services.runtime.service import StartError
from services.tokenizer import otlp_endpoint
from services.tokenizer.otlp_endpoint import check_export
from services.wire.answers import HopReport
from services.wire.finish import Finish
from services.wire.members import Role
from services.wire.requests import Submit
from tests.sockets import wait_until
from tests.unit.tokenizer.backend_peers import Server, admitted_stream, chunk, takes_requests
from tests.unit.tokenizer.http_client import Connection, Json, Response, request

pytestmark = [pytest.mark.slow, pytest.mark.surface]


TEXT_PATH = "/v1/completions"
KEYS = {"one": {"Authorization": "Bearer one"}, "two": {"Authorization": "Bearer two"}}


def reports(submit: Submit, role: Role, **counters: float) -> HopReport:
    """What a process says of an answer that came there just now."""
    return HopReport(
        request_id=submit.request_id,
        attempt=0,
        role=role,
        instance="s" if role is Role.SCHEDULER else "d",
        started_unix_us=time.time_ns() // 1000,
        wait_us=2_000,
        work_us=50_000 if role is Role.SCHEDULER else 300,
        counters=dict(counters),
    )


def answer(server: Server, path: str = TEXT_PATH, **headers: str) -> tuple[Response, Submit]:
    """One request, answered with two tokens, about which scheduler and detokenizer have told."""
    with Connection(server.port) as connection:
        connection.send("POST", path, {"prompt": "xyz"}, **headers)
        (submit,) = server.backend.take_submits()
        server.backend.admit(submit)
        server.backend.send(reports(submit, Role.SCHEDULER, first_token_us=12_000, pages=1, steps=1))
        server.backend.send_text(chunk(submit, 0, [1], 0, "a", cached=2))
        server.backend.send(reports(submit, Role.SCHEDULER, first_token_us=12_000, ended=1, pages=2, steps=3))
        server.backend.send_text(reports(submit, Role.DETOKENIZER, chunks=2))
        server.backend.send_text(chunk(submit, 1, [2], 1, "b", Finish.LENGTH, cached=2))
        return connection.read_response(), submit


def trace(server: Server, name: str, **headers: str) -> Json:
    response = request(server.port, "GET", f"/trace/{name}", **headers)
    assert response.status == 200, response.body
    return response.json()


# ---------------------------------------------------------------- /trace


def test_a_trace_tells_every_hop_of_an_answer(server: Server) -> None:
    response, submit = answer(server)
    name = response.headers["x-request-id"]
    wait_until(lambda: len(trace(server, name)["answers"][0]["hops"]) == 4)
    told = trace(server, name)
    assert (told["route"], told["status"], told["tenant"], told["has_ended"]) == (TEXT_PATH, 200, "default", True)
    assert 0 < told["ttft_ms"] <= told["duration_ms"]
    assert [hop["hop"] for hop in told["hops"]] == ["http", "tokenize"]
    assert told["hops"][0]["work_ms"] == told["duration_ms"]
    [one] = told["answers"]
    assert one["request_id"] == submit.request_id.hex()
    assert (one["finish"], one["prompt_tokens"], one["cached_tokens"], one["output_tokens"]) == ("length", 3, 2, 2)
    queue, prefill, decode, detokenize = one["hops"]
    assert [hop["hop"] for hop in one["hops"]] == ["queue", "prefill", "decode", "detokenize"]
    assert (queue["wait_ms"], prefill["work_ms"], decode["work_ms"]) == (2, 10, 40)
    assert decode["counters"] == {"pages": 2, "steps": 3}
    assert (detokenize["role"], detokenize["instance"], detokenize["counters"]) == ("detokenizer", "d", {"chunks": 2})
    for spelling in (submit.request_id.hex(), f"anything-{submit.request_id.hex()}"):
        assert trace(server, spelling) == told


def test_an_open_request_has_a_trace_too(server: Server) -> None:
    with Connection(server.port) as connection:
        submit, reader = admitted_stream(server.backend, connection, TEXT_PATH, {"prompt": "x", "stream": True})
        told = trace(server, submit.request_id.hex())
        assert (told["has_ended"], told["ttft_ms"], told["answers"][0]["finish"]) == (False, None, None)
        server.backend.send_text(chunk(submit, 0, [1], 0, "a", Finish.LENGTH))
        reader.rest()
    wait_until(lambda: trace(server, submit.request_id.hex())["has_ended"])


def test_a_client_that_left_has_a_trace(server: Server) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": "x"})
        (submit,) = server.backend.take_submits()
    wait_until(lambda: trace(server, submit.request_id.hex())["has_ended"])
    told = trace(server, submit.request_id.hex())
    assert (told["status"], told["answers"][0]["finish"]) == (499, "abort")


@pytest.mark.parametrize("name", ["x", 32 * "0", "..%2f..%2fetc", "%00", "cmpl-", 200 * "a"])
def test_an_id_that_nobody_knows_is_404(server: Server, name: str) -> None:
    response = request(server.port, "GET", f"/trace/{name}")
    assert (response.status, response.error["code"]) == (404, "not_found")


@pytest.fixture(scope="module")
def pair(small_model_path: Path) -> Iterator[tuple[Server, Server]]:
    """Two processes with keys and one run directory."""
    flags = ("--api-key", "one,two", "--trace-ring", "2")
    is_ready = lambda port: takes_requests(port, **KEYS["one"])  # noqa: E731
    first = Server(small_model_path, *flags, is_ready=is_ready)
    second = Server(small_model_path, *flags, "--run-dir", str(first.run_dir), is_tcp=True, is_ready=is_ready)
    yield first, second
    second.close()
    first.close()


def test_a_trace_is_for_the_key_that_made_the_request_and_for_the_operator(pair: tuple[Server, Server]) -> None:
    first, _ = pair
    response, submit = answer(first, **KEYS["one"])
    name = response.headers["x-request-id"]
    assert trace(first, name, **KEYS["one"])["id"] == submit.request_id.hex()
    unknown = request(first.port, "GET", f"/trace/{32 * '0'}", **KEYS["two"])
    other = request(first.port, "GET", f"/trace/{name}", **KEYS["two"])
    assert (other.status, other.body) == (404, unknown.body)
    assert request(first.port, "GET", f"/trace/{name}").status == 401
    assert first.over_control("GET", f"/trace/{name}").json()["id"] == submit.request_id.hex()


def test_any_process_of_a_host_answers_for_the_others(pair: tuple[Server, Server]) -> None:
    first, second = pair
    response, submit = answer(first, **KEYS["two"])
    name = response.headers["x-request-id"]
    assert trace(second, name, **KEYS["two"])["id"] == submit.request_id.hex()
    assert request(second.port, "GET", f"/trace/{name}", **KEYS["one"]).status == 404
    assert request(second.port, "GET", f"/trace/{name}?own", **KEYS["two"]).status == 404
    assert request(second.port, "GET", f"/trace/{32 * '0'}", **KEYS["two"]).status == 404


def test_the_oldest_traces_are_forgotten(pair: tuple[Server, Server]) -> None:
    first, _ = pair
    names = [answer(first, **KEYS["one"])[0].headers["x-request-id"] for _ in range(3)]
    statuses = [request(first.port, "GET", f"/trace/{name}", **KEYS["one"]).status for name in names]
    assert statuses == [404, 200, 200]


# ---------------------------------------------------------------- the line in the log


def test_each_request_writes_one_line_at_its_end(start_server: Callable[..., Server]) -> None:
    server = start_server("--log-requests")
    response, submit = answer(server)
    line = server.wait_for_line(f"[{submit.request_id.hex()}] request ended")
    assert " I tokenizer/" in line
    for part in (
        "route=/v1/completions",
        "status=200",
        "prompt_tokens=3",
        "cached_tokens=2",
        "output_tokens=2",
        "ttft_ms=",
    ):
        assert part in line
    assert response.json()["choices"][0]["text"] not in line.partition("ended")[2].split("=")


# ---------------------------------------------------------------- spans


@dataclass
class Collector:
    """An OTLP/HTTP receiver; `delay` holds answers up, `status` is what it answers."""

    requests: list[tuple[str, ExportTraceServiceRequest]] = field(default_factory=list)
    condition: threading.Condition = field(default_factory=threading.Condition)
    release: threading.Event = field(default_factory=threading.Event)
    status: int = 200
    port: int = 0

    def spans(self) -> list[Span]:
        return [
            span
            for _, message in self.requests
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def wait_for(self, count: int) -> list[Span]:
        deadline_s = time.monotonic() + 20
        with self.condition:
            while len(self.spans()) < count:
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"{len(self.spans())} spans instead of {count}"
                self.condition.wait(left_s)
            return self.spans()


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    found.release.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = ExportTraceServiceRequest()
            message.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            found.release.wait(20)
            with found.condition:
                found.requests.append((self.path, message))
                found.condition.notify_all()
            self.send_response(found.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.release.set()
        server.shutdown()
        thread.join()


def attributes(span: Span) -> dict[str, object]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in span.attributes}


def test_each_hop_of_a_request_is_a_span_below_the_caller_s_own(
    start_server: Callable[..., Server], collector: Collector
) -> None:
    server = start_server("--otlp-endpoint", f"http://127.0.0.1:{collector.port}")
    before_ns = time.time_ns()
    _, submit = answer(server, traceparent=f"00-{32 * 'a'}-{16 * 'b'}-01")
    spans = {span.name: span for span in collector.wait_for(6)}
    assert collector.requests[0][0] == "/v1/traces"
    root = spans.pop("http /v1/completions")
    assert set(spans) == {"tokenize", "queue", "prefill", "decode", "detokenize"}
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.kind) == (32 * "a", 16 * "b", Span.SPAN_KIND_SERVER)
    for span in spans.values():
        assert (span.trace_id, span.parent_span_id) == (root.trace_id, root.span_id)
        assert before_ns - 10**9 <= span.start_time_unix_nano <= span.end_time_unix_nano
    facts = attributes(root)
    assert (facts["http.route"], facts["http.response.status_code"]) == (TEXT_PATH, 200)
    assert (facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.output_tokens"]) == (3, 2)
    assert facts["gen_ai.request.model"] == "small"
    assert root.end_time_unix_nano - root.start_time_unix_nano >= 1000 * 300
    assert spans["decode"].end_time_unix_nano - spans["decode"].start_time_unix_nano == 40_000_000
    assert spans["queue"].end_time_unix_nano == spans["prefill"].start_time_unix_nano
    assert attributes(spans["decode"])["tokenway.steps"] == 3
    assert attributes(spans["decode"])["tokenway.answer_id"] == submit.request_id.hex()
    [resource] = {
        resource.resource.SerializeToString() for _, sent in collector.requests for resource in sent.resource_spans
    }
    assert b"tokenway" in resource
    assert b"xyz" not in b"".join(sent.SerializeToString() for _, sent in collector.requests)


def test_without_a_traceparent_each_request_is_a_trace_of_its_own(
    start_server: Callable[..., Server], collector: Collector
) -> None:
    server = start_server("--otlp-endpoint", f"http://127.0.0.1:{collector.port}/v1/traces")
    for _ in range(2):
        answer(server)
    spans = collector.wait_for(12)
    assert len({span.trace_id for span in spans}) == 2
    assert sum(not span.parent_span_id for span in spans) == 2
    assert collector.requests[0][0] == "/v1/traces"


def test_a_caller_that_records_nothing_gets_no_spans(start_server: Callable[..., Server], collector: Collector) -> None:
    server = start_server("--otlp-endpoint", f"http://127.0.0.1:{collector.port}")
    answer(server, traceparent=f"00-{32 * 'a'}-{16 * 'b'}-00")
    answer(server)
    spans = collector.wait_for(6)
    assert len({span.trace_id for span in spans}) == 1
    assert spans[0].trace_id.hex() != 32 * "a"


@pytest.mark.parametrize("how", ["stuck", "refusing", "gone"])
def test_serving_does_not_wait_for_a_collector(
    start_server: Callable[..., Server], collector: Collector, how: str
) -> None:
    if how == "stuck":
        collector.release.clear()
    collector.status = 500 if how == "refusing" else 200
    port = 9 if how == "gone" else collector.port
    server = start_server("--otlp-endpoint", f"http://127.0.0.1:{port}")
    for _ in range(20):
        response, _ = answer(server)
        assert response.status == 200
    server.process.terminate()
    assert server.exit_status(within_s=15) == 0  # with spans that nobody took
    assert not [line for line in server.lines if "Traceback" in line and "tokenizer" in line]


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://x:4317", "http://", "x"])
def test_an_endpoint_that_cannot_be_one_is_refused_at_the_start(endpoint: str) -> None:
    with pytest.raises(StartError, match="--otlp-endpoint"):
        check_export(endpoint)


def test_a_missing_package_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_endpoint, "_NEEDED", ("no_such_package.trace",))
    with pytest.raises(StartError, match="pip install"):
        check_export("http://localhost:4318")


def test_a_trace_is_json_that_can_be_kept(server: Server) -> None:
    response, _ = answer(server)
    told = trace(server, response.headers["x-request-id"])
    assert json.loads(json.dumps(told)) == told

"""/flush_cache, /abort_request, /pause, /resume and /server_info, over the control socket and the public port."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from services.runtime.config import SECRETS, Settings
from services.tokenizer.request_names import RequestNames
from services.tokenizer.status_routes import shown_settings
from services.wire.controls import Control, ControlAction, ControlDone
from services.wire.finish import Finish
from services.wire.messages import PROTOCOL_VERSION
from tests.unit.tokenizer.backend_peers import Server, chunk
from tests.unit.tokenizer.http_client import Response, request

GROUP = bytes(range(16))


@pytest.fixture(name="pool")
def other_threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def asked(server: Server, pool: ThreadPoolExecutor, path: str, body: object = None) -> tuple[Control, Future[Response]]:
    """The wish that reaches the scheduler, and the answer to come."""
    server.backend.forget()
    answer = pool.submit(server.over_control, "POST", path, body)
    [control] = server.backend.wait_for(lambda arrived: [item for item in arrived if isinstance(item, Control)] or None)
    return control, answer


def done(server: Server, control: Control, count: int, answer: Future[Response]) -> dict[str, Any]:
    server.backend.send(ControlDone(control.serial, count))
    response = answer.result(timeout=20)
    assert response.status == 200, response.body
    return response.json()


@pytest.mark.parametrize(
    ("path", "body", "action", "name"),
    [
        ("/flush_cache", None, ControlAction.FLUSH_CACHE, "freed_pages"),
        ("/flush_cache", {}, ControlAction.FLUSH_CACHE, "freed_pages"),
        ("/pause", None, ControlAction.PAUSE, "waiting_requests"),
        ("/resume", None, ControlAction.RESUME, "waiting_requests"),
        ("/abort_request", {"abort_all": True}, ControlAction.ABORT_ALL, "aborted_answers"),
    ],
)
def test_a_wish_reaches_the_scheduler_and_its_answer_the_operator(
    server: Server, pool: ThreadPoolExecutor, path: str, body: object, action: ControlAction, name: str
) -> None:
    control, answer = asked(server, pool, path, body)
    assert (control.action, control.group_id) == (action, b"")
    assert done(server, control, 7, answer) == {name: 7}


@pytest.mark.parametrize("kind", ["chatcmpl-", "cmpl-", "resp_", "msg_", "gen-"])
def test_a_request_is_ended_by_the_id_of_its_answer(server: Server, pool: ThreadPoolExecutor, kind: str) -> None:
    control, answer = asked(server, pool, "/abort_request", {"request_id": kind + GROUP.hex()})
    assert (control.action, control.group_id) == (ControlAction.ABORT_GROUP, GROUP)
    assert done(server, control, 1, answer) == {"aborted_answers": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x", "rid": "meine 请求"}),
        ("/v1/completions", {"prompt": "x", "request_id": "meine 请求"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "rid": "meine 请求"}),
    ],
)
def test_a_request_is_ended_by_its_clients_name(
    server: Server, pool: ThreadPoolExecutor, path: str, body: dict[str, Any]
) -> None:
    server.backend.forget()
    asking = pool.submit(request, server.port, "POST", path, body)
    [submit] = server.backend.take_submits()
    server.backend.admit(submit)
    control, answer = asked(server, pool, "/abort_request", {"rid": "meine 请求"})
    assert control.group_id == submit.group_id
    assert done(server, control, 1, answer) == {"aborted_answers": 1}
    server.backend.send_text(chunk(submit, 0, [1], 0, "", Finish.ABORTED))
    assert asking.result(timeout=20).error["code"] == "aborted"


def test_an_unknown_name_ends_nothing(server: Server) -> None:
    for name in ("nobody", "chatcmpl-xyz", "chatcmpl-" + "0" * 31):
        assert server.over_control("POST", "/abort_request", {"rid": name}).json() == {"aborted_answers": 0}


def test_a_wish_that_names_nothing_lacks_a_field(server: Server) -> None:
    for body in ({}, {"rid": None}, {"abort_all": False}):
        response = server.over_control("POST", "/abort_request", body)
        assert (response.status, response.error["code"], response.error["param"]) == (400, "missing_field", "rid")


@pytest.mark.parametrize(
    ("body", "param"), [({}, "rid"), ({"rid": ""}, "rid"), ({"rid": 3}, "rid"), ({"abort_all": "yes"}, "abort_all")]
)
def test_wrong_wishes_are_named(server: Server, body: object, param: str) -> None:
    response = server.over_control("POST", "/abort_request", body)
    assert (response.status, response.error["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/flush_cache", "/abort_request", "/pause", "/resume"])
def test_on_the_public_port_there_is_no_such_route(server: Server, path: str) -> None:
    assert request(server.port, "POST", path, {}).status == 404


def test_server_info_tells_all_but_secrets(server: Server) -> None:
    assert request(server.port, "GET", "/server_info").status == 404
    info = server.over_control("GET", "/server_info").json()
    assert info["protocol"] == PROTOCOL_VERSION
    assert info["model"]["name"] == request(server.port, "GET", "/v1/models").json()["data"][0]["id"]
    assert set(info["settings"]) == set(Settings.__dataclass_fields__)
    assert {process["role"] for process in info["processes"]} >= {"scheduler", "gpu_worker", "detokenizer"}
    assert info["load"]["state"] == "ready"
    assert set(info["sampling_defaults"]) == {"temperature", "top_p", "top_k", "min_p"}


def test_secrets_are_told_to_be_set_and_no_more() -> None:
    settings = Settings(api_key="sk-geheim", admin_key="")
    shown = shown_settings(settings)
    assert {name: shown[name] for name in SECRETS} == {"api_key": "set", "admin_key": ""}
    assert "geheim" not in str(shown)


def test_sch_21_a_name_means_every_open_request_that_has_it() -> None:
    names = RequestNames()
    with names.open(["a", "b"], b"1"):
        with names.open(["a"], b"2"):
            assert (names.find("a"), names.find("b"), names.find("c")) == ([b"1", b"2"], [b"1"], [])
        assert names.find("a") == [b"1"]
    assert names.num_names == 0

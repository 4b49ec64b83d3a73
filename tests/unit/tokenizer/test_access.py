"""Keys: who may ask for what, and every way around them that others were caught with (security rules 17 and 18)."""

from __future__ import annotations

import json
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.config import Settings, load_settings
from services.runtime.service import StartError
from services.tokenizer.access import AccessSettings, Audience, read_access_settings, tenant_of, warning_of
from services.tokenizer.routes import ROUTES
from tests.unit.tokenizer.backend_peers import Server, takes_requests
from tests.unit.tokenizer.http_client import Connection, Response, request
from tests.unit.tokenizer.scripts import OK

KEY, OTHER_KEY, ADMIN_KEY = "sk-Alpha-111", "sk-Beta-222", "admin-333"
BEARER = {"Authorization": f"Bearer {KEY}"}
TEXT_PATH = "/v1/completions"
OPEN = sorted(path for path, route in ROUTES.items() if route.audience is Audience.ANYONE)
CONTROL = sorted(path for path, route in ROUTES.items() if route.audience is Audience.CONTROL)
CLOSED = sorted(set(ROUTES) - set(OPEN))


@pytest.fixture(scope="module")
def keyed(small_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A process that wants keys: one from its flags, one from a file."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"# those of clients\n\n{OTHER_KEY}\n")
    server = Server(
        small_model_path,
        "--api-key", KEY, "--api-key-file", str(keys), "--admin-key", ADMIN_KEY, "--log-requests",
        "--log-level", "debug", is_ready=lambda port: takes_requests(port, **BEARER),
    )  # fmt: skip
    server.backend.script = OK
    yield server
    server.close()


def ask(server: Server, **headers: str) -> Response:
    return request(server.port, "POST", TEXT_PATH, {"prompt": "x"}, **headers)


# ---------------------------------------------------------------- with a key and without


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_sec_17_every_route_wants_a_key_whatever_the_method(keyed: Server, path: str, method: str) -> None:
    with Connection(keyed.port) as connection:
        connection.send(method, path.replace("{id}", "small"), b"{}" if method == "POST" else None)
        status, headers = connection.read_head()
    assert status == 401
    assert headers["www-authenticate"] == "Bearer"
    assert headers["connection"] == "close"


def test_what_is_open_to_everybody_is_what_the_documents_say() -> None:
    assert OPEN == ["/health", "/live", "/ready"]
    assert len(CONTROL) > 3


@pytest.mark.parametrize("path", OPEN)
def test_whether_it_lives_is_told_to_everybody(keyed: Server, path: str) -> None:
    assert request(keyed.port, "GET", path).status == 200


def test_health_tells_the_state_of_the_roles_to_those_with_a_key_only(keyed: Server) -> None:
    assert request(keyed.port, "GET", "/health").json() == {"status": "ok"}
    assert "gpu_worker" in request(keyed.port, "GET", "/health", **BEARER).json()["roles"]


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
@pytest.mark.parametrize("form", ["Authorization: Bearer {}", "authorization: bearer   {}", "x-api-key: {}"])
def test_both_ways_of_sending_a_key_are_taken(keyed: Server, key: str, form: str) -> None:
    name, _, value = form.partition(": ")
    assert ask(keyed, **{name: value.format(key)}).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer ,"},
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {KEY.lower()}"},
        {"Authorization": f"Bearer {KEY.upper()}"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY},{OTHER_KEY}"},
        {"Authorization": f"Bearer {KEY} {OTHER_KEY}"},
        {"Authorization": "Bearer # those of clients"},
        {"Authorization": "Bearer \x80\xff"},
        {"x-api-key": "wrong"},
        {"x-api-key": f"Bearer {KEY}"},
        {"api-key": KEY},
        {"Cookie": f"api_key={KEY}"},
    ],
)
def test_sec_17_whatever_is_no_key_gets_the_same_401_as_none(keyed: Server, headers: dict[str, str]) -> None:
    expected = ask(keyed)
    response = ask(keyed, **headers)
    assert (response.status, response.body) == (401, expected.body)
    assert response.error["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "line",
    [
        "GET //v1/models HTTP/1.1",
        "GET /v1//models HTTP/1.1",
        "GET /v1/models/ HTTP/1.1",
        "GET /live/../v1/models HTTP/1.1",
        "GET /live%2f..%2fv1%2fmodels HTTP/1.1",
        "GET /%76%31/models HTTP/1.1",
        "GET /v1%2fmodels HTTP/1.1",
        "GET /v1/models;/live HTTP/1.1",
        "GET /live/v1/models HTTP/1.1",
        "GET /LIVE HTTP/1.1",
        "GET /v1/models?/live HTTP/1.1",
        "GET /v1/models#/live HTTP/1.1",
        "GET http://localhost/v1/models HTTP/1.1",
        "GET http://localhost//v1/models HTTP/1.1",
        "GET http:///live@/v1/models HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "HEAD /v1/models HTTP/1.0",
        "GET /v1/models HTTP/1.0",
        "GET /trace/0123456789abcdef0123456789abcdef HTTP/1.1",
        "GET /nothing HTTP/1.1",
    ],
)
@pytest.mark.parametrize(
    "host",
    [
        "Host: localhost",
        "Host: /live",
        "Host: localhost/live?",
        "X-Original-URL: /live\r\nX-Rewrite-URL: /live\r\nHost: x",
    ],
)
def test_sec_17_no_spelling_of_a_path_or_a_host_leads_past_the_keys(keyed: Server, line: str, host: str) -> None:
    with Connection(keyed.port) as connection:
        connection.sock.sendall(f"{line}\r\n{host}\r\n\r\n".encode())
        status, _ = connection.read_head()
    assert status in (400, 401)


def test_an_unknown_path_is_401_before_it_is_404(keyed: Server) -> None:
    assert request(keyed.port, "GET", "/nothing").status == 401
    assert request(keyed.port, "GET", "/nothing", **BEARER).status == 404
    assert request(keyed.port, "PUT", "/v1/models", **BEARER).status == 405


def test_no_body_is_read_without_a_key(keyed: Server) -> None:
    with Connection(keyed.port) as connection:
        connection.send("POST", TEXT_PATH, b"", Content_Length="1000000", Expect="100-continue")
        response = connection.read_response()
        assert response.status == 401  # and not: 100 Continue


def test_metrics_can_be_left_open(small_model_path: Path) -> None:
    flags = ("--api-key", KEY, "--metrics-open")
    server = Server(small_model_path, *flags, is_ready=lambda port: takes_requests(port, **BEARER))
    try:
        assert request(server.port, "GET", "/metrics").status == 200
        assert request(server.port, "GET", "/v1/models").status == 401
    finally:
        server.close()


# ---------------------------------------------------------------- who it was


def test_requests_carry_a_name_of_their_key_and_the_key_is_nowhere(keyed: Server) -> None:
    keyed.backend.forget()
    assert ask(keyed, **BEARER).status == 200
    assert ask(keyed, **{"x-api-key": OTHER_KEY}).status == 200
    first, second = (keyed.backend.take_submits()[0] for _ in range(2))
    assert (first.tenant, second.tenant) == (tenant_of(KEY), tenant_of(OTHER_KEY))
    assert re.fullmatch(r"key-[0-9a-f]{12}", first.tenant)
    metrics = request(keyed.port, "GET", "/metrics", **BEARER).body.decode()
    said = "\n".join([*keyed.lines, metrics, ask(keyed).body.decode(), repr(first)])
    assert tenant_of(KEY) in said
    for key in (KEY, OTHER_KEY, ADMIN_KEY):
        assert key not in said


@given(st.text(min_size=1), st.text(min_size=1))
def test_names_of_keys_are_told_apart_and_hold_nothing_of_them(one: str, other: str) -> None:
    assert (tenant_of(one) == tenant_of(other)) == (one == other)
    assert len(tenant_of(one)) == 16


# ---------------------------------------------------------------- the operator


def test_sec_18_the_control_socket_is_private_and_answers_without_a_key(keyed: Server) -> None:
    [path] = keyed.run_dir.glob("control-*.sock")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keyed.over_control("GET", "/v1/models").status == 200
    assert keyed.over_control("POST", TEXT_PATH, {"prompt": "x"}).status == 200
    assert "roles" in keyed.over_control("GET", "/health").json()


@pytest.mark.parametrize("path", CONTROL)
def test_sec_18_control_routes_are_not_on_the_public_port_whoever_asks(keyed: Server, path: str) -> None:
    for key in (KEY, ADMIN_KEY):
        response = request(keyed.port, ROUTES[path].method, path, Authorization=f"Bearer {key}")
        assert response.status == 404
        nowhere = request(keyed.port, ROUTES[path].method, "/nothing", Authorization=f"Bearer {key}")
        assert response.body == nowhere.body.replace(b"/nothing", path.encode())
    assert keyed.over_control("DELETE", path).status == 405


@pytest.mark.parametrize("path", CONTROL)
def test_sec_18_without_keys_control_routes_are_not_on_the_public_port_either(server: Server, path: str) -> None:
    assert request(server.port, ROUTES[path].method, path).status == 404


def test_sec_18_on_the_public_port_control_routes_want_the_admin_key(small_model_path: Path) -> None:
    flags = ("--api-key", KEY, "--admin-key", ADMIN_KEY, "--admin-on-public")
    server = Server(small_model_path, *flags, is_ready=lambda port: takes_requests(port, **BEARER))
    try:
        for headers in ({}, BEARER, {"x-api-key": "wrong"}):
            assert request(server.port, "GET", "/server_info", **headers).status == 401
        response = request(server.port, "GET", "/server_info", **{"x-api-key": ADMIN_KEY})
        assert response.status == 200
        for key in (KEY, ADMIN_KEY):
            assert key.encode() not in response.body
    finally:
        server.close()


def test_sec_18_a_control_port_wants_the_admin_key(small_model_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(small_model_path, "--control-port", str(port), "--admin-key", ADMIN_KEY)
    try:
        assert request(port, "GET", "/v1/models").status == 401
        assert request(port, "GET", "/v1/models", Authorization="Bearer wrong").status == 401
        assert request(port, "GET", "/v1/models", Authorization=f"Bearer {ADMIN_KEY}").status == 200
        assert request(server.port, "GET", "/v1/models").status == 200
    finally:
        server.close()
    assert not list(server.run_dir.parent.glob(f"{server.run_dir.name}/control-*"))


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--admin-on-public"], "--admin-on-public needs --admin-key"),
        (["--control-port", "9"], "--control-port needs --admin-key"),
        (["--api-key", "one,two", "--admin-key", "two"], "one of the clients' keys"),
        (["--api-key-file", "/nowhere/keys"], "--api-key-file /nowhere/keys: No such file"),
        (["--admin-key-file", "/nowhere/keys"], "--admin-key-file /nowhere/keys: No such file"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(StartError, match=re.escape(problem)):
        read_access_settings(load_settings(flags, {}))


@pytest.mark.parametrize("text", ["", "\n\n", "# none\n"])
def test_a_file_without_a_key_does_not_leave_the_server_open(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(StartError, match="holds no key"):
        read_access_settings(Settings(api_key_file=str(path)))


def test_keys_from_all_sources_count_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("two\n  three  \n")
    settings = Settings(api_key="one, two", api_key_file=str(path), admin_key="admin")
    assert read_access_settings(settings) == AccessSettings(("one", "two", "three"), "admin")


@pytest.mark.parametrize(
    ("host", "keys", "cert", "part"),
    [
        ("127.0.0.1", (), "", ""),
        ("127.0.0.1", ("k",), "", ""),
        ("0.0.0.0", (), "", "anybody"),
        ("0.0.0.0", ("k",), "", "in the clear"),
        ("0.0.0.0", ("k",), "cert.pem", ""),
        ("", ("k",), "", "all addresses"),
    ],
)
def test_a_public_address_without_protection_is_warned_of(
    host: str, keys: tuple[str, ...], cert: str, part: str
) -> None:
    warning = warning_of(Settings(host=host, tls_cert=cert), AccessSettings(keys))
    assert (part in warning) if part else (warning == "")


def test_children_get_their_keys_through_the_environment_not_the_command_line() -> None:
    settings = load_settings(["--api-key", KEY], {})
    assert settings.as_environment()["TOKENWAY_API_KEY"] == KEY
    assert json.dumps(repr(settings)).find(KEY) == -1

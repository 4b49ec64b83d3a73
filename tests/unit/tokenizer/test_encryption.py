"""HTTPS: the whole way through it, and files that cannot be used."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.runtime.config import Settings
from services.runtime.service import Process, StartError
from services.tokenizer.encryption import encryption_of
from services.tokenizer.service import main
from services.wire.endpoints import Identity
from services.wire.members import Role
from tests.sockets import wait_until
from tests.unit.tokenizer.backend_peers import Server
from tests.unit.tokenizer.http_client import Connection, EventReader, text_of
from tests.unit.tokenizer.scripts import answering

TEXT = ["Hello", " 世界", " 🙂"]


@dataclass(frozen=True)
class Files:
    """A certificate for localhost and its key."""

    cert: Path
    key: Path


def make_files(folder: Path, *options: str) -> Files:
    """By the command line tool that operators use too."""
    files = Files(folder / "cert.pem", folder / "key.pem")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2",
            "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(files.key),
            "-out", str(files.cert), *options,
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("tls"), "-nodes")


def connect(port: int, files: Files, most: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> Connection:
    """An encrypted connection that knows whom it speaks to."""
    context = ssl.create_default_context(cafile=str(files.cert))
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = most
    connection = Connection(port)
    connection.sock = context.wrap_socket(connection.sock, server_hostname="localhost")
    return connection


@pytest.fixture(scope="module")
def encrypted(small_model_path: Path, files: Files) -> Iterator[Server]:
    def is_ready(port: int) -> bool:
        with connect(port, files) as connection:
            connection.send("POST", "/v1/completions", b"{")
            return connection.read_response().status == 400

    flags = ("--tls-cert", str(files.cert), "--tls-key", str(files.key), "--head-timeout-s", "1")
    server = Server(small_model_path, *flags, is_ready=is_ready)
    server.backend.script = answering(TEXT)
    yield server
    server.close()


@pytest.mark.parametrize("most", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_answers_and_streams_come_through(encrypted: Server, files: Files, most: ssl.TLSVersion) -> None:
    assert "listening on https://127.0.0.1:" in encrypted.wait_for_line("listening on")
    with connect(encrypted.port, files, most) as connection:
        connection.send("POST", "/v1/completions", {"prompt": "x"})
        assert connection.read_response().json()["choices"][0]["text"] == "".join(TEXT)
        connection.send("POST", "/v1/completions", {"prompt": "x", "stream": True})
        reader = EventReader(connection)
        assert text_of(reader.rest()) == "".join(TEXT)


def test_nothing_older_than_tls_1_2_is_spoken(encrypted: Server, files: Files) -> None:
    context = encryption_of(Settings(tls_cert=str(files.cert), tls_key=str(files.key)))
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    old_hello = bytes.fromhex("160301002d010000290301" + "00" * 32 + "000002002f0100")  # TLS 1.0
    with Connection(encrypted.port) as connection:
        connection.sock.sendall(old_hello)
        answer = connection.sock.recv(100)
    assert answer == b"" or answer[0] == 21  # an alert, no hello


def test_plain_http_gets_nothing_there(encrypted: Server, files: Files) -> None:
    with Connection(encrypted.port) as connection:
        connection.send("GET", "/v1/models")
        answer = connection.sock.recv(100)
    assert b"HTTP" not in answer
    assert b"small" not in answer


def test_sec_16_a_client_that_never_agrees_on_keys_is_cut(encrypted: Server, files: Files) -> None:
    with Connection(encrypted.port) as silent, connect(encrypted.port, files) as other:
        other.send("GET", "/live")
        assert other.read_response().status == 200
        wait_until(silent.is_closed)


def test_the_control_socket_needs_no_certificate(encrypted: Server) -> None:
    [path] = encrypted.run_dir.glob("control-*.sock")
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(str(path))
        control.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert control.recv(100).startswith(b"HTTP/1.1 200")


# ---------------------------------------------------------------- files


def refusal(cert: object, key: object) -> str:
    with pytest.raises(StartError) as caught:
        encryption_of(Settings(tls_cert=str(cert), tls_key=str(key)))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_plain_http_is_the_default() -> None:
    assert encryption_of(Settings()) is None


def test_a_certificate_without_a_key_is_refused(files: Files) -> None:
    assert "go together" in refusal(files.cert, "")
    assert "go together" in refusal("", files.key)


def test_files_that_cannot_be_used_are_named(files: Files, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    other = make_files(tmp_path, "-nodes")
    assert re.search(r"--tls-cert /nowhere\.pem: No such file", refusal("/nowhere.pem", files.key))
    assert re.search(r"--tls-key /nowhere\.pem: No such file", refusal(files.cert, "/nowhere.pem"))
    assert str(empty) in refusal(empty, files.key)
    assert str(empty) in refusal(files.cert, empty)
    assert "mismatch" in refusal(files.cert, other.key)
    assert "go together" not in refusal(files.key, files.cert)


def test_an_encrypted_key_is_refused_and_nobody_is_asked(files: Files, tmp_path: Path) -> None:
    locked = make_files(tmp_path, "-passout", "pass:secret")
    assert "is encrypted" in refusal(locked.cert, locked.key)


def test_a_bad_file_ends_the_process_before_it_binds_anything(small_model_path: Path) -> None:
    settings = Settings(model=str(small_model_path), tls_cert="/nowhere.pem", tls_key="/nowhere.pem")
    with pytest.raises(StartError, match=r"--tls-cert /nowhere\.pem: No such file"):
        main(Process(settings, Identity(Role.TOKENIZER, "t")))

"""A tokenizer process for tests that do not end it, and a way to start others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.wire.members import Role
from tests.sockets import wait_until
from tests.unit.tokenizer.backend_peers import READY_LOAD, Server, write_small_model
from tests.unit.tokenizer.http_client import request


@pytest.fixture(scope="session")
def small_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def shared_server(small_model_path: Path) -> Iterator[Server]:
    server = Server(small_model_path)
    yield server
    server.close()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The shared process, ready, with nothing open; afterwards it must still be alive and have logged no trace."""
    shared_server.backend.script = None
    wait_until(lambda: request(shared_server.port, "POST", "/v1/completions", b"{").status == 400)
    shared_server.backend.forget()
    yield shared_server
    backend = shared_server.backend
    backend.tell_roles(Role.SCHEDULER, Role.GPU_WORKER, Role.DETOKENIZER)
    backend.tell_load(**{name: getattr(READY_LOAD, name) for name in READY_LOAD.__slots__})
    assert shared_server.process.poll() is None
    assert not [line for line in shared_server.lines if "Traceback" in line]


@pytest.fixture
def start_server(small_model_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts processes of the test's own, by their flags."""
    servers: list[Server] = []

    def start(*flags: str, model: Path = small_model_path, **options: Any) -> Server:
        servers.append(Server(model, *flags, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()

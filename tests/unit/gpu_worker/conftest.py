"""A tiny model, sockets, and what the worker gives when nothing disturbs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.random_checkpoints import write_checkpoint
from services.runtime.config import Settings
from tests.sockets import Sockets, sockets
from tests.unit.gpu_worker.worker_peer import SHAPE, TestScheduler, new_requests, worker_settings, worker_thread


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", SHAPE)


@pytest.fixture
def net() -> Iterator[Sockets]:
    with sockets() as made:
        yield made


@pytest.fixture
def settings(tiny_llama: Path, net: Sockets) -> Settings:
    return worker_settings(tiny_llama, net.directory)


@pytest.fixture(scope="session")
def alone(tiny_llama: Path) -> list[list[int]]:
    """What each of `new_requests` gives when it is the only one."""
    requests = new_requests()
    with sockets() as own, worker_thread(worker_settings(tiny_llama, own.directory)):
        scheduler = TestScheduler(own)
        scheduler.wait_ready()
        writer = scheduler.new_writer()
        for request in requests:
            scheduler.generate(writer, [request])
    return [request.output for request in requests]

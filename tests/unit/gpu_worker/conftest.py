"""A tiny model, sockets, and what the worker gives when nothing disturbs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.random_checkpoints import write_checkpoint
from services.gpu_worker.weights import LoadedModel, load_model
from services.model_files.source import open_model
from services.runtime.config import Settings
from tests.sockets import Sockets, sockets
from tests.unit.gpu_worker.step_bench import CPU
from tests.unit.gpu_worker.worker_peer import SHAPE, new_requests, serving, worker_settings


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", SHAPE)


@pytest.fixture(scope="session")
def model(tiny_llama: Path) -> LoadedModel:
    return load_model(open_model(tiny_llama), CPU)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes with one thread: small steps are faster so, and the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def net(made: Sockets) -> Sockets:
    """Where a worker and its scheduler meet."""
    return made


@pytest.fixture
def settings(tiny_llama: Path, net: Sockets) -> Settings:
    return worker_settings(tiny_llama, net.directory)


@pytest.fixture(scope="session")
def alone(tiny_llama: Path) -> list[list[int]]:
    """What each of `new_requests` gives when it is the only one."""
    requests = new_requests()
    with sockets() as own, serving(worker_settings(tiny_llama, own.directory), own) as (scheduler, _):
        writer = scheduler.new_writer()
        for request in requests:
            scheduler.generate(writer, [request])
    return [request.output for request in requests]


@pytest.fixture
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test on as many of torch's threads as its parameter says."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)

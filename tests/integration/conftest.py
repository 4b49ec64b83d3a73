"""Servers that several test files share, each started once and checked for leaks when a file is through with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.model_files.source import open_model
from services.model_files.tokenizer import load_tokenizer
from tests.integration.client import Client
from tests.integration.server import Server, running


@pytest.fixture(scope="session")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    """The real model's, to decode what transformers' ids should look like."""
    return load_tokenizer(open_model(str(smollm2_path))).tokenizer


def _checked(server: Server) -> Iterator[Client]:
    """The server's client; afterwards nothing may be open, no page lost, nothing complained of."""
    client = Client(server)
    yield client
    client.wait_idle()
    assert "Traceback" not in server.log()
    assert client.scheduler("dropped_messages_total") == 0


@contextmanager
def _with_room(model: Path, numerics: str) -> Iterator[Server]:
    """Pages of one token, room for everything, one plan ahead."""
    settings = {"page_size": 1, "kv_cache_tokens": 16384, "max_running_requests": 64, "chunked_prefill_size": 128}
    with running(model, num_threads=1, write_timeout_s=900, numerics=numerics, **settings) as server:
        yield server


@pytest.fixture(scope="session")
def _page_1_server(smollm2_path: Path) -> Iterator[Server]:
    with _with_room(smollm2_path, "exact") as server:
        yield server


@pytest.fixture(scope="session")
def _quick_server(smollm2_path: Path) -> Iterator[Server]:
    with _with_room(smollm2_path, "fast") as server:
        yield server


@pytest.fixture(scope="module")
def page_1(_page_1_server: Server) -> Iterator[Client]:
    """Pages of one token, room for everything; an answer is the same alone and among others."""
    yield from _checked(_page_1_server)


@pytest.fixture(scope="module")
def quick(_quick_server: Server) -> Iterator[Client]:
    """The same in the numerics that users have, whose steps are several times as fast: for what answers look like.

    Texts that it is asked for must be those of the prompts whose gap no rounding closes, see `client`.
    """
    yield from _checked(_quick_server)


@pytest.fixture(scope="module")
def small(smollm2_path: Path) -> Iterator[Client]:
    """A KV pool of 64 tokens in pages of one, prompts computed 16 tokens at a time."""
    settings = {"page_size": 1, "kv_cache_tokens": 64, "chunked_prefill_size": 16}
    with running(smollm2_path, num_threads=1, **settings) as server:
        yield from _checked(server)


@pytest.fixture(scope="module")
def one_by_one(smollm2_path: Path) -> Iterator[Client]:
    """The reference: no plan ahead, whole prompts, pages of 16."""
    with running(
        smollm2_path, num_threads=1, plans_ahead=0, chunked_prefill_size=-1, page_size=16, kv_cache_tokens=4096
    ) as server:
        yield from _checked(server)


@pytest.fixture(scope="module")
def narrow(smollm2_path: Path) -> Iterator[Client]:
    """One request runs, two may wait."""
    with running(
        smollm2_path, num_threads=1, max_running_requests=1, max_queued_requests=2, kv_cache_tokens=8192
    ) as server:
        yield from _checked(server)

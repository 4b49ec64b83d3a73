"""What /openapi.json says is what the server does: thousands of requests made of it, right and wrong."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.integration.client import TEXT, Client
from tests.integration.described_requests import Totals, ask_as_described
from tests.integration.server import Server, running
from tests.integration.tiny_model import write_tiny_model

FEW, MANY = 200, 10_000
FIXED = {"prompt": "the same as before", "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    with running(folder, num_threads=1, kv_cache_tokens=16384, max_choices=2) as server:
        yield server


def process_ids(server: Server) -> set[int]:
    return {child.pid for child in psutil.Process(server.process.pid).children(recursive=True)}


def hold_to_description(server: Server, num_requests: int) -> Totals:
    """Sends the requests; every process lives on and a fixed request still gives its text."""
    client = Client(server)
    before, ids = client.ask(TEXT, **FIXED).text, process_ids(server)
    totals = ask_as_described(server.url, num_requests)
    assert process_ids(server) == ids
    assert client.ask(TEXT, **FIXED).text == before
    client.wait_idle()
    assert "Traceback" not in server.log()
    return totals


@pytest.mark.slow
@pytest.mark.surface
@pytest.mark.timeout(600)
def test_api_04_some_hundred_requests_made_of_the_description(tiny: Server) -> None:
    totals = hold_to_description(tiny, FEW)
    assert totals.with_status(200) > FEW // 20
    assert totals.with_status(400) > FEW // 20


@pytest.mark.slow
@pytest.mark.schemathesis
@pytest.mark.timeout(7200)
def test_prc_05_ten_thousand_requests_made_of_the_description(tiny: Server) -> None:
    totals = hold_to_description(tiny, MANY)
    assert totals.num_requests >= MANY
    print(sorted(totals.statuses.items()))

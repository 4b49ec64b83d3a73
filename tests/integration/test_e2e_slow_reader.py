"""A client that hardly reads: its answer is kept for it in bounded memory, and nobody waits for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest

from tests.integration.client import NUM, NUM_TEXT, TEXT, Client, PatientReader, read_stream, streamed
from tests.integration.server import Server

pytestmark = pytest.mark.timeout(1200)
MOST_GROWTH_BYTES = 50 * 2**20


def sizes(server: Server) -> dict[str, int]:
    """Resident bytes of each process that handles text."""
    children = psutil.Process(server.process.pid).children()
    found = {child.cmdline()[-1]: child.memory_info().rss for child in children}
    return {name: size for name, size in found.items() if name != "services.gpu_worker"}


@pytest.mark.slow
def test_sse_16_a_slow_reader_delays_nobody_costs_little_and_loses_nothing(page_1: Client) -> None:
    """4,000 tokens for a client that takes a byte a second, eight others beside it."""
    assert isinstance(page_1.server, Server)
    before = sizes(page_1.server)
    assert len(before) == 3
    normal = partial(page_1.stream, TEXT, prompt=NUM, max_tokens=40, ignore_eos=True)
    with page_1.connect(receive_buffer=2048) as connection, ThreadPoolExecutor(8) as pool:
        connection.send("POST", TEXT, streamed({"prompt": NUM, "n": 8, "max_tokens": 500, "ignore_eos": True}))
        others = [pool.submit(normal) for _ in range(8)]
        while not all(other.done() for other in others):
            connection.fill(1)
            assert not page_1.server.has_ended(within_s=1)
        assert [other.result().text for other in others] == [NUM_TEXT] * 8
        page_1.wait_until(lambda: page_1.scheduler("num_requests_running") == 0, within_s=900)
        page_1.settle()
        after = sizes(page_1.server)
        assert {name: size for name, size in after.items() if size > before[name] + MOST_GROWTH_BYTES} == {}
        answer = read_stream(PatientReader(connection))
    assert answer.finish_reasons == ["length"] * 8
    assert answer.completion_tokens == 4000
    assert set(answer.texts) == {answer.text}
    assert answer.text.startswith(NUM_TEXT)

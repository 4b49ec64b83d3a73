"""What `bench.peers` measures: a server over HTTP, llama-server started for a load, transformers in this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.launcher.bench.report import Report
from services.launcher.bench.runner import Pace, run_sessions
from services.launcher.bench.sessions import RequestForm, Session
from services.launcher.bench.workloads import Lengths, Workload
from services.launcher.errors import CommandError
from services.launcher.http.client import Client
from services.launcher.http.server_address import ServerAddress
from services.runtime.service import die_with_parent

_IDS = range(1000, 30000)
_WARM_UP = Lengths(16, 4)
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0
_STREAM_OUTPUT_TOKENS_PER_S = 38.0
"""Of one stream on two cores; of n streams, the square root of n times as much. Only for the first estimate."""
_INPUT_TOKENS_PER_S = 1000.0

Contender = Callable[["Load", int, float], float]
"""Runs a load with prompts of a seed and returns the figure that counts; OutOfTimeError past so many seconds."""


class OutOfTimeError(CommandError):
    """A run takes longer than was left."""


@dataclass(frozen=True)
class Load:
    """One workload.

    Attributes:
        name: as printed.
        streams: connections that are busy at a time.
        requests: of a round.
        shared: prompt tokens that are the same in all requests.
        prompt: prompt tokens of each request's own.
        output: tokens of each answer.
        figure: which figure counts: `output_tokens_per_s` (more is better) or `ttft` (median ms, less is better).
    """

    name: str
    streams: int
    requests: int
    shared: int
    prompt: int
    output: int
    figure: str = "output_tokens_per_s"

    @property
    def tokens_of_a_slot(self) -> int:
        """What one request takes of a context, with room to spare."""
        return self.shared + self.prompt + self.output + 64

    @property
    def expected_s(self) -> float:
        """How long a run of a small model takes on two cores, more or less."""
        num_input, num_output = self.shared + self.requests * self.prompt, self.requests * self.output
        return num_input / _INPUT_TOKENS_PER_S + num_output / (_STREAM_OUTPUT_TOKENS_PER_S * math.sqrt(self.streams))

    def figure_of(self, report: Report) -> float:
        """The figure of a run."""
        return report.ttft.median_ms if self.figure == "ttft" else report.output_tokens_per_s

    def sessions(self, seed: int) -> list[Session]:
        """The requests of a round."""
        workload = Workload(Lengths(self.prompt, self.output), seed, _IDS, self.shared)
        return [workload.session(number) for number in range(self.requests)]


@contextlib.contextmanager
def llama_server(program: Path, gguf: Path, threads: int, load: Load) -> Iterator[str]:
    """A running llama-server and its address; as many slots as streams.

    Raises:
        CommandError: it ended, or was not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = load.streams * load.tokens_of_a_slot
    words = ["-m", gguf, "-np", load.streams, "-t", threads, "-c", context, "--port", port, "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [program, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url)
        yield url
    finally:
        _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        with contextlib.suppress(CommandError, OSError):
            Client(ServerAddress.parse(url)).first_model()
            return
        if process.poll() is not None:
            raise CommandError(f"llama-server ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise CommandError(f"llama-server is not ready after {_START_TIMEOUT_S:.0f} s")
        time.sleep(0.2)  # between two questions whether it is ready


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def over_http(url: str) -> Contender:
    """A server; a run follows one request that does not count. A wrong answer is a CommandError."""
    address = ServerAddress.parse(url)
    form = RequestForm(Client(address).first_model(), is_chat=False)

    async def ask(load: Load, seed: int, limit_s: float) -> Report:
        warm_up = Workload(_WARM_UP, seed, _IDS).session(0)
        try:
            async with asyncio.timeout(limit_s):
                await run_sessions(address, form, [warm_up], Pace(1))
                return Report.of(*await run_sessions(address, form, load.sessions(seed), Pace(load.streams)))
        except TimeoutError:
            raise _too_long(load) from None

    def run(load: Load, seed: int, limit_s: float) -> float:
        report = asyncio.run(ask(load, seed, limit_s))
        if report.failures:
            raise CommandError(f"{load.name}: {next(iter(report.failures))}")
        return load.figure_of(report)

    return run


def of_transformers(gguf: Path, threads: int) -> Contender:
    """The library's own `generate` in this process, in float32: one batch after another, each of as many as streams."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)

    def generate(sessions: list[Session], limit_s: float) -> int:
        """Answers a batch; the tokens of each answer, fewer than were wanted when the time was over."""
        ids = torch.tensor([list(session.turns[0].prompt) for session in sessions])
        wanted = sessions[0].turns[0].output_tokens
        lengths = {"max_new_tokens": wanted, "min_new_tokens": wanted, "max_time": max(limit_s, 0.0)}
        mask = torch.ones_like(ids)
        answers = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
        return int(answers.shape[1] - ids.shape[1])

    def run(load: Load, seed: int, limit_s: float) -> float:
        deadline = time.monotonic() + limit_s
        sessions = load.sessions(seed)
        generate([Workload(_WARM_UP, seed, _IDS).session(0)], limit_s)
        began = time.perf_counter()
        for first in range(0, load.requests, load.streams):
            batch = sessions[first : first + load.streams]
            if generate(batch, deadline - time.monotonic()) != load.output:
                raise _too_long(load)
        return load.requests * load.output / (time.perf_counter() - began)

    return run


def _too_long(load: Load) -> OutOfTimeError:
    return OutOfTimeError(f"{load.name}: not done in the time that is left; see --max-minutes")

"""The client of `bench.pipeline`, a process of its own: many streams at once, every token checked.

    python -m bench.pipeline_client --url URL --model FILE --streams 256 ... --watch scheduler=PID tokenizer=PID

Processor times are read when the last stream has begun and when the first one has ended: between the two all streams
run. Texts are compared with what the fake model must say, after the measurement. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.fake_model import answer_ids, plain_token_ids
from bench.process_times import cpu_seconds
from services.launcher.bench.answers import Answer, Expected, read_answer
from services.launcher.bench.summary import summarize
from services.launcher.http.client import Client
from services.launcher.http.connection import Connection
from services.launcher.http.response import Response
from services.launcher.http.server_address import ServerAddress
from services.model_files.source import open_model
from services.model_files.vocabulary import Vocabulary, load_vocabulary

_CLIENT = "client"


@dataclass
class Window:
    """The time in which all streams run, and the processor time that each process used in it."""

    num_streams: int
    watched: dict[str, int]
    num_begun: int = 0
    begin_s: float = 0.0
    end_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)

    def stream_begins(self) -> None:
        """The first text of one stream has come."""
        self.num_begun += 1
        if self.num_begun == self.num_streams:
            self.cpu_s = self._read()
            self.begin_s = time.perf_counter()

    def stream_ends(self) -> None:
        """One stream has got its last text."""
        if self.begin_s and not self.end_s:
            self.end_s = time.perf_counter()
            now = self._read()
            self.cpu_s = {name: now[name] - before for name, before in self.cpu_s.items()}

    def _read(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self.watched.items()} | {_CLIENT: time.process_time()}


async def _run(options: argparse.Namespace, prompts: Sequence[list[int]], window: Window) -> list[Response]:
    model = Client(ServerAddress.parse(options.url)).first_model()
    connections = await asyncio.gather(*(Connection.open(options.url) for _ in prompts))

    async def stream(connection: Connection, prompt: list[int]) -> Response:
        num_events = 0

        def on_event(time_s: float) -> None:
            nonlocal num_events
            num_events += 1
            if num_events == 1:
                window.stream_begins()
            elif num_events == options.output_tokens:
                window.stream_ends()

        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": options.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        response = await connection.request("POST", "/v1/completions", body, on_event)
        window.stream_ends()  # for a stream whose tokens shared events
        return response

    responses = await asyncio.gather(*(stream(*pair) for pair in zip(connections, prompts, strict=True)))
    for connection in connections:
        connection.close()
    return responses


def _wrong_texts(answers: Sequence[Answer], prompts: Sequence[list[int]], vocabulary: Vocabulary) -> int:
    plain_ids = plain_token_ids(vocabulary)
    num_wrong = 0
    for answer, prompt in zip(answers, prompts, strict=True):
        ids = answer_ids(prompt, answer.output_tokens, plain_ids)
        num_wrong += answer.text.encode() != b"".join(map(vocabulary.token_bytes, ids))
    return num_wrong


def _report(answers: Sequence[Answer], window: Window, num_wrong: int) -> dict[str, Any]:
    times_s = [time_s for answer in answers for time_s in answer.text_times_s]
    num_tokens = sum(window.begin_s < time_s <= window.end_s for time_s in times_s)
    gaps_s = [
        gap
        for answer in answers
        for time_s, gap in zip(answer.text_times_s[1:], answer.gaps_s, strict=True)
        if window.begin_s < time_s <= window.end_s
    ]
    failures = [answer.failure for answer in answers if answer.failure]
    return {
        "streams": len(answers),
        "failures": failures[:3],
        "num_failed": len(failures),
        "num_wrong_texts": num_wrong,
        "tokens": sum(answer.output_tokens for answer in answers),
        "events": len(times_s),
        "window_s": round(window.end_s - window.begin_s, 3),
        "window_tokens": num_tokens,
        "cpu_us_per_token": {name: round(1e6 * cpu_s / max(num_tokens, 1), 2) for name, cpu_s in window.cpu_s.items()},
        "ttft": dataclasses.asdict(summarize([answer.first_s for answer in answers if not answer.failure])),
        "itl": dataclasses.asdict(summarize(gaps_s)),
    }


def main(arguments: Sequence[str]) -> int:
    """Runs and prints; status 1 when a stream failed or has another text than it must have."""
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline_client")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    parser.add_argument("--watch", nargs="*", default=[], metavar="NAME=PID")
    options = parser.parse_args(arguments)
    vocabulary = load_vocabulary(open_model(str(options.model)))
    plain_ids = plain_token_ids(vocabulary)
    generator = random.Random(0)
    prompts = [[generator.choice(plain_ids) for _ in range(options.prompt_tokens)] for _ in range(options.streams)]
    window = Window(options.streams, {name: int(pid) for name, _, pid in (w.partition("=") for w in options.watch)})
    gc.collect()
    gc.disable()  # this process ends soon; a collection would look like a pause of the server
    responses = uvloop.run(_run(options, prompts, window))
    expected = Expected(options.output_tokens, options.prompt_tokens)
    answers = [read_answer(response, expected) for response in responses]
    report = _report(answers, window, _wrong_texts(answers, prompts, vocabulary))
    print(json.dumps(report))
    return 1 if report["num_failed"] or report["num_wrong_texts"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

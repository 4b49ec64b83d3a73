"""Microseconds per token of the detokenizer's pure core: many streams, one token each at a time.

    python -m bench.detokenizer_core [MODEL] [--streams 256] [--tokens 400]

Measures `Decoders.advance` from a `TokensProduced` in memory to the `TextChunks` it gives; encoding and sockets are not
in it. Prints the machine, the commit and the best of several runs.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator

from bench.provenance import provenance
from services.detokenizer.decoders import Decoders
from services.detokenizer.incremental import TokenPieces
from services.launcher.models import resolve_model
from services.model_files.source import open_model
from services.model_files.vocabulary import load_vocabulary
from services.runtime.config import Settings
from services.wire.answers import DecodeOpen, TokensProduced
from services.wire.columns import pack_int32, pack_request_ids
from services.wire.request_params import TextParams

CASES: dict[str, tuple[str, ...]] = {
    "no stop": (),
    "1 stop, rare": ("\n\nUser:",),
    "1 stop, often begun": (" the end of",),
    "4 stops": ("\n\n", "</s>", "Observation:", "✿RESULT✿"),
}


def batches(request_ids: list[bytes], tokens: list[list[int]]) -> Iterator[TokensProduced]:
    """Step k gives token k of every stream."""
    num_streams = len(request_ids)
    for index, step_ids in enumerate(zip(*tokens, strict=True)):
        yield TokensProduced(
            request_ids=pack_request_ids(request_ids),
            attempts=pack_int32([0] * num_streams),
            first_indexes=pack_int32([index] * num_streams),
            counts=pack_int32([1] * num_streams),
            token_ids=pack_int32(step_ids),
            finishes=bytes(num_streams),
            cached_tokens=pack_int32([0] * num_streams),
        )


def microseconds_per_token(pieces: TokenPieces, stops: tuple[str, ...], tokens: list[list[int]]) -> float:
    decoders = Decoders(pieces)
    request_ids = [os.urandom(16) for _ in tokens]
    for request_id in request_ids:
        decoders.open(DecodeOpen(request_id, 0, b"tokenizer/a/1", TextParams(stops, False, True, 0)))
    steps = list(batches(request_ids, tokens))
    start = time.process_time()
    for step in steps:
        decoders.advance(step)
        outgoing = decoders.take_outgoing()
        outgoing.for_tokenizers()
        outgoing.for_scheduler()
    elapsed_s = time.process_time() - start
    return 1e6 * elapsed_s / decoders.statistics.num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", default="smollm2:135m", help="whose vocabulary is used")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    model = resolve_model(options.model, Settings()).path
    pieces = TokenPieces(load_vocabulary(open_model(model)))
    for key, value in provenance().items():
        print(f"{key}: {value}")
    print(f"{options.streams} streams x {options.tokens} random tokens, one a step; best of {options.runs} runs")
    draw = random.Random(0)
    tokens = [[draw.randrange(3, 40_000) for _ in range(options.tokens)] for _ in range(options.streams)]
    for name, stops in CASES.items():
        best = min(microseconds_per_token(pieces, stops, tokens) for _ in range(options.runs))
        print(f"{name:22s} {best:6.2f} us per token")


if __name__ == "__main__":
    main()

"""The grammar child of a gpu_worker: compiles what clients send, so that the worker never has to stand a bad grammar.

`python -m services.gpu_worker.grammar_child MODEL WIDTH TIMEOUT_S MEMORY_MIB`: frames of `CompileGrammar` come in on
standard input, one of `GrammarCompiled` goes out on standard output for each. A grammar that takes longer, or more
memory, ends the process; the worker starts another one. It ends with its worker too: its input does.

It owns nothing that outlives it. It must never import torch: it has to start fast and stay small.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import sys
from contextlib import suppress
from typing import BinaryIO

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from services.gpu_worker.grammar_problems import MAX_PROBLEM_CHARS, problem_of_matcher
from services.gpu_worker.grammar_text import MAX_FORCED, STEP_LIMITS, library_grammar
from services.gpu_worker.grammar_vocabulary import library_tokenizer
from services.model_files.source import open_model
from services.model_files.vocabulary import load_vocabulary
from services.wire.codec import decode, encode
from services.wire.steps import CompileGrammar, GrammarCompiled

READY = b"ready\n"
LENGTH_BYTES = 4
_WALKED_TOKENS = 16
_GRACE = 1.5  # the worker kills a child that is late; if the worker is gone, an alarm does a little later

logger = logging.getLogger(__name__)


def problem_of(request: CompileGrammar, tokenizer: LLTokenizer) -> str:
    """Why a grammar cannot be used; "" when it can."""
    try:
        text = library_grammar(request.grammar)
    except ValueError as error:
        return str(error)[:MAX_PROBLEM_CHARS]
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=STEP_LIMITS)
    _walk(matcher)
    return problem_of_matcher(matcher, request.grammar)


def _walk(matcher: LLMatcher) -> None:
    """Begins an answer as rows will: the first masks cost most, and many a grammar grows too large in one of them."""
    draw = random.Random(0)  # the same grammar always gets the same verdict
    for _ in range(_WALKED_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            return
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if matcher.is_error() or not len(allowed):
            return
        matcher.consume_token(int(draw.choice(allowed)))
        if not matcher.is_error():
            matcher.consume_tokens(matcher.compute_ff_tokens()[:MAX_FORCED])


def serve(requests: BinaryIO, answers: BinaryIO, tokenizer: LLTokenizer, timeout_s: float) -> None:
    """Answers requests until there are no more."""
    while header := requests.read(LENGTH_BYTES):
        request = decode(requests.read(int.from_bytes(header, "big")))
        if not isinstance(request, CompileGrammar):
            raise TypeError(f"a {type(request).__name__} is no request to compile")
        signal.setitimer(signal.ITIMER_REAL, timeout_s * _GRACE)
        problem = problem_of(request, tokenizer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        frame = encode(GrammarCompiled(request.request_id, request.attempt, problem))
        answers.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
        answers.flush()


def limit_memory(num_bytes: int) -> None:
    """Lets this process map so much more than it has: an allocation beyond that fails and ends it."""
    with open("/proc/self/statm", encoding="ascii") as file:
        has_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has_bytes + num_bytes,) * 2)


def main(model: str, width: str, timeout_s: str, memory_mib: str) -> None:
    """Loads the vocabulary, says so, and serves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the worker ends this process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    tokenizer = library_tokenizer(load_vocabulary(open_model(model)), int(width))
    with suppress(OSError, ValueError):  # a system that knows no such limit still has the time limit
        limit_memory(int(memory_mib) * 2**20)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    sys.stdout.close()
    answers.write(READY)
    answers.flush()
    serve(sys.stdin.buffer, answers, tokenizer, float(timeout_s))


if __name__ == "__main__":
    main(*sys.argv[1:])

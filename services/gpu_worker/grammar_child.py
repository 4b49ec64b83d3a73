"""The grammar child of a gpu_worker: compiles what clients send, so that the worker never has to stand a bad grammar.

`python -m services.gpu_worker.grammar_child MODEL WIDTH TIMEOUT_S MEMORY_MIB`: frames of `CompileGrammar` come in on
standard input, one of `GrammarCompiled` goes out on standard output for each. A grammar that takes longer, or more
memory, ends the process; the worker starts another one. It ends with its worker too: its input does.

It owns nothing that outlives it. It must never import torch: it has to start fast and stay small.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import BinaryIO

from llguidance import LLMatcher, LLTokenizer

from services.gpu_worker.grammar_text import STEP_LIMITS, library_grammar
from services.gpu_worker.grammar_vocabulary import library_tokenizer
from services.model_files.source import open_model
from services.model_files.vocabulary import load_vocabulary
from services.wire.codec import decode, encode
from services.wire.steps import CompileGrammar, GrammarCompiled

READY = b"ready\n"
LENGTH_BYTES = 4
MAX_PROBLEM_CHARS = 1000
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
_GRACE = 1.5  # the worker kills a child that is late; if the worker is gone, an alarm does a little later

logger = logging.getLogger(__name__)


def problem_of(request: CompileGrammar, tokenizer: LLTokenizer) -> str:
    """Why a grammar cannot be used; "" when it can."""
    try:
        text = library_grammar(request.grammar)
    except ValueError as error:
        return str(error)[:MAX_PROBLEM_CHARS]
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=STEP_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first one costs most
    problem = _first_paragraph(matcher.get_error()) if matcher.is_error() else ""
    return "no text is a sentence of it" if problem in _DEAD_ENDS else problem


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


def _first_paragraph(error: str) -> str:
    """What the library says, without its dump of the state."""
    return error.split("\n<", 1)[0].strip()[:MAX_PROBLEM_CHARS] or "the grammar library refuses it"


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

"""gpu_worker: the grammars of the rows, and how far their answers have come: which ids may be next.

A matcher takes each id that its row got, and gives the mask for the next one: a bit for each id. Masks are made in a
thread beside the forward pass; the library leaves the interpreter to others meanwhile. Where the grammar leaves one way
to go on (the keys of a schema, say), the ids of that way are given at once: the row jumps ahead. They are the same ids
that the masks would have forced one by one, so an answer does not depend on jumping.

It owns the matchers of the rows. A grammar that fails fails its row alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from services.gpu_worker.grammar_compiler import GrammarCompiler
from services.gpu_worker.grammar_problems import is_too_large
from services.gpu_worker.grammar_seam import GrammarMasks
from services.gpu_worker.grammar_text import MAX_FORCED
from services.runtime.histogram import Histogram
from services.runtime.logs import about
from services.wire.columns import unpack_int32
from services.wire.finish import Finish
from services.wire.request_params import NO_LOGPROBS, Grammar
from services.wire.steps import NewRow

MASK_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    """One answer. `jumps`: whether forced ids are given at once; `finish`: why it failed, then `matcher` is None."""

    request_id: bytes
    grammar: Grammar
    matcher: LLMatcher | None
    jumps: bool
    finish: Finish = Finish.NONE


class MasksInTheMaking:
    """Masks that a thread is making."""

    def __init__(self, made: Future[tuple[GrammarMasks, float]], on_made: Callable[[float, float], None]) -> None:
        """`made`: the masks and how long they took; `on_made` is told that and how long somebody waited for them."""
        self._made = made
        self._on_made = on_made

    def wait(self) -> GrammarMasks:
        """The masks, once they are there."""
        started_s = time.perf_counter()
        masks, took_s = self._made.result()
        self._on_made(took_s, time.perf_counter() - started_s)
        return masks


class GrammarRows:
    """The rows that have a grammar."""

    def __init__(self, compiler: GrammarCompiler, width: int, jumps_ahead: bool) -> None:
        """`width`: how many ids the model's logits have."""
        self.compiler = compiler
        self._width = width
        self._jumps_ahead = jumps_ahead
        self._rows: dict[int, _Row] = {}
        self._thread: ThreadPoolExecutor | None = None
        self.num_forced = 0
        """Ids given without running the model for each."""
        self._advance_s = 0.0  # since the last masks were made
        self.mask_seconds = Histogram(MASK_BOUNDS_S)
        """What grammars cost in a step: its masks, and what its rows' matchers took since the last."""
        self.wait_seconds = Histogram(MASK_BOUNDS_S)
        """How long a step waited for its masks."""

    def set_up(self, new: NewRow) -> None:
        """A row whose answer has a grammar; its output so far is in its ids. One that cannot be set up fails later."""
        grammar = new.sampling.grammar
        assert grammar is not None
        jumps = self._jumps_ahead and new.sampling.num_logprobs == NO_LOGPROBS
        row = self._rows[new.row] = _Row(new.request_id, grammar, self.compiler.matcher(grammar), jumps)
        if row.matcher is None:
            row.finish = Finish.INTERNAL_ERROR
            logger.error("a row has a grammar that was not compiled here", extra=about(new.request_id))
            return
        self._consume(row, unpack_int32(new.token_ids)[new.num_prompt_tokens :])

    def release(self, row: int) -> None:
        """Nobody holds the row any more; it need not have had a grammar."""
        self._rows.pop(row, None)

    def release_all(self) -> None:
        """Nobody holds any row any more."""
        self._rows.clear()

    def begin_masks(self, rows: Sequence[int]) -> MasksInTheMaking:
        """Starts to make the masks of rows with a grammar, in this order."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        held = [self._rows[row] for row in rows]
        return MasksInTheMaking(self._thread.submit(self._masks, held), self._count)

    def advance(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[list[int]]:
        """Tells which id each row got; gives the ids that must follow each, mostly none."""
        started_s = time.perf_counter()
        forced = []
        for number, token_id in zip(rows, token_ids, strict=True):
            row = self._rows[number]
            self._consume(row, [token_id])
            forced.append(self._jump(row) if row.jumps else [])
        self._advance_s += time.perf_counter() - started_s
        return forced

    def close(self) -> None:
        """Ends the threads and the child."""
        if self._thread is not None:
            self._thread.shutdown()
        self.compiler.close()

    def _count(self, mask_s: float, wait_s: float) -> None:
        self.mask_seconds.observe(mask_s + self._advance_s)
        self.wait_seconds.observe(wait_s)
        self._advance_s = 0.0

    def _masks(self, rows: Sequence[_Row]) -> tuple[GrammarMasks, float]:
        started_s = time.perf_counter()
        bits = np.zeros((len(rows), -(-self._width // 32)), dtype=np.int32)
        for place, row in enumerate(rows):
            if row.matcher is not None:
                row.matcher.unsafe_compute_mask_ptr(bits[place].ctypes.data, bits.strides[0])
                self._check(row)
        masks = GrammarMasks(bits, np.array([row.finish for row in rows], dtype=np.int64))
        return masks, time.perf_counter() - started_s

    def _jump(self, row: _Row) -> list[int]:
        if row.matcher is None:
            return []
        forced = row.matcher.compute_ff_tokens()[:MAX_FORCED]
        if forced:
            self._consume(row, forced)
            self.num_forced += len(forced)
        return forced

    def _consume(self, row: _Row, token_ids: Sequence[int]) -> None:
        """Follows some ids. Behind a whole sentence nothing but an end id can come, and it changes nothing."""
        if row.matcher is not None and token_ids and not row.matcher.is_stopped():
            row.matcher.consume_tokens(list(token_ids))
            self._check(row)

    def _check(self, row: _Row) -> None:
        """Ends the row if its grammar has failed. Copies share what they have made, so the next row begins afresh."""
        if row.matcher is None or not row.matcher.is_error():
            return
        problem = row.matcher.get_error().split("\n", 1)[0]
        has_grown = is_too_large(row.matcher)
        log = logger.warning if has_grown else logger.error
        log("the grammar of a row fails: %s", problem, extra=about(row.request_id))
        row.finish = Finish.GRAMMAR_TOO_LARGE if has_grown else Finish.INTERNAL_ERROR
        row.matcher = None
        self.compiler.forget_matcher(row.grammar)

"""Grammars in running steps: masks, ids that follow without being sampled, and plans that did not know of them.

The grammar here is arithmetic: what may follow an id is a function of it. After a multiple of 7 exactly two ids follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from services.gpu_worker.bit_masks import pack_ids
from services.gpu_worker.grammar_seam import GrammarMasks
from services.gpu_worker.plan_check import PlanError
from services.gpu_worker.weights import LoadedModel
from services.wire.columns import unpack_int32
from services.wire.finish import Finish
from services.wire.request_params import Grammar, GrammarKind, SamplingParams
from services.wire.steps import NewRow
from tests.unit.gpu_worker.plan_writer import GREEDY, Request
from tests.unit.gpu_worker.rule_reference import rules
from tests.unit.gpu_worker.step_bench import NUM_OUTPUTS, new_bench
from tests.unit.gpu_worker.worker_peer import SHAPE

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = SHAPE.vocab_size
GRAMMAR = Grammar(GrammarKind.REGEX, "arithmetic")
BROKEN = Grammar(GrammarKind.REGEX, "broken")


def allowed_after(token_id: int) -> list[int]:
    if token_id % 7 == 0:
        return [(token_id + 1) % VOCAB_SIZE]
    if token_id % 7 == 1:
        return [(token_id + 5) % VOCAB_SIZE]
    return [other for other in range(VOCAB_SIZE) if other % 3 == (token_id + 1) % 3]


class Job:
    """Masks that are made when they are waited for."""

    def __init__(self, grammars: Arithmetic, rows: Sequence[int]) -> None:
        self._grammars, self._rows = grammars, list(rows)
        self._newest = [grammars.newest[row] for row in rows]

    def wait(self) -> GrammarMasks:
        assert self._newest == [self._grammars.newest[row] for row in self._rows]
        bits = [pack_ids(np.array(allowed_after(newest)), VOCAB_SIZE) for newest in self._newest]
        finishes = [Finish.GRAMMAR_TOO_LARGE if row in self._grammars.broken else Finish.NONE for row in self._rows]
        return GrammarMasks(np.stack(bits), np.array(finishes, dtype=np.int64))


class Arithmetic:
    """The newest id of each row with a grammar."""

    def __init__(self, jumps: bool) -> None:
        self.newest: dict[int, int] = {}
        self.broken: set[int] = set()
        self.num_forced = 0
        self._jumps = jumps

    def set_up(self, new: NewRow) -> None:
        assert new.row not in self.newest
        self.newest[new.row] = unpack_int32(new.token_ids)[-1]
        if new.sampling.grammar == BROKEN:
            self.broken.add(new.row)

    def release(self, row: int) -> None:
        del self.newest[row]
        self.broken.discard(row)

    def release_all(self) -> None:
        self.newest.clear()

    def begin_masks(self, rows: Sequence[int]) -> Job:
        return Job(self, rows)

    def advance(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[list[int]]:
        forced: list[list[int]] = []
        for row, token_id in zip(rows, token_ids, strict=True):
            assert token_id in allowed_after(self.newest[row])
            self.newest[row] = token_id
            followers: list[int] = []
            while self._jumps and len(allowed := allowed_after(self.newest[row])) == 1:
                followers += allowed
                self.newest[row] = allowed[0]
            forced.append(followers)
        self.num_forced += sum(map(len, forced))
        return forced


def new_requests() -> list[Request]:
    """Greedy and drawing ones, with penalties and bad words, and one without a grammar."""
    drawn = SamplingParams(1.4, 1.0, 0, 0.0, 3, 0, grammar=GRAMMAR)
    penalties = rules(frequency=0.8, presence=0.5, repetition=1.5, bad_words=[[8], [9, 14]])
    return [
        Request(1, [7, 2, 6], replace(GREEDY, grammar=GRAMMAR)),
        Request(2, [1] * 9, replace(drawn, rules=penalties)),
        Request(3, [20, 30, 49], replace(drawn, seed=11)),
        Request(4, [5, 4], replace(GREEDY, rules=penalties)),
        Request(5, [5, 4, 3], replace(drawn, seed=8, rules=penalties)),
    ]


@pytest.fixture(scope="module")
def sampled(model: LoadedModel) -> list[list[int]]:
    """What each gives alone when every id is sampled."""
    outputs = []
    for request in new_requests():
        new_bench(model, grammars=Arithmetic(jumps=False)).finish_all([request])
        outputs.append(request.output)
        if request.sampling.grammar is not None:
            tokens = request.token_ids[len(request.prompt) - 1 :]
            assert all(after in allowed_after(before) for before, after in pairwise(tokens))
    return outputs


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("plans_ahead", [0, 1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_any_course_gives_the_same_tokens_with_and_without_jumps(
    model: LoadedModel, sampled: list[list[int]], jumps: bool, plans_ahead: int, seed: int
) -> None:
    grammars, requests = Arithmetic(jumps), new_requests()
    new_bench(model, grammars=grammars).run_any_course(requests, seed, plans_ahead)
    assert [request.output[:NUM_OUTPUTS] for request in requests] == sampled
    assert (grammars.num_forced > 0) is jumps


def test_rows_run_one_by_one_keep_their_masks(
    model: LoadedModel, sampled: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = new_requests()
    bench = new_bench(model, grammars=Arithmetic(jumps=True))
    bench.refuse_rows_together(monkeypatch)
    bench.finish_all(requests)
    assert [request.output[:NUM_OUTPUTS] for request in requests] == sampled


def test_a_grammar_that_fails_ends_its_own_row(model: LoadedModel, sampled: list[list[int]]) -> None:
    requests = new_requests()
    bad = Request(9, [1, 2], replace(GREEDY, grammar=BROKEN))
    new_bench(model, grammars=Arithmetic(jumps=True)).finish_all([*requests, bad])
    assert bad.finish == Finish.GRAMMAR_TOO_LARGE
    assert bad.output == []
    assert [request.output[:NUM_OUTPUTS] for request in requests] == sampled


def test_the_grammar_has_the_last_word_over_contradicting_rules(model: LoadedModel) -> None:
    """After 48 only multiples of 3, plus 1; of these the rules leave none: no row fails, the grammar is obeyed."""
    wanted = rules(allowed=[3, 6, 9], min_tokens=9, stops=list(range(1, VOCAB_SIZE, 3)))
    request = Request(1, [48], replace(GREEDY, grammar=GRAMMAR, rules=wanted))
    new_bench(model, grammars=Arithmetic(jumps=False)).finish_all([request])
    assert not request.finish
    tokens = request.token_ids
    assert all(after in allowed_after(before) for before, after in pairwise(tokens))


def test_forced_ids_end_with_the_context(model: LoadedModel) -> None:
    class Endless(Arithmetic):
        def advance(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[list[int]]:
            return [[5] * 200 for _ in rows]

    request = Request(1, [3, 2], replace(GREEDY, grammar=GRAMMAR))
    bench = new_bench(model, grammars=Endless(jumps=True), max_model_len=20)
    bench.run((request, 2))
    assert len(request.token_ids) == 20
    assert request.output[1:] == [5] * 17


def test_a_grammar_that_this_worker_cannot_have_is_refused(model: LoadedModel) -> None:
    with pytest.raises(PlanError, match="has a grammar"):
        new_bench(model).run((Request(1, [3], replace(GREEDY, grammar=GRAMMAR)), 1))

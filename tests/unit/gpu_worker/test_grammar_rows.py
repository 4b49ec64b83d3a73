"""The grammars of rows: what may come next, what is forced, and what becomes of a row whose grammar fails."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from services.gpu_worker.grammar_compiler import GrammarCompiler
from services.gpu_worker.grammar_process import ChildSpec
from services.gpu_worker.grammar_rows import GrammarRows
from services.gpu_worker.grammar_text import MAX_FORCED
from services.model_files.source import open_model
from services.model_files.vocabulary import Vocabulary, load_vocabulary
from services.wire.columns import pack_int32
from services.wire.finish import Finish
from services.wire.request_params import Grammar, GrammarKind, SamplingParams
from services.wire.steps import CompileGrammar, NewRow

WIDTH = 49152
END = 2
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "customerName": {"type": "string", "maxLength": 6},
        "日本": {"enum": ["はい", "いいえ", "😀"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["customerName", "日本", "count"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, ensure_ascii=False))
CHOICE = Grammar(GrammarKind.REGEX, "yes|no")
LONG = Grammar(GrammarKind.REGEX, "lorem ipsum " * 200)
TOO_HARD = Grammar(GrammarKind.REGEX, "(.*a.{0,200}b){10}.*c")


@pytest.fixture(scope="module")
def compiler(smollm2_path: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(ChildSpec(str(smollm2_path), WIDTH, timeout_s=30.0, memory_mib=512))
    for grammar in (JSON, CHOICE, LONG, TOO_HARD):
        assert compiler._compile(CompileGrammar(bytes(16), 0, grammar)) == ""
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def vocabulary(smollm2_path: Path) -> Vocabulary:
    return load_vocabulary(open_model(smollm2_path))


@contextmanager
def new_rows(compiler: GrammarCompiler, jumps_ahead: bool) -> Iterator[GrammarRows]:
    rows = GrammarRows(compiler, WIDTH, jumps_ahead)
    yield rows
    if rows._thread is not None:
        rows._thread.shutdown()


@pytest.fixture
def rows(compiler: GrammarCompiler) -> Iterator[GrammarRows]:
    with new_rows(compiler, jumps_ahead=True) as rows:
        yield rows


@pytest.fixture
def steady_rows(compiler: GrammarCompiler) -> Iterator[GrammarRows]:
    with new_rows(compiler, jumps_ahead=False) as rows:
        yield rows


def new_row(row: int, grammar: Grammar, output: list[int] | None = None, num_logprobs: int = -1) -> NewRow:
    params = SamplingParams(1.0, 1.0, 0, 0.0, 0, 0, grammar=grammar, num_logprobs=num_logprobs)
    prompt = [7, 8, 9]
    return NewRow(row, bytes([row]) * 16, 0, pack_int32(prompt + (output or [])), len(prompt), b"", params)


def allowed(rows: GrammarRows, row: int) -> list[int]:
    masks = rows.begin_masks([row]).wait()
    assert not masks.finishes.any()
    return ids_of(masks.bits[0])


def ids_of(bits: np.ndarray) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    return found


def answer(rows: GrammarRows, row: int, draw: random.Random) -> list[int]:
    """A whole answer, drawn at random from what is allowed; also holds that forced ids would have been allowed."""
    token_ids: list[int] = []
    while not token_ids or token_ids[-1] != END:
        token_id = draw.choice(allowed(rows, row))
        [forced] = rows.advance([row], [token_id])
        token_ids += [token_id, *forced]
        assert len(token_ids) < 5000
    return token_ids


def text_of(vocabulary: Vocabulary, token_ids: list[int]) -> str:
    assert token_ids[-1] == END
    return b"".join(map(vocabulary.token_bytes, token_ids[:-1])).decode()


@pytest.mark.parametrize("seed", range(8))
def test_an_answer_is_a_sentence_of_its_grammar(rows: GrammarRows, vocabulary: Vocabulary, seed: int) -> None:
    rows.set_up(new_row(3, JSON))
    found = json.loads(text_of(vocabulary, answer(rows, 3, random.Random(seed))))
    assert list(found) == ["customerName", "日本", "count"]
    assert len(found["customerName"]) <= 6
    assert found["日本"] in ("はい", "いいえ", "😀")
    assert 0 <= found["count"] <= 99
    assert rows.num_forced > 0


def test_jumping_ahead_changes_no_id(rows: GrammarRows, steady_rows: GrammarRows) -> None:
    """Every id that is forced is the only one that the mask would have left, one step after the other."""
    rows.set_up(new_row(0, JSON))
    steady_rows.set_up(new_row(0, JSON))
    draw, token_ids = random.Random(1), []
    while END not in token_ids:
        choices = allowed(rows, 0)
        assert choices == allowed(steady_rows, 0)
        token_id = draw.choice(choices)
        [forced] = rows.advance([0], [token_id])
        assert steady_rows.advance([0], [token_id]) == [[]]
        token_ids = [token_id, *forced]
        for one in forced:
            assert allowed(steady_rows, 0) == [one]
            assert steady_rows.advance([0], [one]) == [[]]


@pytest.mark.parametrize("num_known", [0, 1, 2, 5, 9])
def test_a_row_that_comes_back_goes_on_where_it_was(rows: GrammarRows, num_known: int) -> None:
    rows.set_up(new_row(0, JSON))
    known = answer(rows, 0, random.Random(5))[:num_known]
    rows.release(0)
    rows.set_up(new_row(1, JSON))
    reference = rows
    for token_id in known:
        reference._consume(reference._rows[1], [token_id])
    rows.set_up(new_row(2, JSON, known))
    assert allowed(rows, 2) == allowed(reference, 1)


def test_rows_do_not_know_each_other(rows: GrammarRows, vocabulary: Vocabulary) -> None:
    rows.set_up(new_row(0, JSON))
    rows.set_up(new_row(1, CHOICE))
    masks = rows.begin_masks([1, 0]).wait()
    texts = [{vocabulary.token_bytes(token_id) for token_id in ids_of(bits)} for bits in masks.bits]
    assert {b"yes", b"no", b"y", b"n"} <= texts[0]
    assert texts[1] == {b'{"'}
    assert rows.mask_seconds.buckets()[-1][1] == 1


def test_a_row_with_logprobs_does_not_jump(rows: GrammarRows) -> None:
    rows.set_up(new_row(0, JSON, num_logprobs=0))
    [only] = allowed(rows, 0)
    assert rows.advance([0], [only]) == [[]]
    assert len(allowed(rows, 0)) == 1


def test_a_long_jump_is_taken_in_parts(rows: GrammarRows, vocabulary: Vocabulary) -> None:
    rows.set_up(new_row(0, LONG))
    [token_id] = allowed(rows, 0)
    [forced] = rows.advance([0], [token_id])
    assert len(forced) == MAX_FORCED
    assert text_of(vocabulary, [token_id, *forced, *answer(rows, 0, random.Random(0))]) == LONG.text


def test_an_ended_row_whose_plans_are_out_goes_on_ending(rows: GrammarRows) -> None:
    rows.set_up(new_row(0, CHOICE, [11672]))
    rows.set_up(new_row(0, CHOICE))
    answer(rows, 0, random.Random(2))
    assert allowed(rows, 0) == [END]
    assert rows.advance([0], [END]) == [[]]
    assert allowed(rows, 0) == [END]


def test_str_01_a_grammar_that_fails_fails_its_row_alone(rows: GrammarRows, caplog: pytest.LogCaptureFixture) -> None:
    rows.set_up(new_row(0, JSON))
    rows.set_up(new_row(1, CHOICE, [39428]))  # what came before was no beginning of it
    rows.set_up(new_row(2, Grammar(GrammarKind.REGEX, "never compiled")))
    masks = rows.begin_masks([0, 1, 2]).wait()
    assert masks.finishes.tolist() == [Finish.NONE, Finish.INTERNAL_ERROR, Finish.INTERNAL_ERROR]
    assert rows.advance([1, 2], [5, 5]) == [[], []]
    said = {vars(record)["request_id"]: record.getMessage() for record in caplog.records}
    assert said["01" * 16].startswith("the grammar of a row fails: ")
    assert said["02" * 16] == "a row has a grammar that was not compiled here"


def test_str_01_a_mask_that_would_cost_too_much_fails_its_row_alone(
    rows: GrammarRows, vocabulary: Vocabulary, caplog: pytest.LogCaptureFixture
) -> None:
    rows.set_up(new_row(0, TOO_HARD))
    rows.set_up(new_row(1, CHOICE))
    letters = {vocabulary.token_bytes(token_id): token_id for token_id in range(WIDTH)}
    draw = random.Random(3)
    for _ in range(400):
        masks = rows.begin_masks([0, 1]).wait()
        if masks.finishes[0]:
            break
        rows.advance([0], [letters[draw.choice([b"a", b"b", b"x"])]])
    assert masks.finishes.tolist() == [Finish.GRAMMAR_TOO_LARGE, Finish.NONE]
    assert "the grammar of a row fails" in caplog.text
    rows.set_up(new_row(2, TOO_HARD))  # what the failed row has made is not shared with the next one
    assert allowed(rows, 2)


def test_released_rows_are_forgotten(rows: GrammarRows) -> None:
    rows.set_up(new_row(0, JSON))
    rows.release(0)
    rows.release(0)
    rows.release(77)
    assert not rows._rows
    rows.set_up(new_row(0, JSON))
    rows.release_all()
    assert not rows._rows

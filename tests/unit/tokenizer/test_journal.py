"""The journal entry of an answer: its cursor rule, against a naive reference."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.journal import ChunkRow, GapError, JournalEntry, chunk_rows
from services.wire.columns import pack_int32
from services.wire.errors import ProtocolError
from services.wire.finish import Finish
from services.wire.request_params import SamplingParams, TextParams
from services.wire.requests import Submit
from tests.unit.tokenizer.backend_peers import chunk

PIECES = ["a", "é", "你", "👋🌍", "", "bc", "\u2028"]


def new_submit(prompt: tuple[int, ...] = (1, 2, 3)) -> Submit:
    request_id = secrets.token_bytes(16)
    return Submit(
        request_id=request_id,
        attempt=0,
        prompt_token_ids=pack_int32(prompt),
        output_token_ids=b"",
        sampling=SamplingParams(0.0, 1.0, 0, 0.0, 0, 0),
        text=TextParams((), False, True, 0),
        max_tokens=64,
        stop_token_ids=b"",
        group_id=request_id,
        tenant="default",
        cache_root=b"",
        priority=0,
        deadline_ms=0,
    )


def row(
    entry: JournalEntry, first_index: int, ids: list[int], offset: int, text: str, finish: Finish = Finish.NONE
) -> ChunkRow:
    return chunk_rows(chunk(entry.submit, first_index, ids, offset, text, finish))[0]


class Answer:
    """A whole answer, cut in any way: token i is `ids[i]` and adds `pieces[i]`, which may show up later."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces
        self.text = "".join(pieces)
        self.ids = list(range(100, 100 + len(pieces)))

    def row(self, entry: JournalEntry, first: int, end: int, lag: int) -> ChunkRow:
        """The chunk that covers ids [first, end); the text of the last `lag` of them comes with a later one."""
        shown_from, shown_to = self._shown(first, lag), self._shown(end, lag)
        offset = len("".join(self.pieces[:shown_from]).encode())
        text = "".join(self.pieces[shown_from:shown_to])
        finish = Finish.LENGTH if end == len(self.ids) else Finish.NONE
        return row(entry, first, self.ids[first:end], offset, text, finish)

    def _shown(self, index: int, lag: int) -> int:
        return index if index in (0, len(self.ids)) else max(0, index - lag)


@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=12),
    spans=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(0, 2)), max_size=60),
)
@settings(max_examples=300, deadline=None)
def test_any_order_of_chunks_gives_each_id_and_byte_once(pieces: list[str], spans: list[tuple[int, int, int]]) -> None:
    answer, entry = Answer(pieces), JournalEntry(new_submit())
    taken = ""
    for first, length, lag in [*spans, (0, len(pieces), 0)]:
        first = min(first, len(pieces) - 1)
        end = min(first + length, len(pieces))
        item = answer.row(entry, first, end, lag)
        is_gap = not entry.finish and (item.first_index > entry.next_index or item.text_offset > entry.next_text_offset)
        before = (entry.next_index, entry.next_text_offset, entry.finish)
        if is_gap:
            with pytest.raises(GapError):
                entry.take(item)
            assert (entry.next_index, entry.next_text_offset, entry.finish) == before
            continue
        news = entry.take(item)
        taken += news.text if news is not None else ""
        assert answer.text.startswith(taken)
        assert entry.output_token_ids == answer.ids[: entry.next_index]
        assert entry.next_text_offset == len(taken.encode())
    assert taken == answer.text
    assert entry.output_token_ids == answer.ids
    assert (entry.finish, entry.completion_tokens) == (Finish.LENGTH, len(pieces))


def test_other_attempts_and_what_comes_after_the_end_are_dropped() -> None:
    entry = JournalEntry(new_submit())
    other = chunk_rows(chunk(entry.submit, 0, [7], 0, "x", attempt=1))[0]
    assert entry.take(other) is None
    taken = row(entry, 0, [7], 0, "x", Finish.STOP_TOKEN)
    assert entry.take(taken) is taken
    assert entry.take(row(entry, 1, [8], 1, "y")) is None
    assert (entry.output_token_ids, entry.finish) == ([7], Finish.STOP_TOKEN)


@pytest.mark.parametrize("first_index", [0, 1, 5])
def test_an_error_finish_is_taken_wherever_it_stands(first_index: int) -> None:
    entry = JournalEntry(new_submit())
    assert entry.take(row(entry, 0, [7], 0, "é")) is not None
    news = entry.take(row(entry, first_index, [], 0, "", Finish.BACKEND_LOST))
    assert news is not None
    assert (news.text, list(news.token_ids)) == ("", [])
    assert entry.finish is Finish.BACKEND_LOST
    assert entry.output_token_ids == [7]


def test_an_end_below_the_cursor_is_refused() -> None:
    entry = JournalEntry(new_submit())
    entry.take(row(entry, 0, [7, 8], 0, "ab"))
    with pytest.raises(ProtocolError, match="below its cursor"):
        entry.take(row(entry, 0, [7], 0, "a", Finish.LENGTH))


def test_a_replay_that_differs_inside_a_character_is_refused() -> None:
    entry = JournalEntry(new_submit())
    entry.take(row(entry, 0, [7], 0, "ab"))
    with pytest.raises(ProtocolError, match="differs"):
        entry.take(row(entry, 0, [7, 8], 0, "a\u00e9b"))

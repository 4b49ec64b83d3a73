"""A whole answer against a slow definition: any ids, stops, limits, and any delivery with repeats and overlaps."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.answer import AnswerChunk, AnswerDecoder
from services.detokenizer.incremental import TokenPieces
from services.wire.errors import ProtocolError
from services.wire.finish import Finish
from services.wire.request_params import TextParams

PIECES = [
    b"a",
    b"b",
    b"ab",
    b" ",
    b"\xf0\x9f",
    b"\x98\x80",
    b"\xe4\xbd\xa0",
    b"\xe4",
    b"\xff",
    b"",
    b"<end>",
    b"ba\xc3",
]
SPECIAL = {10}


class Table:
    num_entries = len(PIECES)

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in SPECIAL


TABLE = TokenPieces(Table())
ENDS = [Finish.LENGTH, Finish.STOP_TOKEN, Finish.ABORTED]


@dataclass
class Answer:
    text: str
    finish: Finish
    num_ids: int


def naive_answer(ids: list[int], finish: Finish, params: TextParams) -> Answer:
    """Decodes from the start for every token and looks at every end of the text that the token added."""
    shown_ids = ids[:-1] if finish is Finish.STOP_TOKEN else ids
    before = ""
    for num_ids in [*range(1, len(shown_ids) + 1), len(ids) + 1]:
        is_flush = num_ids > len(ids)
        data = b"".join(
            PIECES[i]
            for i in shown_ids[:num_ids]
            if i < len(PIECES) and not (params.skip_special_tokens and i in SPECIAL)
        )
        text = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data, final=is_flush)
        for end in range(len(before) + 1, len(text) + 1):
            complete = [stop for stop in params.stop if text[:end].endswith(stop)]
            if complete and min(num_ids, len(ids)) >= params.min_tokens:
                length = 0 if params.include_stop_str_in_output else len(max(complete, key=len))
                return Answer(text[: end - length], Finish.STOP_STRING, min(num_ids, len(ids)))
        before = text
    return Answer(before, finish, len(ids))


@st.composite
def params(draw: st.DrawFn) -> TextParams:
    return TextParams(
        stop=tuple(
            draw(
                st.lists(st.sampled_from(["a", "ab", "aab", "ba", "你", "😀", "b 😀", "\ufffd", "<e", " "]), max_size=3)
            )
        ),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        min_tokens=draw(st.sampled_from([0, 0, 1, 4, 9])),
    )


def deliveries(num_ids: int, hops: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Intervals that cover [0, num_ids) without a gap; each hop goes so far back and so far on."""
    covered, intervals = 0, []
    for back, forward in [*hops, (0, num_ids)]:
        start, end = max(0, covered - back), min(num_ids, max(0, covered - back) + forward)
        intervals.append((start, end))
        covered = max(covered, end)
    return intervals


def deliver(ids: list[int], finish: Finish, text: TextParams, intervals: list[tuple[int, int]]) -> list[AnswerChunk]:
    decoder, chunks = AnswerDecoder(TABLE, text), []
    for start, end in intervals:
        chunk = decoder.advance(start, ids[start:end], finish if end == len(ids) else Finish.NONE)
        if chunk is not None:
            chunks.append(chunk)
            if chunk.finish is not Finish.NONE:
                break
    return chunks


id_lists = st.lists(st.integers(0, len(PIECES) + 1), min_size=1, max_size=25)
hop_lists = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=20)


@settings(max_examples=200, deadline=None)
@given(id_lists, hop_lists, st.sampled_from(ENDS), params())
def test_chunks_add_up_to_the_naive_answer(
    ids: list[int], hops: list[tuple[int, int]], finish: Finish, text: TextParams
) -> None:
    expected = naive_answer(ids, finish, text)
    chunks = deliver(ids, finish, text, deliveries(len(ids), hops))
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == ids[: expected.num_ids]
    assert [chunk.finish for chunk in chunks] == [Finish.NONE] * (len(chunks) - 1) + [expected.finish]
    assert len(chunks[-1].token_ids) + chunks[-1].first_index == expected.num_ids
    index = offset = 0
    for chunk in chunks:
        assert (chunk.first_index, chunk.text_offset) == (index, offset)
        index += len(chunk.token_ids)
        offset += len(chunk.text.encode())


@settings(max_examples=200, deadline=None)
@given(id_lists, params())
def test_a_finish_of_its_own_gives_the_same_as_one_with_the_last_ids(ids: list[int], text: TextParams) -> None:
    together = AnswerDecoder(TABLE, text).advance(0, ids, Finish.LENGTH)
    assert together is not None
    apart = AnswerDecoder(TABLE, text)
    chunks = [apart.advance(0, ids)]
    if chunks[0] is not None and chunks[0].finish is Finish.NONE:
        chunks.append(apart.advance(len(ids), [], Finish.LENGTH))
    assert "".join(chunk.text for chunk in chunks if chunk) == together.text
    assert chunks[-1] is not None
    assert chunks[-1].finish == together.finish


PLAIN = TextParams(stop=(), include_stop_str_in_output=False, skip_special_tokens=True, min_tokens=0)


def test_old_rows_are_dropped_also_after_the_end() -> None:
    decoder = AnswerDecoder(TABLE, PLAIN)
    assert decoder.advance(0, [0, 1]) is not None
    assert decoder.advance(0, [0]) is None
    assert decoder.advance(0, [0, 1]) is None
    assert decoder.advance(1, [1, 2], Finish.LENGTH) == AnswerChunk(2, [2], "ab", 2, Finish.LENGTH)
    assert decoder.advance(1, [1, 2], Finish.LENGTH) is None


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_the_end_by_a_stop_token_is_old_when_it_comes_again(stop: tuple[str, ...]) -> None:
    decoder = AnswerDecoder(TABLE, TextParams(stop, False, True, 0))
    assert decoder.advance(0, [0, 1], Finish.STOP_TOKEN) == AnswerChunk(0, [0, 1], "a", 0, Finish.STOP_TOKEN)
    assert decoder.advance(0, [0, 1], Finish.STOP_TOKEN) is None


@pytest.mark.parametrize(
    ("first_index", "ids", "finish"),
    [
        (3, [0], Finish.NONE),  # a gap
        (2, [-1], Finish.NONE),  # no such id
        (0, [0], Finish.LENGTH),  # an end below what was already taken
        (2, [], Finish.STOP_TOKEN),  # the token that should be hidden was shown
    ],
)
def test_what_the_scheduler_must_never_send_raises(first_index: int, ids: list[int], finish: Finish) -> None:
    decoder = AnswerDecoder(TABLE, PLAIN)
    decoder.advance(0, [0, 1])
    with pytest.raises(ProtocolError):
        decoder.advance(first_index, ids, finish)


def test_ids_after_the_end_raise() -> None:
    decoder = AnswerDecoder(TABLE, PLAIN)
    decoder.advance(0, [0], Finish.LENGTH)
    with pytest.raises(ProtocolError):
        decoder.advance(1, [1])

"""The incremental decoder against Python's own, for any vocabulary, any ids and any way to cut them into calls."""

from __future__ import annotations

import codecs
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.incremental import MAX_HELD_BYTES, IncrementalDecoder, TokenPieces

CHARACTERS = ["a", " ", "é", "ß", "你", "好", "世", "🙂", "👋", "🌍", "\u2028", "\ufffd"]


@st.composite
def pieces_of_characters(draw: st.DrawFn) -> list[bytes]:
    """Tokens that begin and end inside characters: real text cut anywhere, and any bytes at all."""
    text = "".join(draw(st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=12))).encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)) | {0, len(text)})
    whole = [text[start:end] for start, end in pairwise(cuts)]
    broken = draw(st.lists(st.binary(max_size=5), max_size=6))
    leads = [b"\xf0\x9f", b"\xf0", b"\xe4\xbd", b"\xed\xa0", b"\xc3", b"\x80", b"\xff", b"", b"\xf4\x90"]
    return [*whole, *broken, *draw(st.lists(st.sampled_from(leads), max_size=6))]


@st.composite
def pieces_and_ids(draw: st.DrawFn) -> tuple[list[bytes], list[int]]:
    pieces = draw(pieces_of_characters())
    in_order = list(range(len(pieces)))
    mixed = draw(st.lists(st.integers(0, len(pieces) + 3), max_size=40))
    return pieces, draw(st.sampled_from([in_order + mixed, mixed + in_order, mixed]))


def bytes_of(pieces: list[bytes], ids: list[int]) -> bytes:
    return b"".join(pieces[i] for i in ids if i < len(pieces))


@settings(max_examples=200, deadline=None)
@given(pieces_and_ids())
def test_each_token_gives_exactly_what_pythons_decoder_gives(case: tuple[list[bytes], list[int]]) -> None:
    pieces, ids = case
    decoder = IncrementalDecoder(pieces)
    reference = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token_id in ids:
        assert decoder.decode(token_id) == reference.decode(bytes_of(pieces, [token_id]))
        assert len(decoder.held_bytes) <= MAX_HELD_BYTES
        assert decoder.held_bytes == reference.getstate()[0]
    assert decoder.flush() == reference.decode(b"", final=True)
    assert decoder.held_bytes == b""


@settings(max_examples=200, deadline=None)
@given(pieces_and_ids(), st.sets(st.integers(0, 60)))
def test_the_text_does_not_depend_on_how_ids_are_cut_into_calls(
    case: tuple[list[bytes], list[int]], cuts: set[int]
) -> None:
    pieces, ids = case
    bounds = sorted({cut for cut in cuts if cut < len(ids)} | {0, len(ids)})
    by_run = IncrementalDecoder(pieces)
    runs = [by_run.decode_run(ids[start:end]) for start, end in pairwise(bounds)]
    one_by_one = IncrementalDecoder(pieces)
    singles = [one_by_one.decode(token_id) for token_id in ids]
    expected = bytes_of(pieces, ids).decode("utf-8", "replace")
    assert "".join(runs) + by_run.flush() == expected
    assert "".join(singles) + one_by_one.flush() == expected


@settings(max_examples=200, deadline=None)
@given(pieces_of_characters(), st.sets(st.integers(0, 30)))
def test_special_tokens_are_skipped_or_shown(pieces: list[bytes], special: set[int]) -> None:
    class Table:
        num_entries = len(pieces)

        def token_bytes(self, token_id: int) -> bytes:
            return pieces[token_id]

        def is_special(self, token_id: int) -> bool:
            return token_id in special

    ids = list(range(len(pieces)))
    table = TokenPieces(Table())
    for skips in (True, False):
        decoder = IncrementalDecoder(table.choose(skip_special_tokens=skips))
        kept = [i for i in ids if not (skips and i in special)]
        assert decoder.decode_run(ids) + decoder.flush() == bytes_of(pieces, kept).decode("utf-8", "replace")

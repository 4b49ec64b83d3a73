"""Rows of a batch taken as columns against the same rows one by one: every answer gets the same chunks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.decoders import Decoders
from services.detokenizer.incremental import TokenPieces
from services.wire.answers import DecodeOpen, TextChunks, TokensProduced
from services.wire.columns import pack_int32, split_by_counts, unpack_int32, unpack_request_ids
from services.wire.finish import Finish
from services.wire.request_params import TextParams

PIECES = [b"a", b"b", b" ab", b"\xf0\x9f", b"\x91\x8b", b"\xff", b"", b"stop", b"st", b"op!"]
STOPS: list[tuple[str, ...]] = [(), (), ("stop",), ("ab", "b!")]
NUM_ANSWERS = 6


class Vocabulary:
    """A few pieces that make and break characters and stop strings."""

    num_entries = len(PIECES)

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


def id_of(number: int) -> bytes:
    return bytes([number + 1]) * 16


row = st.tuples(
    st.integers(0, NUM_ANSWERS),  # the last of them was never opened
    st.integers(-1, 1),  # where it begins, seen from the ids sent so far
    st.lists(st.integers(0, len(PIECES) + 2), min_size=1, max_size=1) | st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from([Finish.NONE] * 8 + [Finish.LENGTH, Finish.STOP_TOKEN]),
    st.sampled_from([0] * 9 + [1]),  # attempt
)


def batch_of(rows: list[tuple[int, int, list[int], Finish, int]], sent: list[int]) -> TokensProduced:
    firsts = []
    for number, shift, ids, _, _ in rows:
        firsts.append(max(sent[number] + shift * (shift < 0 or number % 2), 0))
        sent[number] = firsts[-1] + len(ids)
    return TokensProduced(
        request_ids=b"".join(id_of(number) for number, *_ in rows),
        attempts=pack_int32(attempt for *_, attempt in rows),
        first_indexes=pack_int32(firsts),
        counts=pack_int32(len(ids) for _, _, ids, _, _ in rows),
        token_ids=pack_int32(token_id for _, _, ids, _, _ in rows for token_id in ids),
        finishes=bytes(finish for _, _, _, finish, _ in rows),
        cached_tokens=pack_int32([5] * len(rows)),
    )


def chunks_by_answer(messages: list[tuple[bytes, TextChunks]]) -> dict[bytes, list[object]]:
    by_answer: dict[bytes, list[object]] = {}
    for tokenizer, message in messages:
        message.check()
        stops = iter(message.stops)
        counts = unpack_int32(message.counts)
        columns = zip(
            unpack_request_ids(message.request_ids), unpack_int32(message.attempts),
            unpack_int32(message.first_indexes), split_by_counts(unpack_int32(message.token_ids), counts),
            unpack_int32(message.text_offsets), message.texts, message.finishes,
            unpack_int32(message.completion_tokens), unpack_int32(message.cached_tokens), strict=True,
        )  # fmt: skip
        for name, *rest in columns:
            stop = next(stops) if rest[5] == Finish.STOP_STRING else ""
            by_answer.setdefault(name, []).append((tokenizer, *rest, stop))
    return by_answer


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(row, min_size=1, max_size=8), max_size=12), st.booleans(), st.integers(0, 3))
def test_rows_together_are_rows_one_by_one(
    batches: list[list[tuple[int, int, list[int], Finish, int]]], skips: bool, min_tokens: int
) -> None:
    pieces = TokenPieces(Vocabulary())
    pair = (Decoders(pieces), Decoders(pieces, goes_together=False))
    for decoders in pair:
        for number in range(NUM_ANSWERS):
            text = TextParams(STOPS[number % len(STOPS)], False, skips, min_tokens)
            decoders.open(DecodeOpen(id_of(number), 0, b"tokenizer/%d/1" % (number % 2), text))
    sent = [0] * (NUM_ANSWERS + 1)
    for rows in batches:
        batch = batch_of(rows, sent)
        outgoing = []
        for decoders in pair:
            decoders.advance(batch)
            outgoing.append(decoders.take_outgoing())
        fast, slow = outgoing
        assert chunks_by_answer(fast.for_tokenizers()) == chunks_by_answer(slow.for_tokenizers())
        assert (fast.stops_found, sorted(fast.failures)) == (slow.stops_found, sorted(slow.failures))
        assert sorted(fast.resends) == sorted(slow.resends)
        assert sorted(map(repr, fast.ended)) == sorted(map(repr, slow.ended))
        assert pair[0].statistics == pair[1].statistics

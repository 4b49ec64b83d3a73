"""Failures that other servers had in detokenization and stop handling, on the demo model's own tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import tiktoken

from services.detokenizer.answer import AnswerChunk, AnswerDecoder
from services.detokenizer.incremental import MAX_HELD_BYTES, IncrementalDecoder, TokenPieces
from services.wire.errors import ProtocolError
from services.wire.finish import Finish
from services.wire.request_params import TextParams

# Greedy continuations of fixed prompts by the demo model.
F_NUM = [216, 37, 28, 216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216]
F_WAVE = [10813, 235, 229, 10813, 230, 231]
F_BAD = [10813, 230]


@dataclass
class Run:
    """What a client would see."""

    chunks: list[AnswerChunk]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def texts(self) -> list[str]:
        return [chunk.text for chunk in self.chunks]

    @property
    def finish(self) -> Finish:
        return self.chunks[-1].finish

    @property
    def completion_tokens(self) -> int:
        return self.chunks[-1].first_index + len(self.chunks[-1].token_ids)


def run(
    pieces: TokenPieces,
    ids: Sequence[int],
    finish: Finish = Finish.LENGTH,
    *,
    stop: tuple[str, ...] = (),
    include: bool = False,
    skip: bool = True,
    min_tokens: int = 0,
) -> Run:
    """One id at a time; the finish comes with the last id. All at once must give the same."""
    params = TextParams(stop, include, skip, min_tokens)
    decoder, chunks = AnswerDecoder(pieces, params), []
    for index, token_id in enumerate(ids):
        chunk = decoder.advance(index, [token_id], finish if index == len(ids) - 1 else Finish.NONE)
        assert chunk is not None
        chunks.append(chunk)
        if chunk.finish is not Finish.NONE:
            break
    streamed = Run(chunks)
    at_once = AnswerDecoder(pieces, params).advance(0, list(ids), finish)
    assert at_once is not None
    whole = Run([at_once])
    assert (whole.text, whole.finish, whole.completion_tokens) == (
        streamed.text,
        streamed.finish,
        streamed.completion_tokens,
    )
    return streamed


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([10813, 38887], "🙂"),
        ([143, 233, 5415, 9150], "ďábel"),
        ([18645, 250, 48392, 138, 7906, 240, 178, 239, 230], "你好世界"),
        (F_WAVE * 4, "👋🌍👋🌍👋🌍👋🌍"),
    ],
)
def test_det_01_characters_split_over_tokens_come_whole(smollm2_pieces: TokenPieces, ids: list[int], text: str) -> None:
    answer = run(smollm2_pieces, ids)
    assert answer.text == text
    assert not any("\ufffd" in chunk for chunk in answer.texts)
    if ids[0] == 10813:
        assert answer.texts[0] == ""


def test_det_01_chinese_and_emoji_in_qwens_vocabulary(qwen_ranks: dict[bytes, int]) -> None:
    text = "你好，世界！龘靐齉爩 𠮷野家 👩‍👩‍👧‍👦 ประเทศไทย — ďábel\n" * 3
    pattern = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+"
    encoding = tiktoken.Encoding("qwen", pat_str=pattern, mergeable_ranks=qwen_ranks, special_tokens={})
    by_id = {token_id: token for token, token_id in qwen_ranks.items()}

    class Table:
        num_entries = len(by_id)

        def token_bytes(self, token_id: int) -> bytes:
            return by_id[token_id]

        def is_special(self, token_id: int) -> bool:
            return False

    pieces, ids = TokenPieces(Table()), encoding.encode(text)
    assert any(by_id[token_id].decode("utf-8", "ignore").encode() != by_id[token_id] for token_id in ids)
    answer = run(pieces, ids)
    assert answer.text == text
    assert not any("\ufffd" in chunk for chunk in answer.texts)


def test_det_02_invalid_utf8_streams_and_is_linear(smollm2_pieces: TokenPieces) -> None:
    decoder = IncrementalDecoder(smollm2_pieces.shown)
    texts = []
    for token_id in [218] * 8000 + [81]:
        texts.append(decoder.decode(token_id))
        assert len(decoder.held_bytes) <= MAX_HELD_BYTES
    assert "".join(texts) + decoder.flush() == "\ufffd" * 8000 + "a"
    assert texts[0] == "\ufffd"

    def seconds(num_tokens: int, stop: tuple[str, ...]) -> float:
        start = time.process_time()
        junk = AnswerDecoder(smollm2_pieces, TextParams(stop, False, True, 0))
        for index in range(num_tokens):
            junk.advance(index, [218])
        return time.process_time() - start

    for stop in ((), ("\ufffda", "\ufffd" * 100 + "b")):
        few, many = (min(seconds(num_tokens, stop) for _ in range(5)) for num_tokens in (2000, 8000))
        assert many < 6 * few
        assert many < 1


def test_det_02_a_model_that_repeats_a_broken_character_is_streamed(smollm2_pieces: TokenPieces) -> None:
    answer = run(smollm2_pieces, F_BAD * 12)
    assert answer.text == "\ufffd" * 12
    assert any(answer.texts[:-1])


def test_det_03_a_character_cut_by_the_limit_shows_as_a_replacement(smollm2_pieces: TokenPieces) -> None:
    answer = run(smollm2_pieces, F_WAVE[:5], Finish.LENGTH)
    assert answer.text == "👋\ufffd"
    assert (answer.finish, answer.completion_tokens) == (Finish.LENGTH, 5)
    assert answer.text.encode().decode() == answer.text


@pytest.mark.parametrize(("ids", "text"), [([19556, 49152, 905], "Hello world"), ([19556, 2**31 - 1], "Hello")])
def test_det_06_an_id_without_an_entry_adds_nothing(smollm2_pieces: TokenPieces, ids: list[int], text: str) -> None:
    assert run(smollm2_pieces, ids).text == text
    assert run(smollm2_pieces, ids, stop=("never",)).text == text


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_det_06_a_negative_id_is_refused(smollm2_pieces: TokenPieces, stop: tuple[str, ...]) -> None:
    for ids in ([-1], [19556, -1]):
        with pytest.raises(ProtocolError):
            AnswerDecoder(smollm2_pieces, TextParams(stop, False, True, 0)).advance(0, ids)
    assert run(smollm2_pieces, [19556, 905]).text == "Hello world"


def test_det_08_the_leading_space_of_the_first_token_is_kept(smollm2_pieces: TokenPieces) -> None:
    assert run(smollm2_pieces, [905]).texts == [" world"]
    paris = smollm2_pieces.shown.index(b" Paris")
    assert run(smollm2_pieces, [paris]).text == " Paris"
    assert run(smollm2_pieces, [905, 33662] * 2).text == " world hello world hello"


def test_det_09_special_tokens_are_skipped_or_shown(smollm2_pieces: TokenPieces) -> None:
    assert run(smollm2_pieces, [19556, 2, 905], skip=True).text == "Hello world"
    assert run(smollm2_pieces, [19556, 2, 905], skip=False).text == "Hello<|im_end|> world"


@pytest.mark.parametrize("skip", [True, False])
def test_det_09_the_token_that_ends_an_answer_is_never_shown(smollm2_pieces: TokenPieces, skip: bool) -> None:
    answer = run(smollm2_pieces, [19556, 905, 2], Finish.STOP_TOKEN, skip=skip)
    assert answer.text == "Hello world"
    assert answer.completion_tokens == 3


def test_stp_01_a_stop_string_over_several_tokens(smollm2_pieces: TokenPieces) -> None:
    answer = run(smollm2_pieces, F_NUM, stop=("7, 8",))
    assert answer.text == " 5, 6, "
    assert (answer.finish, answer.completion_tokens) == (Finish.STOP_STRING, 11)


def test_stp_01_a_stop_string_over_characters_that_are_split(smollm2_pieces: TokenPieces) -> None:
    answer = run(smollm2_pieces, F_WAVE * 4, stop=("🌍👋",))
    assert answer.text == "👋"
    assert (answer.finish, answer.completion_tokens) == (Finish.STOP_STRING, 9)


def test_stp_02_no_part_of_the_stop_string_is_ever_shown(smollm2_pieces: TokenPieces) -> None:
    shown = ""
    for text in run(smollm2_pieces, F_NUM, stop=("7, 8",)).texts:
        shown += text
        assert "7" not in shown
    assert shown == " 5, 6, "


def test_stp_04_held_text_comes_out_at_any_other_end(smollm2_pieces: TokenPieces) -> None:
    answer = run(smollm2_pieces, F_NUM[:17], Finish.LENGTH, stop=("9, 1X",))
    assert answer.text == " 5, 6, 7, 8, 9, 1"
    assert (answer.finish, answer.completion_tokens) == (Finish.LENGTH, 17)
    by_token = run(smollm2_pieces, [*F_NUM[:17], 2], Finish.STOP_TOKEN, stop=("9, 1X",))
    assert (by_token.text, by_token.completion_tokens) == (" 5, 6, 7, 8, 9, 1", 18)


def test_stp_05_include_stop_str_in_output(smollm2_pieces: TokenPieces) -> None:
    answer = run(smollm2_pieces, F_NUM, stop=("7, 8",), include=True)
    assert answer.text == " 5, 6, 7, 8"
    assert (answer.finish, answer.completion_tokens) == (Finish.STOP_STRING, 11)


def test_stp_08_a_stop_string_that_overlaps_itself(smollm2_pieces: TokenPieces) -> None:
    answer = run(smollm2_pieces, [81, 81, 81, 82], stop=("aab",))
    assert answer.texts == ["", "", "a", ""]
    assert answer.finish is Finish.STOP_STRING


def test_stp_09_null_means_no_stop_and_an_empty_string_never_ends_an_answer(smollm2_pieces: TokenPieces) -> None:
    assert run(smollm2_pieces, F_NUM, stop=()).completion_tokens == len(F_NUM)
    for stop in (("",), ("", "7")):
        with pytest.raises(ValueError):
            run(smollm2_pieces, F_NUM, stop=stop)
    longest = tuple(chr(0x4E00 + i) * 341 for i in range(16))  # 16 stops of 1,023 bytes
    assert run(smollm2_pieces, F_NUM, stop=longest).completion_tokens == len(F_NUM)


def test_stp_10_only_text_that_begins_a_stop_is_held_back(smollm2_pieces: TokenPieces) -> None:
    answer = run(smollm2_pieces, F_NUM, stop=("✿RESULT✿", "zzzzzzzzzz"))
    assert all(answer.texts)
    assert answer.texts[0] == smollm2_pieces.shown[F_NUM[0]].decode()


def test_stp_13_the_token_that_stops_is_counted_and_not_shown(smollm2_pieces: TokenPieces) -> None:
    for stop in ((), ("never",)):
        answer = run(smollm2_pieces, F_NUM[:8], Finish.STOP_TOKEN, stop=stop)
        assert answer.text == " 5, 6, "
        assert (answer.finish, answer.completion_tokens) == (Finish.STOP_TOKEN, 8)


def test_stop_strings_below_min_tokens_do_not_end_the_answer(smollm2_pieces: TokenPieces) -> None:
    assert run(smollm2_pieces, F_NUM, stop=(",",), min_tokens=3).text == " 5"
    early = run(smollm2_pieces, F_NUM, stop=(",",), min_tokens=4)
    assert (early.text, early.completion_tokens) == (" 5, 6", 6)


def test_of_two_stop_strings_the_one_that_is_complete_first_ends_the_answer(smollm2_pieces: TokenPieces) -> None:
    assert run(smollm2_pieces, F_NUM, stop=("6, 7, 8", "7,")).text == " 5, 6, "
    assert run(smollm2_pieces, F_NUM, stop=(", 7", "6, 7")).text == " 5, "

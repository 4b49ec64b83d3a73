"""Log-probabilities in the schemas of clients, and the formats that show them: fast and slow ways say the same."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.model_files.vocabulary import Vocabulary
from services.tokenizer.answer_parts import AnswerDelta, AnswerEnd, Text, TokenLogprobs
from services.tokenizer.chat_format import ChatFormat
from services.tokenizer.completion_format import CompletionFormat
from services.tokenizer.logprob_forms import FLOOR, CompletionLogprobs, TokenDisplay, floored
from services.tokenizer.openai_chunks import AnswerHead
from services.tokenizer.token_texts import TokenTexts
from services.wire.finish import Finish
from tests.unit.tokenizer.http_client import Json

HEAD = AnswerHead("id-1", 1_700_000_000, "m", fingerprint="fp_1")
INFINITY = float("inf")
SPECIAL = 300


def texts() -> TokenTexts:
    """256 bytes, then some whole tokens, then a control token."""
    pieces = [bytes([byte]) for byte in range(256)] + [" été".encode(), "👋".encode(), b"ab"]
    pieces += [b""] * (SPECIAL - len(pieces)) + [b"<|end|>"]
    offsets = array("Q", [0])
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece))
    return TokenTexts(Vocabulary(len(pieces), 7, frozenset({SPECIAL}), frozenset({SPECIAL}), b"".join(pieces), offsets))


TEXTS = texts()
DISPLAY = TokenDisplay(TEXTS, num_logprobs=2, prompts=[[97, 98]])


def entry(token_id: int, logprob: float | None = -0.25, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, top)


@pytest.mark.parametrize(
    ("value", "shown"), [(-INFINITY, -9999.0), (-1e30, -9999.0), (-0.5, -0.5), (1e-7, 0.0), (0.0, 0.0), (None, None)]
)
def test_smp_14_values_are_numbers_between_the_floor_and_zero(value: float | None, shown: float | None) -> None:
    assert FLOOR == -9999.0
    assert floored(value) == shown
    assert json.loads(json.dumps(floored(value), allow_nan=False)) == shown


def test_smp_17_a_chats_entry_has_the_token_its_bytes_and_the_likeliest() -> None:
    form = DISPLAY.chat_logprobs([entry(257, -0.5, (257, -0.5), (0xF0, -INFINITY), (97, -3.0))])
    assert form == {
        "content": [
            {
                "token": "👋",
                "logprob": -0.5,
                "bytes": [0xF0, 0x9F, 0x91, 0x8B],
                "top_logprobs": [
                    {"token": "👋", "logprob": -0.5, "bytes": [0xF0, 0x9F, 0x91, 0x8B]},
                    {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xF0]},
                ],
            }
        ],
        "refusal": None,
    }


def test_smp_17_a_completions_columns_have_the_token_itself_among_the_likeliest() -> None:
    state = CompletionLogprobs(DISPLAY)
    assert state.more([entry(97, -2.0, (256, -0.1), (98, -1.0)), entry(256, -0.1, (256, -0.1))]) == {
        "tokens": ["a", " été"],
        "token_logprobs": [-2.0, -0.1],
        "top_logprobs": [{" été": -0.1, "b": -1.0, "a": -2.0}, {" été": -0.1}],
        "text_offset": [0, 1],
    }
    assert state.more([entry(97)])["text_offset"] == [5]


def test_tokens_that_are_no_whole_characters_are_spelled_out_where_there_are_no_bytes() -> None:
    state = CompletionLogprobs(DISPLAY)
    assert state.more([entry(byte) for byte in "👋".encode()])["tokens"] == [
        "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x91", "bytes:\\x8b",
    ]  # fmt: skip


def test_ids_stand_for_texts_if_asked() -> None:
    display = TokenDisplay(TEXTS, num_logprobs=1, names_ids=True)
    content = display.chat_logprobs([entry(97, -0.5, (98, -0.1))])["content"]
    assert content == [
        {
            "token": "token_id:97",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [{"token": "token_id:98", "logprob": -0.1, "bytes": [98]}],
        }
    ]
    assert CompletionLogprobs(display).more([entry(97)])["tokens"] == ["token_id:97"]


@given(st.text(max_size=12), st.data())
def test_offsets_are_places_in_the_text(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    state, ids, offsets = CompletionLogprobs(DISPLAY), list(raw), []
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        found = state.more([entry(token_id) for token_id in ids[:count]])["text_offset"]
        assert isinstance(found, list)
        offsets += found
        ids = ids[count:]
    for index, offset in enumerate(offsets):  # the naive way: how many characters are whole before this byte
        assert offset == len(raw[:index].decode("utf-8", "ignore"))


def test_control_tokens_that_are_not_shown_take_no_place() -> None:
    assert CompletionLogprobs(DISPLAY).more([entry(SPECIAL), entry(97)])["text_offset"] == [0, 0]
    shown = TokenDisplay(TEXTS, num_logprobs=2, skips_special=False)
    assert CompletionLogprobs(shown).more([entry(SPECIAL), entry(97)])["text_offset"] == [0, 7]


def test_an_echo_begins_with_null_and_the_answer_goes_on_behind_it() -> None:
    state = CompletionLogprobs(DISPLAY)
    prompt = [TokenLogprobs(SPECIAL, None), entry(256), entry(97)]
    found = state.echo(prompt, " étéa")
    assert found["token_logprobs"] == [None, -0.25, -0.25]
    assert found["top_logprobs"] == [None, {" été": -0.25}, {"a": -0.25}]
    assert found["text_offset"] == [0, 0, 4]  # the control token in front is no part of the text that was sent
    assert state.more([entry(98), entry(98)])["text_offset"] == [5, 6]


def test_prompt_logprobs_are_by_id_with_ranks() -> None:
    display = TokenDisplay(TEXTS, num_prompt_logprobs=1)
    entries = [TokenLogprobs(97, None), entry(98, -0.5, (98, -0.5), (97, -1.0)), entry(98, -INFINITY, (97, -0.1))]
    assert display.prompt_logprobs(entries) == [
        None,
        {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}},
        {
            "98": {"logprob": -9999.0, "rank": None, "decoded_token": "b"},
            "97": {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
        },
    ]


@given(st.text(min_size=1))
def test_the_prepared_bytes_say_what_is_spelled_out(text: str) -> None:
    delta = AnswerDelta((Text(text),))
    for answer_format in (ChatFormat(HEAD, 2), CompletionFormat(HEAD, 2)):
        fast, slow = answer_format.text(1, text), answer_format.delta(1, delta)
        assert json.loads(fast.removeprefix(b"data: ")) == json.loads(slow.removeprefix(b"data: "))
        assert fast.decode().splitlines()[1:] == slow.decode().splitlines()[1:] == [""]


def event(data: bytes) -> Json:
    value = json.loads(data.removeprefix(b"data: "))
    assert isinstance(value, dict)
    return value


def test_a_chunk_has_the_entries_and_ids_of_its_text() -> None:
    display = TokenDisplay(TEXTS, num_logprobs=0, shows_ids=True, prompts=[[97, 98]])
    delta = AnswerDelta((Text("ab"),), [97, 98], [entry(97), entry(98)])
    rest = AnswerDelta((), [SPECIAL], [entry(SPECIAL)])
    end = AnswerEnd(Finish.STOP_TOKEN, stop=7, rest=rest)
    chat = ChatFormat(HEAD, 1, display=display)
    assert event(chat.opening(0))["prompt_token_ids"] == [97, 98]
    (choice,) = event(chat.delta(0, delta))["choices"]
    assert choice["token_ids"] == [97, 98]
    assert [item["token"] for item in choice["logprobs"]["content"]] == ["a", "b"]
    (choice,) = event(chat.finish(0, end))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", 7, [SPECIAL])
    assert [item["token"] for item in choice["logprobs"]["content"]] == ["<|end|>"]
    completion = CompletionFormat(HEAD, 1, display)
    (choice,) = event(completion.delta(0, delta))["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([97, 98], [97, 98])
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    (choice,) = event(completion.finish(0, end))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["<|end|>"],
        "token_logprobs": [-0.25],
        "top_logprobs": [{"<|end|>": -0.25}],
        "text_offset": [2],
    }
    assert "prompt_token_ids" not in choice
    body = event(CompletionFormat(HEAD, 1, display).body([[delta]], [end], {}))
    (choice,) = body["choices"]
    assert choice["token_ids"] == [97, 98, SPECIAL]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_several_parts_are_a_chunk_each_and_the_last_has_the_entries() -> None:
    delta = AnswerDelta((Text("a"), Text("b")), (), [entry(97), entry(98)])
    events = ChatFormat(HEAD, 1, display=DISPLAY).delta(0, delta).split(b"\n\n")[:-1]
    logprobs = [event(one)["choices"][0]["logprobs"] for one in events]
    assert logprobs[0] is None
    assert len(logprobs[1]["content"]) == 2


def test_every_chunk_and_body_has_the_fingerprint() -> None:
    end = AnswerEnd(Finish.LENGTH, timings={"queue_ms": 1})
    for answer_format in (ChatFormat(HEAD, 1), CompletionFormat(HEAD, 1)):
        chunks = [answer_format.delta(0, AnswerDelta((Text("a"),))), answer_format.finish(0, end)]
        assert all(event(one)["system_fingerprint"] == "fp_1" for one in chunks)
        assert event(answer_format.body([[]], [end], {}))["system_fingerprint"] == "fp_1"


def test_timings_are_in_the_last_chunk() -> None:
    end = AnswerEnd(Finish.LENGTH, timings={"queue_ms": 1})
    with_usage = AnswerHead("id-1", 1, "m", has_usage_chunk=True)
    for kind in (ChatFormat, CompletionFormat):
        assert event(kind(HEAD, 1).finish(0, end))["timings"] == {"queue_ms": 1}
        answer_format = kind(with_usage, 1)
        assert "timings" not in event(answer_format.finish(0, end))
        usage_chunk = answer_format.ending({"prompt_tokens": 1}).split(b"\n\n")[0]
        assert (event(usage_chunk)["timings"], event(usage_chunk)["choices"]) == ({"queue_ms": 1}, [])

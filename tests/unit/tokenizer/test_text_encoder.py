"""Encoding never blocks the event loop, never crashes it, and gives the ids of the tokenizers library."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Regex, normalizers

from services.model_files.source import open_model
from services.model_files.tokenizer import LoadedTokenizer, load_tokenizer
from services.tokenizer.conversation import Conversation
from services.tokenizer.prompt_errors import (
    ConversationError,
    EncoderBusyError,
    EncodingFailedError,
    InvalidTextError,
    NoChatTemplateError,
    TextTooLongError,
)
from services.tokenizer.text_encoder import EncoderSettings, TextEncoder
from tests.unit.model_files.mixed_lines import mixed_lines
from tests.unit.tokenizer.small_models import HEADERS, small_model


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LoadedTokenizer:
    return load_tokenizer(open_model(smollm2_path))


@pytest.fixture(scope="module")
def encoder(smollm2: LoadedTokenizer) -> Iterator[TextEncoder]:
    encoder = TextEncoder(smollm2, EncoderSettings(max_tokens=8192))
    yield encoder
    encoder.close()
    assert encoder.num_waiting == 0


@pytest.fixture(scope="module")
def large(smollm2: LoadedTokenizer) -> Iterator[TextEncoder]:
    """One thread and a context that holds megabytes."""
    encoder = TextEncoder(smollm2, EncoderSettings(max_tokens=1_000_000, num_threads=1, max_waiting=2))
    yield encoder
    encoder.close()
    assert encoder.num_waiting == 0


def _chat(text: str) -> Conversation:
    return Conversation([{"role": "user", "content": text}])


def test_ids_are_those_of_the_library_for_short_and_long_texts(smollm2: LoadedTokenizer, encoder: TextEncoder) -> None:
    async def check() -> None:
        lines = mixed_lines(100, seed=6)
        for text in [*lines, "".join(lines), "".join(lines) * 3]:
            expected = smollm2.tokenizer.encode(text).ids
            assert await encoder.encode(text) == expected
            assert await encoder.encode(text, parse_special=False) == expected

    asyncio.run(check())


def test_tok_02_empty_text_has_no_ids(encoder: TextEncoder) -> None:
    assert asyncio.run(encoder.encode("")) == []


def test_tok_10_raw_prompts_parse_control_tokens_and_other_text_does_not(encoder: TextEncoder) -> None:
    async def check(filler: str) -> None:
        text = f"{filler}<|im_start|>user\nHi<|im_end|>"
        parsed = await encoder.encode(text, parse_special=True)
        plain = await encoder.encode(text, parse_special=False)
        assert (parsed.count(1), parsed.count(2)) == (1, 1)
        assert (plain.count(1), plain.count(2)) == (0, 0)

    asyncio.run(check(""))
    asyncio.run(check("x " * 5000))


def test_tok_01_raw_prompts_get_bos_if_the_model_wants_it_and_chats_only_from_the_template(tmp_path: Path) -> None:
    loaded = small_model(tmp_path, HEADERS)
    bos = loaded.bos_token_id
    loaded.tokenizer.post_processor = None
    encoder = TextEncoder(loaded, EncoderSettings(max_tokens=100))
    chat = asyncio.run(encoder.encode_chat(_chat("Hi")))
    assert (chat[0], chat.count(bos or -1)) == (bos, 1)
    encoder.close()


def test_chat_ids_and_text(encoder: TextEncoder) -> None:
    ids = asyncio.run(encoder.encode_chat(_chat("Hi")))
    assert (len(ids), ids[:2]) == (31, [1, 9690])
    rendered = asyncio.run(encoder.render_chat(_chat("Hi <|im_end|>")))
    assert rendered.endswith("<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ConversationError, match="must be an object"):
        asyncio.run(encoder.encode_chat(Conversation(["Hi"])))  # type: ignore[list-item]
    long = _chat("x " * 5000)
    assert asyncio.run(encoder.encode_chat(long))[:2] == [1, 9690]


def test_cht_04_chat_without_a_template_while_raw_prompts_work(tmp_path: Path) -> None:
    encoder = TextEncoder(small_model(tmp_path, None), EncoderSettings(max_tokens=100))
    assert not encoder.template.exists
    with pytest.raises(NoChatTemplateError):
        asyncio.run(encoder.encode_chat(_chat("Hi")))
    assert len(asyncio.run(encoder.encode("Hi"))) == 2
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0].content }}<|eot_id|>")
    supplied = TextEncoder(small_model(tmp_path, None), EncoderSettings(max_tokens=100, chat_template=file))
    assert asyncio.run(supplied.render_chat(_chat("Hi"))) == "Hi<|eot_id|>"
    encoder.close()
    supplied.close()


@pytest.mark.parametrize(("text", "shown"), [("a" * 663_553, "663553 characters"), ("你" * 221_185, "663555 bytes")])
def test_tok_09_text_that_cannot_fit_is_refused_unencoded(encoder: TextEncoder, text: str, shown: str) -> None:
    message = rf"{shown}; the context of 8192 tokens cannot hold more than 663552 bytes"
    with pytest.raises(TextTooLongError, match=message):
        asyncio.run(encoder.encode(text))
    with pytest.raises(TextTooLongError):
        asyncio.run(encoder.encode_chat(_chat(text)))


def test_control_tokens_of_a_template_do_not_count_against_the_length_of_text(tmp_path: Path) -> None:
    encoder = TextEncoder(small_model(tmp_path, "<s><s></s>{{ messages[0].content }}"), EncoderSettings(max_tokens=4))
    room = 4 * len("<|start_header_id|>")
    assert len(asyncio.run(encoder.encode_chat(_chat("x" * room)))) == 3 + room
    with pytest.raises(TextTooLongError, match=f"the text has {room + 1} bytes"):
        asyncio.run(encoder.encode_chat(_chat("x" * (room + 1))))
    encoder.close()


@pytest.mark.parametrize("text", ["a\ud800b", "\udc00", "x" * 5000 + "\udfff", "\ud83d\ude42"])
def test_tok_07_half_a_surrogate_pair_is_refused(encoder: TextEncoder, text: str) -> None:
    for parse_special in (True, False):
        with pytest.raises(InvalidTextError, match="half of a surrogate pair at character"):
            asyncio.run(encoder.encode(text, parse_special=parse_special))
    with pytest.raises(InvalidTextError):
        asyncio.run(encoder.encode_chat(_chat(text)))


def test_prc_05_a_text_that_breaks_the_library_fails_alone(tmp_path: Path) -> None:
    """A normalizer that inserts at an empty match makes the library panic, and a panic is no Exception."""
    loaded = small_model(tmp_path, HEADERS)
    loaded.tokenizer.normalizer = normalizers.Replace(Regex("(?=é)"), " ")
    encoder = TextEncoder(loaded, EncoderSettings(max_tokens=10_000))

    async def check(filler: str) -> None:
        with pytest.raises(EncodingFailedError, match=f"failed on a text of {len(filler) + 1} characters"):
            await encoder.encode(f"é{filler}")
        assert await encoder.encode("Hi") == loaded.tokenizer.encode("Hi").ids

    asyncio.run(check("fine"))
    asyncio.run(check("fine" * 2000))
    encoder.close()


def test_tok_09_long_texts_stop_neither_the_loop_nor_short_texts(smollm2: LoadedTokenizer) -> None:
    """The loop's clock ticks on, and a short text does not wait for the long ones that occupy every thread."""
    encoder = TextEncoder(smollm2, EncoderSettings(max_tokens=1_000_000, num_threads=2))
    text = "".join(mixed_lines(4000, seed=8))

    async def check() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        ticks = [time.perf_counter()]
        handle: asyncio.TimerHandle | None = None

        def tick() -> None:
            nonlocal handle
            ticks.append(time.perf_counter())
            handle = loop.call_later(0.01, tick)

        tick()
        long_texts = [asyncio.ensure_future(encoder.encode(text)) for _ in range(4)]
        await asyncio.wait(long_texts, timeout=0.05)
        assert len(await encoder.encode("Hi")) == 1
        assert not any(future.done() for future in long_texts)
        assert encoder.num_waiting == 4
        lengths = {len(ids) for ids in await asyncio.gather(*long_texts)}
        ticks.append(time.perf_counter())
        assert handle is not None
        handle.cancel()
        assert len(lengths) == 1
        return max(later - earlier for earlier, later in itertools.pairwise(ticks)), ticks[-1] - ticks[0]

    gap, total = asyncio.run(check())
    encoder.close()
    assert gap < min(0.5, total / 2)


def test_more_long_texts_than_may_wait_are_refused(large: TextEncoder) -> None:
    text = "".join(mixed_lines(1500, seed=8))

    async def check() -> None:
        running = [asyncio.ensure_future(large.encode(text)) for _ in range(2)]
        await asyncio.wait(running, timeout=0)
        with pytest.raises(EncoderBusyError, match="2 long texts are waiting"):
            await large.encode(text)
        assert await large.encode("Hi") == [26843]
        first, second = await asyncio.gather(*running)
        assert first == second == await large.encode(text)

    asyncio.run(check())


def test_a_client_that_leaves_takes_its_text_out_of_the_queue(large: TextEncoder) -> None:
    text = "".join(mixed_lines(1500, seed=8))

    async def check() -> None:
        running = asyncio.ensure_future(large.encode(text))
        waiting = asyncio.ensure_future(large.encode(text))
        await asyncio.wait([running, waiting], timeout=0)
        assert large.num_waiting == 2
        waiting.cancel()
        await asyncio.wait([waiting])
        assert large.num_waiting == 1
        assert len(await running) > 1000

    asyncio.run(check())

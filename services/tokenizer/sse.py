"""Tokenizer process: the bytes of server-sent events, and of the one body when nothing is streamed.

All that is the same in every chunk of an answer is written once, as bytes; a token's event is a prefix, its text as a
JSON string, and a suffix. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from services.tokenizer.api_error import ApiError
from services.tokenizer.journal import JournalEntry
from services.wire.messages import Finish

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

_ENCODE = msgspec.json.Encoder().encode
# Line ends for some readers of event streams though not for JSON: NEL, LINE and PARAGRAPH SEPARATOR.
_ODD_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of an answer share."""

    answer_id: str
    created: int
    model: str
    is_chat: bool
    has_usage_chunk: bool = False


def json_string(text: str) -> bytes:
    """A text as a JSON string that is one line for every reader."""
    encoded = _ENCODE(text)
    if text.isascii() or not any(mark in text for mark in ("\x85", "\u2028", "\u2029")):
        return encoded
    return encoded.decode().translate(_ODD_LINE_ENDS).encode()


def error_event(error: ApiError) -> bytes:
    """The one event of an error after the first byte."""
    return b"data: " + error.body() + b"\n\n"


def finish_reason(finish: Finish) -> str:
    """OpenAI's word for how an answer ended."""
    return "length" if finish is Finish.LENGTH else "stop"


def usage_of(entries: Sequence[JournalEntry], num_choices: int) -> dict[str, object]:
    """Usage of a request: each prompt counts once however many answers it got.

    Args:
        entries: The answers in order: `num_choices` for each prompt.
        num_choices: n.
    """
    firsts = entries[::num_choices]
    prompt_tokens = sum(entry.num_prompt_tokens for entry in firsts)
    completion_tokens = sum(entry.completion_tokens for entry in entries)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(entry.cached_tokens for entry in firsts)},
    }


class ChunkWriter:
    """The events of one streamed answer."""

    __slots__ = ("_head", "_prefixes", "_start", "_tail", "_text_end")

    def __init__(self, head: AnswerHead, num_answers: int) -> None:
        kind = "chat.completion.chunk" if head.is_chat else "text_completion"
        opening = {"id": head.answer_id, "object": kind, "created": head.created, "model": head.model}
        self._head = head
        self._start = b"data: " + _one_line(opening)[:-1]
        self._tail = (b',"usage":null' if head.has_usage_chunk else b"") + b"}\n\n"
        before_text = b'"delta":{"content":' if head.is_chat else b'"text":'
        after_text = b"}" if head.is_chat else b""
        self._prefixes = [b'%b,"choices":[{"index":%d,%b' % (self._start, i, before_text) for i in range(num_answers)]
        self._text_end = after_text + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self, choice: int) -> bytes:
        """The first chunk of a chat answer, which says the role; nothing for a completion."""
        if not self._head.is_chat:
            return b""
        delta = b'{"role":"assistant","content":""}'
        return b'%b,"choices":[{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}]%b' % (
            self._start, choice, delta, self._tail,
        )  # fmt: skip

    def text(self, choice: int, text: str) -> bytes:
        """A chunk of text."""
        return self._prefixes[choice] + json_string(text) + self._text_end

    def finish(self, choice: int, finish: Finish) -> bytes:
        """The last chunk of an answer: no text, the reason."""
        nothing = b'"delta":{}' if self._head.is_chat else b'"text":""'
        return b'%b,"choices":[{"index":%d,%b,"logprobs":null,"finish_reason":"%b"}]%b' % (
            self._start, choice, nothing, finish_reason(finish).encode(), self._tail,
        )  # fmt: skip

    def usage(self, usage: dict[str, object]) -> bytes:
        """The usage chunk: no choices."""
        return self._start + b',"choices":[],"usage":' + _ENCODE(usage) + b"}\n\n"


def whole_body(
    head: AnswerHead, texts: Sequence[str], entries: Sequence[JournalEntry], usage: dict[str, object]
) -> bytes:
    """The body of an answer that is not streamed."""
    choices = [
        {
            "index": index,
            **({"message": {"role": "assistant", "content": text}} if head.is_chat else {"text": text}),
            "logprobs": None,
            "finish_reason": finish_reason(entry.finish),
        }
        for index, (text, entry) in enumerate(zip(texts, entries, strict=True))
    ]
    return _ENCODE(
        {
            "id": head.answer_id,
            "object": "chat.completion" if head.is_chat else "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "usage": usage,
        }
    )


def _one_line(value: object) -> bytes:
    return _ENCODE(value).decode().translate(_ODD_LINE_ENDS).encode()

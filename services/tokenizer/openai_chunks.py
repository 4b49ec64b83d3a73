"""Tokenizer process: what the events and bodies of OpenAI's two APIs for answers have in common. Pure.

All that is the same in every chunk of an answer is written once, as bytes; a token's event is a prefix, its text as a
JSON string, and a suffix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.tokenizer.answer_parts import AnswerEnd
from services.tokenizer.sse import DONE, json_line
from services.wire.messages import Finish

_END = b"}\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of an answer share."""

    answer_id: str
    created: int
    model: str
    has_usage_chunk: bool = False


class ChunkFrame:
    """What goes around the choices of every chunk of a request."""

    __slots__ = ("_head", "_timings", "start", "tail")

    def __init__(self, head: AnswerHead, kind: str) -> None:
        """`kind` is the `object` of a chunk."""
        self._head = head
        self._timings: Mapping[str, object] | None = None
        opening = {"id": head.answer_id, "object": kind, "created": head.created, "model": head.model}
        self.start = b"data: " + json_line(opening)[:-1]
        self.tail = (b',"usage":null' if head.has_usage_chunk else b"") + _END

    def tail_with(self, usage: Mapping[str, object] | None, timings: Mapping[str, object] | None = None) -> bytes:
        """The end of a chunk that tells the usage so far, or the timings unless a usage chunk will."""
        if timings is not None and self._head.has_usage_chunk:
            self._timings, timings = timings, None
        told = self.tail[: -len(_END)] if usage is None else b',"usage":' + json_line(usage)
        return told + _timings(timings) + _END

    def ending(self, usage: Mapping[str, object]) -> bytes:
        """The usage chunk, if it is wanted, which has no choices; then [DONE]."""
        if not self._head.has_usage_chunk:
            return DONE
        told = b',"choices":[],"usage":' + json_line(usage) + _timings(self._timings)
        return self.start + told + _END + DONE


def _timings(timings: Mapping[str, object] | None) -> bytes:
    return b"" if timings is None else b',"timings":' + json_line(timings)


def finish_reason(end: AnswerEnd) -> str:
    """OpenAI's word for how an answer ended."""
    if end.finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if end.has_tool_calls else "stop"


def body_of(head: AnswerHead, kind: str, choices: list[dict[str, object]], usage: Mapping[str, object]) -> bytes:
    """A whole answer; `kind` is its `object`."""
    return json_line(
        {
            "id": head.answer_id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "usage": usage,
        }
    )

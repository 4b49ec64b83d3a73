"""Tokenizer process: what the events and bodies of OpenAI's two APIs for answers have in common. Pure.

All that is the same in every chunk of an answer is written once, as bytes; a token's event is a prefix, its text as a
JSON string, and a suffix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.tokenizer.answer_parts import AnswerDelta, AnswerEnd, TokenLogprobs
from services.tokenizer.api_error import ApiError
from services.tokenizer.logprob_forms import TokenDisplay
from services.tokenizer.sse import DONE, KEEP_ALIVE, error_event, json_line, json_string
from services.wire.finish import Finish
from services.wire.request_params import NO_LOGPROBS

_END = b"}\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of an answer share."""

    answer_id: str
    created: int
    model: str
    has_usage_chunk: bool = False
    fingerprint: str = ""

    def opening(self, kind: str) -> dict[str, object]:
        """The first fields of every chunk and body; `kind` is its `object`."""
        fields: dict[str, object] = {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }
        if self.fingerprint:
            fields["system_fingerprint"] = self.fingerprint
        return fields


class ChunkFrame:
    """What goes around the choices of every chunk of a request."""

    __slots__ = ("_head", "_timings", "start", "tail")

    def __init__(self, head: AnswerHead, kind: str) -> None:
        """`kind` is the `object` of a chunk."""
        self._head = head
        self._timings: Mapping[str, object] | None = None
        self.start = b"data: " + json_line(head.opening(kind))[:-1]
        self.tail = (b',"usage":null' if head.has_usage_chunk else b"") + _END

    def chunk(self, choice: Mapping[str, object], beside: Mapping[str, object], tail: bytes = b"") -> bytes:
        """A chunk of one choice, spelled out; `beside` are fields next to the choices."""
        told = b"," + json_line(beside)[1:-1] if beside else b""
        return b'%b,"choices":[%b]%b%b' % (self.start, json_line(choice), told, tail or self.tail)

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


class ChunkFormat:
    """What the formats of both APIs do alike: chunks of nothing but text, the ends of streams, a prompt's logprobs."""

    __slots__ = ("_display", "_frame", "_head", "_prefixes", "_suffix")

    text_place: tuple[bytes, bytes]
    """What stands in a choice before and after its text."""

    def __init__(self, head: AnswerHead, kind: str, num_answers: int, display: TokenDisplay | None) -> None:
        """`kind` is the `object` of a chunk; `display` is None for answers that show nothing of their tokens."""
        self._head = head
        self._display = display
        self._frame = ChunkFrame(head, kind)
        before, after = self.text_place
        start = b'%b,"choices":[{"index":%d,'
        self._prefixes = [start % (self._frame.start, choice) + before for choice in range(num_answers)]
        self._suffix = after + b',"logprobs":null,"finish_reason":null}]' + self._frame.tail

    def text(self, choice: int, text: str) -> bytes:
        """A chunk of nothing but text, made of bytes that were prepared; `delta` is the long way."""
        return self._prefixes[choice] + json_string(text) + self._suffix

    def ending(self, usage: Mapping[str, object]) -> bytes:
        """The usage chunk if it is wanted, and [DONE]."""
        return self._frame.ending(usage)

    def error(self, error: ApiError) -> bytes:
        """The error, and [DONE]."""
        return error_event(error) + DONE

    def keep_alive(self) -> bytes:
        """A comment."""
        return KEEP_ALIVE

    def _prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, object]:
        """Those of a prompt as a field, if they are wanted and there."""
        display = self._display
        if display is None or display.num_prompt_logprobs == NO_LOGPROBS or not entries:
            return {}
        return {"prompt_logprobs": display.prompt_logprobs(entries)}


def _timings(timings: Mapping[str, object] | None) -> bytes:
    return b"" if timings is None else b',"timings":' + json_line(timings)


def finish_reason(end: AnswerEnd) -> str:
    """OpenAI's word for how an answer ended; a last call whose arguments are cut is none to be run."""
    if end.finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if end.is_for_tools else "stop"


def body_of(
    opening: Mapping[str, object],
    choices: list[dict[str, object]],
    usage: Mapping[str, object],
    beside: Mapping[str, object],
) -> bytes:
    """A whole answer: the head's opening, the choices, the usage, and fields next to these."""
    return json_line({**opening, "choices": choices, "usage": usage, **beside})


def timings_beside(ends: Sequence[AnswerEnd]) -> dict[str, object]:
    """The timings of a request as a field of its body, if there are any."""
    timings = ends[-1].timings
    return {} if timings is None else {"timings": timings}


def ids_of(deltas: Iterable[AnswerDelta], end: AnswerEnd) -> list[int]:
    """All ids of an answer."""
    return [token_id for delta in (*deltas, end.rest) for token_id in delta.token_ids]


def logprobs_of(deltas: Iterable[AnswerDelta], end: AnswerEnd) -> list[TokenLogprobs]:
    """The log-probabilities of all ids of an answer."""
    return [entry for delta in (*deltas, end.rest) for entry in delta.logprobs]


def prompt_logprobs_of(deltas: Iterable[AnswerDelta]) -> Sequence[TokenLogprobs]:
    """Those of its prompt; empty if nobody asked."""
    return next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), ())

"""Tokenizer process: the answers of /v1/completions, as events and as a body. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.tokenizer.answer_parts import AnswerDelta, AnswerEnd, Text
from services.tokenizer.api_error import ApiError
from services.tokenizer.openai_chunks import AnswerHead, ChunkFrame, body_of, finish_reason
from services.tokenizer.sse import DONE, KEEP_ALIVE, error_event, json_string

_KIND = "text_completion"


class CompletionFormat:
    """One request's answers in OpenAI's form of text completions."""

    __slots__ = ("_frame", "_head", "_prefixes", "_suffix")

    def __init__(self, head: AnswerHead, num_answers: int) -> None:
        self._head = head
        self._frame = ChunkFrame(head, _KIND)
        self._prefixes = [self._start(choice) for choice in range(num_answers)]
        self._suffix = b',"logprobs":null,"finish_reason":null}]' + self._frame.tail

    def opening(self, choice: int) -> bytes:
        """Nothing comes before the text."""
        return b""

    def delta(self, choice: int, delta: AnswerDelta) -> bytes:
        """A chunk of text."""
        return self._prefixes[choice] + json_string(_text_of(delta)) + self._suffix

    def finish(self, choice: int, end: AnswerEnd) -> bytes:
        """The last chunk of an answer: no text, the reason."""
        tail = self._frame.tail_with(None, end.timings)
        return b'%b"","logprobs":null,"finish_reason":"%b"}]%b' % (
            self._prefixes[choice], finish_reason(end).encode(), tail,
        )  # fmt: skip

    def ending(self, usage: Mapping[str, object]) -> bytes:
        """The usage chunk if it is wanted, and [DONE]."""
        return self._frame.ending(usage)

    def error(self, error: ApiError) -> bytes:
        """The error, and [DONE]."""
        return error_event(error) + DONE

    def keep_alive(self) -> bytes:
        """A comment."""
        return KEEP_ALIVE

    def body(
        self, answers: Sequence[Sequence[AnswerDelta]], ends: Sequence[AnswerEnd], usage: Mapping[str, object]
    ) -> bytes:
        """The body of an answer that is not streamed."""
        choices: list[dict[str, object]] = [
            {
                "index": index,
                "text": "".join(_text_of(delta) for delta in deltas),
                "logprobs": None,
                "finish_reason": finish_reason(end),
            }
            for index, (deltas, end) in enumerate(zip(answers, ends, strict=True))
        ]
        return body_of(self._head, _KIND, choices, usage)

    def _start(self, choice: int) -> bytes:
        return b'%b,"choices":[{"index":%d,"text":' % (self._frame.start, choice)


def _text_of(delta: AnswerDelta) -> str:
    """Its text; a completion has no other parts."""
    return "".join(part.text for part in delta.parts if isinstance(part, Text))

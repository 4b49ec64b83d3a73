"""Tokenizer process: the answers of /v1/chat/completions, as events and as a body. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.tokenizer.answer_parts import AnswerDelta, AnswerEnd, Text
from services.tokenizer.api_error import ApiError
from services.tokenizer.chat_words import CHAT_WORDS, ChatWords
from services.tokenizer.openai_chunks import AnswerHead, ChunkFrame, body_of
from services.tokenizer.sse import DONE, KEEP_ALIVE, error_event, json_line, json_string


class ChatFormat:
    """One request's answers in OpenAI's chat form."""

    __slots__ = ("_frame", "_head", "_prefixes", "_suffix", "_words")

    def __init__(self, head: AnswerHead, num_answers: int, words: ChatWords = CHAT_WORDS) -> None:
        self._head = head
        self._words = words
        self._frame = ChunkFrame(head, "chat.completion.chunk")
        self._prefixes = [self._start(choice) + b'{"content":' for choice in range(num_answers)]
        self._suffix = b'},"logprobs":null,"finish_reason":null}]' + self._frame.tail

    def opening(self, choice: int) -> bytes:
        """The first chunk, which says the role."""
        return self._chunk(choice, b'{"role":"assistant","content":""}')

    def delta(self, choice: int, delta: AnswerDelta) -> bytes:
        """A chunk for each part; ids and probabilities are in the last one."""
        parts = delta.parts
        if len(parts) == 1 and type(parts[0]) is Text and not delta.token_ids and not delta.logprobs:  # nearly always
            return self.text(choice, parts[0].text)
        return b"".join(self._chunk(choice, json_line(self._words.delta_of(part))) for part in parts)

    def text(self, choice: int, text: str) -> bytes:
        """A chunk of nothing but text, made of bytes that were prepared."""
        return self._prefixes[choice] + json_string(text) + self._suffix

    def finish(self, choice: int, end: AnswerEnd) -> bytes:
        """The last chunk of an answer: no text, the reason."""
        reason = b'"%b"' % self._words.reason_of(end).encode()
        return self._chunk(choice, b"{}", reason, self._frame.tail_with(None, end.timings))

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
                "message": self._words.message_of(part for delta in deltas for part in delta.parts),
                "logprobs": None,
                "finish_reason": self._words.reason_of(end),
            }
            for index, (deltas, end) in enumerate(zip(answers, ends, strict=True))
        ]
        return body_of(self._head, "chat.completion", choices, usage)

    def _start(self, choice: int) -> bytes:
        return b'%b,"choices":[{"index":%d,"delta":' % (self._frame.start, choice)

    def _chunk(self, choice: int, delta: bytes, reason: bytes = b"null", tail: bytes = b"") -> bytes:
        end = tail or self._frame.tail
        return b'%b%b,"logprobs":null,"finish_reason":%b}]%b' % (self._start(choice), delta, reason, end)

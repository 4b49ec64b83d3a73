"""Tokenizer process: the answers of /v1/chat/completions, as events and as a body. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.tokenizer.answer_parts import NOTHING, AnswerDelta, AnswerEnd
from services.tokenizer.chat_words import CHAT_WORDS, ChatWords
from services.tokenizer.logprob_forms import TokenDisplay
from services.tokenizer.openai_chunks import (
    AnswerHead,
    ChunkFormat,
    body_of,
    ids_of,
    logprobs_of,
    prompt_logprobs_of,
    timings_beside,
)
from services.wire.request_params import NO_LOGPROBS


class ChatFormat(ChunkFormat):
    """One request's answers in OpenAI's chat form."""

    __slots__ = ("_words",)

    text_place = (b'"delta":{"content":', b"}")

    def __init__(
        self, head: AnswerHead, num_answers: int, words: ChatWords = CHAT_WORDS, display: TokenDisplay | None = None
    ) -> None:
        """`display` is None for answers that show nothing of their tokens."""
        super().__init__(head, "chat.completion.chunk", num_answers, display)
        self._words = words

    def opening(self, choice: int) -> bytes:
        """The first chunk, which says the role."""
        beside = self._prompt_ids() if choice == 0 else {}
        return self._chunk(choice, {"role": "assistant", "content": ""}, NOTHING, beside=beside)

    def delta(self, choice: int, delta: AnswerDelta) -> bytes:
        """A chunk for each part; ids and probabilities are in the last one."""
        deltas = [self._words.delta_of(part) for part in delta.parts]
        beside = self._prompt_logprobs(delta.prompt_logprobs) if choice == 0 else {}
        if not deltas:
            return self._chunk(choice, {}, delta, beside=beside) if beside else b""
        chunks = [self._chunk(choice, part, NOTHING) for part in deltas[:-1]]
        return b"".join((*chunks, self._chunk(choice, deltas[-1], delta, beside=beside)))

    def finish(self, choice: int, end: AnswerEnd) -> bytes:
        """The last chunk of an answer: no text, the reason."""
        return self._chunk(choice, {}, end.rest, end)

    def body(
        self, answers: Sequence[Sequence[AnswerDelta]], ends: Sequence[AnswerEnd], usage: Mapping[str, object]
    ) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [self._whole(*answer) for answer in zip(range(len(ends)), answers, ends, strict=True)]
        beside = self._prompt_logprobs(prompt_logprobs_of(answers[0])) | self._prompt_ids() | timings_beside(ends)
        return body_of(self._head.opening("chat.completion"), choices, usage, beside)

    def _whole(self, index: int, deltas: Sequence[AnswerDelta], end: AnswerEnd) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "message": self._words.message_of(part for delta in deltas for part in delta.parts),
            "logprobs": None,
            "finish_reason": self._words.reason_of(end),
            "stop_reason": end.stop,
        }
        display = self._display
        if display is not None and display.num_logprobs != NO_LOGPROBS:
            choice["logprobs"] = display.chat_logprobs(logprobs_of(deltas, end))
        if display is not None and display.shows_ids:
            choice["token_ids"] = ids_of(deltas, end)
        return choice

    def _chunk(
        self,
        choice: int,
        fields: Mapping[str, object],
        delta: AnswerDelta,
        end: AnswerEnd | None = None,
        beside: Mapping[str, object] | None = None,
    ) -> bytes:
        """A chunk with the ids and probabilities of a delta."""
        display = self._display
        said: dict[str, object] = {"index": choice, "delta": fields, "logprobs": None, "finish_reason": None}
        if display is not None and delta.logprobs:
            said["logprobs"] = display.chat_logprobs(delta.logprobs)
        if end is not None:
            said |= {"finish_reason": self._words.reason_of(end), "stop_reason": end.stop}
        if display is not None and display.shows_ids:
            said["token_ids"] = list(delta.token_ids)
        tail = self._frame.tail_with(delta.usage, None if end is None else end.timings)
        return self._frame.chunk(said, beside or {}, tail)

    def _prompt_ids(self) -> dict[str, object]:
        display = self._display
        return {"prompt_token_ids": list(display.prompts[0])} if display is not None and display.shows_ids else {}

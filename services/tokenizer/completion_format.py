"""Tokenizer process: the answers of /v1/completions, as events and as a body. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.tokenizer.answer_parts import AnswerDelta, AnswerEnd, Text
from services.tokenizer.logprob_forms import CompletionLogprobs, TokenDisplay
from services.tokenizer.openai_chunks import (
    AnswerHead,
    ChunkFormat,
    body_of,
    finish_reason,
    ids_of,
    prompt_logprobs_of,
    timings_beside,
)
from services.wire.request_params import NO_LOGPROBS

_KIND = "text_completion"


class CompletionFormat(ChunkFormat):
    """One request's answers in OpenAI's form of text completions."""

    __slots__ = ("_logprobs", "_untold")

    text_place = (b'"text":', b"")

    def __init__(self, head: AnswerHead, num_answers: int, display: TokenDisplay | None = None) -> None:
        """`display` is None for answers that show nothing of their tokens."""
        super().__init__(head, _KIND, num_answers, display)
        has_logprobs = display is not None and display.num_logprobs != NO_LOGPROBS
        self._logprobs = [CompletionLogprobs(display) for _ in self._prefixes] if display and has_logprobs else []
        self._untold = set(range(num_answers)) if display and display.shows_ids else set()

    def opening(self, choice: int) -> bytes:
        """Nothing comes before the text."""
        return b""

    def delta(self, choice: int, delta: AnswerDelta) -> bytes:
        """A chunk of text, with its ids and probabilities."""
        if not delta.parts and not self._prompt_logprobs(delta.prompt_logprobs):
            return b""
        said: dict[str, object] = {
            "index": choice,
            "text": _text_of(delta),
            "logprobs": self._logprobs_of(choice, delta),
            "finish_reason": None,
            **self._tokens_of(choice, delta),
        }
        return self._frame.chunk(said, {}, self._frame.tail_with(delta.usage))

    def finish(self, choice: int, end: AnswerEnd) -> bytes:
        """The last chunk of an answer: no text, the reason."""
        said: dict[str, object] = {
            "index": choice,
            "text": "",
            "logprobs": self._logprobs_of(choice, end.rest),
            "finish_reason": finish_reason(end),
            "stop_reason": end.stop,
            **self._tokens_of(choice, end.rest),
        }
        return self._frame.chunk(said, {}, self._frame.tail_with(end.rest.usage, end.timings))

    def body(
        self, answers: Sequence[Sequence[AnswerDelta]], ends: Sequence[AnswerEnd], usage: Mapping[str, object]
    ) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [self._whole(*answer) for answer in zip(range(len(ends)), answers, ends, strict=True)]
        return body_of(self._head.opening(_KIND), choices, usage, timings_beside(ends))

    def _whole(self, index: int, deltas: Sequence[AnswerDelta], end: AnswerEnd) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "text": "".join(_text_of(delta) for delta in deltas),
            "logprobs": None,
            "finish_reason": finish_reason(end),
            "stop_reason": end.stop,
        }
        display = self._display
        if display is None:
            return choice
        if self._logprobs:
            choice["logprobs"] = _joined([self._logprobs_of(index, delta) for delta in (*deltas, end.rest)])
        choice |= self._prompt_logprobs(prompt_logprobs_of(deltas))
        if display.shows_ids:
            choice |= {"token_ids": ids_of(deltas, end), "prompt_token_ids": list(display.prompts[index])}
        return choice

    def _logprobs_of(self, choice: int, delta: AnswerDelta) -> Mapping[str, object] | None:
        """The entries of a delta; those of an echo are its prompt's."""
        if not self._logprobs or not delta.logprobs:
            return None
        state = self._logprobs[choice]
        if delta.prompt_logprobs:
            return state.echo(delta.logprobs, _text_of(delta))
        return state.more(delta.logprobs)

    def _tokens_of(self, choice: int, delta: AnswerDelta) -> dict[str, object]:
        """What is told of a delta's tokens beside their probabilities; the prompt's ids once."""
        display = self._display
        if display is None:
            return {}
        fields = self._prompt_logprobs(delta.prompt_logprobs)
        if display.shows_ids:
            fields["token_ids"] = list(delta.token_ids)
        if choice in self._untold:
            self._untold.discard(choice)
            fields["prompt_token_ids"] = list(display.prompts[choice])
        return fields


def _text_of(delta: AnswerDelta) -> str:
    """Its text; a completion has no other parts."""
    return "".join(part.text for part in delta.parts if isinstance(part, Text))


def _joined(forms: Sequence[Mapping[str, object] | None]) -> dict[str, list[object]]:
    """The columns of several deltas, one behind the other."""
    joined: dict[str, list[object]] = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for form in forms:
        for name, column in (form or {}).items():
            assert isinstance(column, list)
            joined[name] += column
    return joined

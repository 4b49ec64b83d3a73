"""Tokenizer process: answers as SGLang's /generate spells them, as a body and as the events of a stream.

A stream's events hold the whole text and all ids so far, as that route's clients expect, so a long stream grows with
the square of its length. `index` tells the answers of several prompts apart. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from services.model_files.vocabulary import Vocabulary
from services.tokenizer.answer_parts import AnswerDelta, AnswerEnd, Text, TokenLogprobs
from services.tokenizer.api_error import ApiError
from services.tokenizer.logprob_forms import FLOOR
from services.tokenizer.sse import DONE, KEEP_ALIVE, error_event, json_line
from services.wire.finish import Finish


@dataclass(frozen=True)
class NativeAnswers:
    """What is known of the answers of a request before they come.

    Attributes:
        ids: `meta_info.id` of each answer.
        prompt_lengths: Tokens of each answer's prompt.
        is_list: Whether a body is a list.
        has_logprobs: Whether the answers' log-probabilities are told.
        prompt_from: Position of the prompt from which its log-probabilities are told; -1 for none.
        vocabulary: Gives the texts of tokens beside their log-probabilities; None for null.
    """

    ids: Sequence[str]
    prompt_lengths: Sequence[int]
    is_list: bool
    has_logprobs: bool = False
    prompt_from: int = -1
    vocabulary: Vocabulary | None = None


@dataclass
class _Progress:
    """What of one answer has come."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: Sequence[TokenLogprobs] = ()
    end: AnswerEnd | None = None

    def add(self, delta: AnswerDelta) -> None:
        self.texts += [part.text for part in delta.parts if isinstance(part, Text)]
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt = delta.prompt_logprobs or self.prompt


class NativeFormat:
    """The answers of one request to /generate."""

    def __init__(self, answers: NativeAnswers) -> None:
        self._answers = answers
        self._progress = [_Progress() for _ in answers.ids]

    def opening(self, choice: int) -> bytes:
        """Nothing: the first event is the first token's."""
        return b""

    def delta(self, choice: int, delta: AnswerDelta) -> bytes:
        """The answer so far."""
        progress = self._progress[choice]
        progress.add(delta)
        return self._event(choice)

    def finish(self, choice: int, end: AnswerEnd) -> bytes:
        """The whole answer."""
        progress = self._progress[choice]
        progress.add(end.rest)
        progress.end = end
        return self._event(choice)

    def ending(self, usage: Mapping[str, object]) -> bytes:
        """[DONE]."""
        return DONE

    def error(self, error: ApiError) -> bytes:
        """The error, and [DONE]."""
        return error_event(error) + DONE

    def keep_alive(self) -> bytes:
        """A comment."""
        return KEEP_ALIVE

    def body(
        self, answers: Sequence[Sequence[AnswerDelta]], ends: Sequence[AnswerEnd], usage: Mapping[str, object]
    ) -> bytes:
        """The answer, or the list of answers."""
        found: list[dict[str, object]] = []
        for choice, (deltas, end) in enumerate(zip(answers, ends, strict=True)):
            progress = _Progress(end=end)
            for delta in (*deltas, end.rest):
                progress.add(delta)
            found.append(self._answer(choice, progress))
        return msgspec.json.encode(found if self._answers.is_list else found[0])

    def _event(self, choice: int) -> bytes:
        answer = self._answer(choice, self._progress[choice])
        if self._answers.is_list:
            answer["index"] = choice
        return b"data: %b\n\n" % json_line(answer)

    def _answer(self, choice: int, progress: _Progress) -> dict[str, object]:
        end = progress.end
        meta: dict[str, object] = {
            "id": self._answers.ids[choice],
            "finish_reason": None if end is None else _finish_reason(end, progress.token_ids),
            "prompt_tokens": self._answers.prompt_lengths[choice],
            "completion_tokens": len(progress.token_ids),
            "cached_tokens": 0 if end is None else end.cached_tokens,
        }
        if self._answers.has_logprobs:
            meta |= self._logprobs("output", progress.logprobs)
            if self._answers.prompt_from >= 0 and end is not None:
                meta |= self._logprobs("input", self._of_prompt(choice, progress))
        return {"text": "".join(progress.texts), "output_ids": list(progress.token_ids), "meta_info": meta}

    def _of_prompt(self, choice: int, progress: _Progress) -> Sequence[TokenLogprobs]:
        """What came of the prompt ends with it and may begin before the position wanted: the first has no own."""
        count = self._answers.prompt_lengths[choice] - self._answers.prompt_from
        return progress.prompt[-count:] if count > 0 else ()

    def _logprobs(self, side: str, tokens: Sequence[TokenLogprobs]) -> dict[str, object]:
        return {
            f"{side}_token_logprobs": [self._entry(token.token_id, token.logprob) for token in tokens],
            f"{side}_top_logprobs": [[self._entry(*pair) for pair in token.top] or None for token in tokens],
        }

    def _entry(self, token_id: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        vocabulary = self._answers.vocabulary
        text = None if vocabulary is None else vocabulary.token_bytes(token_id).decode(errors="replace")
        return None if logprob is None else max(logprob, FLOOR), token_id, text


def _finish_reason(end: AnswerEnd, token_ids: Sequence[int]) -> dict[str, object]:
    if end.finish is Finish.LENGTH:
        return {"type": "length", "length": len(token_ids)}
    matched = token_ids[-1] if end.stop is None and token_ids else end.stop
    return {"type": "stop", "matched": matched}

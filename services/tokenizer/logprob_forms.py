"""Tokenizer process: log-probabilities and ids as OpenAI's two schemas and vLLM's fields spell them. Pure.

JSON has no infinity: what cannot be produced has FLOOR. A value is that of the raw logits, whatever the temperature.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.tokenizer.answer_parts import TokenLogprobs
from services.tokenizer.submission import AnswersWanted
from services.tokenizer.token_texts import TokenTexts, id_name
from services.wire.request_params import NO_LOGPROBS

FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class TokenDisplay:
    """What the answers of a request show of their tokens.

    Attributes:
        texts: The vocabulary.
        num_logprobs: How many of the likeliest at each place; NO_LOGPROBS for no probabilities.
        num_prompt_logprobs: The same for `prompt_logprobs`.
        shows_ids: Whether the ids themselves are shown.
        names_ids: Whether `token_id:5` stands for the token's text.
        skips_special: Whether control tokens are left out of the answers' text.
        prompts: For each answer the ids of its prompt.
    """

    texts: TokenTexts
    num_logprobs: int = NO_LOGPROBS
    num_prompt_logprobs: int = NO_LOGPROBS
    shows_ids: bool = False
    names_ids: bool = False
    skips_special: bool = True
    prompts: Sequence[Sequence[int]] = field(default=(), repr=False)

    def chat_logprobs(self, entries: Iterable[TokenLogprobs]) -> dict[str, object]:
        """The `logprobs` of a chat's choice."""
        return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}

    def prompt_logprobs(self, entries: Iterable[TokenLogprobs]) -> list[dict[str, object] | None]:
        """`prompt_logprobs` as in vLLM: by id; the first token's is null, a rank beyond those asked for too."""
        return [None if entry.logprob is None else self._by_id(entry) for entry in entries]

    def name(self, token_id: int) -> str:
        """A token in the schema of chats, which has its bytes beside it."""
        return id_name(token_id) if self.names_ids else self.texts.text(token_id)

    def exact_name(self, token_id: int) -> str:
        """A token in the schema of completions, which has nothing else."""
        return id_name(token_id) if self.names_ids else self.texts.exact(token_id)

    def top(self, entry: TokenLogprobs) -> Sequence[tuple[int, float]]:
        """The likeliest at a token's place, as many as the answers show."""
        return entry.top[: max(0, self.num_logprobs)]

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, object]:
        top = [self._chat_token(token_id, logprob) for token_id, logprob in self.top(entry)]
        return {**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float | None) -> dict[str, object]:
        raw = self.texts.bytes_of(token_id)
        return {"token": self.name(token_id), "logprob": floored(logprob), "bytes": list(raw)}

    def _by_id(self, entry: TokenLogprobs) -> dict[str, object]:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
        shown = dict([(entry.token_id, entry.logprob), *entry.top[: self.num_prompt_logprobs]])
        return {
            str(token_id): {
                "logprob": floored(logprob),
                "rank": ranks.get(token_id),
                "decoded_token": self.texts.text(token_id),
            }
            for token_id, logprob in shown.items()
        }


def display_of(wanted: AnswersWanted, texts: TokenTexts) -> TokenDisplay | None:
    """What a request wants to see of its tokens; None for the many that want nothing."""
    body = wanted.body
    asked = NO_LOGPROBS if body.prompt_logprobs is None else body.prompt_logprobs
    if max(wanted.num_answer_logprobs, asked) == NO_LOGPROBS and not body.return_token_ids:
        return None
    return TokenDisplay(
        texts=texts,
        num_logprobs=wanted.num_answer_logprobs,
        num_prompt_logprobs=asked,
        shows_ids=bool(body.return_token_ids),
        names_ids=bool(body.return_tokens_as_token_ids),
        skips_special=body.skip_special_tokens is not False and not wanted.shows_special_tokens,
        prompts=[prompt.token_ids for prompt in wanted.prompts for _ in range(body.num_choices)],
    )


class CompletionLogprobs:
    """The `logprobs` of one completion, piece by piece: it knows how far the text has come."""

    __slots__ = ("_decoder", "_display", "_num_characters")

    def __init__(self, display: TokenDisplay) -> None:
        self._display = display
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def echo(self, entries: Sequence[TokenLogprobs], text: str) -> dict[str, object]:
        """The entries of a prompt that comes before the answer as this text."""
        pieces = [self._display.texts.bytes_of(entry.token_id) for entry in entries]
        # A token in front that the text does not have (BOS, the blank of some vocabularies) begins before it.
        self._num_characters = len(text) - len(b"".join(pieces).decode("utf-8", "replace"))
        found = self._form(entries, pieces)
        self._num_characters = len(text)
        self._decoder.reset()
        return found

    def more(self, entries: Sequence[TokenLogprobs]) -> dict[str, object]:
        """The next entries of the answer."""
        display = self._display
        return self._form(
            entries, [display.texts.shown_bytes(entry.token_id, display.skips_special) for entry in entries]
        )

    def _form(self, entries: Sequence[TokenLogprobs], pieces: Sequence[bytes]) -> dict[str, object]:
        offsets: list[int] = []
        for piece in pieces:
            offsets.append(max(0, self._num_characters))
            self._num_characters += len(self._decoder.decode(piece))
        return {
            "tokens": [self._display.exact_name(entry.token_id) for entry in entries],
            "token_logprobs": [floored(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry.logprob is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> Mapping[str, object]:
        """The likeliest and the token itself; of two that look the same the likelier."""
        found: dict[str, object] = {}
        for token_id, logprob in (*self._display.top(entry), (entry.token_id, entry.logprob)):
            found.setdefault(self._display.exact_name(token_id), floored(logprob))
        return found


def floored(logprob: float | None) -> float | None:
    """A log-probability as JSON can say it: between FLOOR and 0; None stays None."""
    return None if logprob is None else min(0.0, max(FLOOR, logprob))

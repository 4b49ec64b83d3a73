"""Tokenizer process: what came of one answer and was not handed on yet. Pure.

Ids and log-probabilities go out with the next part of their answer, or with its end: text that is withheld withholds
them. An answer that opens with its prompt's log-probabilities withholds everything until these are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.tokenizer.answer_blocks import is_whole_object
from services.tokenizer.answer_parts import (
    NOTHING,
    AnswerDelta,
    AnswerEnd,
    AnswerParser,
    Part,
    Text,
    TokenLogprobs,
    ToolCallArguments,
    ToolCallStart,
)
from services.tokenizer.journal import AnswerNews, Ending


class PendingAnswer:
    """One answer between the journal and a format."""

    __slots__ = (
        "_call",
        "_echo",
        "_echoes_logprobs",
        "_keeps_ids",
        "_keeps_logprobs",
        "_logprobs",
        "_parser",
        "_stop_ids",
        "_token_ids",
        "awaits_prompt",
        "is_plain",
        "opening",
        "texts",
    )

    def __init__(
        self,
        echo: str = "",
        parser: AnswerParser | None = None,
        *,
        stop_ids: frozenset[int] = frozenset(),
        keeps_ids: bool = False,
        keeps_logprobs: bool = False,
        awaits_prompt: bool = False,
        echoes_logprobs: bool = False,
    ) -> None:
        """Nothing has come.

        Args:
            echo: What the answer begins with, for most nothing.
            parser: Makes parts of the text; None gives it as it is.
            stop_ids: The client's own stop ids: the end tells which of them it was.
            keeps_ids: Whether the format shows ids.
            keeps_logprobs: Whether it shows log-probabilities.
            awaits_prompt: Whether the prompt's log-probabilities come first.
            echoes_logprobs: Whether these are entries of the answer too, as its echo is text of it.
        """
        self._echo = echo
        self._parser = parser
        self._stop_ids = stop_ids
        self._keeps_ids = keeps_ids
        self._keeps_logprobs = keeps_logprobs
        self.is_plain = parser is None and not (keeps_ids or keeps_logprobs or awaits_prompt)
        """Whether it is nothing but text: then `texts` are all there is to it."""
        self._echoes_logprobs = echoes_logprobs
        self.awaits_prompt = awaits_prompt
        self.opening = AnswerDelta((Text(echo),)) if echo and not awaits_prompt else None
        """What comes before everything else, until it was handed on."""
        self.texts: list[str] = []
        """The text that was not taken yet."""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._call: list[str] | None = None  # the arguments of the call that began last, as far as they came

    def add(self, news: AnswerNews) -> None:
        """More of the answer."""
        if news.text:
            self.texts.append(news.text)
        if self._keeps_ids:
            self._token_ids += news.token_ids
        if self._keeps_logprobs:
            self._logprobs += news.logprobs

    def take_text(self) -> str:
        """The text as it came; "" for none."""
        texts = self.texts
        text = texts[0] if len(texts) == 1 else "".join(texts)
        texts.clear()
        return text

    def set_prompt(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """The prompt's log-probabilities, one for each token."""
        self.awaits_prompt = False
        parts = (Text(self._echo),) if self._echo else ()
        self.opening = AnswerDelta(parts, (), logprobs if self._echoes_logprobs else (), logprobs)

    def take(self, usage: Mapping[str, object] | None = None) -> AnswerDelta | None:
        """What can be shown now; None for nothing."""
        if not self.texts or self.awaits_prompt:
            return None
        text = self.take_text()
        return self._delta((Text(text),) if self._parser is None else self._parser.feed(text), usage)

    def take_last(self, usage: Mapping[str, object] | None = None, *, is_cut: bool = False) -> AnswerDelta | None:
        """What can be shown now that nothing more will come; a parser is told whether the model would have gone on."""
        if self._parser is None:
            return self.take(usage)
        text = self.take_text()
        return self._delta([*(self._parser.feed(text) if text else ()), *self._parser.finish(is_cut=is_cut)], usage)

    def take_end(
        self,
        ending: Ending,
        timings: Mapping[str, object] | None = None,
        usage: Mapping[str, object] | None = None,
    ) -> AnswerEnd:
        """The end, after `take_last`, with what no part was left to show."""
        has_rest = self._token_ids or self._logprobs or usage is not None
        return AnswerEnd(
            finish=ending.finish,
            has_tool_calls=self._call is not None,
            has_cut_call=self._call is not None and not is_whole_object("".join(self._call)),
            stop=ending.stop if isinstance(ending.stop, str) or ending.stop in self._stop_ids else None,
            rest=AnswerDelta((), self._token_ids, self._logprobs, (), usage) if has_rest else NOTHING,
            embedding=ending.embedding,
            timings=timings,
            cached_tokens=ending.cached_tokens,
        )

    def _delta(self, parts: Sequence[Part], usage: Mapping[str, object] | None) -> AnswerDelta | None:
        if not parts:
            return None
        if self._parser is not None:
            self._follow_calls(parts)
        if not self._token_ids and not self._logprobs and usage is None:  # nearly always
            return AnswerDelta(parts)
        token_ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        return AnswerDelta(parts, token_ids, logprobs, (), usage)

    def _follow_calls(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, ToolCallStart):
                self._call = []
            elif isinstance(part, ToolCallArguments) and self._call is not None:
                self._call.append(part.fragment)

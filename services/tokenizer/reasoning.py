r"""Tokenizer process: takes the thoughts out of an answer, before anything else looks at it.

    <think>\n thoughts \n</think>\n\n answer      the block begins the answer, or the prompt has opened it already

A model that does not begin with a block thinks nothing: all of its answer is content. The blanks at the borders of a
block belong to its markup. What follows the block goes to the parser of tool calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.tokenizer.answer_parts import AnswerParser, Part, Reasoning, Text
from services.tokenizer.tool_parts import BLANKS
from services.tokenizer.tool_source import TextSource, Waiting, text_until


@dataclass(frozen=True)
class ReasoningMarks:
    """How a model family marks its thoughts.

    Attributes:
        opening: Begins a block.
        closing: Ends it.
        is_always_open: An answer begins inside a block unless the prompt's end closes one.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    is_always_open: bool = False

    def are_open_at(self, prompt_end: str) -> bool:
        """Whether an answer to a prompt that ends so begins inside a block."""
        if self.is_always_open:
            return not self.are_closed_at(prompt_end)
        return prompt_end.rstrip(BLANKS).endswith(self.opening)

    def are_closed_at(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has closed a block: thinking is over, or off."""
        return prompt_end.rstrip(BLANKS).endswith(self.closing)

    def are_left_open_in(self, text: str) -> bool:
        """Whether a text that the answer continues holds a block that is not closed."""
        return text.rfind(self.opening) > text.rfind(self.closing)


DEFAULT_MARKS = ReasoningMarks()


@dataclass(frozen=True)
class ReasoningWish:
    """What a request wants of the thoughts.

    Attributes:
        is_separate: False: they are text, marks and all.
        is_shown: False: they are left out.
        is_streamed: False: they are given in one piece when they end.
    """

    is_separate: bool = True
    is_shown: bool = True
    is_streamed: bool = True


class PlainText:
    """An `AnswerParser` for answers without markup."""

    def feed(self, text: str) -> Sequence[Part]:
        """The text."""
        return (Text(text),) if text else ()

    def finish(self, *, is_cut: bool = False) -> Sequence[Part]:
        """Nothing is ever held back."""
        return ()


class ReasoningParser:
    """An `AnswerParser` for the thoughts; `rest` parses what follows them."""

    def __init__(self, marks: ReasoningMarks, wish: ReasoningWish, is_open: bool, rest: AnswerParser) -> None:
        self._marks = marks
        self._wish = wish
        self._rest = rest
        self._thoughts: list[str] = []
        self._blanks: list[str] = []
        self._source = TextSource()
        self._reading = self._read(is_open)
        self._is_over = False

    def feed(self, text: str) -> Sequence[Part]:
        """The parts that are certain after more text."""
        if self._is_over:
            return self._rest.feed(text)
        if not text:
            return ()
        self._source.add(text)
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> Sequence[Part]:
        """What was held back."""
        parts: Sequence[Part] = ()
        if not self._is_over:
            self._source.add("")
            self._source.close()
            parts = self._advance()
        return [*parts, *self._rest.finish(is_cut=is_cut)]

    def _advance(self) -> Sequence[Part]:
        try:
            next(self._reading)
        except StopIteration:
            self._is_over = True
            return [*self._new_thoughts(), *self._rest.feed(self._source.rest())]
        return self._new_thoughts()

    def _read(self, is_open: bool) -> Waiting[None]:
        """Ends where the thoughts do; what is not committed then is the rest's."""
        source = self._source
        yield from source.skip_blanks()
        if not (yield from source.take_word(self._marks.opening)):
            if not is_open:
                return
            source.put_back()
        yield from source.skip_blanks()
        self._pass_by(source.commit())
        is_closed = yield from text_until(source, self._think, self._marks.closing)
        if not is_closed or not self._wish.is_separate:
            self._thoughts += self._blanks
        if not is_closed:
            return
        yield from source.skip_blanks()
        self._pass_by(source.commit())

    def _pass_by(self, markup: str) -> None:
        """A mark and its blanks, which are text where thoughts are."""
        if not self._wish.is_separate:
            self._thoughts.append(markup)

    def _think(self, text: str) -> None:
        """Keeps trailing blanks back: the block may end behind them."""
        kept = text.rstrip(BLANKS)
        if kept:
            self._thoughts += [*self._blanks, kept]
            self._blanks.clear()
        self._blanks.append(text[len(kept) :])

    def _new_thoughts(self) -> Sequence[Part]:
        wish = self._wish
        if wish.is_separate and not wish.is_streamed and not self._is_over:
            return ()
        thoughts = "".join(self._thoughts)
        self._thoughts.clear()
        if not wish.is_separate:
            return (Text(thoughts),) if thoughts else ()
        return (Reasoning(thoughts),) if thoughts and wish.is_shown else ()

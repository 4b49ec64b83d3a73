"""Tokenizer process: how the parsers of answers read: a generator that waits where the text has not come yet.

A family's grammar is written down as if the whole answer were there: `yield` is where it waits for the next piece. So a
parser is the same for every way an answer can be cut into pieces, and its time is linear in the answer's length.

    model: ...Let me check. <tool_ | call>{"name": ...
           given as text ------^^^^^^^ taken, not committed: markup, or text after all

What was taken and not committed is what must still come out as text if it turns out to be no markup. Owns nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from services.tokenizer.answer_parts import Part
from services.tokenizer.tool_parts import BLANKS, AnswerParts

_Result = TypeVar("_Result")
Waiting: TypeAlias = Generator[None, None, _Result]
"""Reads from a source; yields where it needs more text, returns when it is done."""

_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_BLANK_RUN = re.compile(r"[ \t\n\r]+")


class NotMarkupError(Exception):
    """What was taken since the last commit is not what it looked like."""


class TextSource:
    """The text of one answer as it comes: one current piece, a position in it, and what is not committed."""

    __slots__ = ("_at", "_is_cut", "_is_over", "_piece", "_taken")

    def __init__(self) -> None:
        self._piece = ""
        self._at = 0
        self._taken: list[str] = []
        self._is_over = False
        self._is_cut = False

    def add(self, text: str) -> None:
        """The next piece; the one before was read to its end."""
        self._piece, self._at = text, 0

    def close(self, *, is_cut: bool = False) -> None:
        """No piece will follow; `is_cut`: the model would have gone on."""
        self._is_over = True
        self._is_cut = is_cut

    @property
    def is_at_end(self) -> bool:
        """Whether the answer has ended and all of it was taken."""
        return self._is_over and self._at == len(self._piece)

    @property
    def is_cut_off(self) -> bool:
        """Whether the answer was cut and all of it was taken."""
        return self._is_cut and self.is_at_end

    def peek(self) -> Waiting[str]:
        """The next character, not taken; "" at the end of the answer."""
        while self._at == len(self._piece):
            if self._is_over:
                return ""
            yield
        return self._piece[self._at]

    def take(self) -> str:
        """Takes the character that `peek` gave."""
        return self._advance(self._at + 1)

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Takes what matches here, as far as the piece goes; "" if nothing does."""
        found = pattern.match(self._piece, self._at)
        return self._advance(found.end()) if found else ""

    def take_runs(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """Takes what matches here, through as many pieces as it goes on; "" if nothing does."""
        runs: list[str] = []
        while (yield from self.peek()):
            run = self.take_run(pattern)
            if not run:
                break
            runs.append(run)
        return "".join(runs)

    def take_hex(self, num_digits: int) -> Waiting[str]:
        """Takes hexadecimal digits.

        Raises:
            NotMarkupError: something else is among them.
        """
        digits = ""
        for _ in range(num_digits):
            if (yield from self.peek()) not in _HEX_DIGITS:
                raise NotMarkupError
            digits += self.take()
        return digits

    def take_before(self, character: str) -> str:
        """Takes what comes before a character, or the rest of the piece without it."""
        found = self._piece.find(character, self._at)
        return self._advance(len(self._piece) if found < 0 else found)

    def take_word(self, word: str) -> Waiting[bool]:
        """Takes a word, or as much of it as is there; whether all was."""
        for character in word:
            if (yield from self.peek()) != character:
                return False
            self.take()
        return True

    def skip_blanks(self) -> Waiting[str]:
        """Takes blanks, as JSON has them; the character after them, not taken, "" at the end."""
        while (character := (yield from self.peek())) and character in BLANKS:
            self.take_run(_BLANK_RUN)
        return character

    def expect(self, character: str) -> Waiting[None]:
        """Takes one character.

        Raises:
            NotMarkupError: another one is there.
        """
        if (yield from self.peek()) != character:
            raise NotMarkupError
        self.take()

    def commit(self) -> str:
        """What was taken since the last commit; from now on it is no longer held."""
        taken = "".join(self._taken)
        self._taken.clear()
        return taken

    def put_back(self) -> None:
        """Takes back what is not committed: it comes once more."""
        self._piece, self._at = self.commit() + self._piece[self._at :], 0

    def rest(self) -> str:
        """What is not committed, and the rest of the piece; both are taken and committed."""
        self._advance(len(self._piece))
        return self.commit()

    def _advance(self, end: int) -> str:
        text = self._piece[self._at : end]
        self._at = end
        if text:
            self._taken.append(text)
        return text


def text_until(source: TextSource, give: Callable[[str], None], marker: str) -> Waiting[bool]:
    """Gives the text up to a marker and takes the marker, uncommitted; False when the answer ended without one.

    The marker's first character must not occur in it again: then a text that breaks it off begins no other.
    """
    while (yield from source.peek()):
        source.take_before(marker[0])
        give(source.commit())
        if (yield from source.take_word(marker)):
            return True
        give(source.commit())
    give(source.commit())
    return False


def markup_or_text(
    source: TextSource, parts: AnswerParts, reading: Waiting[None], *, has_tag: bool = True
) -> Waiting[None]:
    """Reads markup; what turns out to be none is given as text, or closes the call that it broke off.

    Where an answer is cut behind a tag, or behind a call, what begins there is a call and no text.
    """
    try:
        yield from reading
    except NotMarkupError:
        is_call = source.is_cut_off and (has_tag or parts.has_calls)
        parts.break_off(source.commit(), is_at_end=source.is_at_end, is_call=is_call)


class GeneratorParser:
    """An `AnswerParser` made of a generator that reads a source and gives parts."""

    def __init__(self, read: Callable[[TextSource, AnswerParts], Waiting[None]], parts: AnswerParts) -> None:
        self._source = TextSource()
        self._parts = parts
        self._reading = read(self._source, parts)

    def feed(self, text: str) -> Sequence[Part]:
        """The parts that are certain after more text."""
        if text:
            self._source.add(text)
            next(self._reading)
        return self._parts.take()

    def finish(self, *, is_cut: bool = False) -> Sequence[Part]:
        """What was held back."""
        self._source.add("")
        self._source.close(is_cut=is_cut)
        for _ in self._reading:
            raise RuntimeError("a parser waits for text after the end of an answer")
        self._parts.close()
        return self._parts.take()

"""Tokenizer process: the parts of one answer as its parser gives them: neighbours joined, calls numbered.

Owns the numbering of calls and the rule for blanks: text of nothing but blanks before, between and after calls belongs
to the calls' markup, so that the content of an answer that only calls is empty. Of an answer that may be nothing but
calls no text is given at all: what a grammar forced is no text for the user, also where it breaks off. Knows no model
family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from services.tokenizer.answer_parts import Part, Reasoning, Text, ToolCallArguments, ToolCallStart

BLANKS = " \t\n\r"


@dataclass(frozen=True)
class CallRules:
    """Which calls an answer may hold.

    Attributes:
        names: The functions that the request declares; what looks like a call of another one is text.
        max_calls: Further calls are left out; None for no limit.
        has_text: Whether there is text beside the calls; False where a grammar leaves room for calls alone.
        new_call_id: Draws the id of a call.
    """

    names: frozenset[str]
    new_call_id: Callable[[], str]
    max_calls: int | None = None
    has_text: bool = True


class _Stage(Enum):
    """How far the call is that began last."""

    CLOSED = auto()
    ARGUMENTS = auto()
    CLOSING = auto()  # the arguments are complete, the markup around them is not


class AnswerParts:
    """Collects the parts of one answer."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._parts: list[Part] = []
        self._kind: type[Text] | type[Reasoning] | type[ToolCallArguments] | None = None
        self._pending: list[str] = []
        self._blanks: list[str] = []
        self._is_beside_call = True  # the beginning counts: a call may follow the blanks
        self._num_calls = 0
        self._stage = _Stage.CLOSED

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._num_calls > 0

    def knows(self, name: str) -> bool:
        """Whether a call of this function may be given."""
        return name in self._rules.names

    def text(self, text: str) -> None:
        """More text for the user."""
        if not self._rules.has_text:
            return
        if self._is_beside_call:
            self._blanks.append(text)
            if not text.strip(BLANKS):
                return
            text = "".join(self._blanks)
            self._blanks.clear()
            self._is_beside_call = False
        self._add(Text, text)

    def reasoning(self, text: str) -> None:
        """More thoughts."""
        self._add(Reasoning, text)

    def start_call(self, name: str) -> None:
        """A call begins; its arguments follow."""
        self._flush()
        self._blanks.clear()
        self._is_beside_call = True
        if self._is_wanted(self._num_calls):
            self._parts.append(ToolCallStart(self._num_calls, self._rules.new_call_id(), name))
        self._num_calls += 1
        self._stage = _Stage.ARGUMENTS

    def arguments(self, fragment: str) -> None:
        """More of the arguments of the call that began last."""
        if self._is_wanted(self._num_calls - 1):
            self._add(ToolCallArguments, fragment)

    def end_arguments(self) -> None:
        """The arguments of the call are complete."""
        self._stage = _Stage.CLOSING

    def end_call(self) -> None:
        """The call is complete."""
        self._stage = _Stage.CLOSED

    def break_off(self, rest: str, *, is_at_end: bool, is_call: bool) -> None:
        """Something taken for markup is none: give it as text.

        At the end of an answer it may be cut off instead: then it belongs to the arguments of an open call, or to the
        markup behind them, or to that of a call (`is_call`) whose name is not there.
        """
        if not is_at_end or (self._stage is _Stage.CLOSED and not is_call):
            self.text(rest)
        elif self._stage is _Stage.ARGUMENTS:
            self.arguments(rest)
        self._stage = _Stage.CLOSED

    def take(self) -> Sequence[Part]:
        """What came since the last time."""
        self._flush()
        parts, self._parts = self._parts, []
        return parts

    def close(self) -> None:
        """The answer has ended."""
        if self._blanks and not self._num_calls:
            self._add(Text, "".join(self._blanks))
        self._blanks.clear()

    def _is_wanted(self, index: int) -> bool:
        return self._rules.max_calls is None or index < self._rules.max_calls

    def _add(self, kind: type[Text] | type[Reasoning] | type[ToolCallArguments], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._pending.append(text)

    def _flush(self) -> None:
        if not self._pending:
            return
        joined = "".join(self._pending)
        self._pending.clear()
        if self._kind is ToolCallArguments:
            self._parts.append(ToolCallArguments(self._num_calls - 1, joined))
        elif self._kind is Reasoning:
            self._parts.append(Reasoning(joined))
        else:
            self._parts.append(Text(joined))

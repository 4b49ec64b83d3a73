"""Answers for the tests of parsers: fed in pieces, and put together again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from services.tokenizer.answer_parts import AnswerParser, Part, Reasoning, Text, ToolCallArguments, ToolCallStart
from services.tokenizer.tool_hermes import read_hermes
from services.tokenizer.tool_llama3 import read_llama3
from services.tokenizer.tool_mistral import read_mistral
from services.tokenizer.tool_parts import AnswerParts, CallRules
from services.tokenizer.tool_pythonic import read_pythonic
from services.tokenizer.tool_source import GeneratorParser

NAMES = frozenset({"f", "g", "get_weather", "数える"})
READERS = {"hermes": read_hermes, "llama3": read_llama3, "mistral": read_mistral, "pythonic": read_pythonic}


def tool_parser(
    family: str, max_calls: int | None = None, names: frozenset[str] = NAMES, *, has_text: bool = True
) -> GeneratorParser:
    """A parser whose calls are numbered c0, c1, ..."""
    numbers = itertools.count()
    rules = CallRules(names, lambda: f"c{next(numbers)}", max_calls, has_text)
    return GeneratorParser(READERS[family], AnswerParts(rules))


@dataclass
class Answer:
    """What a client makes of the parts."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments, as they came."""

    @property
    def arguments(self) -> list[object]:
        """The arguments of each call, decoded."""
        return [json.loads(text) for _, text in self.calls]


def answer_of(parts: Iterable[Part]) -> Answer:
    """Joins parts; asserts that calls are numbered from 0, begin once and have no arguments out of turn."""
    answer = Answer()
    for part in parts:
        match part:
            case Text(text):
                assert text
                answer.content += text
            case Reasoning(text):
                assert text
                answer.reasoning += text
            case ToolCallStart(index, call_id, name):
                assert index == len(answer.calls)
                assert call_id
                answer.calls.append((name, ""))
            case ToolCallArguments(index, fragment):
                assert fragment
                assert index == len(answer.calls) - 1
                answer.calls[index] = (answer.calls[index][0], answer.calls[index][1] + fragment)
    return answer


def parts_of(parser: AnswerParser, pieces: Iterable[str], *, is_cut: bool = False) -> list[Part]:
    """All parts of an answer that comes in these pieces."""
    return [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish(is_cut=is_cut)]


def cut(text: str, size: int) -> list[str]:
    """A text in pieces of `size` characters."""
    return [text[start : start + size] for start in range(0, len(text), size)]


def parsed(new_parser: Callable[[], AnswerParser], text: str, *, is_cut: bool = False) -> Answer:
    """An answer, which must be the same in pieces of 1, 2, 3, 7 and all characters."""
    sizes = (1, 2, 3, 7, len(text) or 1)
    answers = [answer_of(parts_of(new_parser(), cut(text, size), is_cut=is_cut)) for size in sizes]
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def joined(parts: Sequence[Part]) -> list[Part]:
    """Parts with equal neighbours made one, as if they had come at once."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        match last, part:
            case (Text(before), Text(text)):
                result[-1] = Text(before + text)
            case (Reasoning(before), Reasoning(text)):
                result[-1] = Reasoning(before + text)
            case (ToolCallArguments(index, before), ToolCallArguments(_, text)):
                result[-1] = ToolCallArguments(index, before + text)
            case _:
                result.append(part)
    return result

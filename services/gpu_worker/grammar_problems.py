"""gpu_worker and its grammar child: what the grammar library says of a grammar, as a client can use it.

The library speaks of its own text of the grammar, with places in it, dumps of its state and options of its own. What is
kept is the sentence that says what is wrong, and of a regular expression the place, counted in what the client wrote.
Pure.
"""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher

from services.wire.request_params import Grammar, GrammarKind

MAX_PROBLEM_CHARS = 1000
TOO_LARGE = "it takes too much to follow: it must be simpler, or repeat less"
NO_SENTENCE = "no text is a sentence of it"

_TOO_LARGE_REASONS = frozenset(("LexerTooComplex", "ParserTooComplex"))
_TOO_LARGE_WORDS = ("too many expressions", "too many items", "too many states", "fuel exhausted", "out of fuel")
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
_SHOWN_CHARS = 64
_REGEX_ERROR = re.compile(
    r"regex parse error:\n    (?P<pattern>.*)\n    (?P<before> *)\^+ *\n(?:.*\n)*?error: (?P<problem>.+)$", re.MULTILINE
)
_PLACELESS_REGEX_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")
_INNER = re.compile(r'^(?:failed to compile JSON schema: |invalid regex ".*" \(in regex\): )')
_DUMPED = re.compile(r":  ?\(.*|; \w+ in regex /.*|\. Enable '.*|; try avoiding .*", re.DOTALL)


def is_too_large(matcher: LLMatcher) -> bool:
    """Whether a matcher failed at a limit, and not over a fault in the grammar or of ours."""
    said = matcher.get_error().lower()
    return matcher.stop_reason() in _TOO_LARGE_REASONS or any(word in said for word in _TOO_LARGE_WORDS)


def problem_of_matcher(matcher: LLMatcher, grammar: Grammar) -> str:
    """Why a grammar cannot be used, in one line of at most MAX_PROBLEM_CHARS; "" when it can."""
    if not matcher.is_error():
        return ""
    if is_too_large(matcher):
        return TOO_LARGE
    error = matcher.get_error().split("\n<", 1)[0].strip()
    if error in _DEAD_ENDS:
        return NO_SENTENCE
    in_regex = _regex_problem(error, grammar)
    if in_regex:
        return in_regex[:MAX_PROBLEM_CHARS]
    sentence = _INNER.sub("", _PLACE.sub("", error.split("\n", 1)[0]))
    return _DUMPED.sub("", sentence)[:MAX_PROBLEM_CHARS] or "the grammar library refuses it"


def _regex_problem(error: str, grammar: Grammar) -> str:
    """What is wrong with a regular expression, and where in it; "" when nothing is said of one."""
    found = _REGEX_ERROR.search(error)
    if found is None:
        placeless = _PLACELESS_REGEX_ERROR.search(error)
        return f"a regular expression cannot be read: {placeless[1]}" if placeless else ""
    written, column = found["pattern"], len(found["before"])
    if grammar.kind is GrammarKind.REGEX:
        place = str(_place_in(grammar.text, written, column))
    else:
        shown = written if len(written) <= _SHOWN_CHARS else f"{written[:_SHOWN_CHARS]}..."
        place = f"{column + 1} of {json.dumps(shown, ensure_ascii=False)}"
    return f"a regular expression cannot be read: {found['problem']}, at character {place}"


def _place_in(text: str, written: str, column: int) -> int:
    """Which character of a text, from 1, stands in a column of it as the library writes it: with more backslashes."""
    place = 0
    for character in written[:column]:
        is_own = place < len(text) and text[place] == character
        place += is_own or character != "\\"
    return place + 1

r"""gpu_worker's grammar child: EBNF as clients write it (`root ::= "a" b* | [0-9]+`) to the grammar library's Lark.

The library's terminals are greedy: `[a-z]+ "s"` as two terminals would never match "cats". So a grammar without
recursion becomes one terminal, a regular expression that nothing follows; in one with recursion every terminal is a
single character, and the parser does the rest. Either way exactly the sentences of the EBNF are sentences.

Known: `#` comments, texts in double or single quotes, classes such as `[^a-z\n]`, `.` for any character, groups,
`* + ? {m} {m,} {m,n}`, the escapes of JSON and C. Rules may go over several lines. The answer is a `root`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\n]*)
      | (?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
      | (?P<defined>::=)
      | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<class>\[\^?(?:[^\]\\\n]|\\.)*\])
      | (?P<times>\{\s*\d{1,6}\s*(?:,\s*\d{0,6}\s*)?\})
      | (?P<sign>[()|*+?.])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0"} | {c: c for c in "\"'\\/[]-^.{}()|*+?$#"}
_MAX_GROUPS = 64  # within each other


class EbnfError(ValueError):
    """What is wrong with a grammar, and in which line."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text, letter by letter."""

    text: str


@dataclass(frozen=True, slots=True)
class Class:
    """One character of a class, as a regular expression."""

    regex: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Repeated:
    """Something, several times: `times` is `*`, `+`, `?` or `{m,n}`."""

    item: Node
    times: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several sequences."""

    sequences: tuple[tuple[Node, ...], ...]


Node: TypeAlias = Text | Class | Reference | Repeated | Choice


def lark_of_ebnf(source: str) -> str:
    """The grammar in Lark.

    Raises:
        EbnfError: it is not EBNF, has no `root`, or names a rule that is not there.
    """
    parser = _Parser(source)
    rules = parser.rules()
    if "root" not in rules:
        raise EbnfError("there is no rule named root")
    used = _reachable(rules, parser)
    numbers = {name: number for number, name in enumerate(used)}
    is_regular = not _is_recursive(rules, used)
    kind = "R" if is_regular else "r"
    lines = ["%llguidance {}", f"start: {kind}0"]
    for name, number in numbers.items():
        lines.append(f"{kind}{number}: {_written(rules[name], numbers, is_regular)}")
    return "\n".join(lines)


class _Parser:
    """Tokens to rules by recursive descent."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = list(self._split())
        self._place = 0
        self._first_uses: dict[str, int] = {}

    def rules(self) -> dict[str, Choice]:
        """All rules by name."""
        rules: dict[str, Choice] = {}
        while self._place < len(self._tokens):
            kind, name, _ = self._tokens[self._place]
            if kind != "name" or not self._begins_rule(self._place):
                self._refuse("a rule begins with NAME ::=")
            if name in rules:
                self._refuse(f"the rule {name} is there twice")
            self._place += 2
            rules[name] = self._choice(0)
        return rules

    def first_use(self, name: str) -> str:
        """Where a rule is referred to first."""
        return self._at(self._first_uses[name])

    def _split(self) -> Iterator[tuple[str, str, int]]:
        place = 0
        while place < len(self._source):
            found = _TOKEN.match(self._source, place)
            if found is None:
                raise EbnfError(f"{self._at(place)}: cannot be read from {self._source[place : place + 20]!r} on")
            if found.lastgroup != "blank":
                yield str(found.lastgroup), found[0], place
            place = found.end()

    def _choice(self, depth: int) -> Choice:
        if depth > _MAX_GROUPS:
            self._refuse(f"groups are nested more than {_MAX_GROUPS} deep")
        sequences = [self._sequence(depth)]
        while self._takes("|"):
            sequences.append(self._sequence(depth))
        return Choice(tuple(sequences))

    def _sequence(self, depth: int) -> tuple[Node, ...]:
        items: list[Node] = []
        while self._place < len(self._tokens):
            kind, text, _ = self._tokens[self._place]
            if text in ("|", ")") or (kind == "name" and self._begins_rule(self._place)):
                break
            item = self._item(kind, text, depth)
            while self._place < len(self._tokens) and self._is_repetition():
                item = Repeated(item, re.sub(r"\s", "", self._tokens[self._place][1]))
                self._place += 1
            items.append(item)
        return tuple(items)

    def _item(self, kind: str, text: str, depth: int) -> Node:
        if kind not in ("name", "text", "class") and text not in (".", "("):
            self._refuse(f"{text} has nothing before it")
        self._place += 1
        if kind == "name":
            self._first_uses.setdefault(text, self._tokens[self._place - 1][2])
            return Reference(text)
        if kind == "text":
            return Text("".join(self._characters(text[1:-1])))
        if kind == "class":
            return Class(self._class(text[1:-1]))
        if text == ".":
            return Class("(?s:.)")
        inner = self._choice(depth + 1)
        if not self._takes(")"):
            self._refuse("a group is not closed")
        return inner

    def _class(self, inside: str) -> str:
        """A class as a regular expression: every character by its number, so that none has a meaning of its own."""
        is_negated = inside.startswith("^")
        body = inside[is_negated:]
        spelled = [found[0] for found in _CHARACTER.finditer(body)]
        characters = list(self._characters(body))
        if not characters:
            self._refuse("a class is empty")
        ranges, index = [], 0
        while index < len(characters):
            low = high = characters[index]
            if index + 2 < len(characters) and spelled[index + 1] == "-":
                high, index = characters[index + 2], index + 2
            if low > high:
                self._refuse(f"the range {low!r} to {high!r} is empty")
            ranges.append(f"\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}")
            index += 1
        return f"[{'^' * is_negated}{''.join(ranges)}]"

    def _characters(self, text: str) -> Iterator[str]:
        for found in _CHARACTER.finditer(text):
            *hexadecimal, escaped, plain = found.groups()
            number = next((digits for digits in hexadecimal if digits), None)
            if number is not None:
                code = int(number, 16)
                if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                    self._refuse(f"{found[0]} is no character")
                yield chr(code)
            elif escaped is not None:
                if escaped not in _ESCAPES:
                    self._refuse(f"\\{escaped} is no known escape")
                yield _ESCAPES[escaped]
            else:
                yield plain

    def _begins_rule(self, place: int) -> bool:
        return place + 1 < len(self._tokens) and self._tokens[place + 1][0] == "defined"

    def _is_repetition(self) -> bool:
        kind, text, _ = self._tokens[self._place]
        return kind == "times" or text in ("*", "+", "?")

    def _takes(self, sign: str) -> bool:
        is_there = self._place < len(self._tokens) and self._tokens[self._place][:2] == ("sign", sign)
        self._place += is_there
        return is_there

    def _at(self, offset: int) -> str:
        line = self._source.count("\n", 0, offset) + 1
        return f"line {line}, column {offset - self._source.rfind(chr(10), 0, offset)}"

    def _refuse(self, problem: str) -> NoReturn:
        at = self._tokens[min(self._place, len(self._tokens) - 1)][2] if self._tokens else 0
        raise EbnfError(f"{self._at(at)}: {problem}")


def _references(node: Node) -> Iterator[str]:
    if isinstance(node, Reference):
        yield node.name
    elif isinstance(node, Repeated):
        yield from _references(node.item)
    elif isinstance(node, Choice):
        for sequence in node.sequences:
            for item in sequence:
                yield from _references(item)


def _reachable(rules: dict[str, Choice], parser: _Parser) -> list[str]:
    """The rules that the root needs, the root first."""
    found = {"root": None}
    for name in (queue := ["root"]):
        for needed in _references(rules[name]):
            if needed not in rules:
                raise EbnfError(f"{parser.first_use(needed)}: the rule {name} needs {needed}, which is not there")
            if needed not in found:
                found[needed] = None
                queue.append(needed)
    return list(found)


def _is_recursive(rules: dict[str, Choice], used: list[str]) -> bool:
    """Whether a rule needs itself: else one can always take away a rule that needs no other."""
    needs = {name: set(_references(rules[name])) for name in used}
    users: dict[str, list[str]] = {name: [] for name in used}
    for name, needed in needs.items():
        for other in needed:
            users[other].append(name)
    ready = [name for name in used if not needs[name]]
    for name in ready:
        for user in users[name]:
            needs[user].discard(name)
            if not needs[user]:
                ready.append(user)
    return len(ready) < len(used)


def _written(node: Node, numbers: dict[str, int], is_regular: bool) -> str:
    if isinstance(node, Text):
        if is_regular or len(node.text) < 2:
            return json.dumps(node.text)
        return "(" + " ".join(json.dumps(character) for character in node.text) + ")"
    if isinstance(node, Class):
        return f"/{node.regex}/"
    if isinstance(node, Reference):
        return f"{'R' if is_regular else 'r'}{numbers[node.name]}"
    if isinstance(node, Repeated):
        return f"({_written(node.item, numbers, is_regular)}){node.times}"
    sequences = (" ".join(_written(item, numbers, is_regular) for item in sequence) for sequence in node.sequences)
    return "(" + " | ".join(sequence or '""' for sequence in sequences) + ")"

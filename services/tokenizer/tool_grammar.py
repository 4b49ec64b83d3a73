r"""Tokenizer process: the grammars that hold an answer to calls, in the call form of the model's family.

    start: thoughts? call ("\n" call)*      tool_choice required or named: a call must come
    start: (text call)* text                auto with strict functions: what follows a call's opening is held to it

The language is the grammar library's own (LARK in `GrammarKind`); arguments are `%json` of each function's schema.
Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from services.tokenizer.api_error import Code, bad_field
from services.tokenizer.json_schema_check import SchemaLimits
from services.tokenizer.reasoning import DEFAULT_MARKS, ReasoningMarks
from services.tokenizer.tool_families import CallForm
from services.tokenizer.tool_llama3 import TAG
from services.tokenizer.tool_pythonic_grammar import pythonic_calls
from services.tokenizer.tool_requests import ToolUse
from services.wire.request_params import Grammar, GrammarKind

_LAZY_FORMS = ("hermes", "mistral", "mistral_list")
_ANY_TEXT = r"/(?s:.*)/"


class Thinking(Enum):
    """What of thoughts comes before the rest of an answer."""

    NONE = auto()
    MAY_COME = auto()
    IS_OPEN = auto()  # the prompt has opened the block


@dataclass(frozen=True)
class GrammarSetting:
    """What a model's grammars depend on beside the request.

    Attributes:
        control_ids: The ids of control tokens by their text: a grammar names those by id, other words by letters.
        limits: Of the schemas.
        is_compact: No blanks between the parts of JSON but one behind `,` and `:`.
    """

    control_ids: Mapping[str, int]
    limits: SchemaLimits
    is_compact: bool = True

    def word(self, text: str) -> str:
        """A word of markup in the grammar's language."""
        token_id = self.control_ids.get(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def json_rule(self, schema: Mapping[str, object]) -> str:
        """The JSON texts that fit a schema."""
        options = schema.get("x-guidance")
        blanks: dict[str, object] = {"whitespace_flexible": True}
        if self.is_compact:
            blanks = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
        whole = {**schema, "x-guidance": {**(options if isinstance(options, Mapping) else {}), **blanks}}
        return f"%json {json.dumps(whole, ensure_ascii=False)}"


def quoted(text: str) -> str:
    """Letters in the grammar's language."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class GrammarFrame:
    """What surrounds the calls of an answer."""

    setting: GrammarSetting
    thinking: Thinking = Thinking.NONE
    marks: ReasoningMarks = DEFAULT_MARKS


def answer_grammar(
    frame: GrammarFrame, form: CallForm, use: ToolUse | None, structure: Grammar | None
) -> Grammar | None:
    """The grammar for a request's answers; None when the model writes freely.

    Args:
        frame: What comes before the rest.
        form: How calls are written.
        use: The tools; None for none.
        structure: What another field asks the answer to be; a call may stand in its place, or must.

    Raises:
        ApiError: 400 naming the function or the field: a schema cannot be kept, or not beside thoughts or calls.
    """
    rules = _Rules(frame.setting, use) if use is not None else None
    if rules is None or use is None:
        return structure if structure is None or frame.thinking is Thinking.NONE else _framed(frame, structure)
    if use.must_call:
        return _joined(frame, rules.start(form), rules.lines)
    if structure is not None:
        calls = rules.start(form)
        if form == "llama3":  # bare JSON, as the answer may be: a tag tells calls from it
            calls = f"{frame.setting.word(TAG)} {calls}"
        return _joined(frame, f"{calls} | answer", [*rules.lines, _answer_rule(structure)])
    if form in _LAZY_FORMS and any(function.is_strict for function in use.functions):
        # Thoughts that may come are free text like any other.
        is_open = frame.thinking is Thinking.IS_OPEN
        free = frame if is_open else GrammarFrame(frame.setting, marks=frame.marks)
        return _joined(free, rules.lazy_start(form), rules.lines)
    return None


def _framed(frame: GrammarFrame, structure: Grammar) -> Grammar:
    return _joined(frame, "answer", [_answer_rule(structure)])


def _answer_rule(structure: Grammar) -> str:
    """A grammar of another field as the rule `answer`."""
    match structure.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"answer: %json {structure.text}"
        case GrammarKind.REGEX:
            return f"answer: /{_slashed(structure.text)}/"
        case GrammarKind.LARK:
            return "answer:" + structure.text.removeprefix("start:")
        case GrammarKind.EBNF:
            problem = "cannot be kept beside tools or by a model that thinks first (turn thinking off)"
            raise bad_field("ebnf", problem, Code.UNSUPPORTED_VALUE)


def _joined(frame: GrammarFrame, rest: str, lines: Sequence[str]) -> Grammar:
    """The first rule (thoughts, blanks, the rest) and the others."""
    setting, marks = frame.setting, frame.marks
    if frame.thinking is Thinking.NONE:
        return Grammar(GrammarKind.LARK, "\n".join([f"start: {rest}", *lines]))
    if marks.closing in setting.control_ids:
        thoughts = f"thoughts: {_ANY_TEXT} {setting.word(marks.closing)}"
    else:
        thoughts = f"thoughts[lazy]: {_ANY_TEXT[:-1]}{_slashed(marks.closing)}/"
    block = "thoughts BLANKS?"
    if frame.thinking is Thinking.MAY_COME:
        block = f"({setting.word(marks.opening)} {block})?"
    first = [f"start: {block} ({rest})", thoughts, "BLANKS: /[ \\n]{1,4}/"]
    return Grammar(GrammarKind.LARK, "\n".join([*first, *lines]))


def _slashed(pattern: str) -> str:
    """A regular expression between slashes; what is escaped stays as it is."""
    pieces: list[str] = []
    is_escaped = False
    for character in pattern:
        pieces.append("\\/" if character == "/" and not is_escaped else "\\n" if character == "\n" else character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(pieces)


class _Rules:
    """The rules of one form; `start` gives the right side of the first, `lines` are those that it needs."""

    def __init__(self, setting: GrammarSetting, use: ToolUse) -> None:
        self._setting = setting
        self._use = use
        self._is_lazy = False
        self.lines: list[str] = []

    def lazy_start(self, form: CallForm) -> str:
        """Free text with calls in it."""
        self._is_lazy = True
        return self.start(form)

    def start(self, form: CallForm) -> str:
        """Calls and nothing else."""
        match form:
            case "hermes":
                return self._hermes()
            case "llama3":
                self._objects("parameters")
                self.lines.append("call: object")
                return self._repeated(quoted("; "))
            case "mistral":
                return self._mistral()
            case "mistral_list":
                return self._mistral_list()
            case "pythonic":
                return self._pythonic()

    def _hermes(self) -> str:
        opening, closing = map(self._setting.word, ("<tool_call>", "</tool_call>"))
        self._objects("arguments")
        return self._calls(opening, f'"\\n" object "\\n" {closing}', quoted("\n"))

    def _mistral(self) -> str:
        opening, middle = map(self._setting.word, ("[TOOL_CALLS]", "[ARGS]"))
        self._functions([f"{quoted(function.name)} {middle}" for function in self._use.callable_functions])
        return self._calls(opening, "object", "")

    def _mistral_list(self) -> str:
        self._objects("arguments")
        more = "" if self._use.max_calls == 1 else f"({quoted(', ')} object)*"
        self.lines.append(f'list: " [" object {more} "]"')
        opening = self._setting.word("[TOOL_CALLS]")
        return self._lazily(opening, "list", "?") if self._is_lazy else f"{opening} list"

    def _pythonic(self) -> str:
        for index, function in enumerate(self._use.callable_functions):
            self.lines += pythonic_calls(index, function, self._setting.limits, self._setting.json_rule)
        self.lines.append(f"call: {self._any_function()}")
        return f'"[" {self._repeated(quoted(", "))} "]"'

    def _objects(self, arguments_key: str) -> None:
        """Calls as JSON objects: {"name": "f", "arguments": {...}}."""
        names = [json.dumps(function.name) for function in self._use.callable_functions]
        self._functions([quoted(f'{{"name": {name}, "{arguments_key}": ') for name in names], quoted("}"))

    def _functions(self, heads: Sequence[str], end: str = "") -> None:
        """`object`: the head of any function with arguments that fit its schema."""
        for index, (head, function) in enumerate(zip(heads, self._use.callable_functions, strict=True)):
            schema = function.argument_schema(self._setting.limits)
            self.lines += [f"f{index}: {head} a{index} {end}", f"a{index}: {self._setting.json_rule(schema)}"]
        self.lines.append(f"object: {self._any_function()}")

    def _any_function(self) -> str:
        return " | ".join(f"f{index}" for index in range(len(self._use.callable_functions)))

    def _calls(self, opening: str, rest: str, separator: str) -> str:
        if self._is_lazy:
            return self._lazily(opening, rest, "?" if self._use.max_calls == 1 else "*")
        self.lines.append(f"call: {opening} {rest}")
        return self._repeated(separator)

    def _repeated(self, separator: str) -> str:
        return "call" if self._use.max_calls == 1 else f"call ({separator} call)*"

    def _lazily(self, opening: str, rest: str, how_often: str) -> str:
        """Free text, and `rest` wherever the opening of a call stands in it."""
        self.lines += [f"TEXT: {_ANY_TEXT}", "tail: TEXT"]
        if opening.startswith("<["):  # no text can spell a control token
            self.lines.append(f"call: {opening} {rest}")
            return f"tail call{how_often}"
        self.lines += [f"head[lazy]: TEXT {opening}", f"call: head {rest}"]
        return f"call{how_often} tail"

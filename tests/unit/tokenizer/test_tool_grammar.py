"""Grammars of calls: the library takes them, and what they let through the parsers read as calls that fit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.tokenizer.api_error import ApiError
from services.tokenizer.json_schema_check import SchemaLimits
from services.tokenizer.reasoning import ReasoningMarks
from services.tokenizer.structured_output import json_grammar
from services.tokenizer.tool_families import CallForm
from services.tokenizer.tool_grammar import GrammarFrame, GrammarSetting, Thinking, answer_grammar
from services.tokenizer.tool_requests import DeclaredFunction, ToolUse
from services.wire.request_params import Grammar, GrammarKind
from tests.unit.tokenizer.answer_texts import cut, parsed, tool_parser

LIMITS = SchemaLimits(max_bytes=100_000, max_properties=100, max_depth=10)
SETTING = GrammarSetting({}, LIMITS)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "kind": {"enum": ["雨", "sun"]},
    },
    "required": ["city", "kind"],
}
FAMILY_OF = {
    "hermes": "hermes",
    "llama3": "llama3",
    "mistral": "mistral",
    "mistral_list": "mistral",
    "pythonic": "pythonic",
}
FORMS = cast(Sequence[CallForm], sorted(FAMILY_OF))
GOOD = {"city": "München", "days": 3, "kind": "雨"}
SHORT = {"city": "x", "kind": "sun"}
BAD = {"city": "x", "kind": "snow"}


def function(
    name: str = "get_weather", schema: Mapping[str, object] | None = WEATHER, strict: bool = False
) -> DeclaredFunction:
    return DeclaredFunction(name, "", schema, strict, "tools[0].function.parameters")


def must_call(*functions: DeclaredFunction, **more: Any) -> ToolUse:
    return ToolUse(functions or (function(), function("f", None)), must_call=True, **more)


def written(form: CallForm, *calls: tuple[str, Mapping[str, object]]) -> str:
    """Calls as a model of this form writes them."""
    if form == "pythonic":
        return f"[{', '.join(f'{name}({_keywords(arguments)})' for name, arguments in calls)}]"
    key = "parameters" if form == "llama3" else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {json.dumps(a, ensure_ascii=False)}}}' for name, a in calls]
    match form:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
        case "llama3":
            return "; ".join(objects)
        case "mistral_list":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case _:
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(a, ensure_ascii=False)}" for name, a in calls)


def _keywords(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())


class Matcher:
    """A grammar on a tokenizer of single bytes."""

    _tokenizer = LLTokenizer("byte")

    def __init__(self, grammar: Grammar | None) -> None:
        assert grammar is not None
        assert grammar.kind is GrammarKind.LARK
        self._grammar = LLMatcher.grammar_from_lark(grammar.text)

    def takes(self, text: str) -> bool:
        """Whether a whole answer may be this text."""
        num_taken, is_whole = self._taken(text)
        return is_whole and num_taken == len(text.encode())

    def begins(self, text: str) -> bool:
        """Whether an answer may begin with this text."""
        return self._taken(text)[0] == len(text.encode())

    def _taken(self, text: str) -> tuple[int, bool]:
        matcher = LLMatcher(self._tokenizer, self._grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = list(text.encode())
        num_taken = matcher.try_consume_tokens(ids)
        return num_taken, num_taken == len(ids) and matcher.is_accepting()


def grammar(
    form: CallForm, use: ToolUse, thinking: Thinking = Thinking.NONE, structure: Grammar | None = None
) -> Matcher:
    return Matcher(answer_grammar(GrammarFrame(SETTING, thinking), form, use, structure))


@pytest.mark.parametrize("form", FORMS)
def test_str_07_a_required_call_is_one_that_fits_and_that_the_parser_reads(form: CallForm) -> None:
    matcher = grammar(form, must_call())
    for calls in (
        [("get_weather", GOOD)],
        [("get_weather", SHORT), ("f", {})],
        [("f", {}), ("f", {}), ("get_weather", GOOD)],
    ):
        text = written(form, *calls)
        assert matcher.takes(text), text
        answer = parsed(lambda: tool_parser(FAMILY_OF[form], names=frozenset({"get_weather", "f"})), text)
        assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == list(calls)
        assert answer.content == ""
    for text in (
        "",
        "Hello",
        "{}",
        written(form, ("get_weather", BAD)),
        written(form, ("other", {})),
        written(form, ("get_weather", {})),
        written(form, ("f", {"a": 1})),
        written(form, ("get_weather", GOOD)) + " and text",
        written(form, ("get_weather", GOOD))[:-1],
    ):
        assert not matcher.takes(text), text


@pytest.mark.parametrize("form", FORMS)
def test_one_function_alone_and_one_call_alone(form: CallForm) -> None:
    named = grammar(form, must_call(only="get_weather"))
    assert named.takes(written(form, ("get_weather", GOOD)))
    assert not named.begins(written(form, ("f", {})))
    single = grammar(form, must_call(max_calls=1))
    assert single.takes(written(form, ("f", {})))
    assert not single.takes(written(form, ("f", {}), ("f", {})))


@pytest.mark.parametrize("form", FORMS)
def test_names_of_which_one_begins_another(form: CallForm) -> None:
    matcher = grammar(form, must_call(function("get", None), function("get_x", None), function("get_x.y-z:1", None)))
    for name in ("get", "get_x", "get_x.y-z:1"):
        assert matcher.takes(written(form, (name, {}))), name
    assert not matcher.begins(written(form, ("get_y", {})))


@pytest.mark.parametrize("form", ["hermes", "mistral", "mistral_list"])
def test_strict_functions_are_held_to_their_schema_when_the_model_may_choose(form: CallForm) -> None:
    matcher = grammar(form, ToolUse((function(strict=True),)))
    for text in (
        "",
        "Hello",
        "a <tool_cal b [TOOL_CAL {}",
        "I see. " + written(form, ("get_weather", GOOD)),
        written(form, ("get_weather", SHORT)),
    ):
        assert matcher.takes(text), text
    for text in (
        written(form, ("get_weather", BAD)),
        "So: " + written(form, ("get_weather", {"city": "x"})),
        written(form, ("other", {})),
    ):
        assert not matcher.begins(text), text


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_may_choose_writes_freely_unless_something_is_strict(form: CallForm) -> None:
    assert answer_grammar(GrammarFrame(SETTING), form, ToolUse((function(),)), None) is None
    if form in ("llama3", "pythonic"):  # whose calls nothing tells from text
        assert answer_grammar(GrammarFrame(SETTING), form, ToolUse((function(strict=True),)), None) is None


@pytest.mark.parametrize("form", FORMS)
def test_thoughts_may_come_before_a_call(form: CallForm) -> None:
    call = written(form, ("get_weather", GOOD))
    may = grammar(form, must_call(), Thinking.MAY_COME)
    assert may.takes(call)
    assert may.takes(f"<think>\nhm 你 < / > <tool_call>\n</think>\n\n{call}")
    assert may.takes(f"<think></think>{call}")
    assert not may.takes(f"<think>hm{call}")
    opened = grammar(form, must_call(), Thinking.IS_OPEN)
    assert opened.takes(f"hm\n</think>\n\n{call}")
    assert not opened.takes(call)


STRUCTURE = json_grammar(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}, True
)


def test_thoughts_may_come_before_what_other_fields_ask_for() -> None:
    for structure, answer in (
        (STRUCTURE, '{"a":1}'),
        (Grammar(GrammarKind.REGEX, r"a/b\/[0-9]+"), "a/b/12"),
        (Grammar(GrammarKind.LARK, 'start: "yes" | "no\\n"'), "no\n"),
    ):
        frame = GrammarFrame(SETTING, Thinking.MAY_COME)
        matcher = Matcher(answer_grammar(frame, "hermes", None, structure))
        assert matcher.takes(answer)
        assert matcher.takes(f"<think>\nwhy?\n</think>\n\n{answer}")
        assert not matcher.takes(f"{answer} more")
    assert answer_grammar(GrammarFrame(SETTING), "hermes", None, STRUCTURE) is STRUCTURE
    with pytest.raises(ApiError, match="thinks first"):
        answer_grammar(
            GrammarFrame(SETTING, Thinking.MAY_COME), "hermes", None, Grammar(GrammarKind.EBNF, 'root ::= "a"')
        )


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_of_a_given_structure_or_calls_in_its_place(form: CallForm) -> None:
    matcher = grammar(form, ToolUse((function(),)), structure=STRUCTURE)
    assert matcher.takes('{"a":1}')
    tag = "<|python_tag|>" if form == "llama3" else ""
    assert matcher.takes(tag + written(form, ("get_weather", GOOD)))
    assert not matcher.begins("Hello")


def test_control_tokens_go_by_their_ids() -> None:
    setting = GrammarSetting({"[TOOL_CALLS]": 257, "[ARGS]": 258, "</think>": 259}, LIMITS)
    frame = GrammarFrame(setting, Thinking.IS_OPEN, ReasoningMarks())
    for use, start in (
        (must_call(), "start: thoughts BLANKS? (call ( call)*)"),
        (ToolUse((function(strict=True),)), "start: thoughts BLANKS? (tail call*)"),
    ):
        made = answer_grammar(frame, "mistral", use, None)
        assert made is not None
        assert made.text.startswith(start + "\nthoughts: /(?s:.*)/ <[259]>\n"), made.text
        assert "call: <[257]> object" in made.text
        assert '"get_weather" <[258]> a0' in made.text
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(made.text))
        assert not matcher.is_error(), matcher.get_error()


def test_schemas_that_cannot_be_kept() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert grammar("hermes", must_call(function(schema=odd))).takes(written("hermes", ("get_weather", {"a": []})))
    with pytest.raises(ApiError, match="uniqueItems") as caught:
        grammar("hermes", must_call(function(schema=odd, strict=True)))
    assert caught.value.param == "tools[0].function.parameters"
    wrong = {"type": "object", "properties": {"a": {"type": "notatype"}}}
    with pytest.raises(ApiError) as caught:
        grammar("hermes", must_call(function(schema=wrong)))
    assert caught.value.status == 400
    spaced = {"type": "object", "properties": {"a b": {}}}
    with pytest.raises(ApiError, match="Python"):
        grammar("pythonic", must_call(function(schema=spaced)))


def test_references_within_a_schema_are_kept_in_every_form() -> None:
    schema = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/P"}},
        "required": ["p"],
        "$defs": {"P": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
    for form in FORMS:
        matcher = grammar(form, must_call(function(schema=schema)))
        assert matcher.takes(written(form, ("get_weather", {"p": {"x": 1}}))), form
        assert not matcher.begins(written(form, ("get_weather", {"p": 5}))), form


def test_what_a_grammar_lets_through_is_valid_at_every_step() -> None:
    matcher = grammar("hermes", must_call())
    text = written("hermes", ("get_weather", GOOD), ("f", {}))
    assert all(matcher.begins("".join(cut(text, 1)[:end])) for end in range(len(text)))

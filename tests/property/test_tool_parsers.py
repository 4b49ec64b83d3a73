"""Parsers of answers: the same parts for every way of cutting a text, and those that a naive reading finds."""

from __future__ import annotations

import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.answer_parts import AnswerParser
from services.tokenizer.reasoning import ReasoningMarks, ReasoningParser, ReasoningWish
from services.tokenizer.tool_json import copy_value
from services.tokenizer.tool_source import NotMarkupError, TextSource
from tests.unit.tokenizer.answer_texts import READERS, Answer, answer_of, joined, parts_of, tool_parser

FAMILIES = st.sampled_from(sorted(READERS))
TEXT_CHARACTERS = st.sampled_from(list("ab <>{}[]()\"'\\,:=;_\n\t/|你🙂é0-."))
TEXTS = st.text(TEXT_CHARACTERS, max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
IDENTIFIERS = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
ARGUMENTS = st.dictionaries(IDENTIFIERS, VALUES, max_size=3)
NAMES = st.sampled_from(["f", "g", "get_weather"])
# What markup is made of: put together at random, it is nearly right much more often than random characters are.
SCRAPS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "\n",
        " ",
        '{"name": "f"',
        ', "arguments": ',
        ', "parameters": ',
        "{",
        "}",
        "[",
        "]",
        '"',
        '"a": 1',
        "{}",
        ",",
        "; ",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "f",
        "g",
        "(",
        ")",
        "a=",
        "1",
        "'x'",
        "<|python_tag|>",
        "<|python_start|>",
        "<|python_end|>",
        '{"name": "g", "arguments": {}}',
        "[f(a=1)",
        "<think>",
        "</think>",
        "你🙂",
        "\\",
        "true",
        "null",
        "x",
    ]
)


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    """A text in pieces, some of them empty."""
    ends = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def _new_parser(family: str, thinks: bool, is_open: bool) -> AnswerParser:
    calls = tool_parser(family)
    return ReasoningParser(ReasoningMarks(), ReasoningWish(), is_open, calls) if thinks else calls


@given(st.data(), FAMILIES, st.lists(SCRAPS | TEXTS, max_size=12).map("".join), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_str_03_str_06_every_cut_gives_the_same_parts(
    data: st.DataObject, family: str, text: str, thinks: bool, is_open: bool
) -> None:
    is_cut = data.draw(st.booleans())
    whole = joined(parts_of(_new_parser(family, thinks, is_open), [text], is_cut=is_cut))
    answer_of(whole)
    assert joined(parts_of(_new_parser(family, thinks, is_open), text, is_cut=is_cut)) == whole
    assert joined(parts_of(_new_parser(family, thinks, is_open), data.draw(cuts(text)), is_cut=is_cut)) == whole


@given(FAMILIES, st.lists(SCRAPS | TEXTS, max_size=12).map("".join))
@settings(max_examples=150, deadline=None)
def test_str_06_a_text_without_calls_comes_out_as_it_is(family: str, text: str) -> None:
    answer = answer_of(parts_of(tool_parser(family), [text]))
    assert answer.calls or answer.content == text


def _write(family: str, calls: list[tuple[str, dict[str, object]]], dump: json.JSONEncoder) -> str:
    if family == "hermes":
        return "\n".join(
            f'<tool_call>\n{{"name": "{n}", "arguments": {dump.encode(a)}}}\n</tool_call>' for n, a in calls
        )
    if family == "llama3":
        return "<|python_tag|>" + "; ".join(f'{{"name": "{n}", "parameters": {dump.encode(a)}}}' for n, a in calls)
    if family == "mistral":
        return "".join(f"[TOOL_CALLS]{n}[ARGS]{dump.encode(a)}" for n, a in calls)
    written = (f"{n}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for n, a in calls)
    return f"<|python_start|>[{', '.join(written)}]<|python_end|>"


@given(
    st.data(),
    FAMILIES,
    st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3),
    st.sampled_from(["", "Let me check. ", "你好: "]),
    st.sampled_from(["", " Done 🙂."]),
    st.sampled_from(
        [json.JSONEncoder(), json.JSONEncoder(ensure_ascii=False, indent=1), json.JSONEncoder(separators=(",", ":"))]
    ),
)
@settings(max_examples=150, deadline=None)
def test_str_03_what_was_written_is_what_is_read(
    data: st.DataObject,
    family: str,
    calls: list[tuple[str, dict[str, object]]],
    before: str,
    after: str,
    dump: json.JSONEncoder,
) -> None:
    text = before + _write(family, calls, dump) + after
    answer = answer_of(parts_of(tool_parser(family), data.draw(cuts(text))))
    assert [name for name, _ in answer.calls] == [name for name, _ in calls]
    assert answer.arguments == [arguments for _, arguments in calls]
    assert answer.content == before + after


@st.composite
def call_objects(draw: st.DrawFn, arguments_key: str) -> tuple[str, str, dict[str, object]]:
    """A call as JSON whose keys come in any order, others among them; its name and its arguments."""
    name: str = draw(NAMES)
    arguments: dict[str, object] = {**draw(ARGUMENTS)}
    others = draw(st.dictionaries(TEXTS.filter(lambda key: key not in _CALL_KEYS), VALUES, max_size=3))
    members = [("name", name), (arguments_key, arguments), *others.items()]
    return json.dumps(dict(draw(st.permutations(members)))), name, arguments


_CALL_KEYS = ("name", "arguments", "parameters")
_OBJECT_FORMS = {
    "hermes": ("arguments", "<tool_call>\n{}\n</tool_call>"),
    "llama3": ("parameters", "<|python_tag|>{}"),
    "mistral": ("arguments", "[TOOL_CALLS] [{}]"),
}


@given(st.data(), st.sampled_from(sorted(_OBJECT_FORMS)), st.sampled_from(["", "Let me check. "]))
@settings(max_examples=150, deadline=None)
def test_str_03_keys_in_any_order_and_others_among_them_are_a_call(
    data: st.DataObject, family: str, before: str
) -> None:
    key, frame = _OBJECT_FORMS[family]
    written, name, arguments = data.draw(call_objects(key))
    text = before + frame.replace("{}", written)
    parts = parts_of(tool_parser(family), data.draw(cuts(text)))
    answer = answer_of(parts)
    assert answer == Answer(content=before, calls=answer.calls)
    assert [(called, json.loads(given_text)) for called, given_text in answer.calls] == [(name, arguments)]
    assert joined(parts) == joined(parts_of(tool_parser(family), [text]))


_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def _naive_hermes(text: str) -> Answer | None:
    """All blocks cut out of the whole text by a regular expression; None if one of them is no call."""
    answer = Answer(content=_BLOCK.sub("", text))
    for block in _BLOCK.findall(text):
        try:
            call = json.loads(block)
        except ValueError:
            return None
        if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
            return None
        answer.calls.append((call["name"], json.dumps(call["arguments"])))
    return answer


@given(st.lists(st.tuples(TEXTS, NAMES, st.dictionaries(TEXTS, VALUES, max_size=2)), max_size=3), TEXTS)
@settings(max_examples=100, deadline=None)
def test_str_03_hermes_is_what_a_naive_reading_of_the_whole_text_finds(
    blocks: list[tuple[str, str, dict[str, object]]], end: str
) -> None:
    text = "".join(
        before + _write("hermes", [(name, arguments)], json.JSONEncoder()) for before, name, arguments in blocks
    )
    naive = _naive_hermes(text + end)
    assert naive is not None
    answer = answer_of(parts_of(tool_parser("hermes"), text + end))
    assert [(name, json.dumps(json.loads(arguments))) for name, arguments in answer.calls] == naive.calls
    if not blocks:
        assert answer.content == naive.content
    else:  # blanks beside calls belong to the calls
        assert "".join(answer.content.split()) == "".join(naive.content.split())


_JSON_SCRAPS = st.sampled_from(
    [
        '"',
        "\\",
        "u00e9",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "1",
        "-",
        "0",
        ".",
        "e5",
        "true",
        "nul",
        "l",
        " ",
        "\n",
        "a",
        "你",
    ]
)


def _naive_value(text: str) -> int | None:
    """Where a JSON value that begins the text ends, by the library; None if none does."""
    try:
        value, end = json.JSONDecoder(strict=False, parse_constant=lambda name: 1 / 0).raw_decode(text)
    except (ValueError, ZeroDivisionError):
        return None
    is_scalar = not isinstance(value, str | list | dict)
    return None if is_scalar and re.match(r"[-+.0-9A-Za-z]", text[end:]) else end  # here `1.` and `truex` are one word


@given(st.lists(_JSON_SCRAPS, max_size=14).map("".join) | VALUES.map(json.dumps))
@settings(max_examples=300, deadline=None)
def test_json_values_are_those_of_the_library(text: str) -> None:
    source = TextSource()
    source.add(text)
    source.close()
    given_text: list[str] = []
    try:
        for _ in copy_value(source, given_text.append):
            raise AssertionError("nothing is missing")
        end: int | None = len(source.commit())
    except NotMarkupError:
        end = None
    assert end == _naive_value(text)
    if end is not None:
        assert json.loads("".join(given_text)) == json.loads(text[:end], strict=False)

"""Calls of every family come out of the text they are written in; what only looks like a call comes out as text."""

from __future__ import annotations

import json

import pytest

from services.tokenizer.answer_parts import ToolCallArguments, ToolCallStart
from tests.unit.tokenizer.answer_texts import READERS, Answer, answer_of, cut, parsed, parts_of, tool_parser

# f({"x": 1, "s": a quote b}), then g without arguments, in the form of each family.
TWO_CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 1, "s": "a\\"b"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": {"x": 1, "s": "a\\"b"}}; {"name": "g", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1, "s": "a\\"b"}}, {"name": "g", "arguments": {}}]',
    "pythonic": "[f(x=1, s='a\"b'), g()]",
}
ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "你好 🙂"}]}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "f", "parameters": {"a": [1, {"b": "你好 🙂"}]}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": [1, {"b": "你好 🙂"}]}',
    "pythonic": "<|python_start|>[f(a=[1, {'b': '你好 🙂'}])]<|python_end|>",
}
FAMILIES = sorted(READERS)


def parse(family: str, text: str) -> Answer:
    return parsed(lambda: tool_parser(family), text)


@pytest.mark.parametrize("family", FAMILIES)
def test_str_03_two_calls_whatever_the_pieces(family: str) -> None:
    answer = parse(family, TWO_CALLS[family])
    assert [name for name, _ in answer.calls] == ["f", "g"]
    assert answer.arguments == [{"x": 1, "s": 'a"b'}, {}]
    assert answer.content == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_str_03_the_start_of_a_call_is_given_once_and_its_arguments_as_they_come(family: str) -> None:
    text = ONE_CALL[family]
    parser = tool_parser(family)
    given = [parser.feed(character) for character in text]
    parts = [part for some in given for part in some]
    assert [part for part in parts if isinstance(part, ToolCallStart)] == [ToolCallStart(0, "c0", "f")]
    fragments = [part.fragment for part in parts if isinstance(part, ToolCallArguments)]
    assert "".join(fragments) == '{"a": [1, {"b": "你好 🙂"}]}'
    assert len(fragments) > 15
    assert not parser.finish()
    emoji_at = text.index("🙂")
    assert any(part == ToolCallArguments(0, "🙂") for part in given[emoji_at])  # nothing waits for the call's end


@pytest.mark.parametrize("family", FAMILIES)
def test_str_06_text_before_and_after_a_call_is_kept(family: str) -> None:
    answer = parse(family, f"Let me check. {ONE_CALL[family]} Done 你.")
    assert answer.content == "Let me check.  Done 你."
    assert answer.arguments == [{"a": [1, {"b": "你好 🙂"}]}]


@pytest.mark.parametrize("family", FAMILIES)
def test_str_06_text_that_only_looks_like_markup_is_complete(family: str) -> None:
    for text in (
        "a <tool b",
        "<tool_cal",
        "<",
        "<tool_call",
        "<tool_call>",
        "<tool_call>\n",
        "<<tool_call>",
        "[TOOL_CAL",
        "[[",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] [{",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]f[ARGS]",
        "<|python_tag|",
        "<|python_tag|>",
        "{",
        '{"name"',
        "<|python_start|>[",
        "[f",
        "[f(",
        "[f(x",
        "[f(x)]",
        "[1, 2]",
        "a { b } c",
        '{"name": "other", "parameters": {}}',
        "[other()]",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '{"result": {"name": "f"}}',
        "[f(x) for x in y]",
        " ",
        "\n\n",
        " a ",
        "",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "x": 1}</tool_call>',
        "{}",
        "[]",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '{"parameters": {"a": 1}, "name": "nope"}',
        "a" * 5000 + "<",
        '{"' + "k" * 3000,
        "[" + "f" * 3000,
    ):
        answer = parse(family, text)
        assert answer == Answer(content=text), text


def test_str_06_markup_of_another_family_is_text() -> None:
    for family in FAMILIES:
        for other in FAMILIES:
            if other != family:
                text = "So: " + TWO_CALLS[other]
                assert parse(family, text) == Answer(content=text)


@pytest.mark.parametrize("family", FAMILIES)
def test_bare_markup_inside_a_text_is_text(family: str) -> None:
    if family in ("llama3", "pythonic"):
        text = f"For example: {TWO_CALLS[family]}"
        assert parse(family, text) == Answer(content=text)


@pytest.mark.parametrize("family", FAMILIES)
def test_more_calls_than_wanted_are_left_out(family: str) -> None:
    answer = parsed(lambda: tool_parser(family, max_calls=1), TWO_CALLS[family])
    assert [name for name, _ in answer.calls] == ["f"]
    assert answer.arguments == [{"x": 1, "s": 'a"b'}]
    assert answer.content == ""


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>'),
        ("hermes", '<tool_call>{"id": "7", "type": "function", "name": "f", "parameters": {"x": 1}}'),
        ("hermes", '<tool_call> {"name":"f","arguments":{"x":1}} </tool_call> \n'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}, "extra": 1}\n</tool_call>'),
        ("hermes", '<tool_call>{"why": ["a", {"name": 5}], "name": "f", "n": null, "arguments": {"x": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"x": 1}, "extra": {}, "name": "f", "": ""}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}", "extra": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}, "parameters": {"y": 2}, "name": "g"}</tool_call>'),
        ("hermes", '<tool_call>{"\\u006eame": "f", "arguments": {"x": 1}, "' + "k" * 3000 + '": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}, "extra": "cut of'),
        ("hermes", '\n\n<tool_call>{"name":"f","arguments":{"x":1}}\n'),
        ("hermes", '<tool_call>{"name":"f","arguments":{"x":1}'),
        ("hermes", '<tool_call>{"name":"f","arguments":{"x":1}}</tool_'),
        ("llama3", '\n {"type": "function", "name": "f", "parameters": {"x": 1}}\n'),
        ("llama3", '<|python_tag|> {"name": "f", "arguments": {"x": 1}}'),
        ("llama3", '{"extra": 1, "name": "f", "thought": "so", "parameters": {"x": 1}, "last": [2]}'),
        ("mistral", '[TOOL_CALLS] [{"a": 1, "name": "f", "arguments": {"x": 1}, "extra": {"b": "]"}}]'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]'),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"x": 1}}'),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}'),
        ("mistral", '[TOOL_CALLS]f{"x": 1}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}'),
        ("pythonic", "[ f ( x = 1 , ) , ]"),
        ("pythonic", " [f(x=1)"),
        ("pythonic", "<|python_start|>[f(x=1)]<|python_end"),
    ],
)
def test_other_spellings_of_the_same_call(family: str, text: str) -> None:
    answer = parse(family, text)
    assert [name for name, _ in answer.calls] == ["f"], answer
    assert answer.arguments == [{"x": 1}]
    assert answer.content == ""


@pytest.mark.parametrize("arguments", ["", ', "arguments": {}', ', "arguments": null', ', "arguments": "{}"'])
def test_a_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    answer = parse("hermes", f'<tool_call>{{"name": "g"{arguments}}}</tool_call>')
    assert answer.calls == [("g", "{}")]


def test_several_objects_in_one_block() -> None:
    answer = parse("hermes", '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g"}</tool_call>.')
    assert [name for name, _ in answer.calls] == ["f", "g"]
    assert answer.content == "."


def test_several_calls_of_the_newer_mistral_form() -> None:
    answer = parse("mistral", 'Two: [TOOL_CALLS]f[ARGS]{"a": "[ARGS]"}[TOOL_CALLS]g[ARGS]{}')
    assert answer.calls == [("f", '{"a": "[ARGS]"}'), ("g", "{}")]
    assert answer.content == "Two: "


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call> x', '{"a": 1,', "}}</tool_call> x"),
        ('<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>', '{"a": ', "tru}}</tool_call>"),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\q"}}</tool_call>', '{"a": "', '\\q"}}</tool_call>'),
        ('<tool_call>{"name": "f", "arguments": {"a": 01}}', '{"a": ', "01}}"),
        ('<tool_call>{"name": "f", "arguments": {}, "x": tru}', "{}", ', "x": tru}'),
        ('<tool_call>{"name": "f", "arguments": {}, x: 1}', "{}", ", x: 1}"),
        ('<tool_call>{"name": "f", "arguments": {}} and so', "{}", "and so"),
    ],
)
def test_json_that_breaks_goes_on_as_text_and_nothing_is_lost(text: str, arguments: str, content: str) -> None:
    answer = parse("hermes", text)
    assert answer.calls == [("f", arguments)]
    assert answer.content.lstrip() == content


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f"', ""),
        ('{"name": "f", "param', ""),
        ('{"name": "f", "parameters": ', ""),
        ('{"name": "f", "parameters": {', "{"),
        ('{"parameters": {"a": 1}, "name": "f"', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": "1 2', '{"a": "1 2'),
        ('{"name": "f", "parameters": {"a": "\\u12', '{"a": "\\u12'),
        ('{"name": "f", "parameters": {"a": tr', '{"a": tr'),
        ('{"name": "f", "parameters": {"a": 1}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": 1}, "i', '{"a": 1}'),
    ],
)
def test_a_call_cut_off_by_the_answers_end_keeps_its_beginning(text: str, arguments: str) -> None:
    assert parse("llama3", text) == Answer(calls=[("f", arguments)])


@pytest.mark.parametrize("family", FAMILIES)
def test_of_an_answer_that_must_call_nothing_but_calls_is_shown_wherever_it_is_cut(family: str) -> None:
    text = TWO_CALLS[family]
    found = []
    for end in range(len(text) + 1):
        answer = parsed(lambda: tool_parser(family, has_text=False), text[:end])
        assert answer.content == ""
        assert [name for name, _ in answer.calls] == ["f", "g"][: len(answer.calls)]
        found.append(len(answer.calls))
    assert found == sorted(found)
    assert set(found) == {0, 1, 2}


@pytest.mark.parametrize(
    ("family", "begun"),
    [
        ("hermes", '<tool_call>\n{"name": "get_'),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"why": "so", "name'),
        ("llama3", '<|python_tag|>{"name": "g'),
        ("mistral", "[TOOL_CALLS] ["),
        ("mistral", "[TOOL_CALLS]get_"),
        ("pythonic", "<|python_start|>[get_weather("),
    ],
)
def test_str_06_where_an_answer_is_cut_in_a_call_before_its_name_no_markup_is_text(family: str, begun: str) -> None:
    def read(text: str, *, is_cut: bool = True) -> Answer:
        return parsed(lambda: tool_parser(family), text, is_cut=is_cut)

    assert read(begun) == Answer()
    assert read("Let me check. " + begun) == Answer(content="Let me check. ")
    assert read("Let me check. " + begun, is_cut=False) == Answer(content="Let me check. " + begun)
    known = read(f"So: {ONE_CALL[family]}\n{begun}")
    assert (known.content, [name for name, _ in known.calls]) == ("So: ", ["f"])


@pytest.mark.parametrize("family", FAMILIES)
def test_str_06_what_is_cut_before_a_tag_is_whole_is_text(family: str) -> None:
    for text in ("a <tool_cal", "1 <", '{"name": "ge', "{", "[1, 2", "[TOOL_CAL", "<|python_ta", "see [f", "\n"):
        assert parsed(lambda: tool_parser(family), text, is_cut=True) == Answer(content=text)


@pytest.mark.parametrize("family", ["llama3", "pythonic"])
def test_behind_a_bare_call_another_one_may_be_cut(family: str) -> None:
    begun = TWO_CALLS[family].split("g")[0]
    answer = parsed(lambda: tool_parser(family), begun, is_cut=True)
    assert (answer.content, [name for name, _ in answer.calls]) == ("", ["f"])


def test_raw_line_breaks_inside_a_string_are_escaped() -> None:
    answer = parse("hermes", '<tool_call>{"name": "f", "arguments": {"code": "a\n\tb\r"}}</tool_call>')
    assert answer.arguments == [{"code": "a\n\tb\r"}]


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("True", True),
        ("False", False),
        ("None", None),
        ("true", True),
        ("null", None),
        ("1", 1),
        ("-1", -1),
        ("+1", 1),
        ("1.", 1.0),
        (".5", 0.5),
        ("1e3", 1e3),
        ("00", 0),
        ("-0.50", -0.5),
        ("'a'", "a"),
        ('"a\'b"', "a'b"),
        ("'a\"b'", 'a"b'),
        (r"'a\'b\\\n\t\d'", "a'b\\\n\t\\d"),
        (r"'\x41\u4f60\U0001f642'", "A你🙂"),
        ("'你好🙂'", "你好🙂"),
        ("[]", []),
        ("[1, 'a', ]", [1, "a"]),
        ("{}", {}),
        ("{'a': {'b': [None]},}", {"a": {"b": [None]}}),
        ("'l1\nl2'", "l1\nl2"),
        (r"'\ud83d\ude42'", "🙂"),
        ("'a,)]b'", "a,)]b"),
    ],
)
def test_python_literals_become_json(literal: str, value: object) -> None:
    answer = parse("pythonic", f"[f(a={literal}, b={literal})]")
    assert answer.arguments == [{"a": value, "b": value}]


@pytest.mark.parametrize(
    "literal",
    [
        "(1, 2)",
        "x",
        "1 + 1",
        "f(1)",
        "{1: 2}",
        "'a' 'b'",
        "{1}",
        "1_0",
        "0x1",
        "07",
        "1j",
        ".",
        "-",
        "",
        r"'\xg'",
        r"'\U00110000'",
    ],
)
def test_what_is_no_literal_goes_on_as_text(literal: str) -> None:
    answer = parse("pythonic", f"[f(ok=1, a={literal})] after")
    assert answer.content.endswith(" after")
    assert answer.calls[0][1].startswith('{"ok": 1')
    with pytest.raises(json.JSONDecodeError):
        assert answer.arguments is None


def test_positional_and_repeated_arguments_are_no_call() -> None:
    assert parse("pythonic", "[f(1)]") == Answer(content="[f(1)]")
    assert parse("pythonic", "[f(a=1, a=2)]") == Answer(content=", a=2)]", calls=[("f", '{"a": 1')])


@pytest.mark.parametrize("family", FAMILIES)
def test_names_in_any_script_can_be_called_where_the_form_allows_it(family: str) -> None:
    if family in ("hermes", "llama3"):
        text = ONE_CALL[family].replace('"f"', '"数える"')
        assert parse(family, text).calls[0][0] == "数える"


@pytest.mark.parametrize("family", FAMILIES)
def test_deep_nesting_is_read_without_recursion(family: str) -> None:
    depth = 20_000
    text = ONE_CALL[family].replace("[1, ", "[" * depth + "1" + "]" * depth + ", [")
    parts = parts_of(tool_parser(family), cut(text, 4))
    assert answer_of(parts).calls[0][1].count("[") >= depth

"""Thoughts come out of an answer's text, whatever the pieces; a model that thinks nothing has content alone."""

from __future__ import annotations

import pytest

from services.tokenizer.answer_parts import AnswerParser, Reasoning, Text
from services.tokenizer.reasoning import PlainText, ReasoningMarks, ReasoningParser, ReasoningWish
from tests.unit.tokenizer.answer_texts import Answer, cut, parsed, parts_of, tool_parser

MARKS = ReasoningMarks()
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</think>"}}\n</tool_call>'


def parser(is_open: bool = False, rest: AnswerParser | None = None, wish: ReasoningWish | None = None) -> AnswerParser:
    return ReasoningParser(MARKS, wish or ReasoningWish(), is_open, rest or PlainText())


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm, 你 🙂\n</think>\n\nYes.", "hm, 你 🙂", "Yes."),
        ("\n<think>a\n\nb </think>c\n", "a\n\nb", "c\n"),
        ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("<think>a</think>", "a", ""),
        ("<think>a </thin", "a </thin", ""),
        ("<think>a < b </b> c\n", "a < b </b> c\n", ""),
        ("<think>a</think>b</think>c<think>d", "a", "b</think>c<think>d"),
        ("<think>", "", ""),
        ("<thin", "", "<thin"),
        ("<thinking> x", "", "<thinking> x"),
        (" Yes.", "", " Yes."),
        ("Yes <think>no</think>", "", "Yes <think>no</think>"),
        ("no</think>yes", "", "no</think>yes"),
        (" \n", "", " \n"),
        ("", "", ""),
    ],
)
def test_cht_11_thoughts_are_split_off(text: str, reasoning: str, content: str) -> None:
    assert parsed(parser, text) == Answer(content=content, reasoning=reasoning)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("hm\n</think>\n\nYes.", "hm", "Yes."),
        ("\nhm </think> Yes.", "hm", "Yes."),
        ("<think>\nhm</think>Yes.", "hm", "Yes."),
        ("<thing> is</think>Yes.", "<thing> is", "Yes."),
        ("\n</think>\n\nYes.", "", "Yes."),
        ("never ends", "never ends", ""),
        ("", "", ""),
    ],
)
def test_cht_11_a_block_that_the_prompt_opened(text: str, reasoning: str, content: str) -> None:
    assert parsed(lambda: parser(is_open=True), text) == Answer(content=content, reasoning=reasoning)


def test_thoughts_come_before_calls() -> None:
    answer = parsed(lambda: parser(rest=tool_parser("hermes")), f"<think>\n<tool_call>?\n</think>\n\n{CALL}")
    assert answer == Answer(reasoning="<tool_call>?", calls=[("f", '{"a": "</think>"}')])


def test_an_answer_without_thoughts_goes_to_the_parser_of_calls() -> None:
    answer = parsed(lambda: parser(rest=tool_parser("hermes")), f"Well, {CALL}")
    assert answer == Answer(content="Well, ", calls=[("f", '{"a": "</think>"}')])


def test_thoughts_are_streamed_as_they_come_or_in_one_piece_or_not_at_all() -> None:
    text = "<think>\none two\n</think>\n\nYes."
    streamed = parser()
    assert [list(streamed.feed(piece)) for piece in ("<think>\n", "one ", "two", "\n", "</think>\n", "\nYes.")] == [
        [], [Reasoning("one")], [Reasoning(" two")], [], [], [Text("Yes.")],
    ]  # fmt: skip
    at_once = parts_of(parser(wish=ReasoningWish(is_streamed=False)), cut(text, 1))
    assert at_once[0] == Reasoning("one two")
    hidden = ReasoningWish(is_shown=False)
    assert parsed(lambda: parser(wish=hidden), text) == Answer(content="Yes.")
    cut_off = parts_of(parser(wish=ReasoningWish(is_streamed=False)), cut("<think>one", 1))
    assert cut_off == [Reasoning("one")]


@pytest.mark.parametrize("thoughts", ["<think>\nhm\n\n</think>\n\n", "<think></think>", " <think> a < b", "<think>\n"])
def test_thoughts_that_are_not_taken_apart_are_text_as_they_were_written(thoughts: str) -> None:
    wish = ReasoningWish(is_separate=False, is_shown=False, is_streamed=False)
    rest = "" if "</think>" not in thoughts else CALL
    answer = parsed(lambda: parser(rest=tool_parser("hermes", has_text=False), wish=wish), thoughts + rest)
    assert answer.content == thoughts
    assert len(answer.calls) == bool(rest)
    opened = thoughts.lstrip().removeprefix("<think>")
    again = parsed(lambda: parser(True, tool_parser("hermes", has_text=False), wish), opened + rest)
    assert (again.content, again.calls) == (opened, answer.calls)


def test_whether_a_prompt_leaves_a_block_open() -> None:
    assert MARKS.are_open_at("<|im_start|>assistant\n<think>\n")
    assert not MARKS.are_open_at("<|im_start|>assistant\n")
    assert not MARKS.are_open_at("<think>\n\n</think>\n\n")
    assert not MARKS.are_open_at("what is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert ReasoningMarks(is_always_open=True).are_open_at("assistant\n")
    assert MARKS.are_left_open_in("<think>\nso far")
    assert not MARKS.are_left_open_in("<think>a</think>so far")
    assert not MARKS.are_left_open_in("so far")

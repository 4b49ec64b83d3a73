"""Text on a terminal as it streams: held against a terminal that is emulated and a plain way of breaking lines."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from services.launcher.chat.text_flow import TextFlow
from services.launcher.terminal import aligned, cut, harmless

BACK = re.compile(r"\x1b\[(\d+)D\x1b\[K|(.)", re.DOTALL)
words = st.text("abcdeéß.,-", min_size=1, max_size=9)
wide_words = st.text("漢字かなカナ한글", min_size=1, max_size=9)
emoji = st.sampled_from(["👋", "🌍", "👍🏽", "❤️", "🇩🇪", "👨‍👩‍👧", "e\u0301"])
texts = st.lists(words | wide_words | emoji | st.sampled_from([" ", "  ", "\n", "\t"]), max_size=40).map(" ".join)


def screen(output: str) -> list[str]:
    """The lines that a terminal shows: it knows line feeds and taking back whole columns."""
    lines = [""]
    for columns, character in BACK.findall(output):
        if columns:
            width = cell_len(lines[-1]) - int(columns)
            while cell_len(lines[-1]) > width:
                lines[-1] = lines[-1][:-1]
            assert cell_len(lines[-1]) == width, "half of a character was taken back"
        elif character == "\n":
            lines.append("")
        else:
            lines[-1] += character
    return lines


def shown(text: str, columns: int, sizes: list[int]) -> list[str]:
    """The lines when the text comes in pieces of these sizes, over and over."""
    flow, output, start, turn = TextFlow(columns), "", 0, 0
    while start < len(text):
        size = sizes[turn % len(sizes)]
        output += flow.feed(text[start : start + size])
        start, turn = start + size, turn + 1
    return screen(output)


@given(texts, st.integers(12, 60), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_no_line_is_wider_than_the_terminal_and_no_text_is_lost(text: str, columns: int, sizes: list[int]) -> None:
    lines = shown(text, columns, sizes)
    assert all(cell_len(line) < columns for line in lines)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text)


@given(texts, st.integers(12, 60), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_the_lines_do_not_depend_on_how_the_text_comes(text: str, columns: int, sizes: list[int]) -> None:
    assert shown(text, columns, sizes) == shown(text, columns, [len(text) or 1])


def plain_lines(text: str, width: int) -> list[str]:
    """Greedy breaking of words that all fit, one after the other."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        elif lines[-1]:
            lines.append(word)
        else:
            lines[-1] = word
    return lines


@given(st.lists(st.text("abcdef", min_size=1, max_size=9), max_size=30), st.integers(12, 40))
def test_words_break_as_a_plain_way_breaks_them(found: list[str], columns: int) -> None:
    text = " ".join(found)
    assert [line.rstrip() for line in shown(text, columns, [1])] == plain_lines(text, columns - 1)


def test_chinese_breaks_anywhere_and_a_word_longer_than_a_line_breaks_too() -> None:
    assert shown("漢字漢字漢字漢", 12, [1]) == ["漢字漢字漢", "字漢"]
    assert shown("a bcdefghijklmnop", 12, [3]) == ["a ", "bcdefghijkl", "mnop"]
    assert shown("x\ny", 12, [1]) == ["x", "y"]


def test_a_model_cannot_command_the_terminal() -> None:
    flow = TextFlow(80)
    assert flow.feed("a\x1b[2Jb\x07\r\x9bc\x7f") == "a\ufffd[2Jb\ufffd\ufffd\ufffdc\ufffd"
    assert harmless("好\t\n👋") == "好\t\n👋"


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ("short", 9, "short"),
        ("漢字漢字", 6, "漢字…"),
        ("漢字漢字", 8, "漢字漢字"),
        ("a  b\nc", 9, "a b c"),
        ("abc", 2, "a…"),
    ],
)
def test_a_status_is_cut_to_the_columns_there_are(text: str, columns: int, expected: str) -> None:
    assert cut(text, columns) == expected
    assert cell_len(cut(text, columns)) <= columns


def test_columns_are_even_with_wide_characters_too() -> None:
    lines = aligned([("名前", "1"), ("a", "22"), ("👋 b", "333")], right=(1,))
    assert lines == ["名前    1", "a      22", "👋 b  333"]
    assert len({cell_len(line) for line in lines}) == 1
    assert aligned([]) == []

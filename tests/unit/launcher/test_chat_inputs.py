"""What a person types in a chat, what a conversation becomes of it, what an answer tells, what is kept."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launcher.chat.answer import Answer, Piece, flattened
from services.launcher.chat.conversation import Conversation, Turn
from services.launcher.chat.history import History
from services.launcher.chat.inputs import COMMANDS, Command, Composer, Message, parse_input
from services.launcher.errors import CommandError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        (" \n ", None),
        ("你好", Message("你好")),
        ("  indented\n", Message("  indented")),
        ("/help", Command("help", "")),
        (" /set temperature 0.2 ", Command("set", "temperature 0.2")),
        ("/system You are\nbrief.", Command("system", "You are\nbrief.")),
        ("/usr/bin/env is a path", Message("/usr/bin/env is a path")),
        ("//help", Message("/help")),
        ("1/2", Message("1/2")),
    ],
)
def test_inputs_are_messages_or_commands(text: str, expected: object) -> None:
    assert parse_input(text) == expected


@pytest.mark.parametrize("text", ["/nope", "/", "/helpme"])
def test_an_unknown_command_is_named(text: str) -> None:
    with pytest.raises(CommandError, match="/help shows them"):
        parse_input(text)


def composed(lines: list[str]) -> list[str]:
    composer = Composer()
    return [text for line in lines if (text := composer.add(line)) is not None]


def test_lines_become_one_input() -> None:
    assert composed(["one", "two"]) == ["one", "two"]
    assert composed(["one\\", "two\\", "three", "next"]) == ["one\ntwo\nthree", "next"]
    assert composed(['"""', "a", "", "b", '"""', "c"]) == ["a\n\nb", "c"]
    assert composed(['"""a', 'b"""']) == ["a\nb"]
    assert composed(['"""a"""']) == ["a"]
    assert composed(['"""', '"""']) == [""]


def test_an_input_that_goes_on_has_begun() -> None:
    composer = Composer()
    begun = [composer.has_begun]
    for line in ('"""', "a", '"""'):
        composer.add(line)
        begun.append(composer.has_begun)
    assert begun == [False, True, True, False]


@given(st.lists(st.text(st.characters(exclude_characters='"\\\n\r', exclude_categories=["C"])), min_size=1))
def test_a_quoted_input_is_its_lines(lines: list[str]) -> None:
    assert composed(['"""', *lines, '"""']) == ["\n".join(_without_empty_start(lines))]


def _without_empty_start(lines: list[str]) -> list[str]:
    """A line end right behind the opening quotes is not part of the text."""
    while lines and not lines[0]:
        lines = lines[1:]
    return lines


def test_a_conversation_is_sent_as_messages_and_as_the_fields_that_were_set() -> None:
    chat = Conversation("m", "Be brief.", [Turn("Hi", "Hello"), Turn("你好")])
    for assignment in ("temperature 0.2", "top_k 5", "stop END", "seed 0", "max_tokens 7", "max_tokens default"):
        chat.set_field(assignment)
    assert chat.body() == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "你好"},
        ],
        "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.2, "top_k": 5, "stop": ["END"],
        "seed": 0,
    }  # fmt: skip
    assert json.loads(chat.export()) == {"model": "m", "messages": chat.messages()}


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [("nope 1", "no field 'nope'"), ("temperature", "needs a value"), ("temperature x", "must be a number"),
     ("top_k 1.5", "must be a whole number"), ("", "no field ''")],
)  # fmt: skip
def test_a_field_that_cannot_be_set_is_named(assignment: str, problem: str) -> None:
    with pytest.raises(CommandError, match=problem):
        Conversation("m").set_field(assignment)


def event(**content: object) -> bytes:
    return json.dumps(content).encode()


def test_an_answer_is_read_event_by_event() -> None:
    answer = Answer(asked_s=10.0)
    role = event(choices=[{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    assert answer.take(role, 10.2) is None
    assert answer.take(event(choices=[{"delta": {"reasoning_content": "hm"}}]), 10.5) == Piece("hm", is_reasoning=True)
    assert answer.take(event(choices=[{"delta": {"content": "你"}}]), 11.0) == Piece("你")
    assert answer.take(event(choices=[{"delta": {"content": "好"}}]), 12.5) == Piece("好")
    assert answer.take(event(choices=[{"delta": {}, "finish_reason": "length"}]), 12.5) is None
    usage = {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}}
    timings = {"queue_ms": 0.25, "itl_ms": {"p50": 40.0, "p99": 51.5}, "note": "x", "is_warm": True}
    answer.take(event(choices=[], usage=usage, timings=timings), 13.0)
    assert answer.text == "你好"
    assert answer.statistics() == [
        "first token after 500 ms; 5 tokens; 2.0 tok/s; prompt 20 tokens, 16 of them cached; ended by length",
        "server: queue_ms 0.25; itl_ms p50 40; itl_ms p99 51.5",
    ]


def test_what_a_server_does_not_tell_is_left_out() -> None:
    answer = Answer(asked_s=1.0)
    assert answer.statistics() == ["no text came"]
    answer.take(event(choices=[{"delta": {"content": "x"}, "finish_reason": "stop"}]), 1.25)
    assert answer.statistics() == ["first token after 250 ms"]
    assert flattened({}) == []


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (event(error={"message": "the engine has died"}), "^the engine has died$"),
        (event(error="gone"), "^gone$"),
        (b"{", "is not understood"),
        (b"[]", "is not understood"),
        (event(choices=[5]), "is not understood"),
    ],
)
def test_an_event_that_is_no_answer_is_named(data: bytes, problem: str) -> None:
    with pytest.raises(CommandError, match=problem):
        Answer(0.0).take(data, 1.0)


@given(st.lists(st.text(min_size=1), max_size=5))
def test_history_gives_back_what_was_typed(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("state") / "tokenway" / "history.jsonl"
    for text in texts:
        History(path).add(text)
    assert History(path).load() == texts


def test_history_is_private_keeps_the_last_and_passes_over_what_is_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path)
    history.add("first")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("ab") as file:
        file.write(b"\xff\n5\n{broken\n" + b"".join(b'"%d"\n' % number for number in range(2500)))
    assert History(path).load() == [str(number) for number in range(1500, 2500)]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 1000


def test_a_history_that_cannot_be_kept_is_told_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    history = History(tmp_path / "file" / "history.jsonl")
    assert history.load() == []
    history.add("x")
    assert "cannot be kept" in history.problem


def test_every_command_has_a_line_of_help() -> None:
    assert all(text and name.isalpha() for name, (_, text) in COMMANDS.items())

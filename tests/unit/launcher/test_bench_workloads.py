"""What a bench sends: prompts that differ where they must, files of prompts, bodies, arrivals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launcher.bench.answers import Expected
from services.launcher.bench.runner import Pace, Progress
from services.launcher.bench.session_files import read_sessions
from services.launcher.bench.sessions import RequestForm, Session, Turn
from services.launcher.bench.workloads import WORDS, Lengths, Workload
from services.launcher.errors import CommandError

CHAT, TEXT = RequestForm("m", is_chat=True), RequestForm("m", is_chat=False)


def prompts(workload: Workload, *numbers: int) -> list[list[int]]:
    return [list(workload.session(number).turns[0].prompt) for number in numbers]  # type: ignore[arg-type]


def test_prompts_of_ids_have_their_exact_length_and_repeat_by_number_and_seed() -> None:
    workload = Workload(Lengths(32, 8), 7, range(1000, 2000))
    first, second, again, negative = prompts(workload, 1, 2, 1, -1)
    assert first == again
    assert first != second != negative
    assert all(len(prompt) == 32 and 1000 <= min(prompt) <= max(prompt) < 2000 for prompt in (first, second))
    assert prompts(Workload(Lengths(32, 8), 8, range(1000, 2000)), 1) != [first]


def test_prompts_share_the_prefix_of_their_group_and_no_more() -> None:
    workload = Workload(Lengths(12, 8), 7, range(1000, 30000), prefix_tokens=20, num_prefixes=2)
    zero, one, two, three = prompts(workload, 0, 1, 2, 3)
    assert zero[:20] == two[:20] != one[:20] == three[:20]
    assert len({tuple(prompt[20:]) for prompt in (zero, one, two, three)}) == 4
    assert {len(prompt) for prompt in (zero, one, two, three)} == {32}


def test_words_are_as_many_as_tokens_are_wanted() -> None:
    session = Workload(Lengths(9, 8), 7, None, prefix_tokens=4, num_turns=3).session(5)
    words = [str(turn.prompt).split() for turn in session.turns]
    assert [len(turn) for turn in words] == [13, 9, 9]
    assert set(itertools.chain(*words)) <= set(WORDS)


@given(st.integers(1, 500), st.floats(0, 0.99), st.integers(0, 99))
def test_lengths_stay_within_their_ratio(mean: int, ratio: float, number: int) -> None:
    [turn] = Workload(Lengths(mean, 2 * mean, ratio), 1, range(5)).session(number).turns
    assert max(1, round(mean * (1 - ratio))) <= len(turn.prompt) <= round(mean * (1 + ratio))
    assert max(1, round(2 * mean * (1 - ratio))) <= turn.output_tokens <= round(2 * mean * (1 + ratio))


def test_a_turn_is_sent_with_everything_before_it() -> None:
    session = Session([Turn("one?", 5), Turn("two?", 6)], [{"role": "system", "content": "Be brief."}])
    first, second = CHAT.body(session, []), CHAT.body(session, ["One."])
    assert first["messages"] == [session.opening[0], {"role": "user", "content": "one?"}]
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "one?", "One.", "two?"]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert (first["max_tokens"], second["max_tokens"]) == (5, 6)
    assert TEXT.body(Session(session.turns), ["One."])["prompt"] == "one?One.\ntwo?"


def test_a_request_is_a_stream_that_tells_its_usage() -> None:
    body = RequestForm("m", is_chat=False, extra={"top_k": 1, "temperature": 2}).body(Session([Turn([5, 6], 3)]), [])
    assert body == {
        "model": "m", "max_tokens": 3, "temperature": 2, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True, "prompt": [5, 6], "top_k": 1,
    }  # fmt: skip
    assert "ignore_eos" not in RequestForm("m", True, ignores_eos=False).body(Session([Turn("x", 3)]), [])


def test_what_an_answer_must_say_follows_from_the_turn() -> None:
    assert TEXT.expected(Turn([1, 2, 3], 4)) == Expected(4, 3)
    assert CHAT.expected(Turn("words", 4)) == Expected(4, None)
    assert RequestForm("m", False, ignores_eos=False).expected(Turn([1], 4)) == Expected(4, 1, may_stop=True)


@pytest.mark.parametrize(
    ("form", "session", "num_answers"),
    [
        (CHAT, Session([Turn([1, 2], 3)]), 0),
        (TEXT, Session([Turn("x", 3)], [{"role": "user", "content": "y"}]), 0),
        (TEXT, Session([Turn("x", 3), Turn([1], 3)]), 1),
    ],
)
def test_what_a_route_cannot_take_is_refused(form: RequestForm, session: Session, num_answers: int) -> None:
    with pytest.raises(CommandError):
        form.body(session, ["a"] * num_answers)


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_form_of_entry_is_read(tmp_path: Path) -> None:
    entries: list[object] = [
        {"prompt": "你好 🙂", "output_tokens": 7},
        {"prompt": [5, 6, 7], "max_tokens": 8},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"},
                      {"role": "assistant", "content": "A"}]},
        {"conversations": [{"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Why?"}]},
    ]  # fmt: skip
    expected = [
        Session([Turn("你好 🙂", 7)]), Session([Turn([5, 6, 7], 8)]),
        Session([Turn("U", 16)], [{"role": "system", "content": "S"}]), Session([Turn("Why?", 16)]),
    ]  # fmt: skip
    lines = _file(tmp_path, "\n\n".join(json.dumps(entry) for entry in entries) + "\n")
    found = read_sessions(lines, 16, 99)
    assert [(list(session.turns), list(session.opening)) for session in found] == [
        (list(session.turns), list(session.opening)) for session in expected
    ]
    assert read_sessions(_file(tmp_path, json.dumps(entries)), 16, 99) == found
    assert read_sessions(lines, 16, 2) == found[:2]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no prompt"),
        ("{", "line 1: is not JSON"),
        ('{"prompt": "a"}\nx', "line 2: is not JSON"),
        ("[1]", "entry 0: is not an object"),
        ('{"prompt": ""}', "line 1: has no prompt"),
        ('{"prompt": [-1]}', "line 1: has no prompt"),
        ('{"prompt": [true]}', "line 1: has no prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "length of the answer is 0"),
        ('{"prompt": "a", "max_tokens": "9"}', "length of the answer is '9'"),
        ('{"messages": []}', "no message of a user"),
        ('{"messages": [{"role": "user", "content": null}]}', "no role or no text"),
        ('{"conversations": [{"from": "gpt", "value": "Hello"}]}', "nobody asks"),
    ],
)
def test_an_entry_that_cannot_be_sent_is_named(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=problem) as caught:
        read_sessions(_file(tmp_path, text), 16, 99)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"cannot read .*none\.jsonl: No such file"):
        read_sessions(tmp_path / "none.jsonl", 16, 1)
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(CommandError, match="not UTF-8"):
        read_sessions(tmp_path / "latin", 16, 1)


def test_arrivals_come_at_their_rate_and_repeat_by_seed() -> None:
    arrivals = list(itertools.islice(Pace(None, 20.0, 3).arrivals_s(), 4001))
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(4000 / 20, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    shorter = sum(gap < 1 / 20 for gap in gaps) / len(gaps)
    assert shorter == pytest.approx(1 - 1 / 2.718281828, abs=0.03)  # exponential: not evenly spaced
    assert list(itertools.islice(Pace(None, 20.0, 3).arrivals_s(), 5)) == arrivals[:5]
    assert list(itertools.islice(Pace(8).arrivals_s(), 3)) == [0.0, 0.0, 0.0]


def test_progress_is_one_line() -> None:
    progress = Progress(8, num_ended=2, num_events=300, started_s=10.0)
    assert progress.line(13.0) == "2/8 requests, 100 events/s, 3 s"

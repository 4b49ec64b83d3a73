"""An answer between the journal and a format: what goes out when, however the text is cut."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.answer_parts import AnswerDelta, Part, Reasoning, Text, TokenLogprobs, ToolCallStart
from services.tokenizer.journal import Ending, NewPart
from services.tokenizer.pending_answer import PendingAnswer
from services.wire.finish import Finish

PIECES = ["", "a", "é", "👋🌍", "(", ")", "你好 "]


class Brackets:
    """A parser for tests: what stands in brackets is thought; it holds back what follows an open one."""

    def __init__(self) -> None:
        self._thought: list[str] | None = None

    def feed(self, text: str) -> Sequence[Part]:
        parts: list[Part] = []
        for character in text:
            if character == "(" and self._thought is None:
                self._thought = []
            elif character == ")" and self._thought is not None:
                parts += [Reasoning("".join(self._thought))] if self._thought else []
                self._thought = None
            elif self._thought is not None:
                self._thought.append(character)
            else:
                parts.append(Text(character))
        return parts

    def finish(self, *, is_cut: bool = False) -> Sequence[Part]:
        thought, self._thought = self._thought, None
        return [Text("(" + "".join(thought))] if thought is not None else []


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5)


def news(index: int, text: str) -> NewPart:
    return NewPart(text, [index], [entry(index)])


@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=12), takes=st.sets(st.integers(0, 12)))
def test_ids_and_log_probabilities_come_once_each_with_text_or_the_end(pieces: list[str], takes: set[int]) -> None:
    answer = PendingAnswer(keeps_ids=True, keeps_logprobs=True)
    deltas: list[AnswerDelta | None] = []
    for index, piece in enumerate(pieces):
        answer.add(news(index, piece))
        if index in takes:
            deltas.append(answer.take())
    deltas.append(answer.take_last())
    rest = answer.take_end(Ending(Finish.LENGTH)).rest
    shown = [delta for delta in deltas if delta is not None]
    assert all(delta.parts for delta in shown)
    assert "".join(part.text for delta in shown for part in delta.parts if isinstance(part, Text)) == "".join(pieces)
    ids = [token_id for delta in (*shown, rest) for token_id in delta.token_ids]
    assert ids == list(range(len(pieces)))
    assert [item.token_id for delta in (*shown, rest) for item in delta.logprobs] == ids


@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=12), takes=st.sets(st.integers(0, 12)))
def test_parts_do_not_depend_on_how_the_text_was_cut(pieces: list[str], takes: set[int]) -> None:
    answer, whole = PendingAnswer(parser=Brackets()), PendingAnswer(parser=Brackets())
    parts: list[Part] = []
    expected: list[Part] = []
    for index, piece in enumerate(pieces):
        answer.add(news(index, piece))
        whole.add(news(index, piece))
        if index in takes and (delta := answer.take()):
            parts += delta.parts
    for pending, found in ((answer, parts), (whole, expected)):
        delta = pending.take_last()
        found += delta.parts if delta is not None else ()
    assert parts == expected


def test_stp_02_text_that_a_parser_holds_back_holds_its_probabilities_back() -> None:
    answer = PendingAnswer(parser=Brackets(), keeps_logprobs=True)
    answer.add(news(1, "(thi"))
    assert answer.take() is None
    answer.add(news(2, "nk)"))
    delta = answer.take()
    assert delta is not None
    assert (delta.parts, [item.token_id for item in delta.logprobs]) == ([Reasoning("think")], [1, 2])
    answer.add(news(3, "(end"))
    assert answer.take() is None
    last = answer.take_last()
    assert last is not None
    assert (last.parts, [item.token_id for item in last.logprobs]) == ([Text("(end")], [3])


def test_what_no_text_followed_is_in_the_rest() -> None:
    answer = PendingAnswer(keeps_ids=True, keeps_logprobs=True)
    answer.add(news(1, "a"))
    assert answer.take() == AnswerDelta((Text("a"),), [1], [entry(1)])
    answer.add(news(2, ""))
    assert answer.take() is None
    assert answer.take_last() is None
    end = answer.take_end(Ending(Finish.STOP_TOKEN, 2))
    assert (end.rest.token_ids, [item.token_id for item in end.rest.logprobs]) == ([2], [2])


def test_the_end_tells_the_clients_own_stop_ids_and_strings_only() -> None:
    answer = PendingAnswer(stop_ids=frozenset({7}))
    stops = (Ending(Finish.STOP_TOKEN, 7), Ending(Finish.STOP_TOKEN, 2), Ending(Finish.STOP_STRING, "x"))
    assert [answer.take_end(ending).stop for ending in stops] == [7, None, "x"]


def test_an_answer_that_opens_with_its_prompt_withholds_everything_until_it_is_there() -> None:
    answer = PendingAnswer("the prompt", awaits_prompt=True, echoes_logprobs=True)
    answer.add(news(1, "a"))
    assert answer.take() is None
    openings = [answer.opening]
    prompt = [TokenLogprobs(9, None), entry(8)]
    answer.set_prompt(prompt)
    openings.append(answer.opening)
    assert openings == [None, AnswerDelta((Text("the prompt"),), (), prompt, prompt)]
    delta = answer.take()
    assert delta is not None
    assert delta.parts == (Text("a"),)


def test_a_call_is_remembered_for_the_end() -> None:
    class Calls(Brackets):
        def feed(self, text: str) -> Sequence[Part]:
            return [ToolCallStart(0, "id", text)]

    answer = PendingAnswer(parser=Calls())
    assert not answer.take_end(Ending(Finish.STOP_TOKEN, 2)).has_tool_calls
    answer.add(news(1, "f"))
    assert answer.take() is not None
    assert answer.take_end(Ending(Finish.STOP_TOKEN, 2)).has_tool_calls

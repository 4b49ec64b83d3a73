"""The stop matcher against a definition that looks at the whole text again after every character."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.detokenizer.stop_strings import StopMatcher

ALPHABET = "ab你🙂"
texts = st.text(ALPHABET, max_size=30)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=5).map(tuple)


@dataclass
class NaiveMatcher:
    """Shows everything but the longest end that is a proper beginning of a stop; the first complete stop ends it."""

    stops: tuple[str, ...]
    includes_stop: bool
    seen: str = ""
    num_shown: int = 0
    found: str | None = None

    def feed(self, text: str, counts: bool) -> str:
        for character in text:
            self.seen += character
            complete = [stop for stop in self.stops if self.seen.endswith(stop)]
            if complete and counts:
                self.found = max(complete, key=len)
                return self.show(0 if self.includes_stop else len(self.found))
        begun = {stop[:length] for stop in self.stops for length in range(len(stop))}
        return self.show(max(len(begin) for begin in begun if self.seen.endswith(begin)))

    def show(self, num_held: int) -> str:
        shown = self.seen[self.num_shown : len(self.seen) - num_held]
        self.num_shown = len(self.seen) - num_held
        return shown


@settings(max_examples=200, deadline=None)
@given(stop_lists, st.lists(st.tuples(texts, st.booleans()), max_size=12), st.booleans())
@example((("ab", "abab", "b")), [("a", False), ("bab", False), ("ab", True)], False)
@example(("ab", "b", "aba"), [("ab", False), ("a", True)], False)
@example(("abbaa", "bbb", "ba"), [("abba", True)], False)
@example((("aab",)), [("aa", True), ("a", True), ("b", True)], True)
def test_every_chunk_equals_the_naive_matchers(
    stops: tuple[str, ...], chunks: list[tuple[str, bool]], includes_stop: bool
) -> None:
    matcher, naive = StopMatcher(stops, includes_stop), NaiveMatcher(stops, includes_stop)
    for text, counts in chunks:
        assert matcher.feed(text, counts) == naive.feed(text, counts)
        assert matcher.found == naive.found
        if matcher.found is not None:
            assert matcher.held_text == ""
            return
        assert matcher.held_text == naive.seen[naive.num_shown :]
    assert matcher.flush() == naive.show(0)


@settings(max_examples=200, deadline=None)
@given(stop_lists, texts, st.sets(st.integers(0, 30)))
def test_the_shown_text_does_not_depend_on_chunking(stops: tuple[str, ...], text: str, cuts: set[int]) -> None:
    whole = StopMatcher(stops)
    expected = whole.feed(text)
    if whole.found is None:
        expected += whole.flush()
    bounds = sorted({cut for cut in cuts if cut < len(text)} | {0, len(text)})
    pieces, shown = StopMatcher(stops), ""
    for start, end in pairwise(bounds):
        shown += pieces.feed(text[start:end])
        assert expected.startswith(shown)
        if pieces.found is not None:
            break
    else:
        shown += pieces.flush()
    assert (shown, pieces.found) == (expected, whole.found)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=16).map(tuple), st.text(max_size=40))
def test_any_characters_can_be_stops(stops: tuple[str, ...], text: str) -> None:
    matcher, naive = StopMatcher(stops), NaiveMatcher(stops, False)
    assert matcher.feed(text) == naive.feed(text, counts=True)
    assert matcher.found == naive.found


@pytest.mark.parametrize("stops", [(), ("",), ("a", "")])
def test_stp_09_an_empty_stop_is_refused_and_never_matches(stops: tuple[str, ...]) -> None:
    with pytest.raises(ValueError):
        StopMatcher(stops)


def test_nothing_is_taken_after_the_end() -> None:
    matcher = StopMatcher(("a",))
    assert matcher.feed("ba") == "b"
    with pytest.raises(ValueError):
        matcher.feed("c")

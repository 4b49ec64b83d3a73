"""Detokenizer process: stop strings in a stream of text, found wherever they fall and never shown in part.

Which match ends the answer: the one that is complete first; of several complete at the same character, the longest,
that is the one that began first. The rule looks at the text alone, so it does not depend on how tokens cut it.

All stops of a request are searched at once by one automaton (Aho and Corasick, 1975): a state is the longest end of the
text so far that begins some stop, and exactly that end is held back. A character costs one step however many stops
there are, and what a mismatch leaves over is not forgotten: `aab` is found in `aaab`.

    stops  aab, ab       states 0 -a- 1 -a- 2 -b- 3          fallback of 2 is 1, of 3 is 4
    sorted               states     1 -b- 4

The stops are inserted in sorted order, so the first child of a state is always the next number: the tree is one string
of labels, a dictionary of the few branches, and two arrays. 16 stops of 1,024 bytes take 0.2 MB and some 12 ms.

This module must never read a clock or a token id.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache

_NO_CHILD = "\ud800"  # a lone surrogate: no decoded text holds one


@dataclass(frozen=True, slots=True)
class StopAutomaton:
    """The compiled stops of one request; immutable, shared by requests with the same stops.

    State 0 is the root. `labels[s]` leads from state s to s + 1, `branches` holds all other children, `fallbacks[s]` is
    the longest proper end of s that is a state too, `depths[s]` its number of characters, `complete[s]` the longest
    stop that ends at s.
    """

    first_characters: frozenset[str]
    labels: str
    branches: dict[tuple[int, str], int]
    fallbacks: array[int]
    depths: array[int]
    complete: dict[int, str]

    def step(self, state: int, character: str) -> int:
        """The state after one more character. Amortized O(1): each fallback undoes an earlier step forward."""
        while True:
            if self.labels[state] == character:
                return state + 1
            branch = self.branches.get((state, character))
            if branch is not None:
                return branch
            if state == 0:
                return 0
            state = self.fallbacks[state]

    def release(self, state: int) -> int:
        """The longest end of `state` that can still grow into a stop, when its own match does not count."""
        while self.labels[state] == _NO_CHILD:
            state = self.fallbacks[state]
        return state


@lru_cache(maxsize=256)
def compile_stops(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of at least one stop string, none of them empty (ValueError); time linear in their characters."""
    if not stops or "" in stops:
        raise ValueError("a stop string must not be empty")
    tree = _Tree()
    for stop in sorted(set(stops)):
        tree.insert(stop)
    automaton = StopAutomaton(
        first_characters=frozenset(stop[0] for stop in stops),
        labels="".join(tree.labels),
        branches=tree.branches,
        fallbacks=array("i", bytes(4 * len(tree.labels))),
        depths=array("i", tree.depths),
        complete=tree.stop_at,
    )
    _link(automaton, tree)
    return automaton


class _Tree:
    """All stops as one tree of states, numbered in the order in which they are made."""

    def __init__(self) -> None:
        self.labels = [_NO_CHILD]
        self.branches: dict[tuple[int, str], int] = {}
        self.stop_at: dict[int, str] = {}
        self.parents = [0]
        self.characters = [""]  # that lead to each state
        self.depths = [0]

    def insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            child = state + 1 if self.labels[state] == character else self.branches.get((state, character))
            state = self._add(state, character) if child is None else child
        self.stop_at[state] = stop

    def _add(self, parent: int, character: str) -> int:
        child = len(self.labels)
        if child == parent + 1:
            self.labels[parent] = character
        else:
            self.branches[parent, character] = child
        self.labels.append(_NO_CHILD)
        self.parents.append(parent)
        self.characters.append(character)
        self.depths.append(self.depths[parent] + 1)
        return child


def _link(automaton: StopAutomaton, tree: _Tree) -> None:
    """Fills in fallbacks, and the stops that end at a state through its fallback; shallow states first."""
    fallbacks, complete, step = automaton.fallbacks, automaton.complete, automaton.step
    for state in sorted(range(1, len(tree.parents)), key=tree.depths.__getitem__):
        parent = tree.parents[state]
        if parent:
            fallback = fallbacks[state] = step(fallbacks[parent], tree.characters[state])
            if fallback in complete:
                complete.setdefault(state, complete[fallback])


class StopMatcher:
    """The search of one answer: takes text, gives what may be shown, holds back only what may begin a stop."""

    __slots__ = ("_automaton", "_held", "_includes_stop", "_state", "found")

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        """`include_stop` shows the stop string that ended the answer."""
        self._automaton = compile_stops(stops)
        self._includes_stop = include_stop
        self._state = 0
        self._held = ""
        self.found: str | None = None

    @property
    def held_text(self) -> str:
        """What waits: the longest end of the text that begins a stop string."""
        return self._held

    def feed(self, text: str, counts: bool = True) -> str:
        """The text that may be shown now; after a match, `found` is set and the rest of `text` is dropped.

        Args:
            text: the next characters, usually one token's.
            counts: whether a match that is complete within `text` ends the answer (not below min_tokens).
        """
        if self.found is not None:
            raise ValueError("the answer has ended")
        automaton, state = self._automaton, self._state
        first_characters = automaton.first_characters
        if state == 0 and first_characters.isdisjoint(text):
            return text
        step, complete = automaton.step, automaton.complete
        for position, character in enumerate(text):
            if state == 0 and character not in first_characters:
                continue
            state = step(state, character)
            if state in complete:
                if counts:
                    return self._end(text[: position + 1], complete[state])
                state = automaton.release(state)
        self._state = state
        seen = self._held + text
        num_shown = len(seen) - automaton.depths[state]
        self._held = seen[num_shown:]
        return seen[:num_shown]

    def flush(self) -> str:
        """The answer ended for another reason: what was held is text after all."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _end(self, text: str, stop: str) -> str:
        self.found = stop
        seen = self._held + text
        self._held = ""
        return seen if self._includes_stop else seen[: len(seen) - len(stop)]

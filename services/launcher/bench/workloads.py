"""The workloads that are made up: random prompts, prompts with a shared prefix, conversations of several turns. Pure.

Everything follows from the seed and a session's number, so the same number is always the same prompt and no two are
alike beyond the prefix that they are meant to share.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.launcher.bench.sessions import Session, Turn

# Short common words: one token each in most vocabularies, so that a prompt has about as many tokens as words.
WORDS = (
    "apple", "river", "stone", "cloud", "garden", "winter", "music", "letter", "window", "silver", "forest", "water",
    "house", "light", "paper", "table", "green", "night", "morning", "road", "bridge", "story", "number", "market",
)  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """Tokens of a turn. `range_ratio` r draws both lengths evenly between (1 - r) and (1 + r) times the number."""

    input_tokens: int
    output_tokens: int
    range_ratio: float = 0.0

    def draw(self, generator: random.Random) -> tuple[int, int]:
        """The lengths of one turn, each at least 1."""
        return _around(self.input_tokens, self.range_ratio, generator), _around(
            self.output_tokens, self.range_ratio, generator
        )


@dataclass(frozen=True)
class Workload:
    """What is made up.

    Attributes:
        lengths: of each turn, beyond the shared prefix.
        seed: of everything that is drawn.
        token_ids: the range that prompt ids are drawn from; None for words.
        prefix_tokens: at the beginning of a session, the same in all sessions of a group.
        num_prefixes: groups; session i belongs to group i modulo this.
        num_turns: of each session; only words can have more than one.
    """

    lengths: Lengths
    seed: int
    token_ids: range | None = None
    prefix_tokens: int = 0
    num_prefixes: int = 1
    num_turns: int = 1

    def session(self, number: int) -> Session:
        """Session `number`."""
        own = random.Random(f"{self.seed} {number}")
        common = random.Random(f"{self.seed} shared {number % self.num_prefixes}")
        turns = []
        for index in range(self.num_turns):
            num_input, num_output = self.lengths.draw(own)
            prefix = self._draw(common, self.prefix_tokens) if index == 0 else []
            turns.append(self._turn([*prefix, *self._draw(own, num_input)], num_output))
        return Session(turns)

    def _draw(self, generator: random.Random, count: int) -> list[int]:
        """Ids, or the indexes of words."""
        choices = range(len(WORDS)) if self.token_ids is None else self.token_ids
        return [generator.choice(choices) for _ in range(count)]

    def _turn(self, ids: Sequence[int], output_tokens: int) -> Turn:
        return Turn(" ".join(WORDS[index] for index in ids) if self.token_ids is None else ids, output_tokens)


def _around(number: int, ratio: float, generator: random.Random) -> int:
    if not ratio:
        return number
    return generator.randint(max(1, round(number * (1 - ratio))), max(1, round(number * (1 + ratio))))

"""A model that costs nothing: the next token is a hash of the position and the token before it.

So a whole answer follows from its prompt alone, whatever the batch, the cache or a restart: whoever knows the prompt
can say what every token and every byte of text must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.model_files.vocabulary import Vocabulary
from services.wire.columns import pack_int32, unpack_int32
from services.wire.steps import StepPlan, StepResult

_MAX_PLAIN_IDS = 4096


def plain_token_ids(vocabulary: Vocabulary) -> list[int]:
    """Ids whose text is printable ASCII and begins with a space: each is text of its own, none ends an answer."""
    ids = []
    for token_id in range(vocabulary.num_entries):
        text = vocabulary.token_bytes(token_id)
        is_plain = len(text) > 1 and text.startswith(b" ") and text.isascii() and text.decode().isprintable()
        if is_plain and not vocabulary.is_special(token_id) and token_id not in vocabulary.end_token_ids:
            ids.append(token_id)
    return ids[:_MAX_PLAIN_IDS]


def next_token(position: int, previous: int, plain_ids: Sequence[int]) -> int:
    """The token at `position` (counted from the beginning of the prompt) after the token `previous`."""
    mixed = (previous * 0x9E3779B1 + position * 0x85EBCA6B) & 0xFFFFFFFF
    mixed ^= mixed >> 15
    return plain_ids[(mixed * 0x2C1B3C6D & 0xFFFFFFFF) % len(plain_ids)]


def answer_ids(prompt_ids: Sequence[int], num_tokens: int, plain_ids: Sequence[int]) -> list[int]:
    """The whole answer to a prompt."""
    tokens = [prompt_ids[-1]]
    for position in range(len(prompt_ids), len(prompt_ids) + num_tokens):
        tokens.append(next_token(position, tokens[-1], plain_ids))
    return tokens[1:]


@dataclass(slots=True)
class _Row:
    request_id: bytes
    attempt: int
    num_prompt: int
    token_ids: list[int]


class FakeModel:
    """Holds rows as a worker does and applies plans to them in order."""

    def __init__(self, plain_ids: Sequence[int]) -> None:
        self._plain_ids = plain_ids
        self._rows: dict[int, _Row] = {}

    @property
    def num_held(self) -> int:
        """Rows that are taken."""
        return len(self._rows)

    def release_all(self) -> None:
        """Forgets every row: a new scheduler knows none of them."""
        self._rows.clear()

    def run(self, plan: StepPlan, step_us: int) -> StepResult:
        """The result of a plan.

        Raises:
            KeyError, IndexError: the plan does not fit what is held here: the scheduler's fault.
        """
        for number in unpack_int32(plan.released_rows):
            del self._rows[number]
        for new in plan.new_rows:
            self._rows[new.row] = _Row(new.request_id, new.attempt, new.num_prompt_tokens, unpack_int32(new.token_ids))
        columns = (plan.rows, plan.start_positions, plan.num_new_tokens)
        sampled = [
            (number, start + count, self._rows[number])
            for number, start, count, samples in zip(*map(unpack_int32, columns), plan.samples, strict=True)
            if samples
        ]
        for _, end, row in sampled:
            row.token_ids[end:] = [next_token(end, row.token_ids[end - 1], self._plain_ids)]
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            rows=pack_int32(number for number, _, _ in sampled),
            request_ids=b"".join(row.request_id for _, _, row in sampled),
            attempts=pack_int32(row.attempt for _, _, row in sampled),
            first_indexes=pack_int32(end - row.num_prompt for _, end, row in sampled),
            counts=pack_int32([1] * len(sampled)),
            token_ids=pack_int32(row.token_ids[-1] for _, _, row in sampled),
            finishes=bytes(len(sampled)),
            forward_us=step_us,
            step_us=step_us,
        )

"""scheduler: one request as the core sees it, and the table of its legal states.

A request is an answer to be made (`n` answers are `n` requests). It has no separate prefill and decode phase: its
`num_computed_tokens` catches up with the tokens that it will have. It must never hold text or a tensor.

    positions   0        num_prompt_tokens     num_computed  num_planned  num_expected      max_length
                |  prompt ids    |  output ids ...   |            |            |                 |
                KV confirmed by results ------------>|            |            |
                KV that plans in flight compute ----------------->|            |
                tokens known, and those that plans in flight sample ---------->|

While it is a decode in step with others (`lockstep`), its cursors are not moved one by one: they follow from the step
at which it joined and from the clock that all share.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from services.scheduler.logprob_record import LogprobRecord
from services.scheduler.prompt_record import PromptRecord
from services.scheduler.proposer import Proposer
from services.scheduler.radix_cache import TOKEN_BYTES, Node
from services.scheduler.tenants import TenantAccount
from services.scheduler.usage import Usage
from services.wire.columns import unpack_int32
from services.wire.finish import Finish
from services.wire.request_params import NO_LOGPROBS, PLAIN_PROMPT, Task
from services.wire.requests import Submit

LOGGED_STEPS = 64


class RequestState(Enum):
    """Where a request stands; each state is one queue of the core."""

    COMPILING = "compiling"  # its grammar is not compiled yet: it is not admitted
    HELD = "held"  # an n > 1 sibling whose first one's prompt is not in the tree yet
    WAITING = "waiting"
    RUNNING = "running"
    RETRACTED = "retracted"  # lost its pages, resumes before anything new
    FINISHED = "finished"


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.COMPILING: frozenset({RequestState.HELD, RequestState.WAITING, RequestState.FINISHED}),
    RequestState.HELD: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.WAITING: frozenset(
        {RequestState.COMPILING, RequestState.HELD, RequestState.RUNNING, RequestState.FINISHED}
    ),
    RequestState.RUNNING: frozenset({RequestState.RETRACTED, RequestState.FINISHED}),
    RequestState.RETRACTED: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


class IllegalTransitionError(Exception):
    """A request was told to take a step that its state does not allow: a fault of the scheduler."""


def is_producing(submit: Submit) -> bool:
    """Whether tokens are wanted, and not the prompt alone."""
    return submit.max_tokens > 0 and submit.prompt.task is Task.GENERATE


class StepClock:
    """How far a core is: steps [0, planned) were planned, the results of [0, applied) have come.

    It holds the ids that the last steps gave to requests in lockstep, by step and row, until these write them down:
    `ids[step % LOGGED_STEPS, row]`. When `applied` is a multiple of LOGGED_STEPS all must have done so.
    """

    __slots__ = ("_ids", "_noted", "applied", "planned")

    def __init__(self, max_rows: int) -> None:
        """`max_rows`: of the worker."""
        self.planned = 0
        self.applied = 0
        self._ids = np.zeros((LOGGED_STEPS, max_rows), "<i4")
        self._noted: list[tuple[int, bytes, bytes]] = []  # what is not in the table yet: step, rows, ids

    def note(self, step: int, rows: bytes, ids: bytes) -> None:
        """The ids (int32, one for each row) that a step gave to some rows."""
        self._noted.append((step, rows, ids))

    @property
    def ids(self) -> NDArray[np.int32]:
        """The table. What was noted is sorted into it now: that is cheaper for many steps together."""
        for step, rows, ids in self._noted:
            self._ids[step % LOGGED_STEPS][np.frombuffer(rows, "<i4")] = np.frombuffer(ids, "<i4")
        self._noted.clear()
        return self._ids


class Request:
    """The ids, cursors and pages of one request. The core changes it; nobody else does.

    Args:
        submit: the message that asked for it.
        max_length: prompt + output tokens at which it ends at the latest, >= the tokens it has.
        arrival: its place in the order of arrival.
        lane: where its tokens go; those of one lane leave the core together.
    """

    __slots__ = (
        "_clock",
        "_last_step",
        "_num_computed",
        "_num_expected",
        "_num_planned",
        "_token_bytes",
        "_written_step",
        "account",
        "arrival",
        "cached_tokens",
        "compute_length",
        "final_ids",
        "finish",
        "is_plain",
        "is_published",
        "is_watched",
        "joined_step",
        "lane",
        "lock",
        "logprobs",
        "max_length",
        "min_length",
        "num_prompt",
        "num_proposed",
        "num_tree_pages",
        "pages",
        "peeked",
        "prompt",
        "prompt_end",
        "proposer",
        "queued_pass",
        "row",
        "state",
        "stop_ids",
        "submit",
        "usage",
    )

    def __init__(self, submit: Submit, max_length: int, arrival: int, lane: bytes = b"") -> None:
        self.submit = submit
        self.lane = lane
        self.arrival = arrival
        self.account = TenantAccount(0)  # its tenant's, once it is queued
        self.state = RequestState.WAITING
        self.finish = Finish.NONE
        self._token_bytes = bytearray(submit.prompt_token_ids + submit.output_token_ids)
        self._clock: StepClock | None = None  # the core's, while it goes in lockstep
        self._written_step = -1  # the first step whose id is not in `_token_bytes` yet
        self.num_prompt = len(submit.prompt_token_ids) // TOKEN_BYTES
        self.max_length = max_length
        self.min_length = self.num_prompt + submit.text.min_tokens
        asks_logprobs = submit.sampling.num_logprobs != NO_LOGPROBS
        self.logprobs = LogprobRecord(len(submit.output_token_ids) // TOKEN_BYTES) if asks_logprobs else None
        is_plain = submit.prompt == PLAIN_PROMPT
        self.prompt = None if is_plain else PromptRecord(submit.prompt, self.num_prompt)
        # Why it ends as soon as its known tokens are computed; NONE when it produces something.
        self.prompt_end = Finish.NONE if is_producing(submit) else Finish.LENGTH
        # Tokens that must be computed for all that it may produce. The KV of a last token is never needed.
        self.compute_length = self.num_prompt + self.num_output if self.prompt_end else max_length - 1
        self.stop_ids = frozenset(unpack_int32(submit.stop_token_ids))
        self.final_ids = frozenset(unpack_int32(submit.final_token_ids))
        # Nothing but ids is wanted of it: as a decode it may go in lockstep.
        self.is_plain = is_plain and not asks_logprobs and not self.prompt_end and submit.sampling.grammar is None
        self.joined_step = -1  # the first step of its present lockstep; -1 outside
        self._num_computed = 0  # these four as they were when it joined
        self._num_planned = 0
        self._num_expected = self.num_tokens
        self._last_step = -1
        self.row = -1
        self.pages: list[int] = []
        self.num_tree_pages = 0  # the first so many pages are the radix cache's, kept by `lock`
        self.lock: Node | None = None
        self.is_published = False  # whether the tree was offered what the first pass over the known tokens computed
        self.cached_tokens = -1  # how much of the prompt the cache gave; -1 until admitted
        self.peeked = (-1, 0, 0)  # version of the tree, known tokens, cached tokens: see KvLedger.peek
        self.queued_pass = 0
        self.usage = Usage()
        self.is_watched = False  # these three are speculation's: whether it is looked at for something to propose
        self.proposer: Proposer | None = None
        self.num_proposed = 0  # ids behind its own token in the plan that is in flight

    @property
    def request_id(self) -> bytes:
        """The id made by the tokenizer process."""
        return self.submit.request_id

    @property
    def attempt(self) -> int:
        """Which submission of the request this is."""
        return self.submit.attempt

    @property
    def token_bytes(self) -> bytearray:
        """The known ids as an int32 column, prompt and output; it is the request's own."""
        clock = self._clock
        if clock is not None and clock.applied > self._written_step:
            first, num_steps = self._written_step % LOGGED_STEPS, clock.applied - self._written_step
            self._token_bytes += clock.ids[first : first + num_steps, self.row].tobytes()
            self._written_step = clock.applied
        return self._token_bytes

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_bytes) // TOKEN_BYTES

    @property
    def num_output(self) -> int:
        """Known output tokens."""
        return len(self.token_bytes) // TOKEN_BYTES - self.num_prompt

    @property
    def in_lockstep(self) -> bool:
        """Whether every plan has one more token of it, without being told so."""
        return self._clock is not None

    @property
    def num_computed(self) -> int:
        """Tokens whose KV results have confirmed."""
        clock = self._clock
        if clock is None or clock.applied <= self.joined_step:  # the results of steps before it joined are still coming
            return self._num_computed
        return self._num_planned + clock.applied - self.joined_step

    @num_computed.setter
    def num_computed(self, num_tokens: int) -> None:
        self._num_computed = num_tokens

    @property
    def num_planned(self) -> int:
        """Tokens whose KV is computed when all plans in flight have run."""
        clock = self._clock
        return self._num_planned if clock is None else self._num_planned + clock.planned - self.joined_step

    @num_planned.setter
    def num_planned(self, num_tokens: int) -> None:
        self._num_planned = num_tokens

    @property
    def num_expected(self) -> int:
        """Tokens known, and those that plans in flight sample."""
        clock = self._clock
        return self._num_expected if clock is None else self._num_expected + clock.planned - self.joined_step

    @num_expected.setter
    def num_expected(self, num_tokens: int) -> None:
        self._num_expected = num_tokens

    @property
    def last_step(self) -> int:
        """The last plan that it is part of; -1 before the first."""
        clock = self._clock
        return self._last_step if clock is None or clock.planned == self.joined_step else clock.planned - 1

    @last_step.setter
    def last_step(self, step: int) -> None:
        self._last_step = step

    def join(self, clock: StepClock) -> None:
        """From the next plan on it takes every step: its cursors follow the clock."""
        self._clock, self.joined_step, self._written_step = clock, clock.planned, clock.planned

    def write_down(self) -> None:
        """Takes over the ids that the clock holds for it."""
        _ = self.token_bytes

    def leave(self) -> None:
        """Its cursors stand still from now on, where the clock has brought them."""
        self.write_down()
        computed, planned, expected = self.num_computed, self.num_planned, self.num_expected
        self._last_step = self.last_step
        self._clock, self.joined_step = None, -1
        self._num_computed, self._num_planned, self._num_expected = computed, planned, expected

    @property
    def most_cached(self) -> int:
        """Tokens that the prefix cache may lend; the last known one is never among them."""
        return self.num_tokens if self.prompt is None else self.prompt.most_cached

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.state is not RequestState.FINISHED

    def move_to(self, state: RequestState) -> None:
        """Changes the state.

        Raises:
            IllegalTransitionError: the table does not allow it.
        """
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"{self.state.value} -> {state.value}")
        self.state = state

    def extend(self, token_ids: list[int]) -> tuple[list[int], Finish]:
        """Adds the output tokens (int32 >= 0) of one result, up to the one that ends the request.

        Returns:
            Those that count, and why the request ends with them, if it does.
        """
        known = self.token_bytes
        if len(token_ids) == 1:  # nearly always: the loop below for one id
            token_id = token_ids[0]
            known += token_id.to_bytes(TOKEN_BYTES, "little")
            return token_ids, self._verdict(token_id)
        finish = Finish.NONE
        num_taken = 0
        for token_id in token_ids:
            known += token_id.to_bytes(TOKEN_BYTES, "little")
            num_taken += 1
            finish = self._verdict(token_id)
            if finish:
                break
        # Its plan counted one, and so did each plan in flight; those that end before the last of these ids give none.
        self.num_expected = max(self.num_expected, self.num_tokens)
        return token_ids[:num_taken], finish

    def first_verdict(self) -> Finish:
        """Why a request just made ends at once: its answer had ended already, and nothing of its prompt is wanted.

        If something is, the prompt is computed again and it ends then.
        """
        if not self.num_output:
            return Finish.NONE
        finish = self._verdict(int.from_bytes(self.token_bytes[-TOKEN_BYTES:], "little"))
        if finish and self.prompt is not None:
            self.prompt_end, self.compute_length = finish, self.num_tokens
            return Finish.NONE
        return finish

    def truncate_output(self, num_output: int) -> None:
        """Forgets the output tokens from index `num_output` on: the answer ended before them."""
        del self.token_bytes[(self.num_prompt + num_output) * TOKEN_BYTES :]
        if self.logprobs is not None:
            self.logprobs.truncate(num_output)

    def key(self, num_tokens: int) -> bytes:
        """The first `num_tokens` known tokens as a key of the radix cache."""
        return bytes(self.token_bytes[: num_tokens * TOKEN_BYTES])

    def output_bytes(self, first_index: int) -> bytes:
        """The output ids from `first_index` on, as an int32 column."""
        return bytes(self.token_bytes[(self.num_prompt + first_index) * TOKEN_BYTES :])

    def _verdict(self, token_id: int) -> Finish:
        """What the newest token means: NONE, the end by an id, or by length. Below min_tokens only final ids end."""
        num_tokens = self.num_tokens
        if token_id in self.stop_ids and (num_tokens > self.min_length or token_id in self.final_ids):
            return Finish.STOP_TOKEN
        return Finish.LENGTH if num_tokens >= self.max_length else Finish.NONE

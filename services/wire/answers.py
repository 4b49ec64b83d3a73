"""An answer on its way to the client: ids from the scheduler to a detokenizer, text from there to the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from services.wire.errors import ProtocolError
from services.wire.fields import (
    Float32s,
    Int32s,
    Name,
    RequestId,
    RequestIds,
    Uint8s,
    UInt31,
    require_counts,
    require_finishes,
    require_logprobs,
    require_rows,
)
from services.wire.finish import Finish
from services.wire.forms import Limit, Range
from services.wire.members import Role
from services.wire.request_params import TextParams


@dataclass(frozen=True, slots=True)
class DecodeOpen:
    """Scheduler -> the detokenizer assigned: an answer begins; its chunks go to `tokenizer` (a peer identity)."""

    request_id: RequestId
    attempt: UInt31
    tokenizer: Annotated[bytes, Limit(256)]
    text: TextParams


@dataclass(frozen=True, slots=True)
class TokensProduced:
    """Scheduler -> detokenizer: new ids of many answers. A row may hold no ids and only a finish.

    `first_indexes[i]` is the index of the row's first id; `counts` cuts `token_ids`; `finishes` are `Finish` values;
    `cached_tokens` is how much of the prompt came from the prefix cache. `logprob_counts` is empty when no row asked
    for log-probabilities; else it has one count for each id, which cuts `logprob_ids` and `logprobs`: first the id
    itself, then the likeliest, best first.
    """

    request_ids: RequestIds
    attempts: Int32s
    first_indexes: Int32s
    counts: Int32s
    token_ids: Int32s
    finishes: Uint8s
    cached_tokens: Int32s
    logprob_counts: Int32s = b""
    logprob_ids: Int32s = b""
    logprobs: Float32s = b""

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        num_rows = len(self.request_ids) // 16
        require_rows(num_rows, self.attempts, self.first_indexes, self.counts, self.cached_tokens)
        require_counts(self.counts, self.token_ids)
        require_finishes(num_rows, self.finishes)
        require_logprobs(self.token_ids, self.logprob_counts, self.logprob_ids, self.logprobs)


@dataclass(frozen=True, slots=True)
class StopFound:
    """Detokenizer -> scheduler: a stop string was completed by the token before `end_indexes`: the end."""

    request_ids: RequestIds
    attempts: Int32s
    end_indexes: Int32s

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        require_rows(len(self.request_ids) // 16, self.attempts, self.end_indexes)


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """Detokenizer -> scheduler: these answers could not be decoded (their client knows); stop making them."""

    request_ids: RequestIds
    attempts: Int32s

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        require_rows(len(self.request_ids) // 16, self.attempts)


@dataclass(frozen=True, slots=True)
class TextChunks:
    """Detokenizer -> the tokenizer that holds the clients: new text of many answers.

    Row i covers the ids [first_indexes[i], first_indexes[i] + counts[i]); `texts[i]` starts at byte `text_offsets[i]`
    of the answer's UTF-8 text and may lag behind the ids (withheld text) or be empty. On a finish, `completion_tokens`
    is what usage reports: the lowest end index wins. `stops` holds the stop string of each row that ends with
    STOP_STRING, in order. Log-probabilities are cut as in `TokensProduced`; they come with their ids, so a reader shows
    them no earlier than text that is not withheld.
    """

    request_ids: RequestIds
    attempts: Int32s
    first_indexes: Int32s
    counts: Int32s
    token_ids: Int32s
    text_offsets: Int32s
    texts: Annotated[tuple[Annotated[str, Limit(8 * 1024 * 1024)], ...], Limit(65536)]
    finishes: Uint8s
    completion_tokens: Int32s
    cached_tokens: Int32s
    stops: Annotated[tuple[Annotated[str, Limit(4096)], ...], Limit(65536)] = ()
    logprob_counts: Int32s = b""
    logprob_ids: Int32s = b""
    logprobs: Float32s = b""

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        num_rows = len(self.request_ids) // 16
        columns = (self.attempts, self.first_indexes, self.counts, self.text_offsets, self.completion_tokens)
        require_rows(num_rows, *columns, self.cached_tokens)
        require_counts(self.counts, self.token_ids)
        require_finishes(num_rows, self.finishes)
        if len(self.texts) != num_rows or len(self.stops) != self.finishes.count(Finish.STOP_STRING):
            raise ProtocolError("columns of different lengths")
        require_logprobs(self.token_ids, self.logprob_counts, self.logprob_ids, self.logprobs)


@dataclass(frozen=True, slots=True)
class HopReport:
    """Scheduler or detokenizer -> tokenizer: how a request fared there; for people, never needed for an answer.

    The scheduler sends one when the first token came and one at the end, a detokenizer one at the end; the last takes
    the place of what came before. `started_unix_us` is when the request came there, by the sender's wall clock;
    `wait_us` how long it waited there, `work_us` how long it was worked on; `counters` are pages, steps, chunks, ...
    A lost report is missed, not asked for again.
    """

    request_id: RequestId
    attempt: UInt31
    role: Role
    instance: Name
    started_unix_us: Annotated[int, Range(0, 2**63 - 1)]
    wait_us: Annotated[int, Range(0, 2**63 - 1)]
    work_us: Annotated[int, Range(0, 2**63 - 1)]
    counters: Annotated[dict[str, float], Limit(64)] = field(default_factory=dict)

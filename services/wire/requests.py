"""A request between tokenizer and scheduler: given, taken or refused, ended, acknowledged, and how much fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from services.wire.fields import Int32s, Name, RequestId, RequestIds, UInt31, require_rows
from services.wire.forms import Limit, Range
from services.wire.members import State
from services.wire.request_params import PLAIN_PROMPT, PromptParams, SamplingParams, TextParams


@dataclass(frozen=True, slots=True)
class Submit:
    """Tokenizer -> scheduler: one answer to be made. `n` answers are n Submits that share a `group_id`.

    `stop_token_ids` holds the model's end ids too unless the client said ignore_eos. Those in `final_token_ids` end the
    answer below `min_tokens` too: with a grammar they come only when it leaves nothing else. `output_token_ids` is
    empty, or what was produced before when a request is submitted again under a higher attempt. `deadline_ms` counts
    from receipt; 0 is none. `cache_root` separates prefix caches (adapter and salt); `group_id` is the first sibling's.
    With `max_tokens` 0 the prompt is computed and nothing is produced: the answer ends with LENGTH.
    """

    request_id: RequestId
    attempt: UInt31
    prompt_token_ids: Int32s
    output_token_ids: Int32s
    sampling: SamplingParams
    text: TextParams
    max_tokens: UInt31
    stop_token_ids: Int32s
    group_id: RequestId
    tenant: Name
    cache_root: Annotated[bytes, Limit(256)]
    priority: int
    deadline_ms: UInt31
    prompt: PromptParams = PLAIN_PROMPT
    final_token_ids: Int32s = b""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Scheduler -> tokenizer: taken (being queued counts); only now may the status line be written."""

    request_id: RequestId
    attempt: UInt31


@dataclass(frozen=True, slots=True)
class Refused:
    """Scheduler -> tokenizer: not taken; becomes an HTTP status. `param` is "" when no field is to blame."""

    request_id: RequestId
    attempt: UInt31
    status: Annotated[int, Range(400, 599)]
    code: Name
    text: Annotated[str, Limit(4096)]
    param: Name
    retry_after_s: UInt31


@dataclass(frozen=True, slots=True)
class Abort:
    """Tokenizer -> scheduler: nobody reads these answers any more. Unknown ids are counted, not an error."""

    request_ids: RequestIds
    attempts: Int32s

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        require_rows(len(self.request_ids) // 16, self.attempts)


@dataclass(frozen=True, slots=True)
class Load:
    """Scheduler -> tokenizers: lets a full queue refuse before encoding, and tells what fits.

    `max_total_tokens` is the most prompt + output tokens of one request: the smaller of context and KV pool.
    `max_waiting` counts those that free rows await; `max_open` is how many requests rows and queue hold at most.
    `idle_ms` is the time since a token last came out (0 when none ever did); `state` is READY once requests can run.
    """

    state: State
    num_waiting: UInt31
    max_waiting: UInt31
    num_running: UInt31
    free_pages: UInt31
    num_pages: UInt31
    max_total_tokens: UInt31
    retry_after_s: UInt31
    idle_ms: UInt31
    max_open: UInt31


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tokenizer -> scheduler: cumulative: output ids below `next_indexes` are in the journal."""

    request_ids: RequestIds
    attempts: Int32s
    next_indexes: Int32s

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        require_rows(len(self.request_ids) // 16, self.attempts, self.next_indexes)


@dataclass(frozen=True, slots=True)
class Resend:
    """Detokenizer or tokenizer -> scheduler: send the tokens again from `first_indexes` on.

    From a detokenizer: a gap, or an answer it has never heard of (index 0: `DecodeOpen` comes again too). From a
    tokenizer: a gap in the chunks; index 0, a fresh decoder replays the answer and the tokenizer drops what it has.
    """

    request_ids: RequestIds
    attempts: Int32s
    first_indexes: Int32s

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        require_rows(len(self.request_ids) // 16, self.attempts, self.first_indexes)

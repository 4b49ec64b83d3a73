"""Every message that crosses a process, and nothing else. A test holds docs/protocol.md against this module.

Rules that hold for all of them:
- What concerns a request carries (request id, attempt, index of the first token). A receiver takes only what continues
  its cursor, drops older indexes and other attempts, and asks again for a gap (`Resend`).
- Intervals of token indexes are half-open and count output tokens: index 0 is the first token after the prompt.
- Batches are columns (see `columns`): row i of every column belongs together.
- Request ids are 16 random bytes made by the tokenizer process; what a client calls its request never appears here.
- Tags are never reused. A change of a field's meaning, type or place raises PROTOCOL_VERSION.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Annotated

from services.wire.codec import message
from services.wire.columns import unpack_int32
from services.wire.errors import ProtocolError
from services.wire.forms import Column, Exactly, Limit, Range

PROTOCOL_VERSION = 2

RequestId = Annotated[bytes, Exactly(16)]
RequestIds = Annotated[bytes, Column(16)]
Int32s = Annotated[bytes, Column(4, is_natural=True)]  # int32, none below 0: ids, rows, pages, counts, positions
Uint8s = Annotated[bytes, Column(1)]
Float32s = Annotated[bytes, Column(4)]  # little-endian float32; may hold -inf where a field says so
UInt31 = Annotated[int, Range(0, 2**31 - 1)]
Epoch = Annotated[int, Range(0, 2**64 - 1)]
Name = Annotated[str, Limit(128)]
MAX_LOGPROBS = 20
NO_LOGPROBS = -1
NumLogprobs = Annotated[int, Range(NO_LOGPROBS, MAX_LOGPROBS)]  # -1 none; 0 the token's own; n: the n likeliest too


class Role(StrEnum):
    """The kinds of process."""

    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    GPU_WORKER = "gpu_worker"
    DETOKENIZER = "detokenizer"


class State(IntEnum):
    """What a process can be asked to do."""

    STARTING = 0
    READY = 1
    DRAINING = 2


class Finish(IntEnum):
    """Why an answer ended. NONE in a row of a batch means that it goes on."""

    NONE = 0
    STOP_TOKEN = 1  # the last id is an end id or one of stop_token_ids; it counts, its text is not shown
    LENGTH = 2
    STOP_STRING = 3  # decided by the detokenizer
    ABORTED = 4
    NUMERICAL_ERROR = 5  # the logits of this row were not finite
    INTERNAL_ERROR = 6
    TIMEOUT = 7
    BACKEND_LOST = 8  # a process that the request needed died


# ---------------------------------------------------------------- who is there


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """What a worker brings: its shape, its memory, its speed and the rows it still holds.

    `vocab_size` counts ids the model may be given, `logits_width` what it can produce; `chunk_tokens` is the prefill
    chunk that it measured to run within its time limit.
    """

    vocab_size: UInt31
    logits_width: UInt31
    page_size: UInt31
    num_pages: UInt31
    max_model_len: UInt31
    max_rows: UInt31
    chunk_tokens: UInt31
    chunk_ms: float
    held_request_ids: RequestIds = b""
    held_attempts: Int32s = b""
    held_indexes: Int32s = b""

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        _require_rows(len(self.held_request_ids) // 16, self.held_attempts, self.held_indexes)


@dataclass(frozen=True, slots=True)
class ForeignHello:
    """What a Hello of another protocol version is received as; never sent. The answer is `HandshakeRefused`."""

    version: UInt31


@message(1, foreign=(PROTOCOL_VERSION, ForeignHello))
@dataclass(frozen=True, slots=True)
class Hello:
    """Any process -> scheduler, until welcomed: who I am and where peers reach me ("" when nobody connects to me).

    Tag and first field (the version) never change, so that a scheduler of any version can refuse the others by name.
    """

    version: UInt31
    role: Role
    instance: Name
    epoch: Epoch
    address: Annotated[str, Limit(512)]
    state: State
    worker: WorkerCard | None = None


@message(2)
@dataclass(frozen=True, slots=True)
class Welcome:
    """Scheduler -> the sender of a Hello: accepted; `epoch` is the scheduler's own."""

    version: UInt31
    epoch: Epoch


@message(3)
@dataclass(frozen=True, slots=True)
class HandshakeRefused:
    """Scheduler -> the sender of a Hello that cannot join; it ends with this reason. This form never changes."""

    version: UInt31
    reason: Annotated[str, Limit(1024)]


@dataclass(frozen=True, slots=True)
class Member:
    """One live process of the group."""

    role: Role
    instance: Name
    epoch: Epoch
    address: Annotated[str, Limit(512)]
    state: State


@message(4)
@dataclass(frozen=True, slots=True)
class Roster:
    """Scheduler -> all, at every change: who is there. A receiver connects to new members and drops missing ones."""

    generation: UInt31
    members: Annotated[tuple[Member, ...], Limit(4096)]


@message(5)
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Any process -> scheduler and scheduler -> all, from the work loop itself, at least every HEARTBEAT_INTERVAL_S.

    `progress` counts the loop's own steps of work; `metrics` is a flat snapshot, sample name (with labels) -> value.
    """

    epoch: Epoch
    state: State
    progress: Annotated[int, Range(0, 2**63 - 1)]
    metrics: Annotated[dict[str, float], Limit(4096)] = field(default_factory=dict)


@message(6)
@dataclass(frozen=True, slots=True)
class Goodbye:
    """A process -> scheduler: drained, ending now, by its own will."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class MemberTelemetry:
    """The last heartbeat of one process, how old it is, and for how long it may be silent at present.

    A worker that runs a step says nothing until the step has ended, however long that may rightly take.
    """

    role: Role
    instance: Name
    epoch: Epoch
    state: State
    age_ms: UInt31
    progress: Annotated[int, Range(0, 2**63 - 1)]
    metrics: Annotated[dict[str, float], Limit(4096)]
    silence_limit_ms: UInt31


@message(7)
@dataclass(frozen=True, slots=True)
class Telemetry:
    """Scheduler -> tokenizers, about once a second: every process, so that any tokenizer's /metrics answers for all."""

    members: Annotated[tuple[MemberTelemetry, ...], Limit(4096)]


# ---------------------------------------------------------------- a request


class Task(IntEnum):
    """What a request is for."""

    GENERATE = 0
    EMBED_LAST = 1  # the hidden state of the last prompt token, after the final norm
    EMBED_MEAN = 2  # the mean of the hidden states of all prompt tokens, each after the final norm


class GrammarKind(IntEnum):
    """The language that a `Grammar` is written in."""

    JSON_SCHEMA = 1
    REGEX = 2
    EBNF = 3
    LARK = 4  # the grammar library's own; what tool calls are built from


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be a sentence of, from its first token on. Its limits were checked by the tokenizer."""

    kind: GrammarKind
    text: Annotated[str, Limit(1024 * 1024)]


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What is done to the logits of a row before a token is picked, in this order.

    `allowed_token_ids` (empty: all are), `bias_ids` and `biases`, repetition penalty (prompt and output), frequency and
    presence penalty (output only); ids in `stop_token_ids` cannot come below `min_tokens` output tokens, nor the last
    id of a bad word whose ids before it have just come. `bad_word_counts` cuts `bad_word_ids`.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: UInt31 = 0
    stop_token_ids: Int32s = b""
    bias_ids: Int32s = b""
    biases: Float32s = b""
    allowed_token_ids: Int32s = b""
    bad_word_counts: Int32s = b""
    bad_word_ids: Int32s = b""

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        _require_rows(len(self.bias_ids) // 4, self.biases)
        _require_counts(self.bad_word_counts, self.bad_word_ids)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. A token is a function of (seed, choice, position, logits) and of nothing else.

    temperature 0 is greedy; top_k 0 is off; top_p 1 and min_p 0 are off; `choice` numbers the answers of one request.
    `rules` and `grammar` are None for the many requests that use none. Log-probabilities are those of the raw logits.
    """

    temperature: float
    top_p: float
    top_k: UInt31
    min_p: float
    seed: int
    choice: UInt31
    rules: LogitRules | None = None
    grammar: Grammar | None = None
    num_logprobs: NumLogprobs = NO_LOGPROBS


@dataclass(frozen=True, slots=True)
class PromptParams:
    """What is wanted of the prompt itself.

    `num_logprobs` log-probabilities for each prompt token from position `logprobs_from` on (position 0 has none:
    nothing comes before it). The prefix cache is used only up to the first position wanted; for EMBED_MEAN not at all.
    """

    task: Task = Task.GENERATE
    num_logprobs: NumLogprobs = NO_LOGPROBS
    logprobs_from: UInt31 = 1


PLAIN_PROMPT = PromptParams()


@dataclass(frozen=True, slots=True)
class TextParams:
    """What the detokenizer needs to know of a request."""

    stop: Annotated[tuple[Annotated[str, Limit(4096)], ...], Limit(64)]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    min_tokens: UInt31


@message(10)
@dataclass(frozen=True, slots=True)
class Submit:
    """Tokenizer -> scheduler: one answer to be made. `n` answers are n Submits that share a `group_id`.

    `stop_token_ids` holds the model's end ids too unless the client said ignore_eos. `output_token_ids` is empty, or
    what was produced before when a request is submitted again under a higher attempt. `deadline_ms` counts from
    receipt; 0 is none. `cache_root` separates prefix caches (adapter and salt); `group_id` is the first sibling's id.
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


@message(11)
@dataclass(frozen=True, slots=True)
class Admitted:
    """Scheduler -> tokenizer: taken (being queued counts); only now may the status line be written."""

    request_id: RequestId
    attempt: UInt31


@message(12)
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


@message(13)
@dataclass(frozen=True, slots=True)
class Abort:
    """Tokenizer -> scheduler: nobody reads these answers any more. Unknown ids are counted, not an error."""

    request_ids: RequestIds
    attempts: Int32s

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        _require_rows(len(self.request_ids) // 16, self.attempts)


@message(14)
@dataclass(frozen=True, slots=True)
class Load:
    """Scheduler -> tokenizers: lets a full queue refuse before encoding, and tells what fits.

    `max_total_tokens` is the most prompt + output tokens of one request: the smaller of context and KV pool.
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


@message(15)
@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tokenizer -> scheduler: cumulative: output ids below `next_indexes` are in the journal."""

    request_ids: RequestIds
    attempts: Int32s
    next_indexes: Int32s

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        _require_rows(len(self.request_ids) // 16, self.attempts, self.next_indexes)


@message(16)
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
        _require_rows(len(self.request_ids) // 16, self.attempts, self.first_indexes)


class ControlAction(IntEnum):
    """What an operator can ask of a scheduler."""

    FLUSH_CACHE = 1  # forget every cached prefix that nobody uses
    PAUSE = 2  # plan nothing more; requests keep their place
    RESUME = 3
    ABORT_GROUP = 4  # end the answers that share a group id
    ABORT_ALL = 5


@message(17)
@dataclass(frozen=True, slots=True)
class Control:
    """Tokenizer -> scheduler: an operator's wish, answered with `ControlDone` of the same serial.

    `group_id` is empty except for ABORT_GROUP.
    """

    serial: UInt31
    action: ControlAction
    group_id: Annotated[bytes, Limit(16)] = b""


@message(18)
@dataclass(frozen=True, slots=True)
class ControlDone:
    """Scheduler -> tokenizer: done; `count` is what it concerned: pages freed, answers ended, requests that wait."""

    serial: UInt31
    count: UInt31


@message(19)
@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Worker -> scheduler (in a StepResult) -> tokenizer: log-probabilities of prompt tokens, chunk by chunk.

    For the prompt's positions from `first_position` on: `counts[i]` entries each, first the prompt's own token, then
    the likeliest, best first; a value may be -inf. The scheduler keeps what it sent until the answer has ended.
    """

    request_id: RequestId
    attempt: UInt31
    first_position: UInt31
    counts: Int32s
    token_ids: Int32s
    logprobs: Float32s

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        _require_counts(self.counts, self.token_ids)
        _require_rows(len(self.token_ids) // 4, self.logprobs)


# ---------------------------------------------------------------- tokens to text


@message(20)
@dataclass(frozen=True, slots=True)
class DecodeOpen:
    """Scheduler -> the detokenizer assigned: an answer begins; its chunks go to `tokenizer` (a peer identity)."""

    request_id: RequestId
    attempt: UInt31
    tokenizer: Annotated[bytes, Limit(256)]
    text: TextParams


@message(21)
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
        _require_rows(num_rows, self.attempts, self.first_indexes, self.counts, self.cached_tokens)
        _require_counts(self.counts, self.token_ids)
        _require_finishes(num_rows, self.finishes)
        _require_logprobs(self.token_ids, self.logprob_counts, self.logprob_ids, self.logprobs)


@message(22)
@dataclass(frozen=True, slots=True)
class StopFound:
    """Detokenizer -> scheduler: a stop string was completed by the token before `end_indexes`: the end."""

    request_ids: RequestIds
    attempts: Int32s
    end_indexes: Int32s

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        _require_rows(len(self.request_ids) // 16, self.attempts, self.end_indexes)


@message(23)
@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """Detokenizer -> scheduler: these answers could not be decoded (their client knows); stop making them."""

    request_ids: RequestIds
    attempts: Int32s

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        _require_rows(len(self.request_ids) // 16, self.attempts)


@message(30)
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
        _require_rows(num_rows, *columns, self.cached_tokens)
        _require_counts(self.counts, self.token_ids)
        _require_finishes(num_rows, self.finishes)
        if len(self.texts) != num_rows or len(self.stops) != self.finishes.count(Finish.STOP_STRING):
            raise ProtocolError("columns of different lengths")
        _require_logprobs(self.token_ids, self.logprob_counts, self.logprob_ids, self.logprobs)


@message(31)
@dataclass(frozen=True, slots=True)
class Embedding:
    """Worker -> scheduler (in a StepResult) -> tokenizer: the pooled hidden state of a prompt, not normalized."""

    request_id: RequestId
    attempt: UInt31
    values: Float32s


@message(32)
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


# ---------------------------------------------------------------- scheduler and worker


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request takes a row at the worker: all its ids (prompt, then outputs so far), where output begins, its pages.

    `page_ids` is the whole page table so far: cached prefix pages, then pages to be written. Penalties and the
    grammar's state are rebuilt from the output ids. `prompt.logprobs_from` is the first position still wanted.
    """

    row: UInt31
    request_id: RequestId
    attempt: UInt31
    token_ids: Int32s
    num_prompt_tokens: UInt31
    page_ids: Int32s
    sampling: SamplingParams
    prompt: PromptParams = PLAIN_PROMPT


@message(40)
@dataclass(frozen=True, slots=True)
class StepPlan:
    """Scheduler -> worker: one forward pass, and only what changed since the last plan.

    Applied in this order: `released_rows` are forgotten; `new_rows` are set up; `page_counts` cuts `page_ids` into what
    is appended to the page tables of `page_rows`; then row `rows[i]` computes `num_new_tokens[i]` tokens from position
    `start_positions[i]` on, and samples one token after the last of them if `samples[i]`. A decoding row's newest token
    may not be known to the scheduler yet: the worker has it.
    """

    epoch: Epoch
    step: Annotated[int, Range(0, 2**63 - 1)]
    released_rows: Int32s
    new_rows: Annotated[tuple[NewRow, ...], Limit(65536)]
    page_rows: Int32s
    page_counts: Int32s
    page_ids: Int32s
    rows: Int32s
    start_positions: Int32s
    num_new_tokens: Int32s
    samples: Uint8s

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        _require_rows(len(self.page_rows) // 4, self.page_counts)
        _require_counts(self.page_counts, self.page_ids)
        _require_rows(len(self.rows) // 4, self.start_positions, self.num_new_tokens)
        if len(self.samples) != len(self.rows) // 4:
            raise ProtocolError("columns of different lengths")
        if self.samples.translate(None, b"\0\1"):
            raise ProtocolError("samples are 0 or 1")


@message(41)
@dataclass(frozen=True, slots=True)
class StepResult:
    """Worker -> scheduler: what a plan gave, for the rows that sampled and the rows that failed.

    `epoch` and `step` are the plan's. `first_indexes` is the output index of each row's first id, `counts` (0..m) cuts
    `token_ids`, `finishes` is NONE or why the row failed. Times are the worker's own, in microseconds. A row gets more
    than one id where its grammar leaves no choice; the plans already out for it then give it none. Log-probabilities
    are cut as in `TokensProduced`. `prompt_logprobs` and `embeddings` belong to rows of this step.
    """

    epoch: Epoch
    step: Annotated[int, Range(0, 2**63 - 1)]
    rows: Int32s
    request_ids: RequestIds
    attempts: Int32s
    first_indexes: Int32s
    counts: Int32s
    token_ids: Int32s
    finishes: Uint8s
    forward_us: UInt31
    step_us: UInt31
    logprob_counts: Int32s = b""
    logprob_ids: Int32s = b""
    logprobs: Float32s = b""
    prompt_logprobs: Annotated[tuple[PromptLogprobs, ...], Limit(65536)] = ()
    embeddings: Annotated[tuple[Embedding, ...], Limit(65536)] = ()

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        num_rows = len(self.rows) // 4
        _require_rows(num_rows, self.attempts, self.first_indexes, self.counts)
        _require_counts(self.counts, self.token_ids)
        _require_finishes(num_rows, self.finishes)
        if len(self.request_ids) // 16 != num_rows:
            raise ProtocolError("columns of different lengths")
        _require_logprobs(self.token_ids, self.logprob_counts, self.logprob_ids, self.logprobs)


@message(42)
@dataclass(frozen=True, slots=True)
class CompileGrammar:
    """Scheduler -> worker: a request waits for this grammar; answered with `GrammarCompiled`. It takes no row yet."""

    request_id: RequestId
    attempt: UInt31
    grammar: Grammar


@message(43)
@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """Worker -> scheduler: rows may use the grammar now; or, with a text, why it cannot be used: the client's fault."""

    request_id: RequestId
    attempt: UInt31
    problem: Annotated[str, Limit(4096)] = ""


_FINISH_VALUES = bytes(Finish)


def _require_rows(num_rows: int, *columns: bytes) -> None:
    if any(len(column) != 4 * num_rows for column in columns):
        raise ProtocolError("columns of different lengths")


def _require_counts(counts: bytes, values: bytes) -> None:
    total = sum(unpack_int32(counts))
    if 4 * total != len(values):
        raise ProtocolError(f"counts add up to {total}, column holds {len(values) // 4}")


def _require_finishes(num_rows: int, finishes: bytes) -> None:
    if len(finishes) != num_rows:
        raise ProtocolError("columns of different lengths")
    if finishes.translate(None, _FINISH_VALUES):
        raise ProtocolError("a finish is none of ours")


def _require_logprobs(token_ids: bytes, counts: bytes, logprob_ids: bytes, logprobs: bytes) -> None:
    if not counts and not logprob_ids and not logprobs:  # nearly always
        return
    _require_rows(len(token_ids) // 4, counts)
    _require_counts(counts, logprob_ids)
    _require_rows(len(logprob_ids) // 4, logprobs)

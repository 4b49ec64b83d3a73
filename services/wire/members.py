"""Who is in the group: greetings, the roster, heartbeats, and the telemetry that is made of these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated

from services.wire.fields import Epoch, Int32s, Name, RequestIds, UInt31, require_rows
from services.wire.forms import Limit, Range
from services.wire.samples import MAX_SAMPLES_BYTES


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


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """What a worker brings: its shape, its memory, its speed and the rows it still holds.

    `vocab_size` counts ids the model may be given, `logits_width` what it can produce; `chunk_tokens` is the prefill
    chunk that it measured to run within its time limit, `chunk_context` the tokens of context behind which each token
    takes twice as long as in it, 0 when chunks are not to be cut by that; `chunk_limit_ms` is that time limit, 0 where
    there is none. `model_digest` tells one model's files from another's.
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
    model_digest: Name = ""
    chunk_context: UInt31 = 0
    chunk_limit_ms: float = 0.0

    def check(self) -> None:
        """ProtocolError unless the columns agree."""
        require_rows(len(self.held_request_ids) // 16, self.held_attempts, self.held_indexes)


@dataclass(frozen=True, slots=True)
class ForeignHello:
    """What a Hello of another protocol version is received as; never sent. The answer is `HandshakeRefused`."""

    version: UInt31


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


@dataclass(frozen=True, slots=True)
class Welcome:
    """Scheduler -> the sender of a Hello: accepted; `epoch` is the scheduler's own."""

    version: UInt31
    epoch: Epoch


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


@dataclass(frozen=True, slots=True)
class Roster:
    """Scheduler -> all, at every change: who is there. A receiver connects to new members and drops missing ones."""

    generation: UInt31
    members: Annotated[tuple[Member, ...], Limit(4096)]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Any process -> scheduler and scheduler -> all, from the work loop itself, at least every HEARTBEAT_INTERVAL_S.

    `progress` counts the loop's own steps of work; `metrics` is a flat snapshot, packed (see `samples`).
    """

    epoch: Epoch
    state: State
    progress: Annotated[int, Range(0, 2**63 - 1)]
    metrics: Annotated[bytes, Limit(MAX_SAMPLES_BYTES)] = b""


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
    metrics: Annotated[bytes, Limit(MAX_SAMPLES_BYTES)]
    silence_limit_ms: UInt31


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Scheduler -> tokenizers, about once a second: every process, so that any tokenizer's /metrics answers for all."""

    members: Annotated[tuple[MemberTelemetry, ...], Limit(4096)]

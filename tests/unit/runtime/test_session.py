"""The session of a process with the scheduler, step by step."""

from __future__ import annotations

import pytest

from services.runtime.session import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S, HandshakeError, SchedulerSession
from services.wire.endpoints import Identity
from services.wire.members import (
    Goodbye,
    HandshakeRefused,
    Heartbeat,
    Hello,
    Member,
    Role,
    Roster,
    State,
    Welcome,
    WorkerCard,
)
from services.wire.messages import PROTOCOL_VERSION
from services.wire.requests import Admitted
from services.wire.samples import pack_samples

IDENTITY = Identity(Role.DETOKENIZER, "d-1", 77)
CARD = WorkerCard(1, 2, 3, 4, 5, 6, 7, 8.0)


def new_session(now_s: float = 100.0) -> SchedulerSession:
    return SchedulerSession(IDENTITY, "ipc:///d.sock", lambda: {"open": 3.0}, now_s)


def welcomed_session() -> SchedulerSession:
    session = new_session()
    session.messages_due(100.0)
    session.receive(Welcome(PROTOCOL_VERSION, 5), 100.1)
    return session


def hello(state: State = State.STARTING, card: WorkerCard | None = None) -> Hello:
    return Hello(PROTOCOL_VERSION, Role.DETOKENIZER, "d-1", 77, "ipc:///d.sock", state, card)


def test_it_greets_until_it_is_welcome_and_then_sends_heartbeats() -> None:
    session = new_session()
    assert session.next_due_s(100.0) == 0
    assert session.messages_due(100.0) == [hello()]
    assert session.messages_due(100.1) == []
    assert session.next_due_s(100.1) == pytest.approx(0.4)
    assert session.messages_due(100.5) == [hello()]
    assert session.receive(Welcome(PROTOCOL_VERSION, 5), 100.6)
    assert session.is_welcome
    session.progress = 9
    assert session.messages_due(100.6) == [Heartbeat(77, State.STARTING, 9, pack_samples({"open": 3.0}))]
    assert session.messages_due(100.6 + HEARTBEAT_INTERVAL_S / 2) == []
    assert session.messages_due(100.6 + HEARTBEAT_INTERVAL_S) == [
        Heartbeat(77, State.STARTING, 9, pack_samples({"open": 3.0}))
    ]


def test_a_new_state_is_told_at_once() -> None:
    session = welcomed_session()
    session.messages_due(100.1)
    session.set_state(State.READY, 100.2)
    assert session.messages_due(100.2) == [Heartbeat(77, State.READY, 0, pack_samples({"open": 3.0}))]
    session.set_state(State.READY, 100.3)
    assert session.messages_due(100.3) == []


def test_a_new_card_is_told_by_a_new_greeting() -> None:
    session = welcomed_session()
    session.messages_due(100.1)
    session.worker_card = CARD
    assert session.messages_due(100.2) == [hello(card=CARD)]
    session.receive(Welcome(PROTOCOL_VERSION, 5), 100.3)
    session.worker_card = CARD
    assert session.is_welcome


def test_a_scheduler_started_anew_is_greeted_again() -> None:
    session = welcomed_session()
    session.messages_due(100.1)
    session.receive(Heartbeat(5, State.READY, 0), 100.2)
    assert session.messages_due(100.2) == []
    session.receive(Heartbeat(6, State.READY, 0), 100.3)
    assert session.messages_due(100.3) == [hello()]
    session.receive(Heartbeat(6, State.READY, 1), 100.4)
    assert session.messages_due(100.4) == []
    session.receive(Welcome(PROTOCOL_VERSION, 6), 100.5)
    assert session.messages_due(100.5) == [Heartbeat(77, State.STARTING, 0, pack_samples({"open": 3.0}))]
    assert session.scheduler_epoch == 6


def test_the_roster_is_kept_until_the_next() -> None:
    session = welcomed_session()
    tokenizer = Member(Role.TOKENIZER, "t", 1, "ipc:///t.sock", State.READY)
    other = Member(Role.DETOKENIZER, "d", 2, "", State.READY)
    assert session.receive(Roster(3, (tokenizer, other)), 101.0)
    assert session.members_of(Role.TOKENIZER) == (tokenizer,)
    session.receive(Heartbeat(6, State.READY, 0), 101.1)
    assert session.members_of(Role.TOKENIZER) == (tokenizer,)
    session.receive(Roster(1, ()), 101.2)  # a new scheduler counts from the beginning
    assert session.members == ()


def test_a_refusal_ends_the_process_with_its_reason() -> None:
    with pytest.raises(HandshakeError, match="another page size"):
        new_session().receive(HandshakeRefused(PROTOCOL_VERSION, "another page size"), 100.0)
    with pytest.raises(HandshakeError, match="other process of this name"):
        welcomed_session().receive(HandshakeRefused(PROTOCOL_VERSION, "other process of this name"), 100.0)


def test_another_protocol_version_ends_the_process() -> None:
    with pytest.raises(HandshakeError, match=f"protocol 9, this process {PROTOCOL_VERSION}"):
        new_session().receive(Welcome(9, 5), 100.0)


def test_silence_counts_from_the_last_message_of_any_kind() -> None:
    session = welcomed_session()
    assert not session.is_silent(100.1 + SILENCE_LIMIT_S)
    assert session.is_silent(100.2 + SILENCE_LIMIT_S)
    assert not session.receive(Admitted(bytes(16), 0), 110.0)
    assert session.silent_s(110.5) == pytest.approx(0.5)
    assert not session.is_silent(112.0)


def test_a_scheduler_that_was_never_there_is_not_silent() -> None:
    session = new_session()
    assert not session.is_silent(1000.0)
    assert session.silent_s(1000.0) == 900.0


def test_the_last_word() -> None:
    assert new_session().goodbye() == Goodbye(77)

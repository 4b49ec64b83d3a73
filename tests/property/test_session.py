"""A session against a model of what it must do, under any order of events and any passing of time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.runtime.session import HEARTBEAT_INTERVAL_S, SchedulerSession
from services.wire.endpoints import Identity
from services.wire.members import Heartbeat, Hello, Member, Role, Roster, State, Welcome, WorkerCard
from services.wire.messages import PROTOCOL_VERSION
from services.wire.requests import Admitted

EPOCHS = st.integers(1, 3)


class SessionMachine(RuleBasedStateMachine):
    """The model keeps who welcomed us last, when we last spoke, and whether something is to be told at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 50.0
        self.session = SchedulerSession(Identity(Role.GPU_WORKER, "w", 9), "", dict, self.now_s)
        self.welcomed_by: int | None = None
        self.spoke_s = -1000.0
        self.must_speak = True
        self.heard_s = self.now_s

    @rule(seconds=st.floats(0, 1))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def loop_comes_round(self) -> None:
        messages = self.session.messages_due(self.now_s)
        is_due = self.must_speak or self.now_s >= self.spoke_s + HEARTBEAT_INTERVAL_S
        assert len(messages) == is_due
        for message in messages:
            assert isinstance(message, Hello if self.welcomed_by is None else Heartbeat)
            assert message.epoch == 9
            assert message.state == self.session.state
            if isinstance(message, Hello):
                assert message.worker == self.session.worker_card
            self.spoke_s, self.must_speak = self.now_s, False

    @rule(epoch=EPOCHS)
    def welcome(self, epoch: int) -> None:
        assert self.session.receive(Welcome(PROTOCOL_VERSION, epoch), self.now_s)
        self.welcomed_by, self.must_speak, self.heard_s = epoch, True, self.now_s

    @rule(epoch=EPOCHS)
    def scheduler_heartbeat(self, epoch: int) -> None:
        assert self.session.receive(Heartbeat(epoch, State.READY, 0), self.now_s)
        self.heard_s = self.now_s
        if self.welcomed_by not in (None, epoch):
            self.welcomed_by, self.must_speak = None, True

    @rule(names=st.lists(st.sampled_from("abc"), unique=True))
    def roster(self, names: list[str]) -> None:
        members = tuple(Member(Role.TOKENIZER, name, 1, "", State.READY) for name in names)
        assert self.session.receive(Roster(1, members), self.now_s)
        self.heard_s = self.now_s
        assert self.session.members_of(Role.TOKENIZER) == members
        assert self.session.members_of(Role.SCHEDULER) == ()

    @rule()
    def other_message(self) -> None:
        assert not self.session.receive(Admitted(bytes(16), 0), self.now_s)
        self.heard_s = self.now_s

    @rule(state=st.sampled_from(State))
    def set_state(self, state: State) -> None:
        self.must_speak |= state != self.session.state
        self.session.set_state(state, self.now_s)

    @rule(pages=st.integers(1, 2))
    def set_card(self, pages: int) -> None:
        card = WorkerCard(1, 1, 1, pages, 1, 1, 1, 1.0)
        if card != self.session.worker_card:
            self.welcomed_by, self.must_speak = None, True
        self.session.worker_card = card

    @invariant()
    def agrees_with_the_model(self) -> None:
        session = self.session
        assert session.scheduler_epoch == self.welcomed_by
        assert session.silent_s(self.now_s) == self.now_s - self.heard_s
        due_s = session.next_due_s(self.now_s)
        assert 0 <= due_s <= HEARTBEAT_INTERVAL_S
        assert (due_s == 0) == (self.must_speak or self.now_s >= self.spoke_s + HEARTBEAT_INTERVAL_S)


TestSession = SessionMachine.TestCase
TestSession.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""Tokenizer process: what the scheduler has told of itself and of the group, and whether requests can be served.

Pure: the shell passes messages and the time in. `refusal` is asked before a request is encoded, `health` by the probes.
"""

from __future__ import annotations

from services.runtime import metrics
from services.runtime.session import SILENCE_LIMIT_S, SchedulerSession
from services.tokenizer.api_error import ApiError, Code, unavailable
from services.wire.members import MemberTelemetry, Role, State, Telemetry
from services.wire.requests import Load

NEEDED_ROLES = (Role.GPU_WORKER, Role.DETOKENIZER)
OK = "ok"
_PAUSED = "scheduler_paused"


class BackendView:
    """The last word of the scheduler. Times are those of one monotonic clock, in seconds."""

    def __init__(self, session: SchedulerSession) -> None:
        self.session = session
        self.is_draining = False
        """Whether this process itself was told to stop."""
        self.load: Load | None = None
        self._load_s = 0.0
        self._telemetry: tuple[MemberTelemetry, ...] = ()
        self._telemetry_s = 0.0
        self._progress: dict[int, int] = {}
        self._progress_s = float("-inf")

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of prompt + answer of one request, 0 while nothing can run."""
        return self.load.max_total_tokens if self.load is not None else 0

    @property
    def members(self) -> tuple[MemberTelemetry, ...]:
        """The last heartbeat of every process."""
        return self._telemetry

    @property
    def is_paused(self) -> bool:
        """Whether the scheduler has told that an operator's pause holds."""
        return any(
            metrics.plain_gauges(member.metrics).get(_PAUSED, 0) > 0
            for member in self._telemetry
            if member.role is Role.SCHEDULER
        )

    def take_load(self, load: Load, now_s: float) -> None:
        """The scheduler's load changed."""
        self.load, self._load_s = load, now_s

    def take_telemetry(self, telemetry: Telemetry, now_s: float) -> None:
        """The heartbeats of all processes."""
        self._telemetry, self._telemetry_s = telemetry.members, now_s
        progress = {member.epoch: member.progress for member in telemetry.members if member.role is Role.GPU_WORKER}
        if any(progress[epoch] != self._progress.get(epoch, progress[epoch]) for epoch in progress):
            self._progress_s = now_s
        self._progress = progress

    def forget(self) -> None:
        """The scheduler is lost: what it said no longer holds."""
        self.load = None
        self._telemetry = ()
        self._progress = {}

    def missing_roles(self) -> list[Role]:
        """Roles that a request needs and the roster lacks."""
        return [role for role in NEEDED_ROLES if not self.session.members_of(role)]

    def refusal(self, now_s: float) -> ApiError | None:
        """Why no request can be taken at this moment; None when one can be submitted."""
        load = self.load
        if not self.session.is_welcome or self.session.is_silent(now_s):
            return unavailable(Code.STARTING, "the scheduler is not reached")
        missing = self.missing_roles()
        if missing:
            return unavailable(Code.STARTING, f"the server is not ready: no {' and no '.join(missing)}")
        if load is None or load.state is State.STARTING or not load.max_total_tokens:
            return unavailable(Code.STARTING, "the server is starting")
        if load.state is State.DRAINING:
            return unavailable(Code.DRAINING, "the server is shutting down", load.retry_after_s)
        if load.max_waiting and load.num_waiting >= load.max_waiting:
            message = f"{load.num_waiting} requests are waiting, at most {load.max_waiting} may"
            return unavailable(Code.QUEUE_FULL, message, load.retry_after_s)
        return None

    @property
    def max_open(self) -> int | None:
        """Most answers that the workers and their queue hold at once; None as long as nobody has told."""
        return None if self.load is None or not self.load.max_total_tokens else self.load.max_open

    def last_sign_of_work_s(self) -> float:
        """When a token last came out anywhere, or a worker's step counter moved, as far as is known."""
        token_s = float("-inf")
        if self.load is not None and self.load.idle_ms:  # 0 means never, or just now: then others know
            token_s = self._load_s - self.load.idle_ms / 1000
        return max(token_s, self._progress_s)

    def is_step_running(self, now_s: float) -> bool:
        """Whether a worker is in a step that may rightly take longer than a heartbeat may; no token can come meanwhile.

        A step that takes too long is the scheduler's to judge: it then takes the worker out of the roster.
        """
        return any(
            member.role is Role.GPU_WORKER
            and member.state is State.READY
            and member.silence_limit_ms > 1000 * SILENCE_LIMIT_S
            and self._is_fresh(member, now_s)
            for member in self._telemetry
        )

    def health(self, now_s: float) -> dict[str, str]:
        """For each role "ok", or what is wrong with it."""
        verdicts = {Role.TOKENIZER: "draining" if self.is_draining else OK, Role.SCHEDULER: self._scheduler(now_s)}
        for role in NEEDED_ROLES:
            verdicts[role] = self._role(role, now_s)
        return {str(role): verdict for role, verdict in verdicts.items()}

    def _scheduler(self, now_s: float) -> str:
        if not self.session.is_welcome:
            return "not reached"
        if self.session.is_silent(now_s):
            return f"silent for {self.session.silent_s(now_s):.1f} s"
        if self.load is None:
            return "has not told its load"
        return OK if self.load.state is State.READY else self.load.state.name.lower()

    def _role(self, role: Role, now_s: float) -> str:
        members = [member for member in self._telemetry if member.role is role]
        if not members or not self.session.members_of(role):
            return "none in the group"
        fresh = [member for member in members if self._is_fresh(member, now_s)]
        if not fresh:
            return f"no heartbeat for {min(self._age_s(member, now_s) for member in members):.1f} s"
        if any(member.state is State.READY for member in fresh):
            return OK
        return fresh[0].state.name.lower()

    def _is_fresh(self, member: MemberTelemetry, now_s: float) -> bool:
        return 1000 * self._age_s(member, now_s) < member.silence_limit_ms

    def _age_s(self, member: MemberTelemetry, now_s: float) -> float:
        return member.age_ms / 1000 + now_s - self._telemetry_s

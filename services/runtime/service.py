"""What a process does around its loop: identity, logs, signals, its parent's death, its exit status."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry

from services.runtime import metrics
from services.runtime.config import Settings, SettingsError, load_settings
from services.runtime.health import Pulse
from services.runtime.logs import set_up_logging
from services.runtime.session import HandshakeError, SchedulerSession
from services.wire.endpoints import (
    Identity,
    ipc_endpoint,
    is_ipc,
    is_ipv6,
    local_address_towards,
    new_instance_name,
    private_directory,
    tcp_endpoint,
)
from services.wire.errors import EndpointInUseError
from services.wire.members import Role

EXIT_FAILURE = 1
EXIT_BAD_START = 2  # settings, model files, endpoints: starting again will not help
HURRY_SIGNAL = signal.SIGUSR1  # from the launcher: end what is open with an error now, do not drain
LOSS_SIGNAL = signal.SIGUSR2  # the same, because a process of the group has died
ONE_STOP_S = 1.0  # signals of a kind within this time are one: sent by several at once, or passed on
BAD_START_MARK = b"tokenway "  # begins the one line on standard error that tells why a process cannot start
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


class StartError(Exception):
    """This process cannot start; the message is one line that names what is wrong."""


class GroupLostError(Exception):
    """What this process cannot work without is gone, so it ends; the message is one line that says what."""


class OrphanError(GroupLostError):
    """The parent of this process has died: nobody would end it."""


@dataclass
class Process:
    """What the loop of a service gets to know about the process that it runs in."""

    settings: Settings
    identity: Identity
    registry: CollectorRegistry = field(default_factory=metrics.new_registry)
    is_stopping: bool = False
    """Set by SIGTERM or SIGINT: finish what is open, then return."""
    is_hurried: bool = False
    """Set before `is_stopping` when there is no time to let requests finish."""
    has_lost_peer: bool = False
    """Set before `is_stopping` when that is so because a process of the group has died."""
    on_stop: Callable[[], None] | None = None
    """Called once, in the signal handler, when stopping begins: a service puts its receiver's `interrupt` here."""
    pulse: Pulse | None = None
    """What a health check looks at; None without a run directory."""
    _parent: int = field(default_factory=os.getppid)

    def ask_to_stop(self) -> None:
        """Stopping begins, unless it has begun. Safe in a signal handler; in a thread if `on_stop` is."""
        if self.is_stopping:
            return
        self.is_stopping = True
        if self.on_stop is not None:
            self.on_stop()

    def end_with_parent(self) -> None:
        """Raises OrphanError when the parent has died: the way to notice it where the kernel sends no signal."""
        if os.getppid() != self._parent:
            raise OrphanError("the parent process has died")

    @property
    def drain_timeout_s(self) -> float:
        """How long what is open may take to finish, once stopping."""
        return 0.0 if self.is_hurried else self.settings.drain_timeout_s

    def new_session(self, address: str) -> SchedulerSession:
        """This process's session with the scheduler; `address` is where peers reach it, or ""."""
        return SchedulerSession(self.identity, address, self.vital_signs, time.monotonic())

    def vital_signs(self) -> dict[str, float]:
        """The metrics for a heartbeat. Called by the work loop for each one, which renews the pulse file too.

        Raises:
            OrphanError: the parent has died.
        """
        self.end_with_parent()
        if self.pulse is not None:
            self.pulse.beat()
        return metrics.snapshot(self.registry)

    def scheduler_endpoint(self) -> str:
        """Where the scheduler is bound; a host name is resolved, since sockets bind to addresses only.

        Raises:
            StartError: neither an endpoint nor a run directory was set, or the host is unknown.
        """
        endpoint = self.settings.scheduler_endpoint
        if not endpoint:
            if not self.settings.run_dir:
                raise StartError("set --scheduler-endpoint or --run-dir")
            return ipc_endpoint(private_directory(Path(self.settings.run_dir)), "scheduler")
        if is_ipc(endpoint):
            return endpoint
        host, port = _host_and_port(endpoint)
        if self.identity.role != Role.SCHEDULER:
            return tcp_endpoint(host, port)
        try:
            return tcp_endpoint(host if is_ipv6(endpoint) else socket.gethostbyname(host), port)
        except OSError as error:
            raise StartError(f"--scheduler-endpoint {endpoint}: {error}") from error

    def peer_endpoint(self) -> str:
        """What this process binds for its peers: a file beside the scheduler's, or a free port on its network.

        Raises:
            StartError: no network of this host leads to the scheduler.
        """
        endpoint = self.scheduler_endpoint()
        if is_ipc(endpoint):
            directory = Path(endpoint.removeprefix("ipc://")).parent
            return ipc_endpoint(directory, f"{self.identity.role}-{self.identity.instance}")
        host, port = _host_and_port(endpoint)
        try:
            return tcp_endpoint(local_address_towards(host, port), 0)
        except OSError as error:
            raise StartError(f"--scheduler-endpoint {endpoint}: {error}") from error


def _host_and_port(endpoint: str) -> tuple[str, int]:
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not endpoint.startswith("tcp://") or host is None or port is None:
        raise StartError(f"--scheduler-endpoint {endpoint}: neither ipc://PATH nor tcp://HOST:PORT")
    return host, port


def run_service(role: Role, main: Callable[[Process], None]) -> None:
    """Runs one process and ends it with a status: 0 when `main` returned, 1 when it failed, 2 when it could not start.

    SIGTERM and SIGINT set `is_stopping`; a second one of the same kind ends the process at once. Of the same kind,
    because Ctrl-C reaches every process of a terminal, and their parent then sends SIGTERM; and not within
    ONE_STOP_S, because a supervisor such as systemd sends SIGTERM to all of them, and their parent passes its own on.
    HURRY_SIGNAL and LOSS_SIGNAL do too, and set `is_hurried` (the latter `has_lost_peer` too) before. The process dies
    with its parent.
    """
    die_with_parent()
    faulthandler.enable()
    try:
        settings = load_settings(sys.argv[1:])
        identity = Identity(role, settings.instance or new_instance_name())
        set_up_logging(identity, settings.log_level, settings.log_format)
        process = Process(settings, identity, pulse=_new_pulse(settings, identity))
        _install_signals(process)
        main(process)
    except (SettingsError, StartError, EndpointInUseError, HandshakeError) as error:
        print(f"{BAD_START_MARK.decode()}{role}: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_BAD_START)
    except GroupLostError as error:
        logger.error("%s ends: %s", role, error)
        sys.exit(EXIT_FAILURE)
    except Exception:
        logger.exception("%s failed", role)
        sys.exit(EXIT_FAILURE)


def _new_pulse(settings: Settings, identity: Identity) -> Pulse | None:
    if not settings.run_dir:
        return None
    return Pulse(private_directory(Path(settings.run_dir)), f"{identity.role}-{identity.instance}")


def _install_signals(process: Process) -> None:
    first_s: dict[int, float] = {}

    def stop(signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - first_s.setdefault(signum, now_s) >= ONE_STOP_S:
            os._exit(128 + signum)
        process.ask_to_stop()

    def hurry(signum: int, frame: FrameType | None) -> None:
        process.is_hurried = True
        process.has_lost_peer = process.has_lost_peer or signum == LOSS_SIGNAL
        stop(signum, frame)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(HURRY_SIGNAL, hurry)
    signal.signal(LOSS_SIGNAL, hurry)


def die_with_parent(parent: int | None = None) -> None:
    """Has the kernel kill this process when the thread that started it ends (Linux; elsewhere see `end_with_parent`).

    Args:
        parent: the process that started this one, when it is known: if it has ended already, so does this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(EXIT_FAILURE)

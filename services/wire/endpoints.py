"""Where sockets live, and who owns them.

Inside a host `ipc://` paths in a private directory (mode 0700), each guarded by a lock file, because ZeroMQ's own bind
on an ipc path silently steals it, and its close removes the file at some later time, perhaps another process's by then:
so the listening socket is made here and handed over. Between containers and hosts `tcp://`, where the kernel refuses a
second bind.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path

from services.wire.errors import EndpointInUseError
from services.wire.members import Role

_BACKLOG = 256  # connections that may wait to be accepted
_MAX_IPC_PATH_BYTES = 100  # sun_path holds 104 bytes on macOS, 108 on Linux, the terminating zero included


@dataclass(frozen=True)
class Identity:
    """Who a process is: role, instance name, and the epoch drawn at this start (random, compared for equality)."""

    role: Role
    instance: str
    epoch: int = field(default_factory=lambda: secrets.randbits(64))

    @property
    def routing_id(self) -> bytes:
        """The socket identity: a ROUTER refuses a second live peer of the same one."""
        return f"{self.role}/{self.instance}/{self.epoch:016x}".encode()


def parse_routing_id(routing_id: bytes) -> Identity | None:
    """The identity in a routing id, or None when it is not exactly what one of our processes would call itself."""
    try:
        role, instance, epoch = routing_id.decode().rsplit("/", 2)
        identity = Identity(Role(role), instance, int(epoch, 16))
    except ValueError:
        return None
    is_ours = identity.routing_id == routing_id and 0 <= identity.epoch < 2**64
    return identity if is_ours else None


def new_instance_name() -> str:
    """A name for a process that was given none: unique enough to tell replicas apart in logs."""
    return secrets.token_hex(3)


def private_directory(path: Path) -> Path:
    """Makes `path` a directory that only this user can enter, and returns it as an absolute path.

    Raises:
        EndpointInUseError: it cannot be made, belongs to somebody else, or others may enter it.
    """
    path = path.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise EndpointInUseError(f"cannot make the directory {path}: {error.strerror}") from error
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise EndpointInUseError(f"{path} must belong to this user with mode 0700")
    return path


def ipc_endpoint(directory: Path, name: str) -> str:
    """The endpoint of a socket file in a private directory; EndpointInUseError when the path is too long."""
    path = directory / f"{name}.sock"
    _require_short(path)
    return f"ipc://{path}"


def is_ipc(endpoint: str) -> bool:
    """Whether an endpoint is a socket file of this host."""
    return endpoint.startswith("ipc://")


def is_ipv6(endpoint: str) -> bool:
    """Whether a tcp endpoint is an IPv6 literal (`tcp://[::1]:5000`). Host names stand for IPv4 addresses."""
    return endpoint.startswith("tcp://[")


class EndpointClaim:
    """The exclusive right to bind an endpoint, held by this process until closed (or until it dies)."""

    def __init__(self, endpoint: str) -> None:
        """Takes the claim.

        Raises:
            EndpointInUseError: another process holds it (named if known), something that is no socket lies at the
                path, or the path is unusable: too long, or not in a private directory.
        """
        self._path = Path(endpoint.removeprefix("ipc://")).absolute() if is_ipc(endpoint) else None
        self._lock: int | None = None
        self._owner = os.getpid()
        if self._path is None:
            return
        _require_short(self._path)
        private_directory(self._path.parent)
        self._lock = _locked(Path(f"{self._path}.lock"), endpoint)
        if os.path.lexists(self._path):
            if not stat.S_ISSOCK(self._path.lstat().st_mode):
                self._release_lock()
                raise EndpointInUseError(f"{self._path} exists and is not a socket; it was left alone")
            self._path.unlink()  # left by a process that was killed: its lock is gone

    def listen(self) -> int | None:
        """A descriptor that listens at the path, for a ZeroMQ socket to own; None for tcp, which it binds itself."""
        if self._path is None:
            return None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.setblocking(False)
            listener.bind(str(self._path))
            listener.listen(_BACKLOG)
            return listener.detach()

    def close(self) -> None:
        """Gives the claim back and removes the files. In a forked child it only lets go of the descriptor."""
        if self._path is None or self._lock is None:
            return
        if os.getpid() == self._owner:
            self._path.unlink(missing_ok=True)
        self._release_lock()

    def _release_lock(self) -> None:
        assert self._lock is not None
        if os.getpid() == self._owner:
            Path(f"{self._path}.lock").unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None


def _require_short(path: Path) -> None:
    if len(os.fsencode(path)) > _MAX_IPC_PATH_BYTES:
        raise EndpointInUseError(f"{path} is over {_MAX_IPC_PATH_BYTES} bytes: choose a shorter run directory")


def _locked(path: Path, endpoint: str) -> int:
    """Opens and locks a lock file, and writes this process's id into it."""
    while True:
        try:
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise EndpointInUseError(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise EndpointInUseError(f"{endpoint} is bound by another running process (pid {owner or '?'})") from error
        if _is_file_at(lock, path):
            break
        os.close(lock)  # its owner removed it between our open and our lock: whoever locks that inode locks nothing
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def local_address_towards(host: str, port: int) -> str:
    """The address of this host on the network that leads to `host` (no packet is sent); OSError if there is none.

    `host` is an address, or a name of an IPv4 address.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def tcp_endpoint(address: str, port: int) -> str:
    """`tcp://ADDRESS:PORT`, with the brackets that an IPv6 address needs."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"

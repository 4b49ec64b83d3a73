"""Where sockets live, and who owns them.

Inside a host `ipc://` paths in a private directory (mode 0700), each guarded by a lock file, because a second bind on
an ipc path silently steals it. Between containers and hosts `tcp://`, where the kernel refuses a second bind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path

from services.wire.errors import EndpointInUseError
from services.wire.messages import Role

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
    """The identity in a routing id, or None when it is not one of ours."""
    try:
        role, instance, epoch = routing_id.decode().rsplit("/", 2)
        return Identity(Role(role), instance, int(epoch, 16))
    except ValueError:
        return None


def new_instance_name() -> str:
    """A name for a process that was given none: unique enough to tell replicas apart in logs."""
    return secrets.token_hex(3)


def private_directory(path: Path) -> Path:
    """Makes `path` a directory that only this user can enter, and returns it.

    Raises:
        EndpointInUseError: it belongs to somebody else or others may write to it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise EndpointInUseError(f"{path} must belong to this user with mode 0700")
    return path


def ipc_endpoint(directory: Path, name: str) -> str:
    """The endpoint of a socket file in a private directory; EndpointInUseError when the path is too long."""
    path = directory / f"{name}.sock"
    if len(os.fsencode(path)) > _MAX_IPC_PATH_BYTES:
        raise EndpointInUseError(f"{path} is over {_MAX_IPC_PATH_BYTES} bytes: choose a shorter run directory")
    return f"ipc://{path}"


def is_ipc(endpoint: str) -> bool:
    """Whether an endpoint is a socket file of this host."""
    return endpoint.startswith("ipc://")


class EndpointClaim:
    """The exclusive right to bind an endpoint, held by this process until closed (or until it dies)."""

    def __init__(self, endpoint: str) -> None:
        """Takes the claim.

        Raises:
            EndpointInUseError: another process holds it, or something that is no socket lies at the path.
        """
        self._path = Path(endpoint.removeprefix("ipc://")) if is_ipc(endpoint) else None
        self._lock: int | None = None
        if self._path is None:
            return
        self._lock = os.open(f"{self._path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise EndpointInUseError(f"{endpoint} is bound by another running process") from error
        if self._path.exists() or self._path.is_symlink():
            if not stat.S_ISSOCK(self._path.lstat().st_mode):
                os.close(self._lock)
                raise EndpointInUseError(f"{self._path} exists and is not a socket; it was left alone")
            self._path.unlink()  # left by a process that was killed: its lock is gone

    def close(self) -> None:
        """Gives the claim back and removes the files."""
        if self._path is None or self._lock is None:
            return
        for path in (self._path, Path(f"{self._path}.lock")):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        os.close(self._lock)
        self._lock = None


def local_address_towards(host: str, port: int) -> str:
    """The address of this host on the network that leads to `host` (no packet is sent)."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
        probe.connect(family[4])
        return str(probe.getsockname()[0])

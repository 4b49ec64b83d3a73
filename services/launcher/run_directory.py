"""The run directory: where the sockets of one run live, private, gone at the end.

A launcher that is killed leaves its directory behind; the lock on it dies with the launcher, so the next start knows
that nobody uses it and removes it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.runtime.config import user_directory
from services.runtime.service import StartError
from services.wire.endpoints import private_directory

_PREFIX = "tokenway-"


def run_directory_base() -> Path:
    """The directory in which new run directories are made."""
    base = user_directory("XDG_RUNTIME_DIR", Path(tempfile.gettempdir()))
    return base if os.access(base, os.W_OK) else Path(tempfile.gettempdir())


def run_directories() -> list[Path]:
    """Those of this user's servers that run now, or were killed and are not cleared away yet."""
    bases = dict.fromkeys([run_directory_base(), Path(tempfile.gettempdir())])
    return [path for base in bases for path in sorted(base.glob(f"{_PREFIX}*")) if _is_own_directory(path)]


@contextmanager
def new_run_directory() -> Iterator[Path]:
    """A new private directory with a short path, removed at the end; those of killed runs are removed first."""
    base = run_directory_base()
    _remove_leftovers(base)
    # It gets its name only once it is locked: a directory of that name without a lock is a leftover.
    unnamed = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base))
    lock = _lock(unnamed)
    path = unnamed.rename(base / (_PREFIX + secrets.token_hex(4)))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # what stays is removed by the next start
        if lock is not None:
            os.close(lock)


@contextmanager
def given_run_directory(path: Path) -> Iterator[Path]:
    """The operator's own directory, made private and locked; at the end only sockets are removed from it.

    Raises:
        StartError: another running server uses it.
        EndpointInUseError: others may enter it.
    """
    path = private_directory(path.absolute())
    lock = _lock(path)
    if lock is None:
        raise StartError(f"--run-dir {path} is used by another running server")
    try:
        yield path
    finally:
        for entry in path.iterdir():
            if stat.S_ISSOCK(entry.lstat().st_mode):
                entry.unlink()
        os.close(lock)


@contextmanager
def shared_run_directory(path: Path) -> Iterator[Path]:
    """A directory for one process of a group whose others may use it too, also those of a running server.

    Raises:
        EndpointInUseError: others may enter it.
    """
    path = private_directory(path.absolute())
    lock = _lock(path, fcntl.LOCK_SH)  # None where a whole server runs in it: then that one clears it away
    try:
        yield path
    finally:
        if lock is not None:
            os.close(lock)


def _is_own_directory(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False  # its server has just ended
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def _remove_leftovers(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, or another launcher removes it at this moment
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = _lock(path)
            if lock is not None:
                shutil.rmtree(path)
                os.close(lock)


def _lock(directory: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """Locks a directory for as long as the descriptor is open; None when a lock of another process forbids it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor

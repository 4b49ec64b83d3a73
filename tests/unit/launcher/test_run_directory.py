"""Run directories: private, short, gone afterwards; those of killed runs hurt nobody."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from services.launcher.run_directory import given_run_directory, new_run_directory, shared_run_directory
from services.runtime.service import StartError
from services.wire.errors import EndpointInUseError

_ROOT = Path(__file__).parents[3]
_KILLED_RUN = """
import os, signal
from services.launcher.run_directory import new_run_directory
with new_run_directory() as path:
    (path / "scheduler.sock").touch()
    print(path, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run directories are made."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_prc_07_a_run_directory_is_private_and_gone_afterwards(base: Path) -> None:
    with new_run_directory() as path:
        assert path.parent == base
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "scheduler.sock").touch()
    assert list(base.iterdir()) == []


def test_prc_07_two_runs_at_a_time_keep_apart(base: Path) -> None:
    with new_run_directory() as first, new_run_directory() as second:
        assert first != second
        assert first.is_dir()
        assert second.is_dir()


def test_prc_07_what_a_killed_run_left_is_removed_by_the_next(base: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED_RUN], cwd=_ROOT, capture_output=True, text=True, timeout=20)
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    with new_run_directory():
        assert not left.exists()


def test_prc_07_what_only_looks_like_a_left_over_is_left_alone(base: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (base / "tokenway-link").symlink_to(elsewhere)
    (base / "tokenway-notes").write_text("mine")
    with new_run_directory():
        pass
    assert (base / "tokenway-link").is_symlink()
    assert elsewhere.is_dir()
    assert (base / "tokenway-notes").read_text() == "mine"


def test_a_runtime_directory_that_cannot_be_used_is_replaced_by_the_temporary_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "not there"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with new_run_directory() as path:
        assert path.parent == tmp_path


def test_prc_07_a_given_directory_keeps_everything_but_sockets(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with given_run_directory(directory) as path, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "a.sock"))
        (path / "b.sock").write_text("not a socket")
    assert sorted(entry.name for entry in directory.iterdir()) == ["b.sock"]


def test_prc_07_a_given_directory_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        given_run_directory(tmp_path / "run") as path,
        pytest.raises(StartError, match="used by another running server"),
        given_run_directory(path),
    ):
        pass


def test_a_process_of_a_group_shares_the_directory_of_a_server_and_takes_nothing_away(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with given_run_directory(directory) as path, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "a.sock"))
        with shared_run_directory(path):
            pass
        assert [entry.name for entry in directory.iterdir()] == ["a.sock"]


def test_processes_of_a_group_share_a_directory_that_no_other_server_may_have(tmp_path: Path) -> None:
    with shared_run_directory(tmp_path / "run") as first, shared_run_directory(tmp_path / "run") as second:
        assert first == second
        with pytest.raises(StartError, match="used by another running server"), given_run_directory(first):
            pass
    with given_run_directory(first):
        pass


def test_a_given_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(EndpointInUseError, match="mode 0700"), given_run_directory(tmp_path / "open"):
        pass

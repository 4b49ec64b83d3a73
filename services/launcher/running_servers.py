"""The servers of this user that run on this machine, as their control sockets: a client in there needs no key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.launcher.http.server_address import ServerAddress
from services.launcher.run_directory import run_directories

NO_SERVER = "no server of this user runs here with a control socket; say which with --url or --run-dir"


def control_sockets(run_dir: Path | None) -> dict[Path, Sequence[ServerAddress]]:
    """By run directory: of this one, or of all that this user's servers have made; those without a socket left out."""
    found = {
        folder: [ServerAddress.of_socket(path) for path in sorted(folder.glob("control-*.sock"))]
        for folder in (run_directories() if run_dir is None else [run_dir])
    }
    return {folder: addresses for folder, addresses in found.items() if addresses}

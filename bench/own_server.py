"""A server of its own for a measurement: `tokenway serve` with all its processes, on a free port."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from services.launcher import own_server
from services.runtime.config import inherited_environment

_START_TIMEOUT_S = 300.0


class OwnServer(own_server.OwnServer):
    """A running server whose processes can be looked at; no setting of this environment reaches it."""

    def __init__(self, model: str, arguments: Sequence[str] = ()) -> None:
        """Starts it and waits until it is ready.

        Args:
            model: what to serve, as for `tokenway serve`.
            arguments: further flags of it.

        Raises:
            CommandError: it ended, or was not ready in time.
        """
        super().__init__([model, *arguments], inherited_environment(), start_timeout_s=_START_TIMEOUT_S)

    @property
    def processes(self) -> dict[str, psutil.Process]:
        """All its processes by name, the launcher first."""
        launcher = psutil.Process(self.pid)
        named = {"launcher": launcher}
        for child in launcher.children():
            role = child.cmdline()[-1].removeprefix("services.")
            named[role if role not in named else f"{role} {child.pid}"] = child
        return named

"""Tokenizer process: the end of a connection whose client may still be sending.

To close on bytes that nobody has read resets the connection, and the reset may destroy an answer on its way. So the
sending side is closed first, and what still comes is dropped until the client is quiet. Owns no request.
"""

from __future__ import annotations

import asyncio

QUIET_S = 1.0
"""A client that sent nothing for so long has heard: the connection is closed."""
LONGEST_S = 10.0
"""One that sends on and on is closed after this."""


class Lingering:
    """The last moments of one connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        """Begins them: nothing may be written any more. A client that leaves ends them by itself."""
        self._loop = loop
        self._transport = transport
        self._ends_s = loop.time() + LONGEST_S
        self._has_heard = False
        if transport.can_write_eof() and not transport.is_closing():  # the former not under TLS
            transport.write_eof()
        self._timer = loop.call_later(QUIET_S, self._look)

    def hear(self) -> None:
        """The client has sent something."""
        self._has_heard = True

    def cancel(self) -> None:
        """The connection is closed."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._has_heard and self._loop.time() < self._ends_s:
            self._has_heard = False
            self._timer = self._loop.call_later(QUIET_S, self._look)
        else:
            self._transport.close()

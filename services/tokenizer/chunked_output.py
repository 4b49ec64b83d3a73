"""Tokenizer process: the bytes of an event stream on their way to a connection."""

from __future__ import annotations

import logging

from services.tokenizer.http_connection import ClientConnection

logger = logging.getLogger(__name__)


class ChunkedOutput:
    """Event bytes straight to the socket's transport: no task wakes up and nothing is awaited for a token."""

    __slots__ = ("_connection", "_is_chunked", "_transport")

    def __init__(self, connection: ClientConnection, is_chunked: bool) -> None:
        """`is_chunked`: whether the response is in chunked transfer coding (HTTP/1.1)."""
        self._connection = connection
        self._transport = connection.transport
        self._is_chunked = is_chunked

    @property
    def is_blocked(self) -> bool:
        """Whether the client is a buffer behind."""
        return self._connection.writing_paused

    def write(self, data: bytes) -> None:
        """Writes one transfer chunk in one piece."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def cut(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            logger.info("cut a connection whose client is too far behind")
            self._transport.abort()

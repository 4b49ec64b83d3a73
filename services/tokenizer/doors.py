"""Tokenizer process: where it is reached: the public port, the control socket, perhaps a control port. Bound before
anything slow is done.

The control socket is a file in the private run directory, so that only the user who runs the server can open it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.runtime.service import Process
from services.tokenizer.encryption import encryption_of
from services.tokenizer.http_server import HttpServer
from services.tokenizer.listener import bind_port
from services.wire.endpoints import ipc_endpoint, private_directory

CONTROL_HOST = "127.0.0.1"
_BACKLOG = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Doors:
    """Bound sockets that do not listen yet.

    Attributes:
        public: For clients.
        control: For the operator.
        control_path: The file of the control socket; None without a run directory.
        encryption: Of the public ones; None for plain HTTP.
        head_timeout_s: How long a client may take to agree on keys.
    """

    public: list[socket.socket]
    control: list[socket.socket]
    control_path: Path | None
    encryption: ssl.SSLContext | None
    head_timeout_s: float

    async def open(self, server: HttpServer, control: HttpServer) -> list[asyncio.Server]:
        """Listens; connections are handed to the one server or the other."""
        loop = asyncio.get_running_loop()
        timeout_s = self.head_timeout_s if self.encryption is not None else None
        listening = []
        for sock in self.public:
            listening.append(
                await loop.create_server(
                    server, sock=sock, ssl=self.encryption, ssl_handshake_timeout=timeout_s, backlog=_BACKLOG
                )
            )
            logger.info("listening on %s", _url(sock, self.encryption is not None))
        for sock in self.control:
            if sock.family == socket.AF_UNIX:
                listening.append(await loop.create_unix_server(control, sock=sock))
            else:
                listening.append(await loop.create_server(control, sock=sock))
                logger.info("control routes on %s", _url(sock, False))
        return listening


@contextmanager
def open_doors(process: Process) -> Iterator[Doors]:
    """Binds everything; closed again at the end, and the control socket's file removed.

    Raises:
        StartError: a port is taken, or the certificate cannot be used.
    """
    settings = process.settings
    encryption = encryption_of(settings)
    path = _control_path(process)
    sockets: list[socket.socket] = []
    try:
        sockets += bind_port(settings.host, settings.port)
        public = list(sockets)
        if settings.control_port:
            sockets += bind_port(CONTROL_HOST, settings.control_port)
        if path is not None:
            sockets.append(_bind_file(path))
        control = sockets[len(public) :]
        yield Doors(public, control, path, encryption, settings.head_timeout_s)
    finally:
        for sock in sockets:
            sock.close()
        if path is not None:
            path.unlink(missing_ok=True)


def _control_path(process: Process) -> Path | None:
    if not process.settings.run_dir:
        return None
    directory = private_directory(Path(process.settings.run_dir))
    return Path(ipc_endpoint(directory, f"control-{process.identity.instance}").removeprefix("ipc://"))


def _bind_file(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # a killed process of the same name: the launcher holds the directory's lock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
    finally:
        os.umask(before)
    sock.setblocking(False)
    return sock


def _url(sock: socket.socket, is_encrypted: bool) -> str:
    host, port = sock.getsockname()[:2]
    scheme = "https" if is_encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

"""Where a server of the OpenAI API is, and what every request to it carries."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from services.launcher.errors import CommandError

_PORTS = {"http": 80, "https": 443}
_API = "/v1"


@dataclass(frozen=True)
class ServerAddress:
    """A server's place. `prefix` stands before every path, for servers behind a proxy; `key` is sent as a bearer token.

    With a `socket_path` the connection goes to that Unix socket, whatever host and port say.
    """

    scheme: str
    host: str
    port: int
    prefix: str = ""
    key: str = field(default="", repr=False)
    socket_path: Path | None = None

    @classmethod
    def parse(cls, url: str, key: str = "") -> ServerAddress:
        """From a URL as people write it: with or without `http://`, a slash at the end or the API's own `/v1`.

        Raises:
            CommandError: it is no http:// or https:// URL, or the key cannot stand in a header.
        """
        full = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(full)
            port = parts.port
        except ValueError:
            raise CommandError(f"--url {url} is not a http:// or https:// URL") from None
        if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
            raise CommandError(f"--url {url} is not a http:// or https:// URL")
        if not full.isascii() or any(letter.isspace() for letter in full):
            raise CommandError(f"--url {url}: only ASCII without blanks can stand in a URL")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise CommandError("the API key holds characters that cannot stand in a header")
        prefix = parts.path.rstrip("/").removesuffix(_API)
        return cls(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], prefix, key)

    @classmethod
    def of_socket(cls, path: Path) -> ServerAddress:
        """A server that listens on a Unix socket."""
        return cls("http", "localhost", 80, socket_path=path)

    @property
    def url(self) -> str:
        """What people call it."""
        if self.socket_path is not None:
            return str(self.socket_path)
        return f"{self.scheme}://{self.netloc}{self.prefix}"

    @property
    def netloc(self) -> str:
        """Host and port as a URL and the Host header have them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def tls(self) -> ssl.SSLContext | None:
        """How to check the server's certificate; None for plain HTTP."""
        return ssl.create_default_context() if self.scheme == "https" else None

    def request(self, method: str, path: str, content: bytes) -> bytes:
        """The bytes of a request."""
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.netloc}",
            f"Content-Length: {len(content)}",
            "Content-Type: application/json",
        ]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*lines, "", ""]).encode("ascii") + content

"""Tokenizer process: what clients may do to connections: how long, how large, how many. Pure but for the counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

from aiohttp import web

from services.runtime.config import Settings
from services.tokenizer.api_error import ApiError, Code


@dataclass(frozen=True)
class ConnectionLimits:
    """How long a client may take, in seconds, how large its heads may be, and how many connections there may be.

    0 connections are no limit.
    """

    head_timeout_s: float
    write_timeout_s: float
    max_headers: int
    max_header_bytes: int
    max_head_bytes: int
    max_body_bytes: int
    max_connections: int = 0
    max_connections_per_address: int = 0

    @classmethod
    def of(cls, settings: Settings) -> ConnectionLimits:
        """As they are set."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})


class ConnectionCounts:
    """How many connections are open, in all and from each address; those of a Unix socket are not counted."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._by_address: Counter[str] = Counter()
        self.num_refused = 0

    @property
    def num_open(self) -> int:
        """Connections from other places than this host's Unix sockets."""
        return self._by_address.total()

    def enter(self, address: str) -> str:
        """One more, to be taken back by `leave`; "", or why it may not be used."""
        limits = self._limits
        is_full = 0 < limits.max_connections <= self.num_open
        has_too_many = 0 < limits.max_connections_per_address <= self._by_address[address]
        self._by_address[address] += 1
        if is_full or has_too_many:
            self.num_refused += 1
            return "this server has as many connections as it takes" if is_full else "too many connections from you"
        return ""

    def leave(self, address: str) -> None:
        """One has closed."""
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def check_head(request: web.BaseRequest, limits: ConnectionLimits) -> None:
    """Refuses what no header alone is too large for.

    Raises:
        ApiError: 431: all headers together are over the limit.
    """
    num_bytes = sum(len(name) + len(value) for name, value in request.raw_headers)
    if num_bytes > limits.max_head_bytes:
        raise ApiError(431, "the head of the request is too large", code=Code.HEADERS_TOO_LARGE)

"""Tokenizer process: whether a web page of another origin may ask: only those listed, never with cookies.

Pure. Without listed origins nothing here adds a header, so browsers keep pages out.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from services.runtime.config import values_of
from services.runtime.service import StartError

_ANY = "*"
_MAX_AGE_S = 600
_EXPOSED = "x-request-id, x-ignored-fields, x-should-retry, Retry-After"


class CrossOrigin:
    """The origins that may ask."""

    def __init__(self, origins: str) -> None:
        """`origins` as in --cors-origins.

        Raises:
            StartError: one is no origin: scheme, host and port, nothing behind.
        """
        self._origins = frozenset(values_of(origins))
        for origin in self._origins - {_ANY}:
            scheme, _, rest = origin.partition("://")
            if not scheme or not rest or "/" in rest or any(c.isspace() for c in origin):
                raise StartError(f"--cors-origins {origin}: write an origin as https://HOST or https://HOST:PORT")

    def headers(self, request: web.BaseRequest) -> Mapping[str, str]:
        """What every answer to this request has to say about origins."""
        if not self._origins:
            return {}
        origin = request.headers.get("Origin")
        if _ANY in self._origins:
            return {"Access-Control-Allow-Origin": _ANY, "Access-Control-Expose-Headers": _EXPOSED} if origin else {}
        if origin not in self._origins:
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a browser that asks before it asks; None for every other request.

        It carries no key and tells nothing but this: `headers` says to whom.
        """
        is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not self._origins or not is_preflight:
            return None
        allowed = {
            "Access-Control-Allow-Methods": "GET, HEAD, POST",
            "Access-Control-Allow-Headers": "Authorization, *",  # the star does not cover that one
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }
        is_listed = "Access-Control-Allow-Origin" in self.headers(request)
        return web.Response(status=204, headers=allowed if is_listed else {})

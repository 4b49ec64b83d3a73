"""Tokenizer process: answers that are one JSON body, and the headers of every answer for tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from services.tokenizer.answer_ids import id_headers
from services.tokenizer.request_body import Ignored


def json_answer(value: object, headers: Mapping[str, str] | None = None, status: int = 200) -> web.Response:
    """A value as the whole answer to a request."""
    body = msgspec.json.encode(value)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def answer_headers(answer_id: str, ignored: Ignored) -> Mapping[str, str]:
    """The headers of every answer for tokens."""
    return {**id_headers(answer_id), **ignored.headers}

"""Tokenizer process: answers to what never became a request, in the error body of the API. Pure."""

from __future__ import annotations

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from services.tokenizer.api_error import ApiError, Code


def head_error(exc: BaseException | None, message: str | None) -> ApiError:
    """What the parser's complaint is called here."""
    if isinstance(exc, LineTooLong) or "Too many headers" in (message or ""):
        return ApiError(431, "the head of the request is too large", code=Code.HEADERS_TOO_LARGE)
    return ApiError(400, "the request is not valid HTTP", code=Code.INVALID_HTTP)


def closing_response(error: ApiError) -> web.Response:
    """An error as the last response of a connection."""
    headers = {**error.headers(), "Connection": "close"}  # to be said aloud: aiohttp answers these as HTTP/1.0
    response = web.Response(status=error.status, body=error.body(), content_type="application/json", headers=headers)
    response.force_close()
    return response


def raw_response(error: ApiError, reason: str) -> bytes:
    """The same as bytes, for a connection on which no request is there to be answered."""
    body = error.body()
    head = f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: application/json\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in error.headers().items())
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body

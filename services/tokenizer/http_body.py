"""Tokenizer process: reading a request's body within its limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from services.runtime.config import Settings
from services.tokenizer.api_error import ApiError, Code
from services.tokenizer.strict_json import decode_object


@dataclass(frozen=True)
class ReceivedRequest:
    """A request whose body has been read: its JSON object, and when the request came, by `time.monotonic`."""

    request: web.BaseRequest
    fields: Mapping[str, object]
    time_s: float


async def read_json_body(request: web.BaseRequest, settings: Settings) -> dict[str, object]:
    """The JSON object in the body of a request.

    Raises:
        ApiError: 415 for another content type and for a compressed body, 413 for a body over the limit, 408 for one
            that takes too long, 400 for one that cannot be read or is no JSON object.
    """
    if request.content_type != "application/json" or (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise ApiError(415, "send the body as application/json in UTF-8", code=Code.UNSUPPORTED_MEDIA_TYPE)
    coding = request.headers.getall("Content-Encoding", [])
    if any(name.strip().lower() not in ("", "identity") for value in coding for name in value.split(",")):
        message = f"Content-Encoding: {', '.join(coding)[:64]!r} is not taken; send the body as it is"
        raise ApiError(415, message, code=Code.UNSUPPORTED_MEDIA_TYPE)
    most_bytes = settings.max_body_bytes
    if (request.content_length or 0) > most_bytes:
        raise _too_large(most_bytes)
    await _answer_expectation(request)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, "the body of the request did not arrive in time", code=Code.REQUEST_TIMEOUT) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(most_bytes) from None
    except RequestPayloadError:
        raise ApiError(400, "the body of the request cannot be read", code=Code.INVALID_HTTP) from None
    return decode_object(body)


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is over {most_bytes} bytes", code=Code.BODY_TOO_LARGE)


async def _answer_expectation(request: web.BaseRequest) -> None:
    """A client that waits for permission to send its body gets it, now that nothing speaks against it."""
    expectation = request.headers.get("Expect")
    if expectation is None:
        return
    if expectation.lower() != "100-continue":
        raise ApiError(417, "only Expect: 100-continue is understood", code=Code.EXPECTATION_FAILED)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0

"""Tokenizer process: the bytes that server-sent events of every API are made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.tokenizer.api_error import ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

_ENCODE = msgspec.json.Encoder().encode
# Line ends for some readers of event streams though not for JSON: NEL, LINE and PARAGRAPH SEPARATOR.
_ODD_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def json_string(text: str) -> bytes:
    """A text as a JSON string that is one line for every reader."""
    encoded = _ENCODE(text)
    if text.isascii() or not any(mark in text for mark in ("\x85", "\u2028", "\u2029")):
        return encoded
    return encoded.decode().translate(_ODD_LINE_ENDS).encode()


def json_line(value: object) -> bytes:
    """Any value as JSON that is one line for every reader."""
    encoded = _ENCODE(value)
    return encoded if encoded.isascii() else encoded.decode().translate(_ODD_LINE_ENDS).encode()


def named_event(name: str, fields: Mapping[str, object]) -> bytes:
    """An event of an API whose events have names; its data begin with the name as `type`."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_line({"type": name, **fields}))


def error_event(error: ApiError) -> bytes:
    """The one event of an error after the first byte."""
    return b"data: " + error.body() + b"\n\n"

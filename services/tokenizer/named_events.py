"""Tokenizer process: server-sent events with names, as the APIs write them that end in an event of their own.

    event: NAME
    data: {"type": "NAME", ...}

One line of data for every reader. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_ENCODE = msgspec.json.Encoder().encode
# Line ends for some readers of event streams though not for JSON: NEL, LINE and PARAGRAPH SEPARATOR.
_ODD_LINE_ENDS = {"\x85".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}


def one_line_json(value: object) -> bytes:
    """A value as JSON that is one line for every reader."""
    encoded = _ENCODE(value)
    if not encoded.isascii():
        for mark, escaped in _ODD_LINE_ENDS.items():
            encoded = encoded.replace(mark, escaped)
    return encoded


def named_event(name: str, fields: Mapping[str, object]) -> bytes:
    """One event; its data begin with its name as `type`."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), one_line_json({"type": name, **fields}))

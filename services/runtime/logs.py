"""Log lines: one line an event, as text or JSON, with role and instance; control characters are escaped.

A line about a request carries its id: `logger.info("...", extra=about(request_id))`, or, where a whole task works for
one request, `request_of_task.set(...)` once.

As text a traceback follows on lines that begin with `  | `, so that what a client sent never looks like a line of ours.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

from services.wire.endpoints import Identity

request_of_task: ContextVar[str] = ContextVar("request_of_task", default="")
"""The request that the present task works for; lines that it logs carry it."""


def about(request_id: bytes | str, **fields: object) -> dict[str, object]:
    """What makes a log line one about a request: pass it as `extra`. The fields are keys of the JSON line too."""
    return {"request_id": request_id.hex() if isinstance(request_id, bytes) else request_id, "fields": fields}


def set_up_logging(identity: Identity, level: str, log_format: str) -> None:
    """Sends all logging of this process to standard error.

    Args:
        identity: named in every line.
        level: debug, info, warning or error.
        log_format: text or json.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(identity) if log_format == "json" else _TextFormatter(identity))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class _TextFormatter(logging.Formatter):
    def __init__(self, identity: Identity) -> None:
        super().__init__()
        self._who = f"{identity.role}/{identity.instance}"

    def format(self, record: logging.LogRecord) -> str:
        request = _request_of(record)
        event = f"[{request}] {record.getMessage()}" if request else record.getMessage()
        line = f"{_clock(record)} {record.levelname[0]} {self._who} {escaped(event)}"
        return "\n".join([line, *(f"  | {escaped(part)}" for part in _trace_lines(self, record))])


class _JsonFormatter(logging.Formatter):
    def __init__(self, identity: Identity) -> None:
        super().__init__()
        self._who = {"role": str(identity.role), "instance": identity.instance}

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _clock(record),
            "level": record.levelname.lower(),
            **self._who,
            "event": record.getMessage(),
        }
        request = _request_of(record)
        if request:
            entry["request_id"] = request
        entry |= {name: value for name, value in getattr(record, "fields", {}).items() if name not in entry}
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True)


def _request_of(record: logging.LogRecord) -> str:
    """The id of the request that a line is about, or ""."""
    return str(getattr(record, "request_id", "") or request_of_task.get())


def _trace_lines(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    return formatter.formatException(record.exc_info).split("\n") if record.exc_info else []


def _clock(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def escaped(text: str) -> str:
    """The text on one line: what cannot be printed, line ends too, as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

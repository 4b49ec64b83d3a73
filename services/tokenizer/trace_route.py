"""Tokenizer process: GET /trace/{id}: a request's way, as `tokenway trace` prints it.

For the operator, and for the key that made the request: everybody else is told that there is none. A process that does
not know the request asks the others of its host through their control sockets, so any one answers for all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web

from services.tokenizer.access import caller_of
from services.tokenizer.api_error import ApiError, Code
from services.tokenizer.hops import Hop, HopName, hops_of
from services.tokenizer.json_answer import json_answer
from services.tokenizer.request_record import AnswerSummary, RequestRecord
from services.tokenizer.request_ring import RequestRing
from services.tokenizer.request_watch import reason_of
from services.wire.endpoints import Identity

TRACE_ROUTE = "/trace/"
_OWN_ONLY = "own"  # in the query: do not ask the others
_SIBLING_TIMEOUT_S = 2.0
_SHARED_HOPS = (HopName.HTTP, HopName.TOKENIZE)


class TraceRoute:
    """Finds requests by the ids of their answers."""

    def __init__(self, ring: RequestRing, own: Identity, control_socket: Path | None) -> None:
        """`control_socket`: this process's own, beside which the others' lie; None where there is none."""
        self._ring = ring
        self._own = own
        self._control_socket = control_socket

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The trace of the request in the path.

        Raises:
            ApiError: 404: nobody knows it, or it is another key's.
        """
        name = request.path.removeprefix(TRACE_ROUTE)
        trace = self._own_trace(name)
        if trace is None and request.query_string != _OWN_ONLY:
            trace = await self._trace_elsewhere(name)
        caller = caller_of(request)
        if trace is None or not (caller.is_operator or trace.get("tenant") == caller.tenant):
            message = "no request of this id is remembered"
            raise ApiError(404, message, code=Code.NOT_FOUND)
        return json_answer(trace)

    def _own_trace(self, name: str) -> Mapping[str, object] | None:
        record = self._ring.find(name)
        return None if record is None else trace_of(record, self._own)

    async def _trace_elsewhere(self, name: str) -> Mapping[str, object] | None:
        own = self._control_socket
        others = [path for path in own.parent.glob("control-*.sock") if path != own] if own is not None else []
        for trace in await asyncio.gather(*(_ask(path, name) for path in others)):
            if trace is not None:
                return trace
        return None


def trace_of(record: RequestRecord, own: Identity) -> dict[str, object]:
    """A request's way as JSON; times in milliseconds from its beginning."""
    hops = hops_of(record, own)
    first_token_s = record.first_token_s
    return {
        "id": record.request_id,
        "route": record.route,
        "status": record.status,
        "tenant": record.tenant,
        "started": _iso(record.received_unix_us),
        "has_ended": record.has_ended,
        "duration_ms": _ms(record.duration_s * 1e6),
        "ttft_ms": None if first_token_s is None else _ms(first_token_s * 1e6),
        "hops": [_hop_json(hop, record) for hop in hops if hop.name in _SHARED_HOPS],
        "answers": [_answer_json(answer, hops, record) for answer in record.answers],
    }


def _answer_json(answer: AnswerSummary, hops: list[Hop], record: RequestRecord) -> dict[str, object]:
    return {
        "request_id": answer.request_id.hex(),
        "finish": reason_of(answer) if record.was_taken and (answer.finish or record.has_ended) else None,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        "hops": [_hop_json(hop, record) for hop in hops if hop.request_id == answer.request_id],
    }


def _hop_json(hop: Hop, record: RequestRecord) -> dict[str, object]:
    return {
        "hop": str(hop.name),
        "role": str(hop.role),
        "instance": hop.instance,
        "start_ms": _ms(hop.start_unix_us - record.received_unix_us),
        "wait_ms": _ms(hop.wait_us),
        "work_ms": _ms(hop.work_us),
        "counters": dict(hop.counters),
    }


async def _ask(socket: Path, name: str) -> Mapping[str, object] | None:
    """What another process of this host knows of a request; None when it is not there or does not know it."""
    timeout = aiohttp.ClientTimeout(total=_SIBLING_TIMEOUT_S)
    url = f"http://localhost{TRACE_ROUTE}{quote(name, safe='')}?{_OWN_ONLY}"
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(socket)), timeout=timeout) as session,
            session.get(url) as response,
        ):
            return msgspec.json.decode(await response.read(), type=dict[str, object]) if response.ok else None
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return None  # it is just ending, or stuck: the others were asked too


def _ms(microseconds: float) -> float:
    return round(microseconds / 1000, 3)


def _iso(unix_us: int) -> str:
    seconds, rest = divmod(unix_us, 1_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1000:03d}Z"

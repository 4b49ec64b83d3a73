"""Tokenizer process: POST /flush_cache, /abort_request, /pause, /resume: an operator's wishes to the scheduler.

/abort_request takes an id of ours (`chatcmpl-` and hexadecimal digits, as in every answer and `x-request-id`) through
any tokenizer process, or a client's own `rid` through the one that has the request.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from services.runtime.config import Settings
from services.tokenizer.api_error import Code, bad_field
from services.tokenizer.control_calls import ControlCalls
from services.tokenizer.http_body import read_json_body
from services.tokenizer.json_answer import json_answer
from services.tokenizer.request_body import BodyForm
from services.tokenizer.request_names import RequestNames
from services.wire.controls import ControlAction

_OWN_ID = re.compile(r"[a-z]+[-_]([0-9a-f]{32})")


class EmptyBody(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing to say: `{}`, or no body at all."""


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /abort_request: which request, or all."""

    rid: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    abort_all: bool | None = None


EMPTY_FORM = BodyForm(EmptyBody)
ABORT_FORM = BodyForm(AbortBody)


class ControlRoutes:
    """The routes that change what the scheduler does."""

    def __init__(self, settings: Settings, control: ControlCalls, names: RequestNames) -> None:
        self._settings = settings
        self._control = control
        self._names = names

    async def flush_cache(self, request: web.BaseRequest) -> web.StreamResponse:
        """Forgets every cached prefix that nobody uses."""
        return await self._do(request, ControlAction.FLUSH_CACHE, "freed_pages")

    async def pause(self, request: web.BaseRequest) -> web.StreamResponse:
        """Nothing more is computed; requests keep their place and new ones wait."""
        return await self._do(request, ControlAction.PAUSE, "waiting_requests")

    async def resume(self, request: web.BaseRequest) -> web.StreamResponse:
        """Goes on."""
        return await self._do(request, ControlAction.RESUME, "waiting_requests")

    async def abort_request(self, request: web.BaseRequest) -> web.StreamResponse:
        """Ends the answers of a request, or of all.

        Raises:
            ApiError: 400: it does not say which; 503: the scheduler does not answer.
        """
        body, _ = ABORT_FORM.parse(await read_json_body(request, self._settings), self._settings)
        if body.abort_all:
            return json_answer({"aborted_answers": await self._control.ask(ControlAction.ABORT_ALL)})
        name = body.request_id or body.rid
        if name is None:
            raise bad_field("rid", "is required, unless abort_all is true", Code.MISSING_FIELD)
        group_ids = self._group_ids(name)
        counts = [await self._control.ask(ControlAction.ABORT_GROUP, group_id) for group_id in group_ids]
        return json_answer({"aborted_answers": sum(counts)})

    def _group_ids(self, name: str) -> list[bytes]:
        """What the scheduler calls the request; nothing when nobody knows it."""
        known = self._names.find(name)
        own = _OWN_ID.fullmatch(name)
        return known or ([bytes.fromhex(own[1])] if own else [])

    async def _do(self, request: web.BaseRequest, action: ControlAction, count_name: str) -> web.StreamResponse:
        if request.can_read_body:
            EMPTY_FORM.parse(await read_json_body(request, self._settings), self._settings)
        return json_answer({count_name: await self._control.ask(action)})

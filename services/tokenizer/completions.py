"""Tokenizer process: the way of a request for tokens: validate, encode, submit, be admitted, answer.

    refuse by load -> body -> names, types -> encode -> Submit ... Admitted -> status line -> text -> end
                                                        '-- Refused: its status      client gone: Abort, at once

Nothing of an answer is written before every choice was admitted: a refusal is an HTTP status. Whatever ends a handler
(an error, the client's leaving, the end of the process) closes the request, and closing aborts what has not ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import HttpVersion11, web

from services.runtime.config import Settings
from services.tokenizer.answer_sinks import CollectedAnswers, EventStream
from services.tokenizer.api_error import ApiError, Code
from services.tokenizer.http_body import read_json_body
from services.tokenizer.http_connection import SERVER_NAME, ChunkedOutput, ClientConnection
from services.tokenizer.instruments import HttpStatistics
from services.tokenizer.openai_schema import ChatBody, CompletionBody, Ignored, parse_chat, parse_completion
from services.tokenizer.prompts import PromptMaker
from services.tokenizer.request_limits import ServedModel, check_token_ids
from services.tokenizer.scheduler_link import SchedulerLink
from services.tokenizer.sse import EVENT_STREAM_HEADERS, AnswerHead, ChunkWriter, usage_of, whole_body
from services.tokenizer.submission import Prompt, build_submits
from services.wire.messages import Submit


@dataclass(frozen=True)
class _Call:
    """A request for tokens that has been understood."""

    request: web.BaseRequest
    body: ChatBody | CompletionBody
    prompts: Sequence[Prompt]
    submits: Sequence[Submit]
    head: AnswerHead
    headers: dict[str, str]
    received_s: float


class Completions:
    """POST /v1/chat/completions and /v1/completions."""

    def __init__(
        self, settings: Settings, model: ServedModel, prompts: PromptMaker, link: SchedulerLink, http: HttpStatistics
    ) -> None:
        self._settings = settings
        self._model = model
        self._prompts = prompts
        self._link = link
        self._http = http

    async def chat(self, request: web.BaseRequest) -> web.StreamResponse:
        """A chat completion.

        Raises:
            ApiError: it is refused, or fails before its first byte.
        """
        received_s = time.monotonic()
        self._refuse_if_unavailable()
        body, ignored = parse_chat(await read_json_body(request, self._settings), self._settings)
        self._check_against_model(body)
        prompt = await self._prompts.chat(body)
        ignored = ignored.with_dropped(await self._prompts.dropped_keys(body), self._settings)
        return await self._answer(self._call(request, body, ignored, [prompt], received_s))

    async def completion(self, request: web.BaseRequest) -> web.StreamResponse:
        """A text completion.

        Raises:
            ApiError: it is refused, or fails before its first byte.
        """
        received_s = time.monotonic()
        self._refuse_if_unavailable()
        body, ignored = parse_completion(await read_json_body(request, self._settings), self._settings)
        self._check_against_model(body)
        prompts = await self._prompts.completions(body)
        return await self._answer(self._call(request, body, ignored, prompts, received_s))

    def _refuse_if_unavailable(self) -> None:
        error = self._link.ended or self._link.view.refusal(time.monotonic())
        if error is not None:
            raise error

    def _check_against_model(self, body: ChatBody | CompletionBody) -> None:
        if body.model is not None and body.model != self._model.name:
            raise model_not_found(body.model)
        check_token_ids(body.stop_token_ids or (), self._model, "stop_token_ids")

    def _call(
        self,
        request: web.BaseRequest,
        body: ChatBody | CompletionBody,
        ignored: Ignored,
        prompts: Sequence[Prompt],
        received_s: float,
    ) -> _Call:
        for prompt in prompts:
            self._http.prompt_tokens.observe(len(prompt.token_ids))
        submits = build_submits(body, prompts, self._model)
        is_chat = isinstance(body, ChatBody)
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{submits[0].request_id.hex()}"
        head = AnswerHead(answer_id, int(time.time()), self._model.name, is_chat, body.wants_usage_chunk)
        headers = {"x-request-id": answer_id}
        if ignored.names:
            headers["x-ignored-fields"] = ignored.header
        return _Call(request, body, prompts, submits, head, headers, received_s)

    async def _answer(self, call: _Call) -> web.StreamResponse:
        self._refuse_if_unavailable()  # much may have happened while a long prompt was encoded
        try:
            return await (self._stream(call) if call.body.stream else self._whole(call))
        except ApiError as error:
            if error.param == "prompt" and call.head.is_chat:  # the scheduler knows prompts only
                error.param = "messages"
            raise
        finally:
            self._http.request_s.observe(time.monotonic() - call.received_s)

    async def _whole(self, call: _Call) -> web.StreamResponse:
        answers = CollectedAnswers(len(call.submits))
        opened = self._link.submit(call.submits, answers, call.received_s)
        try:
            await opened.admission
            await answers.done
        finally:
            self._link.close_request(opened)
        texts = [echo + text for echo, text in zip(_echoes(call), answers.texts, strict=True)]
        body = whole_body(call.head, texts, opened.entries, usage_of(opened.entries, call.body.num_choices))
        return web.Response(body=body, content_type="application/json", headers=call.headers)

    async def _stream(self, call: _Call) -> web.StreamResponse:
        chunks = ChunkWriter(call.head, len(call.submits))
        events = EventStream(chunks, _echoes(call))
        opened = self._link.submit(call.submits, events, call.received_s)
        if call.head.has_usage_chunk:
            events.usage = lambda: usage_of(opened.entries, call.body.num_choices)
        try:
            await opened.admission
            if events.failure is not None:  # nothing is written yet: it can still be a status
                raise events.failure
            return await self._write_events(call, events)
        finally:
            self._link.close_request(opened)

    async def _write_events(self, call: _Call, events: EventStream) -> web.StreamResponse:
        """Hands the connection to the stream; its chunks are written by the loop that receives them."""
        connection = call.request.protocol
        assert isinstance(connection, ClientConnection)
        response = web.StreamResponse(headers={**EVENT_STREAM_HEADERS, "Server": SERVER_NAME, **call.headers})
        if self._link.view.is_draining:
            response.force_close()
        await response.prepare(call.request)
        call.request.writer.send_headers()
        self._http.num_open_streams += 1
        try:
            connection.on_writable = events.flush
            events.open(ChunkedOutput(connection, is_chunked=call.request.version >= HttpVersion11))
            if await events.done is not None:
                response.force_close()
            await response.write_eof()
        finally:
            self._http.num_open_streams -= 1
        return response


def model_not_found(name: str) -> ApiError:
    """A 404 for a model that is not served."""
    return ApiError(404, f"the model {name[:256]!r} does not exist", code=Code.MODEL_NOT_FOUND, param="model")


def _echoes(call: _Call) -> list[str]:
    """What each answer begins with, in the order of the answers."""
    return [prompt.text or "" for prompt in call.prompts for _ in range(call.body.num_choices)]

"""Tokenizer process: how every route gets its answers: submit, be admitted, stream or collect, close whatever comes.

    AnswersWanted -> Submit ... Admitted -> status line -> deltas -> end -> body, or the last event
                             '-- Refused: its status     client gone: Abort, at once

A route checks its request, encodes its prompts and brings a format; what happens between is here and the same for all.
Nothing of an answer is written before every choice was admitted: a refusal is an HTTP status. Whatever ends a handler
(an error, the client's leaving, the end of the process) closes the request, and closing aborts what has not ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiohttp import HttpVersion11, web

from services.runtime.config import Settings
from services.tokenizer.answer_parts import AnswerDelta, AnswerEnd, AnswerFormat, ParserFactory
from services.tokenizer.answer_sinks import CollectedAnswers, EventStream, StreamOptions
from services.tokenizer.api_error import ApiError, Code, name_grammar
from services.tokenizer.chunked_output import ChunkedOutput
from services.tokenizer.http_body import ReceivedRequest, read_json_body
from services.tokenizer.http_connection import SERVER_NAME, ClientConnection
from services.tokenizer.instruments import HttpStatistics
from services.tokenizer.logit_rules import RuleMaker, bias_of_ids
from services.tokenizer.open_request import OpenRequest
from services.tokenizer.pending_answer import PendingAnswer
from services.tokenizer.request_limits import ServedModel, check_token_ids
from services.tokenizer.request_names import RequestNames
from services.tokenizer.request_record import present_record
from services.tokenizer.sampling_body import SamplingBody
from services.tokenizer.scheduler_link import SchedulerLink
from services.tokenizer.sse import EVENT_STREAM_HEADERS
from services.tokenizer.submission import AnswersWanted, Asker, build_submits
from services.tokenizer.timings import timings_of
from services.tokenizer.usage import usage_of
from services.wire.request_params import NO_LOGPROBS


@dataclass(frozen=True)
class GenerationCall:
    """A request for answers that has been understood.

    Attributes:
        received: The client's.
        wanted: The answers.
        format: How they are spelled.
        is_streamed: Events, or one body.
        headers: Those of the response that are the route's.
        parsers: Makes the parser of each answer; None gives texts as they are.
        prompt_param: The field that the prompt came in, for errors.
        names: What the client calls the request, for /abort_request.
    """

    received: ReceivedRequest
    wanted: AnswersWanted
    format: AnswerFormat
    is_streamed: bool
    headers: Mapping[str, str]
    parsers: ParserFactory | None = None
    prompt_param: str = "prompt"
    names: Sequence[str] = ()


@dataclass(frozen=True)
class FinishedAnswers:
    """All answers of a request, complete: for each its deltas and its end, and the usage of all."""

    answers: Sequence[Sequence[AnswerDelta]]
    ends: Sequence[AnswerEnd]
    usage: Mapping[str, object]


class Generation:
    """Gets answers for the routes of one process."""

    def __init__(
        self, settings: Settings, model: ServedModel, rules: RuleMaker, link: SchedulerLink, http: HttpStatistics
    ) -> None:
        self._settings = settings
        self._model = model
        self._rules = rules
        self._link = link
        self._http = http
        self.names = RequestNames()
        """What clients call the requests that are open."""

    async def receive(self, request: web.BaseRequest) -> ReceivedRequest:
        """The request with its body, which is not read where the load alone is reason to refuse.

        Raises:
            ApiError: 503: starting, draining, full; and as `read_json_body`.
        """
        time_s = time.monotonic()
        self._refuse_if_unavailable()
        return ReceivedRequest(request, await read_json_body(request, self._settings), time_s)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together; the context's as long as no worker has told its pool."""
        context_tokens = self._model.context_tokens
        return min(self._link.view.max_total_tokens or context_tokens, context_tokens)

    def check_model(self, name: str | None) -> None:
        """Whether the client means the served model; it may leave that out.

        Raises:
            ApiError: 404 for another model.
        """
        if name is not None and name != self._model.name:
            raise model_not_found(name)

    def check_against_model(self, body: SamplingBody) -> None:
        """What only the model can tell of a body.

        Raises:
            ApiError: 404 for another model; 400 naming the field for ids that it does not have.
        """
        self.check_model(body.model)
        check_token_ids(body.stop_token_ids or (), self._model, "stop_token_ids")
        check_token_ids(body.allowed_token_ids or (), self._model, "allowed_token_ids")
        bias_of_ids(body.logit_bias or {}, self._model)

    async def answer(self, call: GenerationCall) -> web.StreamResponse:
        """The response to a request: a body, or a stream that is written when this returns.

        Raises:
            ApiError: it is refused, or fails before its first byte.
        """
        try:
            with self.names.open(call.names, call.wanted.request_id):
                return await (self._stream(call) if call.is_streamed else self._whole(call))
        except ApiError as error:
            if error.param == "prompt":  # the scheduler knows prompts only
                error.param = call.prompt_param
            name_grammar(error, call.wanted.grammar_param)
            raise
        finally:
            if present_record().was_taken:
                self._http.request_s.observe(time.monotonic() - call.received.time_s)

    async def _whole(self, call: GenerationCall) -> web.StreamResponse:
        finished = await self._collect(call.wanted, call.received.time_s, call.parsers)
        body = call.format.body(finished.answers, finished.ends, finished.usage)
        return web.Response(body=body, content_type="application/json", headers=call.headers)

    async def collect(self, wanted: AnswersWanted, received_s: float, *, prompt_param: str) -> FinishedAnswers:
        """The answers themselves, when all have ended; for routes whose bodies are no answers.

        Raises:
            ApiError: the request is refused, or fails; `prompt_param` is the field that the prompts came in.
        """
        try:
            return await self._collect(wanted, received_s)
        except ApiError as error:
            if error.param == "prompt":
                error.param = prompt_param
            raise

    async def _collect(
        self, wanted: AnswersWanted, received_s: float, parsers: ParserFactory | None = None
    ) -> FinishedAnswers:
        answers = CollectedAnswers(_pending(wanted, parsers))
        opened = await self._open(wanted, answers, received_s)
        try:
            await opened.admission
            await answers.done
        finally:
            self._link.close_request(opened)
        timings = timings_of(opened, wanted.body.num_choices) if wanted.body.wants_timings else None
        deltas, ends = answers.take(timings)
        return FinishedAnswers(deltas, ends, usage_of(opened.entries, wanted.body.num_choices))

    async def _stream(self, call: GenerationCall) -> web.StreamResponse:
        events = EventStream(call.format, _pending(call.wanted, call.parsers))
        opened = await self._open(call.wanted, events, call.received.time_s)
        events.tell(_options(call, opened))
        try:
            await opened.admission
            if events.failure is not None:  # nothing is written yet: it can still be a status
                raise events.failure
            return await self._write_events(call, events)
        finally:
            self._link.close_request(opened)

    async def _open(
        self, wanted: AnswersWanted, sink: CollectedAnswers | EventStream, received_s: float
    ) -> OpenRequest:
        rules = await self._rules.rules(wanted.body)
        self._refuse_if_too_many(wanted)
        self._refuse_if_unavailable()  # much may have happened while a long prompt was encoded
        for prompt in wanted.prompts:
            self._http.prompt_tokens.observe(len(prompt.token_ids))
        record = present_record()
        asker = Asker(record.tenant, self._settings.isolate_cache_by_key, time.monotonic() - received_s, rules)
        opened = self._link.submit(build_submits(wanted, self._model, asker), sink, received_s)
        record.opened(opened)
        return opened

    def _refuse_if_unavailable(self) -> None:
        error = self._link.ended or self._link.view.refusal(time.monotonic())
        if error is not None:
            raise error

    def _refuse_if_too_many(self, wanted: AnswersWanted) -> None:
        """What can never be held at once is no matter of waiting."""
        most = self._link.view.max_open
        if most is not None and wanted.num_answers > most:
            param = "prompt" if len(wanted.prompts) > 1 else "n"
            message = f"{wanted.num_answers} answers in one request, at most {most} can run and wait at once"
            raise ApiError(400, message, code=Code.INVALID_VALUE, param=param)

    async def _write_events(self, call: GenerationCall, events: EventStream) -> web.StreamResponse:
        """Hands the connection to the stream; its chunks are written by the loop that receives them."""
        request = call.received.request
        connection = request.protocol
        assert isinstance(connection, ClientConnection)
        response = web.StreamResponse(headers={**EVENT_STREAM_HEADERS, "Server": SERVER_NAME, **call.headers})
        if self._link.view.is_draining:
            response.force_close()
        await response.prepare(request)
        request.writer.send_headers()
        self._http.num_open_streams += 1
        try:
            connection.on_writable = events.flush
            events.open(ChunkedOutput(connection, is_chunked=request.version >= HttpVersion11))
            if await events.done is not None:
                response.force_close()
            await response.write_eof()
        finally:
            self._http.num_open_streams -= 1
        return response


def model_not_found(name: str) -> ApiError:
    """A 404 for a model that is not served."""
    return ApiError(404, f"the model {name[:256]!r} does not exist", code=Code.MODEL_NOT_FOUND, param="model")


def _pending(wanted: AnswersWanted, parsers: ParserFactory | None) -> list[PendingAnswer]:
    """One for each answer, in their order."""
    body = wanted.body
    stop_ids = frozenset(body.stop_token_ids or ())
    return [
        PendingAnswer(
            prompt.text,
            None if parsers is None else parsers(),
            stop_ids=stop_ids,
            keeps_ids=bool(body.return_token_ids),
            keeps_logprobs=wanted.num_answer_logprobs != NO_LOGPROBS,
            awaits_prompt=prompt.asks.num_logprobs != NO_LOGPROBS,
            echoes_logprobs=bool(prompt.text) and wanted.num_answer_logprobs != NO_LOGPROBS,
        )
        for prompt in wanted.prompts
        for _ in range(body.num_choices)
    ]


def _options(call: GenerationCall, opened: OpenRequest) -> StreamOptions:
    """What a stream tells beside its answers."""
    body = call.wanted.body
    has_ids = body.wants_event_ids or "Last-Event-ID" in call.received.request.headers
    return StreamOptions(
        usage=lambda: usage_of(opened.entries, body.num_choices),
        timings=(lambda: timings_of(opened, body.num_choices)) if body.wants_timings else lambda: None,
        has_continuous_usage=body.wants_continuous_usage,
        event_id=call.wanted.request_id.hex() if has_ids else "",
        grammar_param=call.wanted.grammar_param,
    )

"""Tokenizer process: what can be asked, declared: each path, its method, whom it is for, what it takes and gives.

The table that routing, metrics' labels, access and /openapi.json are all made from. Handlers are elsewhere
(`handlers`), so that the table needs no running process. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.tokenizer.access import Audience
from services.tokenizer.answer_ids import AnswerKind
from services.tokenizer.api_error import ApiError
from services.tokenizer.control_routes import ABORT_FORM, EMPTY_FORM
from services.tokenizer.embeddings import EMBEDDINGS_FORM
from services.tokenizer.messages_format import messages_error_body
from services.tokenizer.messages_schema import COUNT_FORM, MESSAGES_FORM
from services.tokenizer.native_schema import GENERATE_FORM
from services.tokenizer.openai_schema import CHAT_FORM, COMPLETION_FORM
from services.tokenizer.request_body import BodyForm
from services.tokenizer.responses_schema import RESPONSES_FORM
from services.tokenizer.scores import SCORE_FORM
from services.tokenizer.tokenization import DETOKENIZE_FORM, TOKENIZE_FORM
from services.tokenizer.trace_route import TRACE_ROUTE

ErrorBody = Callable[[ApiError], bytes]


def openai_error_body(error: ApiError) -> bytes:
    """The error body of all routes that have no form of their own."""
    return error.body()


@dataclass(frozen=True)
class Route:
    """One path.

    Attributes:
        method: GET or POST; HEAD goes wherever GET does.
        path: As it is, or with `{id}` as its last part.
        summary: One line for /openapi.json.
        form: What its body may hold; None without a body.
        answers: The kind of its answers, for a route that gives tokens or numbers of the model; None for any other.
        makes_answers: Whether it asks the scheduler for something, and so meets its refusals.
        is_streamable: Whether `stream: true` gives events.
        audience: Whom it is for.
        error_body: How its errors are spelled.
        content_type: Of its answer.
    """

    method: str
    path: str
    summary: str
    form: BodyForm[Any] | None = None
    answers: AnswerKind | None = None
    makes_answers: bool = False
    is_streamable: bool = False
    audience: Audience = Audience.CLIENT
    error_body: ErrorBody = openai_error_body
    content_type: str = "application/json"

    @property
    def allowed_methods(self) -> tuple[str, ...]:
        """The methods that are answered."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)

    @property
    def has_id(self) -> bool:
        """Whether the path ends in an `{id}`."""
        return self.path.endswith("{id}")


def _answering(path: str, form: BodyForm[Any], summary: str, answers: AnswerKind) -> Route:
    error_body = messages_error_body if answers is AnswerKind.MESSAGE else openai_error_body
    return Route(
        "POST", path, summary, form, answers=answers, makes_answers=True, is_streamable=True, error_body=error_body
    )


def _control(path: str, form: BodyForm[Any], summary: str) -> Route:
    return Route("POST", path, summary, form, makes_answers=True, audience=Audience.CONTROL)


_ROUTES = (
    _answering("/v1/chat/completions", CHAT_FORM, "A chat completion", AnswerKind.CHAT),
    _answering("/v1/completions", COMPLETION_FORM, "A text completion", AnswerKind.COMPLETION),
    _answering("/v1/responses", RESPONSES_FORM, "A response; nothing of it is kept", AnswerKind.RESPONSE),
    _answering("/v1/messages", MESSAGES_FORM, "A message", AnswerKind.MESSAGE),
    Route("POST", "/v1/messages/count_tokens", "How many tokens a message's prompt has", COUNT_FORM,
          error_body=messages_error_body),
    _answering("/generate", GENERATE_FORM, "Answers to raw prompts, with SGLang's names", AnswerKind.NATIVE),
    Route("POST", "/tokenize", "The token ids of a text or a chat", TOKENIZE_FORM),
    Route("POST", "/detokenize", "The text of token ids", DETOKENIZE_FORM),
    Route("POST", "/v1/chat/completions/render", "A chat as the model would see it: text and ids", CHAT_FORM),
    Route("POST", "/v1/embeddings", "The pooled hidden state of each input", EMBEDDINGS_FORM, makes_answers=True,
          answers=AnswerKind.EMBEDDING),
    Route("POST", "/v1/score", "The log-probability of each continuation", SCORE_FORM, makes_answers=True,
          answers=AnswerKind.SCORE),
    Route("GET", "/v1/models", "The served model, as a list of one"),
    Route("GET", "/v1/models/{id}", "The served model"),
    Route("GET", "/live", "Whether this process runs", audience=Audience.ANYONE),
    Route("GET", "/ready", "Whether a request would be answered now", audience=Audience.ANYONE),
    Route("GET", "/health", "The same, and for each role what is wrong with it", audience=Audience.ANYONE),
    Route("GET", "/metrics", "Prometheus text for the whole group", audience=Audience.METRICS,
          content_type="text/plain"),
    Route("GET", f"{TRACE_ROUTE}{{id}}", "The way of a request through the processes"),
    Route("GET", "/openapi.json", "This description"),
    Route("GET", "/server_info", "Settings, model, load and processes", audience=Audience.CONTROL),
    _control("/flush_cache", EMPTY_FORM, "Forgets every cached prefix that nobody uses"),
    _control("/abort_request", ABORT_FORM, "Ends a request, or all of them"),
    _control("/pause", EMPTY_FORM, "Computes nothing more until /resume; requests keep their place"),
    _control("/resume", EMPTY_FORM, "Goes on"),
)  # fmt: skip
ROUTES: Mapping[str, Route] = {route.path: route for route in _ROUTES}
_WITH_ID = tuple(route for route in _ROUTES if route.has_id)


def find_route(path: str) -> Route | None:
    """The route of a path, compared as it is; None when it leads nowhere."""
    for route in _WITH_ID:
        start = route.path.removesuffix("{id}")
        if path.startswith(start) and len(path) > len(start):
            return route
    return None if "{" in path else ROUTES.get(path)

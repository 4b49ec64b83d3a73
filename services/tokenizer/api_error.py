"""Tokenizer process: what a client is told when a request fails, in the one body that OpenAI clients read.

Owns the error body and the statuses; must never carry internals (paths, addresses, traces): a fault of ours has an
error id that the log knows too.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from services.wire.finish import Finish
from services.wire.requests import Refused


class Code(StrEnum):
    """What an error is called in the body, for programs; docs/api.md says when each is given."""

    INVALID_VALUE = "invalid_value"
    MISSING_FIELD = "missing_field"
    UNSUPPORTED_FIELD = "unsupported_field"
    UNSUPPORTED_VALUE = "unsupported_value"
    UNKNOWN_FIELD = "unknown_field"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    NO_CHAT_TEMPLATE = "no_chat_template"
    INVALID_GRAMMAR = "invalid_grammar"
    INVALID_JSON = "invalid_json"
    INVALID_HTTP = "invalid_http"
    INVALID_API_KEY = "invalid_api_key"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TIMEOUT = "request_timeout"
    BODY_TOO_LARGE = "body_too_large"
    TOO_MANY_VALUES = "too_many_values"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    EXPECTATION_FAILED = "expectation_failed"
    HEADERS_TOO_LARGE = "headers_too_large"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    INTERNAL_ERROR = "internal_error"
    NUMERICAL_ERROR = "numerical_error"
    STARTING = "starting"
    DRAINING = "draining"
    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"
    BACKEND_LOST = "backend_lost"
    ABORTED = "aborted"
    TIMEOUT = "timeout"


_STATUS_OF_FINISH = {
    Finish.ABORTED: (503, Code.ABORTED, "the server ended this request"),
    Finish.NUMERICAL_ERROR: (
        500,
        Code.NUMERICAL_ERROR,
        "the model gave values that are no numbers",
    ),
    Finish.GRAMMAR_TOO_LARGE: (
        400,
        Code.INVALID_GRAMMAR,
        "the grammar takes too much to follow; what came so far is the beginning of a sentence of it",
    ),
    Finish.TIMEOUT: (504, Code.TIMEOUT, "the request ran into its deadline"),
    Finish.BACKEND_LOST: (503, Code.BACKEND_LOST, "a process that this request needed has died; try again"),
}


_WOULD_REPEAT = frozenset({Code.ABORTED, Code.NUMERICAL_ERROR, Code.TIMEOUT, Code.INTERNAL_ERROR})
"""What was wanted so, or would come out the same: the official clients, which repeat every 5xx, are told not to."""


class ApiError(Exception):
    """A failed request: an HTTP status before the first byte, one error event after it.

    Attributes:
        status: 400 to 599.
        message: One line for the client.
        code: A `Code`, or the scheduler's own word.
        param: The request field at fault, None when no field is.
        retry_after_s: When to try again; 0 for no promise.
        allow: The methods of a route that was asked by another one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: int = 0,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = allow

    def body(self) -> bytes:
        """`{"error": {...}}` as JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> Mapping[str, str]:
        """The headers that belong to the status."""
        headers: dict[str, str] = {}
        if self.code in _WOULD_REPEAT:
            headers["x-should-retry"] = "false"
        elif self.retry_after_s:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.allow:
            headers["Allow"] = self.allow
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def bad_field(param: str, problem: str, code: Code = Code.INVALID_VALUE) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {problem}", code=code, param=param)


def unavailable(code: Code, message: str, retry_after_s: int = 1) -> ApiError:
    """A 503 with Retry-After."""
    return ApiError(503, message, code=code, retry_after_s=max(1, retry_after_s))


def internal_error(error_id: str = "") -> ApiError:
    """A 500 whose error id is all that the client learns; log the cause under the same id."""
    error_id = error_id or secrets.token_hex(8)
    return ApiError(500, f"internal error, id {error_id}", code=Code.INTERNAL_ERROR)


def refusal_error(refused: Refused) -> ApiError:
    """What the scheduler's refusal becomes."""
    retry_after_s = max(1, refused.retry_after_s) if refused.status == 503 else refused.retry_after_s
    return ApiError(
        refused.status, refused.text, code=refused.code, param=refused.param or None, retry_after_s=retry_after_s
    )


def name_grammar(error: ApiError, param: str | None) -> None:
    """Names the field in an error about a grammar; scheduler and worker do not know where it came from."""
    if error.code == Code.INVALID_GRAMMAR and param is not None and error.param in (None, "grammar"):
        error.message = f"{param}: {error.message}"
        error.param = param


def finish_error(finish: Finish) -> ApiError | None:
    """The error of an answer that ended otherwise than by stopping or by its length; None for those two."""
    if finish in (Finish.STOP_TOKEN, Finish.STOP_STRING, Finish.LENGTH):
        return None
    if finish not in _STATUS_OF_FINISH:
        return internal_error()
    status, code, message = _STATUS_OF_FINISH[finish]
    return ApiError(status, message, code=code, retry_after_s=1 if status == 503 else 0)

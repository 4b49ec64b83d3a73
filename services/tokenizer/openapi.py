"""Tokenizer process: GET /openapi.json: every route with its fields, their types and ranges, and its statuses.

Made from the table of routes and from the structs that bodies are checked with, so that it cannot say anything else
than the code does. Pure but for its handler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from services.runtime.config import Settings
from services.tokenizer.access import Audience
from services.tokenizer.conversation import ROLES
from services.tokenizer.field_tables import Neutral
from services.tokenizer.message_fields import TEXTS
from services.tokenizer.messages_format import messages_error_body
from services.tokenizer.messages_schema import MessagesBody
from services.tokenizer.native_schema import DEFAULT_NEW_TOKENS, GenerateBody, NativeSampling
from services.tokenizer.openai_schema import ChatBody, CompletionBody
from services.tokenizer.request_body import BodyForm
from services.tokenizer.request_limits import DEFAULT_COMPLETION_TOKENS, ServedModel
from services.tokenizer.responses_schema import ResponsesBody
from services.tokenizer.routes import ROUTES, Route
from services.tokenizer.status_routes import server_version
from services.tokenizer.submission import sampling_defaults
from services.tokenizer.tokenization import TokenizeBody

_COMPONENTS = "#/components/schemas/{name}"
_WITH_BODY = (400, 404, 408, 413, 415, 417)
_EVERYWHERE = (401, 429, 431, 500)
_FROM_SCHEDULER = (503, 504)
_ALTERNATIVES: Mapping[type[msgspec.Struct], tuple[str, str]] = {
    GenerateBody: ("text", "input_ids"),
    TokenizeBody: ("prompt", "messages"),
}
_EVENT: dict[str, object] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "description": "Each event: its name, if the API gives it one, and a line of JSON.",
}
_ANY_MESSAGES: dict[str, object] = {"type": "array", "minItems": 1, "items": {"type": "object"}}


class ErrorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: in words, and for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error."""

    error: ErrorFacts


class MessagesErrorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: for programs, and in words."""

    type: str
    message: str


class MessagesErrorAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The body of every error of Anthropic's routes."""

    error: MessagesErrorFacts


class OpenApiRoute:
    """Answers with the description, which is made once."""

    def __init__(self, settings: Settings, model: ServedModel) -> None:
        self._body = msgspec.json.encode(description(settings, model))

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The description."""
        return web.Response(body=self._body, content_type="application/json")


def statuses_of(route: Route, settings: Settings) -> tuple[int, ...]:
    """Every status that a route can answer with, ascending."""
    found = {200, *_EVERYWHERE}
    if route.form is not None:
        found.update(_WITH_BODY)
    if route.makes_answers or route.form is not None:  # whoever encodes can be too busy
        found.update(_FROM_SCHEDULER)
    if route.has_id or route.audience is Audience.CONTROL:
        found.add(404)
    if route.path in ("/ready", "/health"):
        found.add(503)
    return tuple(sorted(found))


def description(settings: Settings, model: ServedModel) -> dict[str, object]:
    """The whole description, OpenAPI 3.1.

    Args:
        settings: Whether unknown fields are taken.
        model: The one that `model` may name; its sampling defaults.
    """
    kinds = [route.form.kind for route in ROUTES.values() if route.form is not None]
    _, components = msgspec.json.schema_components(
        [*dict.fromkeys(kinds), ErrorAnswer, MessagesErrorAnswer], ref_template=_COMPONENTS
    )
    for route in ROUTES.values():
        if route.form is not None:
            _add_other_fields(components[route.form.kind.__name__], route.form, settings)
            _narrow(components[route.form.kind.__name__]["properties"], model.name)
    for schema in components.values():
        if "n" in schema.get("properties", {}):
            _integer_of(schema["properties"]["n"])["maximum"] = settings.max_choices
    _add_defaults(components, model)
    for kind, (one, other) in _ALTERNATIVES.items():
        components[kind.__name__]["oneOf"] = [_only(one, other), _only(other, one)]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tokenway", "version": server_version()},
        "paths": {path: {route.method.lower(): _operation(route, settings)} for path, route in ROUTES.items()},
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _narrow(fields: dict[str, object], model_name: str) -> None:
    """What is known of a field beyond its type: there is one model, and messages have roles and texts."""
    if "model" in fields:
        fields["model"] = {"enum": [None, model_name]}
    if "messages" in fields:
        fields["messages"] = _with_messages(fields["messages"])


def _integer_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The part of a schema that speaks of integers."""
    return next(option for option in schema["anyOf"] if option.get("type") == "integer")


def _only(given: str, absent: str) -> dict[str, object]:
    """The one of two fields is there and the other is not."""
    properties = {given: {"not": {"type": "null"}}, absent: {"type": "null"}}
    return {"required": [given], "properties": properties}


def _add_defaults(components: dict[str, Any], model: ServedModel) -> None:
    """What a field is when it is left out, where that is not nothing."""
    drawn = sampling_defaults(model)
    of_kinds = {
        **{kind.__name__: drawn for kind in (ChatBody, ResponsesBody, MessagesBody)},
        CompletionBody.__name__: {**drawn, "max_tokens": DEFAULT_COMPLETION_TOKENS},
        NativeSampling.__name__: {**drawn, "max_new_tokens": DEFAULT_NEW_TOKENS},
    }
    for kind, defaults in of_kinds.items():
        fields = components[kind]["properties"]
        for name, value in defaults.items():
            if name in fields:
                fields[name]["default"] = value


def _with_messages(schema: object) -> object:
    """Objects without a shape become messages of a chat."""
    if schema == _ANY_MESSAGES:
        return {**_ANY_MESSAGES, "items": message_schema()}
    if isinstance(schema, dict) and "anyOf" in schema:
        return {**schema, "anyOf": [_with_messages(option) for option in schema["anyOf"]]}
    return schema


def message_schema() -> dict[str, object]:
    """A message of a chat; its keys are checked one by one, not by a struct."""
    part = {
        "type": "object",
        "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    texts = {name: {"type": ["string", "null"]} for name in sorted(TEXTS)}
    content = {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": part}]}
    return {
        "type": "object",
        "properties": {"role": {"enum": list(ROLES)}, "content": content, **texts},
        "required": ["role"],
    }


def _operation(route: Route, settings: Settings) -> dict[str, object]:
    operation: dict[str, object] = {
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('{id}', 'id')}",
        "summary": route.summary,
        "tags": [str(route.audience)],
        "responses": {str(status): _answer(route, status) for status in statuses_of(route, settings)},
    }
    if route.has_id:
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": schema}]
    if route.form is not None:
        schema = {"$ref": _COMPONENTS.format(name=route.form.kind.__name__)}
        is_required = bool(route.form.kind.__struct_fields__)
        operation["requestBody"] = {"required": is_required, "content": {"application/json": {"schema": schema}}}
    if route.audience is not Audience.ANYONE:
        operation["security"] = [{"key": []}, {"x-api-key": []}]
    return operation


def _answer(route: Route, status: int) -> dict[str, object]:
    if status == 200 or (status == 503 and route.audience is Audience.ANYONE):
        content: dict[str, object] = {route.content_type: {"schema": {}}}
        if route.is_streamable and status == 200:
            content["text/event-stream"] = {"schema": _EVENT}
        return {"description": "The answer" if status == 200 else "Not ready", "content": content}
    name = "MessagesErrorAnswer" if route.error_body is messages_error_body else "ErrorAnswer"
    schema = {"$ref": _COMPONENTS.format(name=name)}
    return {"description": "An error", "content": {"application/json": {"schema": schema}}}


def _add_other_fields(schema: dict[str, Any], form: BodyForm[Any], settings: Settings) -> None:
    """The fields that are known beside those of the struct, and whether others are taken."""
    fields: dict[str, object] = schema["properties"]
    fields.update({name: _unbuilt(values) for name, values in form.unbuilt.items() if "." not in name})
    for name in sorted(form.without_effect):
        if "." not in name:
            fields[name] = {"description": "Without effect."}
    if settings.strict_fields:
        schema["additionalProperties"] = False


def _unbuilt(neutral: Neutral) -> Mapping[str, object]:
    """Not built: only what asks for nothing is taken."""
    return {"enum": [None, *neutral], "description": "Not built: only what asks for nothing is taken."}

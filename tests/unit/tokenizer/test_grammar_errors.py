"""Errors about a grammar begin with the field that the client wrote, on every route, before an answer and within it."""

from __future__ import annotations

from typing import Any

import pytest

from services.wire.finish import Finish
from tests.unit.tokenizer.backend_peers import Server, chunk
from tests.unit.tokenizer.http_client import Connection, Json
from tests.unit.tokenizer.short_bodies import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, SHORT_BODIES

SCHEMA: Json = {"type": "string", "pattern": "("}
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
OUTPUT_FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}
TEXT_FORMAT = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
FIELDS: list[tuple[str, Json, str]] = [
    (CHAT, {"response_format": NAMED}, "response_format.json_schema.schema"),
    (CHAT, {"guided_regex": "("}, "guided_regex"),
    (CHAT, {"response_format": {"type": "text"}, "guided_choice": ["a"]}, "guided_choice"),
    (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    (COMPLETIONS, {"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
    (COMPLETIONS, {"ebnf": "root ::= root"}, "ebnf"),
    (GENERATE, {"sampling_params": {"json_schema": '{"type":"string","pattern":"("}'}}, "sampling_params.json_schema"),
    (GENERATE, {"sampling_params": {"json_schema": None, "regex": "("}}, "sampling_params.regex"),
    (MESSAGES, {"output_config": OUTPUT_FORMAT}, "output_config.format.schema"),
    (MESSAGES, {"output_format": OUTPUT_FORMAT["format"]}, "output_format.schema"),
    (RESPONSES, {"text": TEXT_FORMAT}, "text.format.schema"),
]
REASON = "a regular expression cannot be read: unclosed group, at character 1"


def error_of(response: Any) -> Json:
    error: Json = response.json()["error"]
    return error


@pytest.mark.parametrize(("path", "fields", "place"), FIELDS)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_grammar_that_cannot_be_compiled_is_told_with_its_field(
    server: Server, path: str, fields: Json, place: str, is_stream: bool
) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", path, {**SHORT_BODIES[path], **fields, "stream": is_stream})
        (submit,) = server.backend.take_submits()
        server.backend.refuse(submit, 400, "invalid_grammar", REASON, "grammar")
        response = connection.read_response()
    assert response.status == 400
    error = error_of(response)
    assert error["message"] == f"{place}: {REASON}"
    assert error.get("param", place) == place


@pytest.mark.parametrize(("path", "fields", "place"), FIELDS)
def test_a_grammar_that_grows_too_large_is_told_with_its_field(
    server: Server, path: str, fields: Json, place: str
) -> None:
    """A 400 while nothing was sent; in a stream an event, in which the field is the client's too."""
    with Connection(server.port) as connection, Connection(server.port) as streaming:
        connection.send("POST", path, {**SHORT_BODIES[path], **fields})
        streaming.send("POST", path, {**SHORT_BODIES[path], **fields, "stream": True})
        submits = server.backend.take_submits(2)
        server.backend.admit(*submits)
        for submit in submits:
            server.backend.send_text(chunk(submit, 0, [1], 0, "so far"))
            server.backend.send_text(chunk(submit, 1, [], 6, "", Finish.GRAMMAR_TOO_LARGE))
        response = connection.read_response()
        rest = streaming.read_response().body
    assert response.status == 400
    assert error_of(response)["message"].startswith(f"{place}: the grammar takes too much")
    assert f"{place}: the grammar takes too much".encode() in rest

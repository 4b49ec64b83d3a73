"""Bodies and bytes that nobody wrote: whatever comes, the answer is one of ours and the process lives."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.tokenizer.field_tables import UNBUILT_IN_CHAT, UNBUILT_IN_COMPLETIONS, WITHOUT_EFFECT
from services.tokenizer.openai_schema import ChatBody, CompletionBody
from tests.unit.tokenizer.backend_peers import Server
from tests.unit.tokenizer.http_client import Connection, Json, request
from tests.unit.tokenizer.scripts import OK

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["", "small", "user", "text", "system", "👋", "<|im_end|>"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "name", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"]), "content": VALUES},
        optional={"name": VALUES, "tool_calls": VALUES, "tool_call_id": VALUES, "reasoning_content": VALUES},
    ),
    max_size=4,
)
NAMES = sorted(
    {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, *UNBUILT_IN_CHAT, *UNBUILT_IN_COMPLETIONS}
    | WITHOUT_EFFECT
    | {"unknown", ""}
)
FIELDS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3)
IN_TIME = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def assert_ours(server: Server, path: str, body: Json) -> None:
    server.backend.script = OK
    response = request(server.port, "POST", path, body)
    assert response.status in (200, 400, 404), (response, body)
    if response.status != 200:
        assert response.error["message"]
    elif body.get("stream"):
        assert response.body.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(response.body)["usage"]


@given(fields=FIELDS, messages=MESSAGES)
@IN_TIME
def test_any_values_in_a_chat_are_answered(server: Server, fields: Json, messages: list[Json]) -> None:
    assert_ours(server, "/v1/chat/completions", {"messages": messages, **fields})


@given(fields=FIELDS, prompt=VALUES | st.lists(st.integers(0, 300), max_size=5))
@IN_TIME
def test_any_values_in_a_completion_are_answered(server: Server, fields: Json, prompt: object) -> None:
    assert_ours(server, "/v1/completions", {"prompt": prompt, **fields})


REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n"


@given(position=st.integers(0, len(REQUEST) + 14), junk=st.binary(min_size=1, max_size=4), is_insert=st.booleans())
@IN_TIME
def test_any_change_of_a_requests_bytes_is_answered_or_closed(
    server: Server, position: int, junk: bytes, is_insert: bool
) -> None:
    server.backend.script = OK
    raw = REQUEST + b'{"prompt": "x"}'
    raw = raw[:position] + junk + raw[position if is_insert else position + len(junk) :]
    with Connection(server.port) as connection:
        connection.sock.sendall(raw)
        connection.sock.settimeout(0.05)
        try:
            while connection.fill():
                pass
        except (TimeoutError, ConnectionResetError):
            pass
        if connection.pending:
            version, status = connection.pending.split(maxsplit=2)[:2]
            assert version.startswith(b"HTTP/")
            assert b"100" <= status < b"500"

"""The shortest body that each route for answers takes."""

from __future__ import annotations

from tests.unit.tokenizer.http_client import Json

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER: Json = {"role": "user", "content": "Hi"}
SHORT_BODIES: dict[str, Json] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "Hi"},
    GENERATE: {"text": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
}

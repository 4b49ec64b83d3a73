"""`litellm` as its users call it: through its routes to OpenAI and to Anthropic."""

from __future__ import annotations

import json
from typing import Any

import pytest

litellm = pytest.importorskip("litellm")

HI: list[Any] = [{"role": "user", "content": "Say hello."}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def openai_route(url: str, model: str) -> dict[str, Any]:
    return {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "temperature": 0}


def test_completion_and_stream_say_the_same(openai_route: dict[str, Any]) -> None:
    whole = litellm.completion(messages=HI, max_tokens=32, **openai_route)
    chunks = litellm.completion(messages=HI, max_tokens=32, stream=True, **openai_route)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0


def test_tools(openai_route: dict[str, Any]) -> None:
    answer = litellm.completion(messages=HI, tools=[TOOL], tool_choice="required", max_tokens=100, **openai_route)
    [call, *_] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_embedding(url: str, model: str) -> None:
    answer = litellm.embedding(model=f"openai/{model}", input=["a cat"], api_base=f"{url}/v1", api_key="none")
    assert len(answer.data[0]["embedding"]) > 100


def test_text_completion(openai_route: dict[str, Any], model: str) -> None:
    asked = {**openai_route, "model": f"text-completion-openai/{model}"}
    answer = litellm.text_completion(prompt="1, 2, 3, 4,", max_tokens=8, **asked)
    assert answer.choices[0].text.startswith(" 5, 6")


def test_the_route_to_messages(url: str, model: str) -> None:
    asked = {"model": f"anthropic/{model}", "api_base": url, "api_key": "none", "max_tokens": 32, "num_retries": 0}
    whole = litellm.completion(messages=HI, **asked)
    assert whole.choices[0].message.content
    chunks = list(litellm.completion(messages=HI, stream=True, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

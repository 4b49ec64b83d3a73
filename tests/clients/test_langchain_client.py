"""`langchain-openai` as its users call it: streaming, structured output, tools."""

from __future__ import annotations

from typing import Any, Literal

import pytest

langchain_openai = pytest.importorskip("langchain_openai")
BaseModel: Any = pytest.importorskip("pydantic").BaseModel


class Verdict(BaseModel):  # type: ignore[misc]
    """A verdict on what was said."""

    mood: Literal["good", "bad"]
    is_sure: bool


class GetWeather(BaseModel):  # type: ignore[misc]
    """The weather in a city."""

    city: Literal["Paris", "Rome"]


@pytest.fixture(scope="module")
def chat(url: str, model: str) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=64, max_retries=0
    )


def test_invoke_and_stream_say_the_same(chat: Any) -> None:
    whole = chat.invoke("Say hello.")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream("Say hello.")) == whole.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, method: str) -> None:
    verdict = chat.with_structured_output(Verdict, method=method).invoke("I like it.")
    assert isinstance(verdict, Verdict)


def test_tool_calling(chat: Any) -> None:
    answer = chat.bind_tools([GetWeather], tool_choice="any").invoke("What is the weather in Paris?")
    assert {call["name"] for call in answer.tool_calls} == {"GetWeather"}
    assert answer.tool_calls[0]["args"]["city"] in ("Paris", "Rome")


def test_batch(chat: Any) -> None:
    assert len(chat.batch(["Say hello.", "Say goodbye."])) == 2

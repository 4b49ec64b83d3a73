"""`instructor` as its users call it: a pydantic model out of each of its modes that need no other server."""

from __future__ import annotations

from typing import Any, Literal

import pytest

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")
BaseModel: Any = pytest.importorskip("pydantic").BaseModel


class Verdict(BaseModel):  # type: ignore[misc]
    """A verdict on what was said."""

    mood: Literal["good", "bad"]
    is_sure: bool


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_model_is_filled_in(url: str, model: str, mode: str) -> None:
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
    verdict = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "I like it."}],
        response_model=Verdict,
        max_tokens=100,
        temperature=0,
        parallel_tool_calls=False,
        max_retries=0,
    )
    assert isinstance(verdict, Verdict)

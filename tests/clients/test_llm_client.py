"""The command `llm` with its OpenAI plugin, set up as its documentation says for a server of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llm")


@pytest.fixture
def environment(url: str, model: str, tmp_path: Path) -> dict[str, str]:
    entry = f"- model_id: mine\n  model_name: {model}\n  api_base: {url}/v1\n  api_key_name: mine\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry)
    (tmp_path / "keys.json").write_text('{"mine": "none"}')
    return {**os.environ, "LLM_USER_PATH": str(tmp_path)}


def ask(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "llm", "-m", "mine", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=200).stdout


@pytest.mark.parametrize("flag", ["--no-stream", ""])
def test_a_prompt(environment: dict[str, str], flag: str) -> None:
    assert ask(environment, "Say hello.", "-o", "max_tokens", "16", *filter(None, [flag])).strip()


def test_a_conversation_goes_on(environment: dict[str, str]) -> None:
    first = ask(environment, "My name is Ada.", "-o", "max_tokens", "16", "-o", "temperature", "0")
    second = ask(environment, "Say hello.", "-c", "-o", "max_tokens", "16", "-o", "temperature", "0")
    assert first.strip()
    assert second.strip()

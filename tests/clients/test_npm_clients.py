"""The npm packages `openai` and `ai` with `@ai-sdk/openai-compatible`: scripts that end with 0 if all is well."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "npm"
NODE = shutil.which("node")


@pytest.mark.parametrize(
    ("script", "packages"),
    [("openai.mjs", ["openai"]), ("ai_sdk.mjs", ["ai", "@ai-sdk/openai-compatible"])],
    ids=["openai", "ai"],
)
def test_an_npm_client(url: str, model: str, script: str, packages: list[str]) -> None:
    if NODE is None:
        pytest.skip("node is not installed")
    missing = [name for name in packages if not (FOLDER / "node_modules" / name).is_dir()]
    if missing:
        pytest.skip(f"npm could not install {', '.join(missing)}")
    environment = {**os.environ, "BASE_URL": f"{url}/v1", "MODEL": model}
    result = subprocess.run(
        [NODE, script], cwd=FOLDER, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert result.returncode == 0, result.stdout + result.stderr

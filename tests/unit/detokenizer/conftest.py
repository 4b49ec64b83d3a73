"""Real vocabularies, and a detokenizer process with its peers."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.detokenizer.incremental import TokenPieces
from services.model_files.source import open_model
from services.model_files.vocabulary import load_vocabulary
from tests.unit.detokenizer.peers import Group


@pytest.fixture(scope="module")
def group(smollm2_path: Path) -> Iterator[Group]:
    group = Group(smollm2_path)
    group.add_tokenizer()
    yield group
    group.close()


@pytest.fixture(scope="session")
def smollm2_pieces(smollm2_path: Path) -> TokenPieces:
    """The tokens of the demo model (byte-level, 49,152 entries)."""
    return TokenPieces(load_vocabulary(open_model(smollm2_path)))


@pytest.fixture(scope="session")
def qwen_ranks() -> dict[bytes, int]:
    """Qwen's published vocabulary: bytes -> id, 151,643 entries, with many that end inside a Chinese character."""
    spec = importlib.util.find_spec("dashscope")
    assert spec is not None, "install dashscope==2.0.2 with --no-deps"
    folder = Path(next(iter(spec.submodule_search_locations or ())))
    lines = (folder / "resources" / "qwen.tiktoken").read_bytes().split()
    return {base64.b64decode(token): int(rank) for token, rank in zip(lines[::2], lines[1::2], strict=True)}

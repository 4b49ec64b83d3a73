"""Tokenizer process: how the served model writes calls and thoughts, found out once from its chat template.

    template shows tools in a known form   -> its form
    template shows none, or in another     -> tools are rendered in the default form, and the model is read as Hermes

Pure; owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.model_files.errors import ModelFileError
from services.tokenizer.reasoning import ReasoningMarks
from services.tokenizer.tool_families import HERMES, ToolFamily, family_in, family_named

REASONING_PARSERS = ("auto", "none", "qwen3", "qwen3-thinking", "deepseek_r1", "deepseek-r1")
_ALWAYS_OPEN = ("qwen3-thinking", "deepseek_r1", "deepseek-r1")


@dataclass(frozen=True)
class DialectNames:
    """The settings `--tool-call-parser` and `--reasoning-parser`."""

    tools: str = "auto"
    reasoning: str = "auto"


@dataclass(frozen=True)
class Dialect:
    """How a model writes.

    Attributes:
        family: How it writes calls; None when tools are turned off.
        marks: How it writes thoughts; None when it writes none, or they are not to be taken apart.
        shows_tools: Whether its template shows tools, calls and tools' answers itself.
        switches: The variables that its templates look at.
    """

    family: ToolFamily | None
    marks: ReasoningMarks | None
    shows_tools: bool
    switches: frozenset[str]


def dialect_of(sources: Mapping[str, str], variables: Mapping[str, Iterable[str]], names: DialectNames) -> Dialect:
    """The dialect of a model.

    Args:
        sources: Its templates by name; `tool_use` is the one for requests with tools if it is there.
        variables: For each template the variables that it looks at.
        names: What the operator says.

    Raises:
        ModelFileError: calls are to be read in a form that neither the template nor the default form asks for.
    """
    with_tools = "tool_use" if "tool_use" in sources else "default"
    source = sources.get(with_tools, "")
    looks_at_tools = "tools" in variables.get(with_tools, ())
    family = family_in(source) if names.tools in ("auto", "none") else family_named(names.tools, source)
    shows_tools = looks_at_tools and family is not None
    if not shows_tools and names.tools not in ("auto", "none") and family is not HERMES:
        problem = f"shows no tools: calls are asked for as hermes, so --tool-call-parser {names.tools} finds none"
        raise ModelFileError(Path("the chat template"), problem)
    return Dialect(
        family=None if names.tools == "none" else family if shows_tools else HERMES,
        marks=_marks(sources.get("default", ""), names.reasoning),
        shows_tools=shows_tools,
        switches=frozenset().union(*variables.values()),
    )


def _marks(source: str, name: str) -> ReasoningMarks | None:
    if name == "none":
        return None
    marks = ReasoningMarks(is_always_open=name in _ALWAYS_OPEN)
    return marks if name != "auto" or (marks.opening in source and marks.closing in source) else None

"""How a model writes calls and thoughts is found out from its template, and set where that is not enough."""

from __future__ import annotations

import typing

import jinja2
import pytest
from jinja2 import meta

from services.model_files.errors import ModelFileError
from services.runtime.config import Settings, SettingsError
from services.tokenizer.dialect import REASONING_PARSERS, Dialect, DialectNames, dialect_of
from services.tokenizer.reasoning import ReasoningMarks
from services.tokenizer.tool_families import HERMES, LLAMA3, MISTRAL, MISTRAL_LIST, PYTHONIC, TOOL_PARSERS, ToolFamily
from tests.unit.tokenizer import model_templates as templates


def dialect(source: str, tools: str = "auto", reasoning: str = "auto", **more: str) -> Dialect:
    sources = {"default": source, **more}
    variables = {
        name: meta.find_undeclared_variables(jinja2.Environment().parse(text)) for name, text in sources.items()
    }
    return dialect_of(sources, variables, DialectNames(tools, reasoning))


@pytest.mark.parametrize(
    ("source", "family", "shows_tools"),
    [
        (templates.QWEN25, HERMES, True),
        (templates.QWEN3, HERMES, True),
        (templates.LLAMA3, LLAMA3, True),
        (templates.MISTRAL, MISTRAL, True),
        (templates.MISTRAL_LIST, MISTRAL_LIST, True),
        (templates.PYTHONIC, PYTHONIC, True),
        (templates.PLAIN, HERMES, False),
        (templates.XML, HERMES, False),
        ("", HERMES, False),
    ],
)
def test_families_are_told_by_their_templates(source: str, family: ToolFamily, shows_tools: bool) -> None:
    found = dialect(source)
    assert found.family is family
    assert found.shows_tools is shows_tools


def test_the_template_for_tools_decides_where_there_is_one() -> None:
    assert dialect(templates.PLAIN, tool_use=templates.MISTRAL).family is MISTRAL


def test_cht_11_thoughts_are_told_by_the_template_too() -> None:
    assert dialect(templates.QWEN25).marks is None
    assert dialect(templates.QWEN3).marks == ReasoningMarks()
    assert dialect(templates.QWEN3, reasoning="none").marks is None
    assert dialect(templates.PLAIN, reasoning="qwen3").marks == ReasoningMarks()
    assert dialect(templates.PLAIN, reasoning="deepseek_r1").marks == ReasoningMarks(is_always_open=True)


def test_an_operators_word_on_calls() -> None:
    assert dialect(templates.QWEN25, tools="none").family is None
    assert dialect(templates.XML, tools="hermes").shows_tools
    assert dialect(templates.PLAIN, tools="qwen25").family is HERMES
    assert dialect(templates.MISTRAL_LIST, tools="mistral").family is MISTRAL_LIST
    with pytest.raises(ModelFileError, match="--tool-call-parser mistral finds none"):
        dialect(templates.PLAIN, tools="mistral")


def test_the_names_are_those_that_the_settings_take() -> None:
    hints = {
        field.name: field.metadata["choices"]
        for field in typing.cast(typing.Any, Settings).__dataclass_fields__.values()
    }
    assert hints["tool_call_parser"] == TOOL_PARSERS
    assert hints["reasoning_parser"] == REASONING_PARSERS
    with pytest.raises(SettingsError, match="--tool-call-parser must be one of auto, none, hermes"):
        Settings(tool_call_parser="xml")

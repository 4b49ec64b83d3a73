"""Plans: which grammar and which parsers a chat's answers get, from its fields and from the end of its prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.model_files.tokenizer import LoadedTokenizer
from services.model_files.tokenizer_config import AddedToken
from services.runtime.config import Settings
from services.tokenizer.answer_plan import AnswerPlan, AnswerPlanner
from services.tokenizer.api_error import ApiError
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.control_tokens import ControlTokens
from services.tokenizer.openai_schema import parse_chat
from services.tokenizer.structured_output import StructureLimits
from services.tokenizer.template_sandbox import RenderLimits
from services.tokenizer.tool_requests import tool_use_of
from tests.unit.tokenizer import model_templates as templates
from tests.unit.tokenizer.answer_texts import Answer, parsed
from tests.unit.tokenizer.small_models import small_model

SETTINGS = Settings()
LIMITS = StructureLimits.of(SETTINGS)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}]


def loaded(folder: Path, template: str) -> LoadedTokenizer:
    return small_model(folder, template)


def plan(
    model: LoadedTokenizer, prompt_end: str = "assistant\n", knows: LoadedTokenizer | None = None, **fields: Any
) -> AnswerPlan:
    """The plan for a chat; `knows` is the tokenizer that the planner knows, the model's own if None."""
    dialect = ChatTemplate(model, ControlTokens(model), RenderLimits(10_000)).dialect
    body, _ = parse_chat({"messages": [{"role": "user", "content": "Hi"}], **fields}, SETTINGS)
    prompt = model.tokenizer.encode(prompt_end, add_special_tokens=False).ids
    structure = body.grammar(SETTINGS)
    return AnswerPlanner(knows or model, dialect, LIMITS).plan(
        body, tool_use_of(body, LIMITS.schema), prompt, structure
    )


def test_a_chat_with_neither_tools_nor_thoughts_has_no_parser(tmp_path: Path) -> None:
    model = loaded(tmp_path, templates.PLAIN)
    assert plan(model) == AnswerPlan()
    structured = plan(model, response_format={"type": "json_object"})
    assert structured.parsers is None
    assert structured.grammar is not None


@pytest.mark.parametrize("prompt_end", ["<think>\n", "x<think>", "a" * 200 + "<think>\n\n"])
def test_cht_11_the_end_of_the_prompt_tells_that_the_model_thinks(tmp_path: Path, prompt_end: str) -> None:
    made = plan(loaded(tmp_path, templates.QWEN3), prompt_end)
    assert made.parsers is not None
    assert parsed(made.parsers, "a</think>b") == Answer(content="b", reasoning="a")


@pytest.mark.parametrize("prompt_end", ["assistant\n", "<think>\n\n</think>\n\n", "what is <think> for?\nassistant\n"])
def test_cht_11_other_ends_leave_it_to_the_model(tmp_path: Path, prompt_end: str) -> None:
    made = plan(loaded(tmp_path, templates.QWEN3), prompt_end)
    assert made.parsers is not None
    assert parsed(made.parsers, "a</think>b") == Answer(content="a</think>b")
    assert parsed(made.parsers, "<think>a</think>b") == Answer(content="b", reasoning="a")


def test_marks_that_are_control_tokens_are_shown_and_go_by_id_in_grammars(tmp_path: Path) -> None:
    model = loaded(tmp_path, templates.MISTRAL)
    plain = plan(model, tools=TOOLS, tool_choice="required")
    assert not plain.shows_special_tokens
    assert plain.grammar is not None
    assert 'call: "[TOOL_CALLS]" object' in plain.grammar.text
    control = [AddedToken(41, "[TOOL_CALLS]", special=True), AddedToken(42, "[ARGS]", special=True)]
    marked = replace(model, control_tokens=(*model.control_tokens, *control))
    made = plan(model, tools=TOOLS, tool_choice="required", knows=marked)
    assert made.shows_special_tokens
    assert made.grammar is not None
    assert "call: <[41]> object" in made.grammar.text
    assert '"f" <[42]> a0' in made.grammar.text
    assert not plan(model, knows=marked).shows_special_tokens


def test_more_than_a_grammar_may_hold_is_refused(tmp_path: Path) -> None:
    wide = {"type": "object", "properties": {"a": {"enum": [f"{'x' * 1000}{index}" for index in range(200)]}}}
    many = [{"type": "function", "function": {"name": f"f{index}", "parameters": wide}} for index in range(6)]
    model = loaded(tmp_path, templates.PLAIN)
    assert plan(model, tools=many).grammar is None
    with pytest.raises(ApiError, match="a grammar of 12") as caught:
        plan(model, tools=many, tool_choice="required")
    assert caught.value.param == "tools"

"""Whatever stands in the fields of tools: a 400 that names a field, or a plan whose grammar can be sent."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.runtime.config import Settings
from services.tokenizer.api_error import ApiError
from services.tokenizer.json_schema_check import SchemaLimits
from services.tokenizer.openai_schema import parse_chat
from services.tokenizer.tool_families import CallForm
from services.tokenizer.tool_grammar import GrammarFrame, GrammarSetting, Thinking, answer_grammar
from services.tokenizer.tool_requests import ToolUse, tool_use_of
from services.wire.request_params import Grammar

SETTINGS = Settings()
LIMITS = SchemaLimits.of(SETTINGS)
FORMS: list[CallForm] = ["hermes", "llama3", "mistral", "mistral_list", "pythonic"]
WORDS = st.sampled_from(
    [
        "type",
        "function",
        "name",
        "f",
        "g",
        "get",
        "parameters",
        "properties",
        "required",
        "object",
        "string",
        "a b",
        "auto",
        "none",
        "description",
        "strict",
        "enum",
        "items",
        "$ref",
        "#/$defs/x",
        "$defs",
        "x-guidance",
        "additionalProperties",
        "uniqueItems",
        "",
        "数",
        "'\"\\\n",
    ]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=10,
)
SCHEMAS = VALUES | st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("object") | VALUES,
        "properties": st.dictionaries(WORDS, VALUES, max_size=3) | VALUES,
        "required": VALUES,
    },
)
FUNCTIONS = VALUES | st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "h"])},
    optional={"parameters": SCHEMAS, "strict": VALUES, "description": VALUES},
)
TOOLS = VALUES | st.lists(
    VALUES | st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS}), max_size=3
)
CHOICES = (
    VALUES | st.just("required") | st.just({"type": "function", "function": {"name": "f"}}) | st.just({"name": "f"})
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "tools": TOOLS,
            "tool_choice": CHOICES,
            "functions": TOOLS,
            "function_call": CHOICES,
            "parallel_tool_calls": VALUES,
        },
    ),
    st.sampled_from(FORMS),
    st.sampled_from(Thinking),
)
@example({"function_call": {"name": []}}, FORMS[0], next(iter(Thinking)))
@example({"tool_choice": {"type": "function", "function": {"name": {}}}}, FORMS[0], next(iter(Thinking)))
@example({"tool_choice": {"type": []}}, FORMS[0], next(iter(Thinking)))
@settings(max_examples=250, deadline=None)
def test_fields_of_tools_are_understood_or_refused_by_name(
    fields: dict[str, Any], form: CallForm, thinking: Thinking
) -> None:
    refused, use, grammar = _understood(fields, form, thinking)
    if refused is not None:
        assert refused.status == 400
        assert refused.param is not None
        assert refused.param.split("[")[0].split(".")[0] in fields
    if use is not None:
        assert use.names
        assert [function.rendered() for function in use.functions]
        assert grammar is not None or not use.must_call
    if grammar is not None:
        grammar.text.encode()


def _understood(
    fields: dict[str, Any], form: CallForm, thinking: Thinking
) -> tuple[ApiError | None, ToolUse | None, Grammar | None]:
    try:
        body, _ = parse_chat({"messages": [{"role": "user", "content": "Hi"}], **fields}, SETTINGS)
        use = tool_use_of(body, LIMITS)
        grammar = answer_grammar(GrammarFrame(GrammarSetting({}, LIMITS), thinking), form, use, None)
    except ApiError as error:
        return error, None, None
    return None, use, grammar

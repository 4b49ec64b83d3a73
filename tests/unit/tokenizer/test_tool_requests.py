"""What chats say about tools: read in both spellings, and refused by name where it means nothing."""

from __future__ import annotations

from typing import Any

import pytest

from services.runtime.config import Settings
from services.tokenizer.api_error import ApiError
from services.tokenizer.json_schema_check import SchemaLimits
from services.tokenizer.openai_schema import parse_chat
from services.tokenizer.tool_requests import ToolUse, tool_use_of

LIMITS = SchemaLimits(max_bytes=10_000, max_properties=100, max_depth=10)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
F = {"name": "f", "description": "does 事", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": F}, {"type": "function", "function": {"name": "g"}}]
NAMED = {"type": "function", "function": {"name": "g"}}


def use_of(**fields: Any) -> ToolUse | None:
    body, _ = parse_chat({"messages": [{"role": "user", "content": "Hi"}], **fields}, Settings())
    return tool_use_of(body, LIMITS)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        use_of(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("choice", [None, "auto"])
def test_tools_that_may_be_called(choice: str | None) -> None:
    use = use_of(tools=TOOLS, tool_choice=choice)
    assert use is not None
    assert use.names == {"f", "g"}
    assert (use.must_call, use.only, use.max_calls, use.is_legacy) == (False, None, None, False)
    assert [function.rendered() for function in use.functions] == TOOLS


def test_str_07_which_function_must_be_called() -> None:
    required, named = use_of(tools=TOOLS, tool_choice="required"), use_of(tools=TOOLS, tool_choice=NAMED)
    assert required is not None
    assert named is not None
    assert required.must_call
    assert required.names == {"f", "g"}
    assert named.must_call
    assert named.names == {"g"}
    assert len(named.functions) == 2
    assert (
        refused(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "h"}}).param
        == "tool_choice.function.name"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": []},
        {"tools": None},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"functions": []},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"functions": [F], "function_call": "none"},
    ],
)
def test_nothing_to_call(fields: dict[str, Any]) -> None:
    assert use_of(**fields) is None


def test_one_call_at_most() -> None:
    use = use_of(tools=TOOLS, parallel_tool_calls=False)
    assert use is not None
    assert use.max_calls == 1


def test_the_older_spelling() -> None:
    use = use_of(functions=[F])
    assert use is not None
    assert (use.is_legacy, use.max_calls, use.must_call) == (True, 1, False)
    assert [function.rendered() for function in use.functions] == TOOLS[:1]
    named = use_of(functions=[F], function_call={"name": "f"})
    assert named is not None
    assert (named.must_call, named.only) == (True, "f")
    assert refused(functions=[F], function_call={"name": "g"}).param == "function_call.name"
    assert refused(functions=[F], function_call="required").param == "function_call"
    assert refused(functions=[F], tools=TOOLS).param == "functions"
    assert refused(functions=[{"name": ""}]).param == "functions[0].name"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "n" * 129}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "数"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "description": 5}}]}, "tools[0].function.description"),
        ({"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [{"function": {"name": "f", "parameters": "{}"}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "parameters": {"x": "y" * 10_000}}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": ["null"]}}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": None}}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": 5}}}]}, "tools[0].function.parameters"),
        (
            {"tools": [*TOOLS, {"function": {"name": "h", "parameters": {"properties": []}}}]},
            "tools[2].function.parameters.properties",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": 5}}}}]},
            "tools[0].function.parameters.properties",
        ),
        ({"functions": [{"name": "f", "parameters": {"required": "a"}}]}, "functions[0].parameters.required"),
        ({"functions": [{"name": "f", "parameters": {"type": "array"}}]}, "functions[0].parameters"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        ({"tools": [{"function": {"name": f"f{index}"}} for index in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"stream_reasoning": 1}, "stream_reasoning"),
    ],
)
def test_what_means_nothing_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_unknown_keys_of_tools_are_named() -> None:
    tool = {"type": "function", "cache_control": {}, "function": {**F, "strict": True, "x": 1}}
    use = use_of(tools=[tool, {**tool, "function": {"name": "g", "x": 2}}])
    assert use is not None
    assert list(use.ignored) == ["tools[].cache_control", "tools[].function.x"]
    assert [function.is_strict for function in use.functions] == [True, False]
    assert use.functions[0].rendered() == TOOLS[0]


@pytest.mark.parametrize("kind", ["object", ["object", "null"], ["null", "object"]])
def test_a_schema_that_an_object_fits_is_held_as_that_of_an_object(kind: object) -> None:
    use = use_of(tools=[{"function": {"name": "f", "parameters": {**PARAMETERS, "type": kind}}}])
    assert use is not None
    assert use.functions[0].argument_schema(LIMITS) == {**PARAMETERS, "additionalProperties": False}


def test_schemas_for_grammars() -> None:
    use = use_of(tools=TOOLS)
    assert use is not None
    assert use.functions[0].argument_schema(LIMITS) == {**PARAMETERS, "additionalProperties": False}
    assert use.functions[1].argument_schema(LIMITS) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }

"""Tokenizer process: what a chat says about tools, checked: which functions there are and which must be called.

`functions` and `function_call`, the older spelling, become the same thing. Pure; knows no model family.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from services.tokenizer.api_error import ApiError, Code, bad_field
from services.tokenizer.json_schema_check import SchemaLimits, check_size, checked_schema
from services.tokenizer.json_schema_numbers import without_inexact
from services.tokenizer.openai_schema import ChatBody

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_TOOL_KEYS = ("type", "function")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_CHOICES = ("none", "auto", "required")
_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class DeclaredFunction:
    """One function that the model may call.

    Attributes:
        name: Unique in the request.
        description: "" for none.
        parameters: The JSON schema of its arguments, which are an object, as the client wrote it; None for none.
        is_strict: Whether arguments must fit the schema whenever the model calls it.
        param: Where the client wrote it, for errors.
    """

    name: str
    description: str
    parameters: Mapping[str, object] | None
    is_strict: bool
    param: str

    def rendered(self) -> dict[str, object]:
        """As chat templates expect it."""
        function: dict[str, object] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}

    def argument_schema(self, limits: SchemaLimits) -> dict[str, object]:
        """The schema that a grammar can hold the arguments to; of a function that is not strict as much as can be.

        Raises:
            ApiError: 400 naming the place: a schema that means nothing; strict, and a keyword not enforced.
        """
        if self.parameters is None:
            return dict(_NO_PARAMETERS)
        whole = {**self.parameters, "type": "object"}
        try:
            return checked_schema(whole, self.param, limits)
        except ApiError as error:
            if self.is_strict or error.code != Code.UNSUPPORTED_VALUE:
                raise
        kept = without_inexact(whole)
        assert isinstance(kept, dict)
        return {**kept, "x-guidance": {"lenient": True}}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        functions: At least one.
        must_call: Whether the answer has to be a call.
        only: The one function that may be called; None for any.
        max_calls: Most calls of an answer; None for no limit.
        is_legacy: Whether the client speaks of `functions` and wants a `function_call` back.
        ignored: Keys of the tools that mean nothing here, as places such as `tools[].function.NAME`.
    """

    functions: Sequence[DeclaredFunction]
    must_call: bool = False
    only: str | None = None
    max_calls: int | None = None
    is_legacy: bool = False
    ignored: Sequence[str] = field(default=())

    @property
    def callable_functions(self) -> Sequence[DeclaredFunction]:
        """Those that the choice leaves."""
        return [function for function in self.functions if self.only in (None, function.name)]

    @property
    def names(self) -> frozenset[str]:
        """What a call may be of."""
        return frozenset(function.name for function in self.callable_functions)


def tool_use_of(body: ChatBody, limits: SchemaLimits) -> ToolUse | None:
    """What a chat wants of tools; None when it has none, or wants none called.

    Raises:
        ApiError: 400 naming the field.
    """
    is_legacy = bool(body.functions)
    if is_legacy and body.tools:
        raise bad_field("functions", "cannot go together with tools")
    choice_param = "function_call" if body.function_call is not None and not body.tools else "tool_choice"
    choice = body.tool_choice if choice_param == "tool_choice" else body.function_call
    ignored: dict[str, None] = {}
    functions = list(_functions(body, limits, ignored))
    _check_unique(functions)
    must_call, only = _choice(choice, choice_param, functions)
    if not functions or choice == "none":
        return None
    is_single = is_legacy or body.parallel_tool_calls is False
    return ToolUse(functions, must_call, only, 1 if is_single else None, is_legacy, tuple(ignored))


def _functions(body: ChatBody, limits: SchemaLimits, ignored: dict[str, None]) -> Iterator[DeclaredFunction]:
    field_name = "functions" if body.functions else "tools"
    items: Sequence[object] = body.functions or body.tools or ()
    if len(items) > MAX_TOOLS:
        raise bad_field(field_name, f"{len(items)} are too many, at most {MAX_TOOLS}")
    for index, item in enumerate(items):
        place = f"{field_name}[{index}]"
        if field_name == "tools":
            tool = _object(item, place)
            if tool.get("type", "function") != "function":
                raise bad_field(f"{place}.type", "only functions can be called", Code.UNSUPPORTED_VALUE)
            ignored.update((f"tools[].{key}", None) for key in tool if key not in _TOOL_KEYS)
            yield _function(tool.get("function"), f"{place}.function", limits, ignored)
        else:
            yield _function(item, place, limits, ignored)


def _function(value: object, place: str, limits: SchemaLimits, ignored: dict[str, None]) -> DeclaredFunction:
    function = _object(value, place)
    name, description, strict = function.get("name"), function.get("description"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_field(f"{place}.name", "must be 1 to 128 letters, digits and `_-.:`")
    if not isinstance(description, str | None):
        raise bad_field(f"{place}.description", "must be a text")
    if not isinstance(strict, bool | None):
        raise bad_field(f"{place}.strict", "must be true or false")
    parameters = function.get("parameters")
    schema_place = f"{place}.parameters"
    schema = None if parameters is None else _object(parameters, schema_place)
    if schema is not None:
        check_size(schema, schema_place, limits)
        _check_is_of_object(schema, schema_place)
    general = re.sub(r"\[\d+\]", "[]", place)
    ignored.update((f"{general}.{key}", None) for key in function if key not in _FUNCTION_KEYS)
    return DeclaredFunction(name, description or "", schema, bool(strict), schema_place)


def _check_is_of_object(schema: Mapping[str, object], place: str) -> None:
    """Arguments are an object with named members, which is all that a template and a parser know to do with them."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise bad_field(place, "must be the schema of an object: its type must be object")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(value, dict | bool) for value in properties.values()):
        raise bad_field(f"{place}.properties", "must be an object of schemas")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_field(f"{place}.required", "must be a list of names")


def _object(value: object, place: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise bad_field(place, "must be an object")
    return value


def _check_unique(functions: Sequence[DeclaredFunction]) -> None:
    seen: set[str] = set()
    for function in functions:
        if function.name in seen:
            place = function.param.removesuffix(".parameters")
            raise bad_field(f"{place}.name", f"{function.name} is declared twice")
        seen.add(function.name)


def _choice(choice: object, param: str, functions: Sequence[DeclaredFunction]) -> tuple[bool, str | None]:
    """Whether a call must come, and of which function alone."""
    if choice is None or isinstance(choice, str):
        allowed = _CHOICES if param == "tool_choice" else _CHOICES[:2]
        if choice is not None and choice not in allowed:
            raise bad_field(param, f"must be {', '.join(allowed)} or the name of a function in an object")
        if choice == "required" and not functions:
            raise bad_field(param, "there are no tools to call")
        return choice == "required", None
    name, place = _chosen_name(_object(choice, param), param)
    if name not in [function.name for function in functions]:  # it may be anything: a list cannot be in a set
        raise bad_field(place, "is no declared function")
    return True, name


def _chosen_name(choice: Mapping[str, object], param: str) -> tuple[object, str]:
    if param == "function_call":
        return choice.get("name"), "function_call.name"
    if choice.get("type", "function") != "function":
        raise bad_field("tool_choice.type", "only a function can be chosen", Code.UNSUPPORTED_VALUE)
    return _object(choice.get("function"), "tool_choice.function").get("name"), "tool_choice.function.name"

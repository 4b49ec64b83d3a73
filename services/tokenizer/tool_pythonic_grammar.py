r"""Tokenizer process: the grammar of a Python call whose arguments fit a JSON schema.

    f1: "get_weather(" (...) ")"      keywords in the schema's order, those that are not required may be left out

Values are written as JSON, which the parser of these calls reads too. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from services.tokenizer.api_error import Code, bad_field
from services.tokenizer.json_schema_check import SchemaLimits
from services.tokenizer.tool_requests import DeclaredFunction

_KEPT = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "x-guidance"})


def pythonic_calls(
    index: int,
    function: DeclaredFunction,
    limits: SchemaLimits,
    json_rule: Callable[[Mapping[str, object]], str],
) -> Sequence[str]:
    """The rules of one function's calls; the first is named `f` and its index.

    Raises:
        ApiError: 400 naming the schema: its arguments are no fixed list of keywords.
    """
    schema = function.argument_schema(limits)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise bad_field(function.param, "is no schema of an object")
    odd = [*(schema.keys() - _KEPT), *(name for name in properties if not name.isidentifier())]
    if odd and (function.is_strict or not all(name.isidentifier() for name in properties)):
        problem = f"{odd[0]!r} cannot be kept in a call that is written as Python"
        raise bad_field(function.param, problem, Code.UNSUPPORTED_VALUE)
    shared: dict[str, object] = {key: schema[key] for key in ("$defs", "x-guidance") if key in schema}
    lines: list[str] = []
    for number, (name, value) in enumerate(properties.items()):
        whole: dict[str, object] = dict(value) if isinstance(value, Mapping) else {}
        whole.update(shared)
        lines += [f'k{index}x{number}: "{name}=" v{index}x{number}', f"v{index}x{number}: {json_rule(whole)}"]
    lines += _keywords(index, [name in required for name in properties])
    return [f'f{index}: "{function.name}(" first{index}x0 ")"', *lines]


def _keywords(index: int, are_required: Sequence[bool]) -> Sequence[str]:
    """Rules for the keywords from each one on: `first` when none came before, `next` when one did."""
    lines: list[str] = []
    for number, is_required in enumerate(are_required):
        keyword = f"k{index}x{number}"
        for state, comma in (("first", ""), ("next", '", " ')):
            taken = f"{comma}{keyword} next{index}x{number + 1}"
            skipped = "" if is_required else f" | {state}{index}x{number + 1}"
            lines.append(f"{state}{index}x{number}: {taken}{skipped}")
    end = len(are_required)
    return [*lines, f'first{index}x{end}: ""', f'next{index}x{end}: ""']

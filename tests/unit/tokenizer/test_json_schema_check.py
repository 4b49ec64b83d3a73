"""What becomes of a client's JSON schema: what is enforced is passed on, what is not is refused with its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher

from services.gpu_worker.grammar_vocabulary import library_tokenizer
from services.tokenizer import json_schema_keywords as keywords
from services.tokenizer.api_error import ApiError
from services.tokenizer.json_schema_check import SchemaLimits, checked_schema
from tests.unit.gpu_worker.grammar_models import byte_vocabulary

LIMITS = SchemaLimits(max_bytes=256 * 1024, max_properties=5000, max_depth=32)
CLOSED = {"additionalProperties": False}


def checked(schema: object, limits: SchemaLimits = LIMITS) -> dict[str, Any]:
    return checked_schema(schema, "response_format.json_schema.schema", limits)


def refusal(schema: object, limits: SchemaLimits = LIMITS) -> str:
    with pytest.raises(ApiError) as caught:
        checked(schema, limits)
    assert caught.value.status == 400
    assert caught.value.param == "response_format.json_schema.schema"
    return str(caught.value.message)


def library_problems(schema: object) -> list[str]:
    text = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    is_error, problems = LLMatcher.validate_grammar_with_warnings(text)
    assert is_error == bool(problems)
    return problems


EXAMPLES: dict[str, dict[str, Any]] = {
    "type": {"type": ["string", "null"]},
    "enum": {"enum": ["a", 1, None, {"b": [True]}]},
    "const": {"const": {"a": "日本"}},
    "anyOf": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    "allOf": {"allOf": [{"type": "string"}, {"maxLength": 3}]},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
    "items": {"type": "array", "items": {"type": "string"}},
    "additionalItems": {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
    "minItems": {"type": "array", "minItems": 1},
    "maxItems": {"type": "array", "maxItems": 3},
    "properties": {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False},
    "patternProperties": {"type": "object", "patternProperties": {"^a": {"type": "string"}}},
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "integer"}},
    "required": {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
    "minProperties": {"type": "object", "minProperties": 1},
    "maxProperties": {"type": "object", "maxProperties": 2},
    "minLength": {"type": "string", "minLength": 1},
    "maxLength": {"type": "string", "maxLength": 3},
    "pattern": {"type": "string", "pattern": "^[a-z]+$"},
    "format": {"type": "string", "format": "date"},
    "minimum": {"type": "integer", "minimum": 3},
    "maximum": {"type": "number", "maximum": 3.5},
    "exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 3},
    "exclusiveMaximum": {"type": "number", "exclusiveMaximum": 3},
    "multipleOf": {"type": "number", "multipleOf": 0.01},
    "$ref": {"$ref": "#/$defs/0", "$defs": {"0": {"type": "string"}}},
}


def enforced_keywords() -> Iterator[str]:
    yield from keywords.SCHEMA_MAPS | keywords.SCHEMA_LISTS | keywords.COUNTS | keywords.NUMBERS
    yield from ("type", "enum", "const", "items", "additionalItems", "additionalProperties", "required", "pattern")
    yield from ("format", "$ref")


@pytest.mark.parametrize("keyword", sorted(set(enforced_keywords())))
def test_what_is_passed_on_the_library_takes(keyword: str) -> None:
    copy = checked(EXAMPLES[keyword])
    assert copy == EXAMPLES[keyword]
    assert library_problems(copy) == []


@pytest.mark.parametrize("keyword", sorted(keywords.UNENFORCED.keys() - {"nullable", "$recursiveAnchor"}))
def test_what_is_refused_the_library_does_not_enforce(keyword: str) -> None:
    assert library_problems({"type": "object", keyword: {}})


@pytest.mark.parametrize("name", sorted(keywords.FORMATS))
def test_every_format_that_is_passed_on_is_enforced(name: str) -> None:
    assert library_problems({"type": "string", "format": name}) == []


@pytest.mark.parametrize(
    ("schema", "place", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "#:", "uniqueItems would not be enforced"),
        ({"type": "object", "properties": {"a/b": {"not": {"type": "null"}}}}, "#/properties/a~1b:", "not would"),
        ({"anyOf": [{"type": "null"}, {"if": {}, "then": {}}]}, "#/anyOf/1:", "if would"),
        ({"items": {"contains": {}}}, "#/items:", "contains would"),
        ({"$ref": "#/$defs/日本", "$defs": {"日本": {"nullable": True}}}, "#/$defs/日本:", "nullable would"),
        ({"type": "string", "format": "iri"}, "#:", "format iri would not be enforced"),
        ({"type": "integer", "format": "date"}, "#:", "format date would not be enforced"),
        ({"type": "string", "maxLenght": 3}, "#/maxLenght:", "no keyword"),
        ({"x-guidance": {"lenient": True}}, "#/x-guidance:", "no keyword"),
        ({"properties": {"a": {"$id": "urn:x"}}}, "#/properties/a:", "$id"),
        ({"$schema": "https://example.com/mine"}, "#:", "$schema"),
    ],
)
def test_what_would_not_be_enforced_is_named_with_its_place(schema: object, place: str, word: str) -> None:
    message = refusal(schema)
    assert place in message
    assert word in message


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ([], "an object"),
        ("text", "an object"),
        (3, "an object"),
        (False, "no value"),
        ({"type": "notatype"}, '"notatype" is no type'),
        ({"type": []}, "at least one type"),
        ({"type": 3}, "3 is no type"),
        ({"enum": []}, "not empty"),
        ({"enum": "a"}, "list of values"),
        ({"anyOf": []}, "not empty"),
        ({"anyOf": {}}, "list of schemas"),
        ({"allOf": [3]}, "#/allOf/0: a schema is an object"),
        ({"properties": []}, "must be an object"),
        ({"properties": {"a": "string"}}, "#/properties/a: a schema is an object"),
        ({"required": "a"}, "list of texts"),
        ({"required": [1]}, "list of texts"),
        ({"minLength": -1}, "from 0 up"),
        ({"minLength": True}, "from 0 up"),
        ({"maxItems": 1.5}, "from 0 up"),
        ({"minimum": "3"}, "must be a number"),
        ({"exclusiveMinimum": True}, "must be a number"),
        ({"multipleOf": 0}, "above 0"),
        ({"pattern": 3}, "must be a text"),
        ({"const": "x" * 20000}, "longer than 16384 bytes"),
    ],
)
def test_a_schema_of_the_wrong_form_is_refused(schema: object, word: str) -> None:
    assert word in refusal(schema)


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("#/$defs/nowhere", "is not in this schema"),
        ("#/$defs/list/3", "is not in this schema"),
        ("#anchor", "is not in this schema"),
        ("https://example.com/schema.json", "only # and #/... are"),
        ("other.json#/a", "only # and #/... are"),
        ("", "only # and #/... are"),
    ],
)
def test_references_out_of_the_schema_are_refused(target: str, word: str) -> None:
    assert word in refusal({"properties": {"a": {"$ref": target}}, "$defs": {"list": [{}, {}]}})


def test_references_lead_to_numbered_definitions_copied_once() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/definitions/a~1b"}, "b": {"$ref": "#/definitions/a~1b"}},
        "definitions": {"a/b": {"type": "string", "title": "left out"}, "unused": {"uniqueItems": True}},
    }
    assert checked(schema) == {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/0"}, "b": {"$ref": "#/$defs/0"}},
        **CLOSED,
        "$defs": {"0": {"type": "string"}},
    }


def test_a_schema_may_need_itself() -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    copy = checked({"$ref": "#/$defs/node", "$defs": {"node": node}})
    assert copy["$defs"]["0"]["properties"]["next"]["anyOf"][0] == {"$ref": "#/$defs/0"}
    assert library_problems(copy) == []
    assert checked({"properties": {"child": {"$ref": "#"}}})["properties"] == {"child": {"$ref": "#"}}


def test_an_object_with_listed_properties_is_closed_where_nothing_else_speaks_of_its_keys() -> None:
    listed = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert checked(listed) == listed | CLOSED
    assert checked({"items": listed})["items"] == listed | CLOSED
    assert checked({"anyOf": [listed, {"type": "null"}]})["anyOf"][0] == listed | CLOSED
    for kept in (
        listed | {"additionalProperties": True},
        listed | {"patternProperties": {"^b": {"type": "string"}}},
        listed | {"required": ["b"]},
        {"type": "object"},
    ):
        assert checked(kept) == kept


def test_parts_of_an_intersection_stay_open() -> None:
    left = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    right = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
    copy = checked({"allOf": [{"$ref": "#/$defs/l"}, right], "$defs": {"l": left}})
    assert copy == {"allOf": [{"$ref": "#/$defs/0"}, right], "$defs": {"0": left}}
    assert library_problems(copy) == []
    both_ways = checked(
        {"allOf": [{"$ref": "#/$defs/l"}], "properties": {"x": {"$ref": "#/$defs/l"}}, "$defs": {"l": left}}
    )
    assert both_ways["$defs"] == {"0": left, "1": left | CLOSED}


def test_what_says_nothing_is_left_out() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "urn:mine",
        "title": "T",
        "description": "d",
        "type": "array",
        "default": [],
        "examples": [[1]],
        "deprecated": True,
        "x-order": 3,
        "uniqueItems": False,
        "propertyNames": {},
        "minItems": 1.0,
    }
    assert checked(schema) == {"type": "array", "minItems": 1}


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [
        ({"type": "integer", "format": "int32"}, {"minimum": -(2**31), "maximum": 2**31 - 1}),
        ({"type": "integer", "format": "uint8", "minimum": 5, "maximum": 1000}, {"minimum": 5, "maximum": 255}),
        ({"type": "number", "format": "double"}, {}),
        ({"type": "object", "format": "anything"}, {}),
    ],
)
def test_formats_of_numbers_become_bounds(schema: dict[str, object], bounds: dict[str, int]) -> None:
    assert checked(schema) == {"type": schema["type"], **bounds}


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_a_schema_at_its_limits_is_taken_and_beyond_them_refused() -> None:
    assert checked(nested(32))
    assert "more than 32 deep" in refusal(nested(33))
    wide: dict[str, dict[str, object]] = {"properties": {f"p{index}": {} for index in range(5000)}}
    assert checked(wide)
    wide["properties"]["one more"] = {}
    assert "more than 5000 properties" in refusal(wide)
    small = SchemaLimits(max_bytes=64, max_properties=10, max_depth=4)
    assert checked({"const": "x" * 40}, small)
    assert "bytes, at most 64" in refusal({"const": "日" * 40}, small)
    value: object = 1
    for _ in range(40):
        value = [value]
    assert "more than 32 deep" in refusal({"const": value})


def test_str_01_a_schema_that_nests_without_end_is_refused_without_a_stack_overflow() -> None:
    value: dict[str, object] = {}
    for _ in range(100_000):
        value = {"items": value}
    assert "nested too deeply" in refusal(value)
    while value:  # its own end would be a stack overflow too
        value = value.pop("items")  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("name", "moment", "more"),
    [
        ("date-time", "2026-01-02T03:04:05", {}),
        ("time", "03:04:05", {}),
        ("time", "03:04:05", {"pattern": "^0"}),
        ("time", "03:04:05", {"pattern": "^0", "allOf": [{"maxLength": 40}]}),
        ("date-time", "2026-01-02T03:04:05", {"type": ["string", "null"]}),
    ],
)
def test_a_time_has_at_most_nine_digits_behind_its_second(name: str, moment: str, more: dict[str, Any]) -> None:
    copy = checked({"type": "string", "format": name, **more})
    tokenizer = library_tokenizer(byte_vocabulary(), 260)
    for zone in ("Z", "+00:00", "-23:59"):
        for num_digits in (0, 1, 8, 9, 10, 11, 15, 30):
            text = json.dumps(moment + ("." + "7" * num_digits if num_digits else "") + zone)
            matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(copy)), log_level=0)
            is_taken = matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()
            assert is_taken == (num_digits <= 9), (text, copy)
    early = checked({"type": "string", "format": name, **more, "maxLength": 22})
    assert early["maxLength"] == 22

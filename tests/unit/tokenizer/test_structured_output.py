"""Every spelling in which clients ask for structure becomes one grammar, or a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.runtime.config import Settings
from services.tokenizer.api_error import ApiError
from services.tokenizer.structured_output import StructureLimits, structure_of, structure_param
from services.wire.request_params import Grammar, GrammarKind

LIMITS = StructureLimits.of(Settings())
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
COMPACT = {"whitespace_flexible": False}


def asked(**fields: Any) -> Grammar | None:
    return structure_of(fields, LIMITS)


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    return caught.value


def schema_of(grammar: Grammar | None) -> dict[str, Any]:
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    found = json.loads(grammar.text)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "description": "d"}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": json.dumps(SCHEMA)},
        {"json_schema": SCHEMA, "response_format": {"type": "text"}},
    ],
)
def test_all_spellings_of_a_schema_are_the_same_grammar(fields: dict[str, object]) -> None:
    assert schema_of(asked(**fields)) == {"x-guidance": COMPACT, **SCHEMA, "additionalProperties": False}


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_json_object_means_an_object(fields: dict[str, object]) -> None:
    assert schema_of(asked(**fields)) == {"x-guidance": COMPACT, "type": "object"}


def test_white_space_is_a_setting() -> None:
    limits = StructureLimits.of(Settings(json_whitespace="flexible"))
    found = structure_of({"response_format": {"type": "json_object"}}, limits)
    assert schema_of(found)["x-guidance"] == {"whitespace_flexible": True}


@pytest.mark.parametrize(
    "fields", [{"structured_outputs": {"regex": "[a-z]+"}}, {"guided_regex": "[a-z]+"}, {"regex": "[a-z]+"}]
)
def test_all_spellings_of_a_regular_expression(fields: dict[str, object]) -> None:
    assert asked(**fields) == Grammar(GrammarKind.REGEX, "[a-z]+")


@pytest.mark.parametrize("name", ["guided_grammar", "ebnf"])
def test_all_spellings_of_ebnf(name: str) -> None:
    expected = Grammar(GrammarKind.EBNF, 'root ::= "日本"')
    assert asked(**{name: 'root ::= "日本"'}) == expected
    assert asked(structured_outputs={"grammar": 'root ::= "日本"'}) == expected


@pytest.mark.parametrize(
    "fields", [{"structured_outputs": {"choice": ['a"b', "日本", "😀"]}}, {"guided_choice": ['a"b', "日本", "😀"]}]
)
def test_a_choice_is_one_of_its_texts(fields: dict[str, object]) -> None:
    assert asked(**fields) == Grammar(GrammarKind.LARK, 'start: CHOICE\nCHOICE: "a\\"b" | "日本" | "😀"')


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {"json_object": False, "disable_any_whitespace": False}},
        {"guided_json": None, "regex": None},
    ],
)
def test_str_02_what_asks_for_nothing_is_free_text(fields: dict[str, object]) -> None:
    assert asked(**fields) is None


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"type": "json_schema", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": []}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "a b"}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": 1}}, "response_format.json_schema.strict"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "x": 1}}, "response_format.json_schema.x"),
        ({"type": "json_object", "json_schema": {}}, "response_format.json_schema"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": None}, "response_format.type"),
        ({}, "response_format.type"),
        ("json_object", "response_format"),
        (["text"], "response_format"),
    ],
)
def test_str_02_a_response_format_of_the_wrong_shape_is_named(value: object, param: str) -> None:
    assert refusal(response_format=value).param == param


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "notatype"}, "notatype"),
        ({"$ref": "#/$defs/node", "$defs": {"node": {"items": {"$ref": "#/$defs/nowhere"}}}}, "#/$defs/nowhere"),
        ({"enum": ["x" * 1000] * 1049}, "262144"),
    ],
)
def test_str_01_an_invalid_schema_is_refused_with_the_reason(schema: object, word: str) -> None:
    error = refusal(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert error.param == "response_format.json_schema.schema"
    assert word in error.message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"regex": "a"}, {"ebnf": 'root ::= "a"'}),
        ({"response_format": {"type": "json_object"}}, {"guided_choice": ["a"]}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    ],
)
def test_two_fields_for_structure_are_refused_naming_both(first: dict[str, object], second: dict[str, object]) -> None:
    error = refusal(**first, **second)
    assert error.param == next(iter(second))
    assert next(iter(first)) in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": None}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"regex": "a" * 20000}, "regex"),
        ({"ebnf": "start: /a/"}, "ebnf"),
        ({"ebnf": "root ::= " + '"a" ' * 100_000}, "ebnf"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_json": ""}, "guided_json"),
        ({"json_schema": ""}, "json_schema"),
        ({"regex": ""}, "regex"),
        ({"ebnf": ""}, "ebnf"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_choice": ["a", "x" * 20000]}, "guided_choice[1]"),
        ({"guided_choice": [f"{index:0300d}" for index in range(1000)]}, "guided_choice"),
    ],
)
def test_wrong_forms_and_sizes_are_named(fields: dict[str, object], param: str) -> None:
    assert refusal(**fields).param == param


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, None),
        ({"response_format": None, "regex": None}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": None, "regex": "a"}}, "structured_outputs.regex"),
        ({"guided_json": {"json_schema": 1}}, "guided_json"),
        ({"regex": None, "ebnf": "x"}, "ebnf"),
    ],
)
def test_the_place_of_a_grammar_is_the_one_that_the_client_wrote(fields: dict[str, object], place: str | None) -> None:
    assert structure_param(fields) == place

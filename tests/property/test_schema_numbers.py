"""Numbers in a JSON schema: what is taken is enforced to the last digit by the compiled grammar, all else is a 400."""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal, localcontext

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from services.gpu_worker.grammar_vocabulary import library_tokenizer
from services.tokenizer.api_error import ApiError
from services.tokenizer.json_schema_check import SchemaLimits, checked_schema
from services.tokenizer.tool_requests import DeclaredFunction
from tests.unit.gpu_worker.grammar_models import byte_vocabulary

LIMITS = SchemaLimits(max_bytes=256 * 1024, max_properties=5000, max_depth=32)
_REFUSALS = ("Unsatisfiable", "fuel exhausted")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

edges = st.sampled_from([2**53, 2**63, 2**64, 10**15, 10**19, 0]).flatmap(
    lambda edge: st.integers(-2, 2).flatmap(lambda away: st.sampled_from([edge + away, -edge + away]))
)
wholes = st.one_of(st.integers(-1000, 1000), st.integers(-(2**54), 2**54), st.integers(), edges)
fractions = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.builds(lambda digits, places: float(f"{digits}e-{places}"), st.integers(-(10**17), 10**17), st.integers(0, 25)),
)
numbers = st.one_of(wholes, fractions)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return library_tokenizer(byte_vocabulary(), 260)


def taken(schema: dict[str, object]) -> dict[str, object] | None:
    """The checked schema, or None when it is a 400, which names the field and the keyword."""
    try:
        return checked_schema(schema, "guided_json", LIMITS)
    except ApiError as error:
        if error.status != 400 or not error.message.startswith("guided_json: #/"):
            raise
        return None


def matcher_of(schema: dict[str, object], tokenizer: LLTokenizer) -> LLMatcher | None:
    """The compiled grammar; None when no number fits it, or when it would cost too much: that is a 400 too."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    assert not matcher.is_error() or any(word in matcher.get_error() for word in _REFUSALS), (
        schema,
        matcher.get_error(),
    )
    return None if matcher.is_error() else matcher


def is_sentence(matcher: LLMatcher | None, text: str) -> bool:
    if matcher is None:
        return False
    own = matcher.deep_copy()
    return own.try_consume_tokens(list(text.encode())) == len(text) and own.is_accepting()


def exactly(value: object) -> Decimal:
    return Decimal(repr(value))


def plain(value: Decimal) -> str:
    """Without an exponent; zero as one digit."""
    return format(value, "f") if value else "0"


def can_come(matcher: LLMatcher | None, value: Decimal, places: Iterable[int]) -> bool:
    """Whether a number can be written in one way at least: the library wants a fixed number of digits sometimes."""
    spellings = {plain(value.normalize())} | {f"{value:.{number}f}" for number in places}
    return any(is_sentence(matcher, text) for text in spellings if Decimal(text) == value)


def near(value: Decimal) -> set[Decimal]:
    """A number and its neighbours: at its last place, one place further, and one away."""
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)
    last = Decimal(1).scaleb(min(exponent, 0))
    return {value + away for step in (last, last / 10, Decimal(1)) for away in (-step, Decimal(0), step)}


def fits(value: Decimal, schema: dict[str, object]) -> bool:
    """What JSON Schema says of a number."""
    return all(
        (
            schema["type"] != "integer" or value == value.to_integral_value(),
            "minimum" not in schema or value >= exactly(schema["minimum"]),
            "maximum" not in schema or value <= exactly(schema["maximum"]),
            "exclusiveMinimum" not in schema or value > exactly(schema["exclusiveMinimum"]),
            "exclusiveMaximum" not in schema or value < exactly(schema["exclusiveMaximum"]),
        )
    )


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["integer", "number"]),
    bounds=st.dictionaries(st.sampled_from(BOUNDS), numbers, min_size=1, max_size=2),
    width=st.none() | st.integers(0, 3),
)
def test_bounds_that_are_taken_are_enforced_to_the_last_digit(
    tokenizer: LLTokenizer, kind: str, bounds: dict[str, int | float], width: int | None
) -> None:
    if "minimum" in bounds and width is not None:
        bounds = {"minimum": bounds["minimum"], "maximum": bounds["minimum"] + width}
    schema: dict[str, object] = {"type": kind, **bounds}
    copy = taken(schema)
    assume(copy is not None)
    assert copy is not None
    with localcontext(prec=100):
        matcher = matcher_of(copy, tokenizer)
        for value in set().union(*(near(exactly(bound)) for bound in bounds.values())):
            exponent = value.as_tuple().exponent
            assert isinstance(exponent, int)
            assert can_come(matcher, value, {-exponent, 1 - exponent} if exponent < 0 else ()) == fits(value, schema), (
                schema,
                value,
            )


@settings(max_examples=150, deadline=None)
@given(value=numbers, is_nested=st.booleans(), keyword=st.sampled_from(["const", "enum"]))
def test_constants_that_are_taken_come_back_to_the_last_digit(
    tokenizer: LLTokenizer, value: int | float, is_nested: bool, keyword: str
) -> None:
    whole: object = {"a": [value, None]} if is_nested else value
    copy = taken({keyword: [whole] if keyword == "enum" else whole})
    assume(copy is not None)
    assert copy is not None
    with localcontext(prec=100):
        matcher = matcher_of({"x-guidance": {"whitespace_flexible": False}, **copy}, tokenizer)
        for one in near(exactly(value)):
            text = plain(one.normalize())
            text = f'{{"a":[{text},null]}}' if is_nested else text
            assert is_sentence(matcher, text) == (one == exactly(value)), (value, text)


multiples = st.builds(lambda digits, places: float(f"{digits}e-{places}"), st.integers(1, 200), st.integers(0, 3))


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(multiples, min_size=1, max_size=2), factor=st.integers(0, 10**6))
def test_multiples_that_are_taken_are_enforced_together_too(
    tokenizer: LLTokenizer, parts: list[float], factor: int
) -> None:
    copy = taken({"type": "number", "allOf": [{"multipleOf": part} for part in parts]})
    assume(copy is not None)
    assert copy is not None
    matcher = matcher_of(copy, tokenizer)
    assume(matcher is not None)
    with localcontext(prec=100):
        for value in near(exactly(parts[0]) * factor):
            expected = all(value % exactly(part) == 0 for part in parts)
            assert can_come(matcher, value, range(7)) == expected, (parts, value)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("int8", -128, 127),
        ("int32", -(2**31), 2**31 - 1),
        ("int64", -(2**63) + 1024, 2**63 - 1),
        ("uint8", 0, 255),
        ("uint32", 0, 2**32 - 1),
        ("uint64", 0, 2**63 - 1),
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_formats_of_integers_are_enforced_to_the_last_digit(
    tokenizer: LLTokenizer, name: str, least: int, most: int, kind: str
) -> None:
    copy = taken({"type": kind, "format": name})
    assert copy is not None
    matcher = matcher_of(copy, tokenizer)
    accepted = [
        value for edge in (least, most) for value in range(edge - 2, edge + 3) if is_sentence(matcher, f"{value}")
    ]
    assert accepted == [least, least + 1, least + 2, most - 2, most - 1, most]
    assert not is_sentence(matcher, f"{most * 10}")
    assert not is_sentence(matcher, f"{least * 10 - 1}")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "integer", "minimum": 1e30, "maximum": 2e30}, "#/minimum"),
        ({"type": "integer", "minimum": 10**19, "maximum": 10**20}, "#/minimum"),
        ({"type": "integer", "minimum": 2**63, "maximum": 2**63 + 1}, "#/minimum"),
        ({"type": "integer", "format": "uint64", "minimum": 2**64 - 6}, "#/minimum"),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "#/minimum"),
        ({"type": "integer", "exclusiveMaximum": -(2**53)}, "#/exclusiveMaximum"),
        ({"const": 12345678901234567890123}, "#/const"),
        ({"const": {"a": [1, -(2**63)]}}, "#/const/a/1"),
        ({"enum": [1, {"b/c": 2**53}]}, "#/enum/1/b~1c"),
        ({"type": "number", "minimum": 123456789.12345679}, "#/minimum"),
        ({"properties": {"x": {"items": {"maximum": 1e300}}}}, "#/properties/x/items/maximum"),
        ({"type": "number", "multipleOf": 0.07}, "#/multipleOf"),
        ({"type": "number", "multipleOf": 2**32}, "#/multipleOf"),
        ({"type": "integer", "multipleOf": 429496730}, "#/multipleOf"),
        ({"allOf": [{"multipleOf": 999983}, {"multipleOf": 999979}]}, "#/allOf/1/multipleOf"),
        ({"multipleOf": 65537, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 65539}}}, "multipleOf"),
        ({"type": "string", "maxLength": 2**31}, "#/maxLength"),
        ({"type": "array", "minItems": 1e18}, "#/minItems"),
    ],
)
def test_numbers_that_would_not_be_enforced_exactly_are_named_with_their_place(
    schema: dict[str, object], place: str
) -> None:
    with pytest.raises(ApiError) as caught:
        checked_schema(schema, "guided_json", LIMITS)
    assert caught.value.code == "unsupported_value"
    assert place in caught.value.message
    assert "would not be enforced" in caught.value.message


def test_a_tool_that_is_not_strict_keeps_the_rest_of_a_schema_whose_numbers_cannot_be_kept() -> None:
    exact = {"type": "integer", "minimum": 3}
    parameters = {
        "properties": {
            "minimum": exact,
            "a": {"type": "integer", "minimum": 1e30, "maximum": 2e30},
            "b": {"enum": [1, 2**63]},
            "c": {"const": {"x": [-(2**63)]}},
            "d": {"anyOf": [exact, {"const": 7}]},
        }
    }
    loose = DeclaredFunction("f", "", parameters, False, "tools[0]").argument_schema(LIMITS)
    assert loose["properties"] == {
        "minimum": exact,
        "a": {"type": "integer"},
        "b": {},
        "c": {},
        "d": {"anyOf": [exact, {"const": 7}]},
    }
    with pytest.raises(ApiError, match=r"tools.0.: #/properties/a/minimum: 1e\+30 would not be enforced exactly"):
        DeclaredFunction("f", "", parameters, True, "tools[0]").argument_schema(LIMITS)

"""Whatever a schema that is taken allows, it allows by the schema's own words: random answers against a validator.

Answers are drawn byte by byte from what the matcher allows, so they go everywhere that a grammar lets them; a schema is
drawn from what the check passes on. The reference is `jsonschema`, on the schema as the client wrote it.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from services.gpu_worker.grammar_ebnf import lark_of_ebnf
from services.gpu_worker.grammar_text import library_grammar
from services.gpu_worker.grammar_vocabulary import library_tokenizer
from services.tokenizer.json_schema_check import SchemaLimits, checked_schema
from services.tokenizer.structured_output import json_grammar
from tests.unit.gpu_worker.grammar_models import END, byte_vocabulary

TOKENIZER: LLTokenizer = library_tokenizer(byte_vocabulary(), 260)
LIMITS = SchemaLimits(max_bytes=256 * 1024, max_properties=5000, max_depth=32)
MAX_BYTES = 3000
NAMES = st.sampled_from(["a", "b", "customerName", "日本", "😀", 'q"x', "a\\b", "with space"])

Schema = dict[str, Any]


def bounds(low: str, high: str, values: st.SearchStrategy[int]) -> st.SearchStrategy[Schema]:
    return st.tuples(values, values).map(lambda pair: {low: min(pair), high: max(pair)})


STRINGS: st.SearchStrategy[Schema] = st.one_of(
    bounds("minLength", "maxLength", st.integers(0, 6)),
    st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(lambda name: {"format": name}),
    st.sampled_from(["^[a-c]{1,4}$", "^(日|本)+x?$", "^\\d{2}-\\d{2}$"]).map(
        lambda text: {"pattern": text, "maxLength": 5}
    ),
).map(lambda rest: {"type": "string", **rest})
NUMBERS: st.SearchStrategy[Schema] = st.one_of(
    bounds("minimum", "maximum", st.integers(-1000, 1000)).map(lambda rest: {"type": "integer", **rest}),
    st.integers(-50, 50).map(lambda low: {"type": "integer", "exclusiveMinimum": low, "maximum": low + 7}),
    st.integers(1, 9).map(lambda step: {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": step}),
    st.just({"type": "integer", "format": "uint8"}),
)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), NAMES, st.lists(st.integers(0, 3), max_size=2))
LEAVES: st.SearchStrategy[Schema] = st.one_of(
    STRINGS,
    NUMBERS,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
    VALUES.map(lambda value: {"const": value}),
    st.lists(VALUES, min_size=1, max_size=4, unique_by=repr).map(lambda values: {"enum": values}),
)


def objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def build(parts: tuple[dict[str, Schema], list[bool], bool]) -> Schema:
        properties, needed, is_closed = parts
        required = [name for name, is_needed in zip(properties, needed, strict=False) if is_needed]
        schema: Schema = {"type": "object", "properties": properties, "required": required, "title": "T"}
        return schema | {"additionalProperties": False} if is_closed else schema

    named = st.dictionaries(NAMES, inner, min_size=1, max_size=4)
    return st.tuples(named, st.lists(st.booleans(), min_size=4, max_size=4), st.booleans()).map(build)


def nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    arrays = st.tuples(inner, bounds("minItems", "maxItems", st.integers(0, 3)))
    return st.one_of(
        objects(inner),
        arrays.map(lambda pair: {"type": "array", "items": pair[0], **pair[1]}),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda items: {"type": "array", "prefixItems": items, "items": False}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        objects(inner).map(lambda one: {"allOf": [{"$ref": "#/$defs/part"}], "$defs": {"part": one}}),
    )


SCHEMAS = st.recursive(LEAVES, nested, max_leaves=8)


def rooted(schema: Schema) -> Schema:
    """A reference is from the root: where a part has definitions, they go there."""
    definitions: dict[str, Schema] = {}

    def lift(value: Any) -> Any:
        if isinstance(value, dict):
            value = {key: lift(inner) for key, inner in value.items()}
            if "$defs" in value:
                name = f"part{len(definitions)}"
                definitions[name] = value.pop("$defs")["part"]
                value["allOf"] = [{"$ref": f"#/$defs/{name}"}]
        elif isinstance(value, list):
            value = [lift(inner) for inner in value]
        return value

    lifted: Schema = lift(schema)
    return lifted | {"$defs": definitions} if definitions else lifted


def random_answer(text: str, draw: random.Random) -> bytes | None:
    """A sentence of a grammar, None when it got too long."""
    matcher = LLMatcher(TOKENIZER, text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    found = bytearray()
    while len(found) < MAX_BYTES:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        choices = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert not matcher.is_error(), matcher.get_error()
        assert choices
        if END in choices and draw.random() < 0.5:
            return bytes(found)
        token_id = draw.choice([choice for choice in choices if choice < 256] or [END])
        if token_id == END:
            return bytes(found)
        assert matcher.consume_token(token_id)
        found.append(token_id)
    return None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEMAS.map(rooted), st.integers(0, 2**32))
def test_every_answer_fits_the_schema_as_the_client_wrote_it(schema: Schema, seed: int) -> None:
    text = library_grammar(json_grammar(checked_schema(schema, "schema", LIMITS), is_compact=True))
    is_error, problems = LLMatcher.validate_grammar_with_warnings(text)
    assume(not is_error or "atisfiable" not in problems[0])  # e.g. no multiple of 9 in a range
    assert not is_error, problems
    draw = random.Random(seed)
    for _ in range(3):
        answer = random_answer(text, draw)
        if answer is not None:
            value = json.loads(answer)
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
            assert json.dumps(value, separators=(",", ":")).count(" ") >= answer.decode().count(
                " "
            ) - answer.decode().count("\\")


# ---------------------------------------------------------------- EBNF

LETTERS = "abc日"
MAX_LETTERS = 4
Language = frozenset[str]


def joined(left: Language, right: Language) -> Language:
    return frozenset(a + b for a in left for b in right if len(a + b) <= MAX_LETTERS)


def sequence(parts: list[tuple[str, Language]]) -> tuple[str, Language]:
    language: Language = frozenset({""})
    for _, part in parts:
        language = joined(language, part)
    return " ".join(source for source, _ in parts), language


def repeated(part: tuple[str, Language], sign: str) -> tuple[str, Language]:
    source, language = part
    least, most = {"?": (0, 1), "*": (0, MAX_LETTERS), "+": (1, MAX_LETTERS), "{2}": (2, 2), "{1,2}": (1, 2)}[sign]
    found: set[str] = set()
    power: Language = frozenset({""})
    for count in range(most + 1):
        found |= power if count >= least else set()
        power = joined(power, language)
    return f"({source}){sign}", frozenset(found)


ATOMS: st.SearchStrategy[tuple[str, Language]] = st.sampled_from(
    [
        ('"a"', frozenset({"a"})),
        ("'ab'", frozenset({"ab"})),
        ('""', frozenset({""})),
        ("[ab]", frozenset("ab")),
        ("[^a()]", frozenset("bc日")),
        (".", frozenset(LETTERS)),
        ('"\\u65e5" # a comment\n', frozenset("日")),
    ]
)
EXPRESSIONS: st.SearchStrategy[tuple[str, Language]] = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(sequence),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: (
                f"({' | '.join(source for source, _ in parts)})",
                frozenset().union(*(one for _, one in parts)),
            )
        ),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,2}"])).map(lambda pair: repeated(*pair)),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(EXPRESSIONS, st.lists(st.text(LETTERS, max_size=MAX_LETTERS), max_size=8), st.booleans())
def test_the_sentences_of_ebnf_are_those_of_its_definition(
    expression: tuple[str, Language], others: list[str], is_recursive: bool
) -> None:
    """The reference makes the whole language, up to a length, by the definition of each form."""
    source, language = expression
    assume(not is_recursive or "." not in source)  # it would stand for brackets too
    source = f'root ::= part | "(" root ")"\npart ::= {source}' if is_recursive else f"root ::= {source}"
    template = LLMatcher(TOKENIZER, lark_of_ebnf(source), log_level=0)
    assert not template.is_error(), template.get_error()
    for text in sorted(language)[:40] + others:
        data = list(f"({text})".encode() if is_recursive else text.encode())
        matcher = template.deep_copy()
        is_sentence = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
        assert is_sentence == (text in language), text

"""Tokenizer process: what an answer must be a sentence of, from the many fields in which clients say so.

OpenAI's `response_format`, vLLM's `structured_outputs` and the `guided_*` fields before it, SGLang's `json_schema`,
`regex` and `ebnf`: all become one `Grammar`, and at most one of them may be there. Sizes and keywords are checked here;
whether the grammar can be compiled the worker finds out before the request is admitted.

Pure. The fields come as decoded JSON; null is the same as leaving one out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.runtime.config import Settings
from services.tokenizer.api_error import ApiError, Code, bad_field
from services.tokenizer.json_schema_check import SchemaLimits, checked_schema
from services.tokenizer.json_schema_keywords import MAX_LITERAL_BYTES
from services.tokenizer.strict_json import decode_object
from services.wire.request_params import Grammar, GrammarKind

MAX_CHOICES = 1024
_FORMAT_KEYS = frozenset(("type", "json_schema"))
_JSON_SCHEMA_KEYS = frozenset(("name", "description", "schema", "strict"))
_FORMAT_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ANY_OBJECT: Mapping[str, object] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class StructureLimits:
    """What a grammar may be, as set.

    Attributes:
        schema: of JSON schemas; `max_bytes` also of grammars and of all choices together.
        is_compact: no blanks between the parts of a JSON text; else wherever JSON allows them.
    """

    schema: SchemaLimits
    is_compact: bool

    @classmethod
    def of(cls, settings: Settings) -> StructureLimits:
        """As set."""
        return cls(SchemaLimits.of(settings), settings.json_whitespace == "compact")


def structure_of(fields: Mapping[str, object], limits: StructureLimits) -> Grammar | None:
    """The grammar that a request asks for; None for free text.

    Args:
        fields: those of FIELDS that the body has (others are not looked at), as decoded JSON.
        limits: how large it may be.

    Raises:
        ApiError: 400 naming the field: a wrong form or size, a keyword that would not be enforced, or two fields.
    """
    found: dict[str, Grammar] = {}
    for name, read in FIELDS.items():
        value = fields.get(name)
        grammar = None if value is None else read(value, name, limits)
        if grammar is not None:
            found[name] = grammar
    if len(found) > 1:
        first, second = list(found)[:2]
        raise bad_field(second, f"cannot go together with {first}: an answer keeps to one grammar")
    return next(iter(found.values()), None)


def structure_param(fields: Mapping[str, object]) -> str | None:
    """The place in the body that the grammar of `structure_of` came from; None for free text.

    Args:
        fields: the same, which were taken.
    """
    asked = [name for name in FIELDS if fields.get(name) is not None]
    if not asked:
        return None
    name = asked[-1]  # `response_format` may be there too and ask for text
    value = fields[name]
    if not isinstance(value, Mapping):
        return name
    if name == "structured_outputs":
        return ".".join((name, *[key for key in _STRUCTURES if value.get(key) is not None][:1]))
    return f"{name}.json_schema.schema" if name == "response_format" and "json_schema" in value else name


def json_grammar(schema: Mapping[str, object], is_compact: bool) -> Grammar:
    """The grammar of the JSON texts that fit a schema which `checked_schema` gave."""
    options = {"whitespace_flexible": not is_compact}
    text = json.dumps({"x-guidance": options, **schema}, ensure_ascii=False, separators=(",", ":"))
    return Grammar(GrammarKind.JSON_SCHEMA, text)


# ---------------------------------------------------------------- OpenAI


def _response_format(value: object, param: str, limits: StructureLimits) -> Grammar | None:
    if not isinstance(value, dict):
        raise bad_field(param, 'must be an object such as {"type": "json_object"}')
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise bad_field(f"{param}.type", "must be text, json_object or json_schema")
    for name in value.keys() - _FORMAT_KEYS if kind == "json_schema" else value.keys() - {"type"}:
        raise bad_field(f"{param}.{name}", f"has no place in a format of type {kind}")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar(_ANY_OBJECT, limits.is_compact)
    return _named_schema(value.get("json_schema"), f"{param}.json_schema", limits)


def _named_schema(value: object, param: str, limits: StructureLimits) -> Grammar:
    """`{"name": ..., "schema": ..., "strict": ...}`: a schema is always kept to the letter, strict or not."""
    if not isinstance(value, dict):
        raise bad_field(param, 'must be an object with "name" and "schema"')
    for key in value.keys() - _JSON_SCHEMA_KEYS:
        raise bad_field(f"{param}.{key}", "is not known")
    name = value.get("name", "schema")
    if not isinstance(name, str) or not _FORMAT_NAME.fullmatch(name):
        raise bad_field(f"{param}.name", "must be 1 to 64 letters, digits, `_` or `-`")
    if not isinstance(value.get("strict"), bool | None):
        raise bad_field(f"{param}.strict", "must be true or false")
    if not isinstance(value.get("description"), str | None):
        raise bad_field(f"{param}.description", "must be a text")
    if value.get("schema") is None:
        raise bad_field(f"{param}.schema", "is missing", Code.MISSING_FIELD)
    return _schema(value["schema"], f"{param}.schema", limits)


# ---------------------------------------------------------------- vLLM, SGLang


def _structured_outputs(value: object, param: str, limits: StructureLimits) -> Grammar | None:
    if not isinstance(value, dict):
        raise bad_field(param, "must be an object")
    for key in value.keys() - _STRUCTURES.keys():
        if value[key] not in (None, False):
            raise bad_field(f"{param}.{key}", "is not built", Code.UNSUPPORTED_FIELD)
    asked = [key for key in _STRUCTURES if value.get(key) is not None]
    if len(asked) > 1:
        raise bad_field(param, f"{asked[0]} and {asked[1]} cannot go together")
    if not asked:
        raise bad_field(param, f"names no structure; there are {', '.join(_STRUCTURES)}")
    return _STRUCTURES[asked[0]](value[asked[0]], f"{param}.{asked[0]}", limits)


def _schema(value: object, param: str, limits: StructureLimits) -> Grammar:
    """A JSON schema, as JSON or as JSON in a text."""
    if isinstance(value, str):
        _check_bytes(value, param, limits.schema.max_bytes)
        try:
            value = decode_object(value.encode())
        except ApiError as error:
            raise bad_field(param, f"as a text it must hold a JSON object: {error.message}") from None
    return json_grammar(checked_schema(value, param, limits.schema), limits.is_compact)


def _json_object(value: object, param: str, limits: StructureLimits) -> Grammar | None:
    if not isinstance(value, bool):
        raise bad_field(param, "must be true or false")
    return json_grammar(_ANY_OBJECT, limits.is_compact) if value else None


def _regex(value: object, param: str, limits: StructureLimits) -> Grammar:
    return Grammar(GrammarKind.REGEX, _checked_text(value, param, min(MAX_LITERAL_BYTES, limits.schema.max_bytes)))


def _ebnf(value: object, param: str, limits: StructureLimits) -> Grammar:
    text = _checked_text(value, param, limits.schema.max_bytes)
    if "::=" not in text:
        raise bad_field(param, "must be EBNF: rules such as `root ::= ...`", Code.UNSUPPORTED_VALUE)
    return Grammar(GrammarKind.EBNF, text)


def _choice(value: object, param: str, limits: StructureLimits) -> Grammar:
    if not isinstance(value, list) or not all(isinstance(choice, str) and choice for choice in value):
        raise bad_field(param, "must be a list of texts, none empty")
    if not value:
        raise bad_field(param, "must have at least one text: no answer is one of none")
    if len(value) > MAX_CHOICES:
        raise bad_field(param, f"has {len(value)} choices, at most {MAX_CHOICES} are taken")
    for index, choice in enumerate(value):
        _check_bytes(choice, f"{param}[{index}]", MAX_LITERAL_BYTES)
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(value))
    text = f"start: CHOICE\nCHOICE: {choices}"
    _check_bytes(text, param, limits.schema.max_bytes)
    return Grammar(GrammarKind.LARK, text)


def _checked_text(value: object, param: str, max_bytes: int) -> str:
    if not isinstance(value, str) or not value:
        raise bad_field(param, "must be a text, not empty")
    _check_bytes(value, param, max_bytes)
    return value


def _check_bytes(text: str, param: str, max_bytes: int) -> None:
    num_bytes = len(text.encode())
    if num_bytes > max_bytes:
        raise bad_field(param, f"has {num_bytes} bytes, at most {max_bytes} are taken")


_Read = Callable[[object, str, StructureLimits], Grammar | None]
_STRUCTURES: Mapping[str, _Read] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": _json_object,
}
FIELDS: Mapping[str, _Read] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _ebnf,
}
"""Every field that can ask for structure, with its reader."""

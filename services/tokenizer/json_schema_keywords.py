"""Tokenizer process: which words of JSON Schema are enforced, which say nothing about a value, and which are refused.

Held by a test against the grammar library: what stands in the first tables it enforces or refuses by itself; what
stands in UNENFORCED it would refuse without saying where.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_COUNT = 2**31 - 1
"""The largest `maxLength` and the like; the library counts in 32 bits."""

MAX_LITERAL_BYTES = 16 * 1024
"""The longest text that an answer must repeat letter by letter; also the longest pattern."""

TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
SCHEMA_MAPS = frozenset(("properties", "patternProperties"))
SCHEMA_LISTS = frozenset(("anyOf", "allOf", "oneOf", "prefixItems"))
COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # fmt: skip

MOMENTS = frozenset(("date-time", "time"))
NINE_DIGITS = r"^[^.]*(\.[0-9]{1,9}[^0-9].*)?$"
"""What these fit besides: at most nine digits behind the second."""

INTEGER_FORMATS: Mapping[str, tuple[int, int]] = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63) + 2**10, 2**63 - 1),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**63 - 1),
}
"""OpenAPI's, for numbers: they are bounds. Of those of 64 bits the library keeps no more than these exactly, so the
lowest 1,024 of `int64` and the upper half of `uint64` cannot come."""

NUMBER_FORMATS = frozenset(("float", "double", "decimal"))
"""Any JSON number fits them."""

KNOWN_DRAFTS = frozenset(
    (
        "http://json-schema.org/schema",
        "http://json-schema.org/draft-04/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
    )
)

ANNOTATIONS = frozenset(
    (
        "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$comment", "$defs", "definitions", "$vocabulary",
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
        "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml", "components",
    )
)  # fmt: skip
"""They say nothing about a value (`$defs`, `definitions` and `components` only hold what `$ref` points at)."""

UNENFORCED: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "if": (),
    "then": (),
    "else": (),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "nullable": (False,),
    "$dynamicRef": (),
    "$recursiveRef": (),
    "$recursiveAnchor": (False,),
}
"""Known and not enforced, with the arguments that ask for nothing."""

"""Tokenizer process: a client's JSON schema, checked and copied into the form that the grammar library takes.

What the library enforces is passed on, what says nothing about a value (titles, defaults, ...) is left out, and all
else is a 400 that names the keyword and its place: a schema that would be kept only in part is never taken. The copy
has no references but `#` and `#/$defs/N`: every part that is referred to is copied once, under a number.

An object with listed `properties` and no word about others gets only the listed ones, as other servers do: whatever
comes out is right by the schema, and a model that may add keys for ever does. It stays open where closing it could
forbid what another part of an `allOf` asks for.

Pure. It knows no model and compiles nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn
from urllib.parse import unquote

from services.runtime.config import Settings
from services.tokenizer.api_error import ApiError, Code, bad_field
from services.tokenizer.json_schema_keywords import (
    ANNOTATIONS,
    COUNTS,
    FORMATS,
    INTEGER_FORMATS,
    KNOWN_DRAFTS,
    MAX_COUNT,
    MAX_LITERAL_BYTES,
    MOMENTS,
    NINE_DIGITS,
    NUMBER_FORMATS,
    NUMBERS,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    TYPES,
    UNENFORCED,
)
from services.tokenizer.json_schema_numbers import MOST_EXACT, fits_together, is_exact, is_exact_multiple

_SHOWN_CHARS = 64
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")  # what else the same value must be
_SAYS_WHICH_KEYS = ("additionalProperties", "patternProperties", "minProperties", *_IN_PLACE)


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """How large a schema may be: its JSON text, the properties of all its objects, schemas within schemas."""

    max_bytes: int
    max_properties: int
    max_depth: int

    @classmethod
    def of(cls, settings: Settings) -> SchemaLimits:
        """As set."""
        return cls(settings.max_schema_bytes, settings.max_schema_properties, settings.max_schema_depth)


def checked_schema(schema: object, param: str, limits: SchemaLimits) -> dict[str, object]:
    """A copy of a schema that the grammar library enforces to the letter.

    Args:
        schema: as decoded from the request.
        param: the field that it came in.
        limits: how large it may be.

    Raises:
        ApiError: 400 naming the field, the place in the schema and the keyword.
    """
    if schema is False:
        raise bad_field(param, "no value fits the schema false")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise bad_field(param, "a JSON schema is an object")
    check_size(schema, param, limits)
    return _Copy(schema, param, limits).whole()


def check_size(schema: Mapping[str, object], param: str, limits: SchemaLimits) -> None:
    """What holds for every schema, also for one that only the model reads.

    Raises:
        ApiError: 400 naming the field.
    """
    try:
        num_bytes = len(json.dumps(schema, ensure_ascii=False).encode())
    except RecursionError:
        raise bad_field(param, "the schema is nested too deeply") from None
    if num_bytes > limits.max_bytes:
        raise bad_field(param, f"the schema has {num_bytes} bytes, at most {limits.max_bytes} are taken")


@dataclass(slots=True)
class _Copy:
    """The copy in the making.

    `names` has a number for each (pointer, whether it is part of an intersection) that something refers to.
    """

    root: Mapping[str, object]
    param: str
    limits: SchemaLimits
    num_properties: int = 0
    names: dict[tuple[str, bool], str] = field(default_factory=dict)
    multiples: set[int | float] = field(default_factory=set)  # those that can concern the same value as others

    def whole(self) -> dict[str, object]:
        """The root and all that it refers to."""
        copy = self.schema(self.root, "#", 0, False)
        assert isinstance(copy, dict)
        definitions: dict[str, object] = {}
        while len(definitions) < len(self.names):  # copying one may name others
            (pointer, is_part), name = list(self.names.items())[len(definitions)]
            definitions[name] = self.schema(self.target(pointer), pointer, 1, is_part)
        return copy | {"$defs": definitions} if definitions else copy

    def schema(self, value: object, place: str, depth: int, is_part: bool) -> dict[str, object] | bool:
        """One schema. `is_part`: the same value must fit others too, so an open object must stay open."""
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            self.refuse(place, "a schema is an object, true or false")
        if depth > self.limits.max_depth:
            self.refuse(place, f"schemas are nested more than {self.limits.max_depth} deep")
        has_siblings = is_part or len(value.keys() - ANNOTATIONS) > 1
        copy: dict[str, object] = {}
        for keyword, argument in value.items():
            if self.is_dropped(keyword, argument, place):
                continue
            inner_is_part = keyword == "allOf" or (keyword in _IN_PLACE and has_siblings)
            copy[keyword] = self.argument(keyword, argument, (f"{place}/{_escaped(keyword)}", depth, inner_is_part))
        self.settle_format(copy, place)
        self.settle_multiple(copy, place, is_part)
        properties = copy.get("properties")
        if isinstance(properties, dict) and properties and not is_part and not copy.keys() & {*_SAYS_WHICH_KEYS}:
            required = copy.get("required", [])
            if isinstance(required, list) and properties.keys() >= set(required):
                copy["additionalProperties"] = False
        return copy

    def is_dropped(self, keyword: str, argument: object, place: str) -> bool:
        """Whether a keyword says nothing about a value; refuses those that would not be enforced."""
        if keyword == "$schema" and not (isinstance(argument, str) and argument.rstrip("#") in KNOWN_DRAFTS):
            self.refuse(place, "$schema names no known draft of JSON Schema")
        if keyword == "$id" and place != "#":
            self.refuse(place, "$id is only taken at the root of a schema", Code.UNSUPPORTED_VALUE)
        if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
            return True
        if keyword in UNENFORCED:
            if argument is None or not any(_is_same(argument, neutral) for neutral in UNENFORCED[keyword]):
                self.refuse(place, f"{keyword} would not be enforced", Code.UNSUPPORTED_VALUE)
            return True
        return False

    def argument(self, keyword: str, value: object, where: tuple[str, int, bool]) -> object:
        """The checked argument of a keyword; `where`: its place, the depth around it, is_part of what is inside."""
        place, depth, is_part = where
        if keyword in SCHEMA_MAPS:
            return self.schema_map(value, place, depth)
        if keyword in SCHEMA_LISTS or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list) or (not value and keyword != "items"):
                self.refuse(place, "must be a list of schemas, not empty")
            return [self.schema(one, f"{place}/{index}", depth + 1, is_part) for index, one in enumerate(value)]
        if keyword in ("items", "additionalItems", "additionalProperties"):
            return self.schema(value, place, depth + 1, False)
        if keyword == "$ref":
            return self.reference(value, place, is_part)
        return self.plain_argument(keyword, value, place)

    def plain_argument(self, keyword: str, value: object, place: str) -> object:
        """The argument of a keyword that holds no schemas."""
        if keyword in COUNTS:
            return self.count(value, place)
        if keyword in NUMBERS:
            return self.number(value, place, is_positive=keyword == "multipleOf")
        if keyword == "type":
            return self.type(value, place)
        if keyword == "const":
            return self.literal(value, place, 0)
        if keyword == "enum":
            if not isinstance(value, list) or not value:
                self.refuse(place, "must be a list of values, not empty")
            return self.literal(value, place, 0)
        if keyword == "required":
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                self.refuse(place, "must be a list of texts")
            self.literal(value, place, 0)
            return list(dict.fromkeys(value))
        if keyword not in ("pattern", "format"):
            self.refuse(place, "is no keyword that would be enforced", Code.UNSUPPORTED_VALUE)
        return self.text(value, place)

    def schema_map(self, value: object, place: str, depth: int) -> dict[str, object]:
        """`properties` and `patternProperties`."""
        if not isinstance(value, dict):
            self.refuse(place, "must be an object")
        self.num_properties += len(value)
        if self.num_properties > self.limits.max_properties:
            raise bad_field(self.param, f"the schema has more than {self.limits.max_properties} properties")
        for name in value:
            self.literal(name, place, 0)
        return {name: self.schema(one, f"{place}/{_escaped(name)}", depth + 1, False) for name, one in value.items()}

    def reference(self, value: object, place: str, is_part: bool) -> str:
        """A `$ref` within the schema, to the copy's own name for what it points at."""
        pointer = unquote(self.text(value, place))
        if not pointer.startswith("#"):
            self.refuse(place, f"{_shown(pointer)} is not in this schema; only # and #/... are", Code.UNSUPPORTED_VALUE)
        if pointer == "#" and not is_part:
            return "#"
        self.target(pointer, place)
        return "#/$defs/" + self.names.setdefault((pointer, is_part), str(len(self.names)))

    def target(self, pointer: str, place: str = "#") -> object:
        """What a pointer (`#`, `#/a/b`) leads to."""
        found: object = self.root
        for step in pointer.split("/")[1:] if pointer.startswith("#/") else [pointer][pointer == "#" :]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name[:8]) < len(found):
                found = found[int(name[:8])]
            else:
                self.refuse(place, f"{_shown(pointer)} is not in this schema")
        return found

    def settle_format(self, copy: dict[str, object], place: str) -> None:
        """Keeps a format that is enforced, makes bounds of those of integers, drops what concerns other types."""
        if "format" not in copy:
            return
        name, kind = copy["format"], copy.get("type", "string")
        kinds = kind if isinstance(kind, list) else [kind]
        if "string" in kinds:
            if name not in FORMATS:
                self.refuse(place, f"format {_shown(str(name))} would not be enforced", Code.UNSUPPORTED_VALUE)
            if name in MOMENTS:  # a second may have digits without end, and models write them
                add_pattern(copy, NINE_DIGITS)
            return
        del copy["format"]
        if not {"integer", "number"}.intersection(kinds) or name in NUMBER_FORMATS:
            return
        if name not in INTEGER_FORMATS:
            self.refuse(place, f"format {_shown(str(name))} would not be enforced", Code.UNSUPPORTED_VALUE)
        if "number" in kinds:
            whole = ["integer" if one == "number" else one for one in kinds]
            copy["type"] = list(dict.fromkeys(whole)) if isinstance(kind, list) else whole[0]
        least, most = INTEGER_FORMATS[str(name)]
        low, high = copy.get("minimum", least), copy.get("maximum", most)
        assert isinstance(low, int | float)
        assert isinstance(high, int | float)
        copy |= {"minimum": max(low, least), "maximum": min(high, most)}

    def settle_multiple(self, copy: Mapping[str, object], place: str, is_part: bool) -> None:
        """Refuses a `multipleOf` that the library could not hold together with those of other parts of the schema."""
        multiple = copy.get("multipleOf")
        if not isinstance(multiple, int | float) or not (is_part or copy.keys() & {*_IN_PLACE}):
            return
        self.multiples.add(multiple)
        if not fits_together(self.multiples):
            problem = "would not be enforced together with the others of this schema"
            self.refuse(f"{place}/multipleOf", problem, Code.UNSUPPORTED_VALUE)

    # ------------------------------------------------------------ values

    def text(self, value: object, place: str) -> str:
        """A text."""
        if not isinstance(value, str):
            self.refuse(place, "must be a text")
        if len(value.encode()) > MAX_LITERAL_BYTES:
            self.refuse(place, f"is longer than {MAX_LITERAL_BYTES} bytes")
        return value

    def count(self, value: object, place: str) -> int:
        """A whole number from 0 up."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.refuse(place, "must be a whole number from 0 up")
        if value > MAX_COUNT:
            self.refuse(place, f"more than {MAX_COUNT} would not be enforced", Code.UNSUPPORTED_VALUE)
        return value

    def number(self, value: object, place: str, is_positive: bool) -> int | float:
        """A number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(place, "must be a number")
        if is_positive and value <= 0:
            self.refuse(place, "must be above 0")
        value = self.exact(value, place)
        if is_positive and not is_exact_multiple(value):
            self.refuse(place, f"{value!r} would not be enforced exactly", Code.UNSUPPORTED_VALUE)
        return value

    def exact(self, value: int | float, place: str) -> int | float:
        """A number that the library keeps as it is; one that is whole without a point, which costs digits."""
        if not is_exact(value):
            limit = f"whole numbers up to {MOST_EXACT} (2**53 - 1) and fractions of at most 15 digits, 22 places, are"
            self.refuse(place, f"{_shown_number(value)} would not be enforced exactly; {limit}", Code.UNSUPPORTED_VALUE)
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def type(self, value: object, place: str) -> object:
        """`type`: a name or a list of names."""
        names = value if isinstance(value, list) else [value]
        for name in names:
            if not isinstance(name, str) or name not in TYPES:
                self.refuse(place, f"{_shown(json.dumps(name))} is no type; they are {', '.join(sorted(TYPES))}")
        if not names:
            self.refuse(place, "must name at least one type")
        return value

    def literal(self, value: object, place: str, depth: int) -> object:
        """What must be written letter by letter: no text too long, no number that would be changed, no deep nesting."""
        if depth > self.limits.max_depth:
            self.refuse(place, f"a value is nested more than {self.limits.max_depth} deep")
        if isinstance(value, str):
            return self.text(value, place)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self.exact(value, place)
        if isinstance(value, list):
            return [self.literal(item, f"{place}/{index}", depth + 1) for index, item in enumerate(value)]
        if isinstance(value, dict):
            return {
                self.text(name, place): self.literal(item, f"{place}/{_escaped(name)}", depth + 1)
                for name, item in value.items()
            }
        return value

    def refuse(self, place: str, problem: str, code: Code = Code.INVALID_VALUE) -> NoReturn:
        """Raises a 400 that names the place."""
        raise ApiError(400, f"{self.param}: {_shown(place, 256)}: {problem}", code=code, param=self.param)


def add_pattern(copy: dict[str, object], pattern: str) -> None:
    """Asks for one more pattern of a text."""
    if "pattern" not in copy:
        copy["pattern"] = pattern
        return
    parts = copy.get("allOf", [])
    assert isinstance(parts, list)
    copy["allOf"] = [*parts, {"pattern": pattern}]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _shown(text: str, limit: int = _SHOWN_CHARS) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _shown_number(value: int | float) -> str:
    """A whole number of any size, shortened."""
    return _shown(repr(value)) if abs(value) < 2**128 else "a number of so many digits"


def _is_same(value: object, neutral: object) -> bool:
    """Equal, and of the same kind: False is not 0."""
    return type(value) is type(neutral) and value == neutral

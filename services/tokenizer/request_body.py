"""Tokenizer process: a body's way from JSON to a checked struct, the same for every route.

A body goes through two doors here: names (known, without effect, known but not built, unknown), then types and ranges.
What one field says about another is for the route. Every error is a 400 that names its field. Owns nothing; knows no
model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import inspect

from services.runtime.config import Settings
from services.tokenizer.api_error import ApiError, Code, bad_field
from services.tokenizer.field_tables import Neutral, is_neutral
from services.tokenizer.whole_numbers import with_whole_numbers

_MAX_IGNORED_NAMES = 32
_EMPTY_NAME = '""'

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True)
class Ignored:
    """Names that nobody knows, or that the template does not show: the answer has them in `x-ignored-fields`."""

    names: tuple[str, ...]

    def with_dropped(self, names: Sequence[str], settings: Settings) -> Ignored:
        """These and names that are known, but not shown by the model's chat template.

        Raises:
            ApiError: 400 naming the first, with `--strict-fields`.
        """
        if names and settings.strict_fields:
            raise bad_field(names[0], "is not shown by this model's chat template", Code.UNSUPPORTED_FIELD)
        return Ignored((*self.names, *names))

    @property
    def headers(self) -> Mapping[str, str]:
        """The header that tells the names, without a character that could end it; none for no names."""
        told = ", ".join(quote(name[:64], safe="[]") for name in self.names[:_MAX_IGNORED_NAMES])
        return {"x-ignored-fields": told} if self.names else {}


@dataclass(frozen=True)
class BodyForm(Generic[Body]):
    """What a route takes: its struct, the known fields that are not built, and those that change no token.

    Attributes:
        kind: The struct of the fields that are built.
        unbuilt: Name -> the values that mean the same as leaving it out; null always does.
        without_effect: Names that are taken whatever they say, those in nested objects as `OBJECT.NAME`.
    """

    kind: type[Body]
    unbuilt: Mapping[str, Neutral] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()

    def parse(self, fields: Mapping[str, object], settings: Settings) -> tuple[Body, Ignored]:
        """A body of this form, and the names in it that nobody knows.

        Raises:
            ApiError: 400 naming the field.
        """
        known = self.without_effect.union(self.kind.__struct_fields__)
        unknown = unknown_names(fields, known, self.unbuilt)
        body = convert(fields, self.kind)
        nested = [name for name in _nested_unknown(body, fields) if name not in self.without_effect]
        return body, ignore([*unknown, *nested], settings)


def unknown_names(
    fields: Mapping[str, object], known: frozenset[str], unbuilt: Mapping[str, Neutral], prefix: str = ""
) -> list[str]:
    """The names that are neither known nor known and not built, behind a prefix such as `stream_options.`.

    Raises:
        ApiError: 400 `unsupported_field`: one that is not built asks for something.
    """
    unknown: list[str] = []
    for name, value in fields.items():
        if name in known:
            continue
        if name not in unbuilt:
            unknown.append(prefix + name or _EMPTY_NAME)
        elif not is_neutral(value, unbuilt[name]):
            raise bad_field(prefix + name, "is not supported by this server", Code.UNSUPPORTED_FIELD)
    return unknown


def ignore(names: Sequence[str], settings: Settings) -> Ignored:
    """The unknown names of a body.

    Raises:
        ApiError: 400 naming the first, with `--strict-fields`.
    """
    if names and settings.strict_fields:
        raise bad_field(names[0][:128], "is not a known field", Code.UNKNOWN_FIELD)
    return Ignored(tuple(names))


def convert(fields: Mapping[str, object], kind: type[Body]) -> Body:
    """A JSON object as a struct.

    Raises:
        ApiError: 400 naming the field of a wrong type or range, or the missing one.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError:
        fields = with_whole_numbers(fields, kind)  # nearly nobody writes 1.0 for 1: not looked at before
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _error_of(fields, kind, str(error)) from None


def _nested_unknown(body: msgspec.Struct, fields: Mapping[str, object]) -> list[str]:
    """Keys of nested objects that no struct has, each once, as `messages[].content[].NAME`."""
    found: dict[str, None] = {}
    for name in body.__struct_fields__:
        _collect_unknown(getattr(body, name), fields.get(name), name, found)
    return list(found)


def _collect_unknown(value: object, raw: object, place: str, found: dict[str, None]) -> None:
    if isinstance(value, msgspec.Struct) and isinstance(raw, Mapping):
        tag = value.__struct_config__.tag_field
        for name, item in raw.items():
            if name in value.__struct_fields__:
                _collect_unknown(getattr(value, name), item, f"{place}.{name}", found)
            elif name != tag:
                found[f"{place}.{name}"] = None
    elif isinstance(value, list) and isinstance(raw, list):
        for item, raw_item in zip(value, raw, strict=True):
            _collect_unknown(item, raw_item, f"{place}[]", found)


_PROBLEM = re.compile(r"(?P<problem>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<param>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_NULL = re.compile(r"Expected .*, got `(?:null|NoneType)`", re.DOTALL)
_ANY_KEY = "[...]"
_WRONG_WORD = re.compile(r"Invalid (enum )?value '")
_ANY_STEP = re.compile(r"\w+|\[[^]]*\]")
_STEP = re.compile(r"(\w+)|\[(\d+)\]")


def _error_of(fields: Mapping[str, object], kind: type[Body], text: str) -> ApiError:
    """Turns the library's "Expected `int`, got `str` - at `$.n`" into an error that names the field."""
    problem, param = _parsed(text)
    missing = _MISSING.match(problem)
    if missing:
        return bad_field(".".join(filter(None, (param, missing[1]))), "is required", Code.MISSING_FIELD)
    if _NULL.fullmatch(problem) and param and not param.endswith("]"):  # null is the same as leaving a field out
        return bad_field(param, "is required", Code.MISSING_FIELD)
    if _WRONG_WORD.match(problem) and (words := _allowed_words(kind, param)):
        problem += f", must be {words}"
    if _ANY_KEY in param:
        param = _with_key(fields, kind, _parsed(text)[0], param)
    return bad_field(param, problem[:1].lower() + problem[1:].replace("`", ""))


def _allowed_words(kind: type[msgspec.Struct], param: str) -> str:
    """The words that may stand at a place where another one does, as `a, b or c`; "" for none."""
    found: Sequence[inspect.Type] = [inspect.type_info(kind)]
    for step in _ANY_STEP.findall(param):
        found = [inner for outer in _alternatives(found) for inner in _within(outer, step)]
    words = [str(word) for one in _alternatives(found) if isinstance(one, inspect.LiteralType) for word in one.values]
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _alternatives(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for one in types:
        if isinstance(one, inspect.Metadata):
            yield from _alternatives([one.type])
        elif isinstance(one, inspect.UnionType):
            yield from _alternatives(one.types)
        else:
            yield one


def _within(outer: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """The types of what a step of a place leads to: a field of a struct, an item of a list, a value of an object."""
    if isinstance(outer, inspect.StructType):
        yield from (field.type for field in outer.fields if field.name == step)
        if outer.tag_field == step and isinstance(outer.tag, str):
            yield inspect.LiteralType((outer.tag,))
    elif isinstance(outer, inspect.ListType):
        yield outer.item_type
    elif isinstance(outer, inspect.DictType):
        yield outer.value_type


def _parsed(text: str) -> tuple[str, str]:
    found = _PROBLEM.fullmatch(text)
    if found is None:
        return text, ""
    problem = found["problem"]
    return f"a key: {problem[:1].lower()}{problem[1:]}" if found["key"] else problem, found["param"] or ""


def _with_key(fields: Mapping[str, object], kind: type[Body], problem: str, param: str) -> str:
    """Names the key of an object, for which the library says `[...]`: found by halving the object.

    The first entry that is wrong is the one that is told, so it is in the first half exactly if that one fails alike.
    """
    before, _, after = param.partition(_ANY_KEY)
    steps = [name or int(index) for name, index in _STEP.findall(before)]
    found: object = fields
    for step in steps:
        found = found[step]  # type: ignore[index]  # the library has been there
    assert isinstance(found, Mapping)
    entries = list(found.items())
    told = (problem, re.sub(r"\[\d+\]", "[0]", param))
    while len(entries) > 1:
        half = entries[: len(entries) // 2]
        entries = half if _problem_of(_only(fields, steps, dict(half)), kind) == told else entries[len(half) :]
    return f"{before}.{str(entries[0][0])[:64]}{after}"


def _problem_of(fields: object, kind: type[Body]) -> tuple[str, str] | None:
    try:
        msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        return _parsed(str(error))
    return None


def _only(container: object, steps: Sequence[str | int], value: object) -> object:
    """The container with nothing in it but what leads to a place, and this value there."""
    if not steps:
        return value
    if isinstance(container, Mapping):
        return {steps[0]: _only(container[steps[0]], steps[1:], value)}
    assert isinstance(container, Sequence)
    assert isinstance(steps[0], int)
    return [_only(container[steps[0]], steps[1:], value)]

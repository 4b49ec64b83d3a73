"""Tokenizer process: whole numbers that JSON writes with a fraction or an exponent, such as 1.0 or 1e3.

JSON knows one kind of number, and to a JSON Schema 1.0 is an integer; some languages write every number so. Where a
struct wants an integer and takes no float, such a number becomes one; everything else stays what it was. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import msgspec
from msgspec import inspect


def with_whole_numbers(fields: Mapping[str, object], kind: type[msgspec.Struct]) -> Mapping[str, object]:
    """The fields of a struct of this kind, with integers where it wants them and floats of their value stand."""
    found = _mended(fields, (_type_of(kind),))
    assert isinstance(found, Mapping)
    return found


@cache
def _type_of(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _mended(value: object, types: Iterable[inspect.Type]) -> object:
    options = list(_options(types))
    if isinstance(value, float):
        wants_integer = any(isinstance(option, inspect.IntType) for option in options)
        takes_float = any(isinstance(option, inspect.FloatType | inspect.AnyType) for option in options)
        return int(value) if wants_integer and not takes_float and value.is_integer() else value
    if isinstance(value, list):
        items = [option.item_type for option in options if isinstance(option, inspect.ListType)]
        return [_mended(item, items) for item in value] if items else value
    if isinstance(value, dict):
        return _mended_object(value, options)
    return value


def _mended_object(value: dict[str, object], options: Iterable[inspect.Type]) -> dict[str, object]:
    inner: dict[str, list[inspect.Type]] = {name: [] for name in value}
    for option in options:
        if isinstance(option, inspect.DictType):
            for types in inner.values():
                types.append(option.value_type)
        elif isinstance(option, inspect.StructType) and _may_be(value, option):
            for field in option.fields:
                if field.encode_name in inner:
                    inner[field.encode_name].append(field.type)
    return {name: _mended(item, inner[name]) if inner[name] else item for name, item in value.items()}


def _may_be(value: Mapping[str, object], option: inspect.StructType) -> bool:
    return option.tag_field is None or value.get(option.tag_field) == option.tag


def _options(types: Iterable[inspect.Type]) -> Iterable[inspect.Type]:
    for one in types:
        if isinstance(one, inspect.Metadata):
            yield from _options((one.type,))
        elif isinstance(one, inspect.UnionType):
            yield from _options(one.types)
        else:
            yield one

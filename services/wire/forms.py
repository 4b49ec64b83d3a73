"""The wire form of a field type: how a value is read from a frame, and how it is checked and laid out for one.

Supported: `int`, `float` (finite), `bool`, `str`, `bytes`, `X | None`, `tuple[X, ...]`, `dict[str, float]`, IntEnum,
StrEnum, and frozen dataclasses as nested arrays. Bounds come from `Annotated`. Both directions hold the same bounds:
what a process could not read, no process sends.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

from services.wire.errors import ProtocolError
from services.wire.flat import FlatField, flat_check, flat_reader
from services.wire.reader import BytesRule, Reader

MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_KEY_BYTES = 512
_DEFAULT_MAX_STR = 256
_DEFAULT_MAX_ITEMS = 4096


@dataclass(frozen=True)
class Limit:
    """The most bytes of a str (as UTF-8) or bytes field, or items of a tuple or dict."""

    most: int


@dataclass(frozen=True)
class Exactly:
    """The exact number of bytes of a bytes field."""

    length: int


@dataclass(frozen=True)
class Column:
    """A bytes field made of little-endian items of `item_bytes` each; `is_natural`: signed, and none is negative."""

    item_bytes: int
    is_natural: bool = False


@dataclass(frozen=True)
class Range:
    """Inclusive bounds of an int field. Without it an int is a signed 64-bit number."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Form:
    """One field type: `read` takes its value from a frame, `write` gives what msgpack shall pack.

    Both raise ProtocolError for a value outside the field's type or bounds. `flat` is the same for values that can be
    read and checked at once, side by side with others.
    """

    read: Callable[[Reader], Any]
    write: Callable[[Any], Any]
    flat: FlatField | None = None

    @property
    def rule(self) -> BytesRule | None:
        """That of a bytes field."""
        return None if self.flat is None else self.flat.rule


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a dataclass in order. `read` is told how many the frame announces.

    `read_flat` makes the message of a whole small frame, None if that is not plain enough; it is there where every
    field may be.
    """

    read: Callable[[Reader, int], Any]
    write: Callable[[Any], Sequence[Any]]
    read_flat: Callable[[bytes], Any] | None


_fields_of: dict[type, Fields] = {}


def fields_of(cls: type) -> Fields:
    """The compiled fields of a dataclass; TypeError when a field has no wire form."""
    compiled = _fields_of.get(cls)
    if compiled is None:
        compiled = _fields_of[cls] = _compile_fields(cls)
    return compiled


def _compile_fields(cls: type) -> Fields:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls)]
    forms = [_compile(hints[name]) for name in names]
    parts = _parts(forms)
    flat_fields = [form.flat for form in forms if form.flat is not None]
    is_flat = len(flat_fields) == len(forms)
    is_plain = flat_check(flat_fields) if is_flat else _never
    values_of = attrgetter(*names) if len(names) > 1 else lambda item: (getattr(item, names[0]),)
    check = getattr(cls, "check", None)

    def agree(item: object) -> None:
        if check is not None:
            try:
                check(item)
            except ProtocolError as error:
                raise ProtocolError(f"{cls.__name__}: {error}") from None

    def read(reader: Reader, arity: int) -> object:
        if arity != len(names):
            raise ProtocolError(f"{cls.__name__} has {len(names)} fields, frame holds {arity}")
        values: list[Any] = []
        try:
            for read_value, rules in parts:
                if read_value is None:
                    reader.byte_strings(rules, values)
                else:
                    values.append(read_value(reader))
        except ProtocolError as error:
            raise ProtocolError(f"{cls.__name__}.{names[len(values)]}: {error}") from None
        item = cls(*values)
        agree(item)
        return item

    def write(item: object) -> Sequence[Any]:
        if type(item) is not cls:
            raise ProtocolError(f"{item!r} is no {cls.__name__}")
        values: Sequence[Any] = values_of(item)
        if not is_plain(values):
            values = write_each(values)
        agree(item)
        return values

    def write_each(values: Sequence[Any]) -> list[Any]:
        written: list[Any] = []
        try:
            for value, form in zip(values, forms, strict=True):
                written.append(form.write(value))
        except ProtocolError as error:
            raise ProtocolError(f"{cls.__name__}.{names[len(written)]}: {error}") from None
        return written

    return Fields(read, write, flat_reader(cls, flat_fields) if is_flat else None)


def _never(values: Sequence[Any]) -> bool:
    """The check of a message whose fields are not all flat."""
    return False


_Part = tuple[Callable[[Reader], Any] | None, Sequence[BytesRule]]


def _parts(forms: Sequence[Form]) -> list[_Part]:
    """How to read fields in order: one by one, or, where there is no function, a run of bytes fields by their rules."""
    parts: list[_Part] = []
    for form in forms:
        if form.rule is None:
            parts.append((form.read, ()))
        elif parts and parts[-1][0] is None:
            parts[-1] = (None, (*parts[-1][1], form.rule))
        else:
            parts.append((None, (form.rule,)))
    return parts


def _compile(hint: Any, bounds: tuple[Any, ...] = ()) -> Form:
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        inner, *extra = typing.get_args(hint)
        return _compile(inner, (*bounds, *extra))
    if origin is types.UnionType or origin is typing.Union:
        return _optional(hint, bounds)
    if origin is tuple:
        return _tuple(hint, _limit(bounds, _DEFAULT_MAX_ITEMS))
    if origin is dict:
        return _number_map(_limit(bounds, _DEFAULT_MAX_ITEMS))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum(hint)
    if dataclasses.is_dataclass(hint):
        return _nested(cast(type, hint))
    if hint is int:
        return _integer(next((bound for bound in bounds if isinstance(bound, Range)), Range(-(2**63), 2**63 - 1)))
    if hint is str:
        return _string(_limit(bounds, _DEFAULT_MAX_STR))
    if hint is bytes:
        return _byte_string(bounds)
    if hint is bool:
        return Form(Reader.boolean, _write_boolean)
    if hint is float:
        return Form(Reader.number, _write_number)
    raise TypeError(f"no wire form for {hint!r}")


def _limit(bounds: tuple[Any, ...], default: int) -> int:
    return next((bound.most for bound in bounds if isinstance(bound, Limit)), default)


def _optional(hint: Any, bounds: tuple[Any, ...]) -> Form:
    inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if len(inner) != 1 or len(typing.get_args(hint)) != 2:
        raise TypeError(f"only `X | None` unions have a wire form, not {hint!r}")
    form = _compile(inner[0], bounds)
    return Form(
        lambda reader: None if reader.nil() else form.read(reader),
        lambda value: None if value is None else form.write(value),
    )


def _tuple(hint: Any, most: int) -> Form:
    inner = typing.get_args(hint)[0]
    if _most_bytes_of(inner) is not None:
        return _strings(most, cast(int, _most_bytes_of(inner)))
    item = _compile(inner)
    read_item, write_item = item.read, item.write

    def write(value: Any) -> list[Any]:
        _require(value, tuple)
        if len(value) > most:
            raise ProtocolError(f"{len(value)} items, limit {most}")
        return [write_item(item) for item in value]

    return Form(
        lambda reader: tuple([read_item(reader) for _ in range(reader.array_header(most))]),
        write,
        FlatField(),
    )


def _most_bytes_of(hint: Any) -> int | None:
    """The most bytes of a string field; None for any other."""
    if hint is str:
        return _DEFAULT_MAX_STR
    is_string = typing.get_origin(hint) is typing.Annotated and typing.get_args(hint)[0] is str
    return _limit(typing.get_args(hint)[1:], _DEFAULT_MAX_STR) if is_string else None


def _strings(most: int, most_bytes: int) -> Form:
    """A tuple of strings, read and checked in one go: each step has one for each answer."""
    write_item = _string(most_bytes).write

    def write(value: Any) -> list[str]:
        _require(value, tuple)
        if len(value) > most:
            raise ProtocolError(f"{len(value)} items, limit {most}")
        for item in value:
            if type(item) is not str or 4 * len(item) > most_bytes:
                write_item(item)
        return list(value)

    flat = FlatField(most=most, most_bytes=most_bytes)
    return Form(lambda reader: tuple(reader.short_strings(most, most_bytes)), write, flat)


def _number_map(most: int) -> Form:
    key = _string(MAX_KEY_BYTES)

    def write(value: Any) -> dict[str, float]:
        _require(value, dict)
        if len(value) > most:
            raise ProtocolError(f"{len(value)} entries, limit {most}")
        for name, number in value.items():
            if type(name) is not str or 4 * len(name) > MAX_KEY_BYTES:
                key.write(name)
            if type(number) is not float or not math.isfinite(number):
                _write_number(number)
        return cast(dict[str, float], value)

    return Form(lambda reader: reader.number_map(most, MAX_KEY_BYTES), write)


def _enum(hint: type[enum.Enum]) -> Form:
    members = {member.value: member for member in hint}
    is_text = issubclass(hint, str)

    def read(reader: Reader) -> enum.Enum:
        value = reader.string(64) if is_text else reader.integer(0, 0xFFFF)
        member = members.get(value)
        if member is None:
            raise ProtocolError(f"{value!r} is no {hint.__name__}")
        return member

    def write(value: Any) -> object:
        _require(value, hint)
        return value.value

    return Form(read, write)


def _nested(cls: type) -> Form:
    # Looked up at each use: a dataclass may come before the one that it holds has been compiled.
    return Form(
        lambda reader: fields_of(cls).read(reader, reader.array_header(_DEFAULT_MAX_ITEMS)),
        lambda value: fields_of(cls).write(value),
    )


def _integer(limits: Range) -> Form:
    low, high = limits.low, limits.high

    def write(value: Any) -> int:
        _require(value, int)
        if not low <= value <= high:
            raise ProtocolError(f"{value} is outside [{low}, {high}]")
        return cast(int, value)

    return Form(lambda reader: reader.integer(low, high), write, FlatField(limits=(low, high)))


def _string(most: int) -> Form:
    def write(value: Any) -> str:
        _require(value, str)
        if 4 * len(value) > most and len(value.encode(errors="surrogatepass")) > most:
            raise ProtocolError(f"string over {most} bytes")
        return cast(str, value)

    return Form(lambda reader: reader.string(most), write)


def _byte_string(bounds: tuple[Any, ...]) -> Form:
    exactly = next((bound.length for bound in bounds if isinstance(bound, Exactly)), None)
    column = next((bound for bound in bounds if isinstance(bound, Column)), Column(1))
    most = _limit(bounds, MAX_FRAME_BYTES) if exactly is None else exactly
    rule = BytesRule(0 if exactly is None else exactly, most, column.item_bytes, column.is_natural)

    def write(value: Any) -> bytes:
        _require(value, bytes)
        rule.check(value)
        return cast(bytes, value)

    def read(reader: Reader) -> bytes:
        values: list[Any] = []
        reader.byte_strings((rule,), values)
        return cast(bytes, values[0])

    return Form(read, write, FlatField(rule=rule))


def _write_boolean(value: Any) -> bool:
    _require(value, bool)
    return cast(bool, value)


def _write_number(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise ProtocolError(f"{type(value).__name__} instead of a number")
    if not math.isfinite(value):
        raise ProtocolError(f"{value} is not finite")
    return value


def _require(value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise ProtocolError(f"{type(value).__name__} instead of {kind.__name__}")

"""docs/protocol.md says of every message what services/wire says: tag, name, direction, fields, types."""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest

from services.runtime.session import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S, STARTING_SILENCE_LIMIT_S
from services.wire import answers, controls, members, request_params, requests, steps
from services.wire.controls import ControlAction
from services.wire.finish import Finish
from services.wire.forms import MAX_FRAME_BYTES, MAX_KEY_BYTES, Column, Exactly, Limit, Range
from services.wire.members import ForeignHello, Role, State
from services.wire.messages import MESSAGE_TYPES, PROTOCOL_VERSION
from services.wire.reader import MAX_VALUES
from services.wire.request_params import GrammarKind, Task

MODULES = (members, request_params, requests, controls, answers, steps)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^### (?:(\d+) )?(\w+)\n\n(.*?)(?=^### |^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (\w+) \| (.+?) \| (.+) \|$", re.MULTILINE)


def sections() -> dict[str, tuple[str, str]]:
    """Name -> (tag or "", text) of every section that describes a message or a part of one."""
    return {name: (tag, text) for tag, name, text in SECTION.findall(DOCUMENT)}


def nested_dataclasses() -> list[type]:
    """The parts of messages: what the modules declare beside the messages themselves."""
    return [
        cls
        for module in MODULES
        for cls in vars(module).values()
        if isinstance(cls, type)
        and cls.__module__ == module.__name__
        and dataclasses.is_dataclass(cls)
        and cls not in MESSAGE_TYPES.values()
        and cls is not ForeignHello
    ]


def notation(hint: Any) -> str:
    """The document's word for a field type."""
    bounds: dict[type, Any] = {}
    if typing.get_origin(hint) is typing.Annotated:
        hint, *extra = typing.get_args(hint)
        bounds = {type(bound): bound for bound in extra}
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return f"{notation(typing.get_args(hint)[0])} or nil"
    if origin is tuple:
        return f"array ≤ {bounds[Limit].most} of {notation(typing.get_args(hint)[0])}"
    if origin is dict:
        return f"map ≤ {bounds[Limit].most}"
    if isinstance(hint, type) and (issubclass(hint, enum.Enum) or dataclasses.is_dataclass(hint)):
        return hint.__name__
    if hint is int:
        return integer_notation(bounds.get(Range))
    if hint is bytes and Exactly in bounds:
        return f"bytes {bounds[Exactly].length}"
    if hint is bytes and Column in bounds:
        column = bounds[Column]
        wide = "int32 column" if column.is_natural else "float32 column"
        return {1: "uint8 column", 4: wide, 16: "id column"}[column.item_bytes]
    if hint in (str, bytes):
        return f"{hint.__name__} ≤ {bounds[Limit].most}"
    return str(hint.__name__)


def integer_notation(limits: Range | None) -> str:
    if limits is None:
        return "int64"
    names = {(0, 2**31 - 1): "uint31", (0, 2**63 - 1): "uint63", (0, 2**64 - 1): "uint64"}
    return names.get((limits.low, limits.high), f"{limits.low}..{limits.high}")


@pytest.mark.parametrize("cls", [*MESSAGE_TYPES.values(), *nested_dataclasses()], ids=lambda cls: cls.__name__)
def test_fields_and_types_of_every_message_are_documented(cls: type) -> None:
    tag, text = sections()[cls.__name__]
    hints = typing.get_type_hints(cls, include_extras=True)
    expected = [(field.name, notation(hints[field.name])) for field in dataclasses.fields(cls)]
    assert [(name, kind) for name, kind, _ in ROW.findall(text) if name != "field"] == expected
    assert (int(tag) if tag else None) == {made: number for number, made in MESSAGE_TYPES.items()}.get(cls)


@pytest.mark.parametrize("cls", MESSAGE_TYPES.values(), ids=lambda cls: cls.__name__)
def test_directions_are_those_of_the_docstrings(cls: type) -> None:
    found = re.match(r"\*\*(.+ → .+)\.\*\*", sections()[cls.__name__][1])
    assert found is not None
    assert (cls.__doc__ or "").startswith(found[1].replace("→", "->"))


def test_the_messages_are_declared_in_these_modules() -> None:
    """Guards the search for their parts: a further module of messages belongs into MODULES."""
    assert {cls.__module__ for cls in MESSAGE_TYPES.values()} <= {module.__name__ for module in MODULES}


def test_nothing_is_documented_that_does_not_exist() -> None:
    known = {cls.__name__ for cls in [*MESSAGE_TYPES.values(), *nested_dataclasses()]}
    assert set(sections()) == known


@pytest.mark.parametrize("kind", [State, Finish, Task, GrammarKind, ControlAction])
def test_numbers_of_the_enumerations_are_documented(kind: type[enum.IntEnum]) -> None:
    for member in kind:
        assert f"{int(member)} {member.name}" in DOCUMENT
    assert all(f"`{role}`" in DOCUMENT for role in Role)


def test_limits_and_times_are_documented() -> None:
    for fact in (
        f"PROTOCOL_VERSION is {PROTOCOL_VERSION}",
        f"{MAX_FRAME_BYTES // 2**20} MiB",
        f"{MAX_VALUES:,} values",
        f"{MAX_KEY_BYTES} bytes",
        f"every {HEARTBEAT_INTERVAL_S} s",
        f"{SILENCE_LIMIT_S:.0f} s of silence ({STARTING_SILENCE_LIMIT_S:.0f} s in state",
    ):
        assert fact in DOCUMENT

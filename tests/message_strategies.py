"""Hypothesis strategies that build every message type from its annotations, independently of the codec's compiler."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any

from hypothesis import strategies as st

from services.wire.columns import pack_int32, unpack_int32
from services.wire.finish import Finish
from services.wire.forms import Column, Exactly, Limit, Range

# Columns that belong together row by row, where a message has more than one group or a column outside of all.
ROW_GROUPS = {
    "WorkerCard": (("held_request_ids", "held_attempts", "held_indexes"),),
    "StepPlan": (
        ("page_rows", "page_counts"),
        ("rows", "start_positions", "num_new_tokens", "samples", "proposal_counts"),
    ),
    "LogitRules": (("bias_ids", "biases"),),
    "PromptLogprobs": (),
}
# column -> the column of counts that cuts it
CUT_BY = {
    "token_ids": "counts",
    "page_ids": "page_counts",
    "bad_word_ids": "bad_word_counts",
    "proposal_ids": "proposal_counts",
}
# What is not drawn row by row: times, and what `_complete` makes to fit the rest.
BESIDE_ROWS = ("epoch", "step", "forward_us", "step_us", "prompt_logprobs", "embeddings", "stops")
LOGPROB_COLUMNS = ("logprob_counts", "logprob_ids", "logprobs")
MAX_ROWS = 4


def messages(cls: type) -> st.SearchStrategy[Any]:
    """Valid instances of one message type (or of a dataclass inside of one)."""
    return _instances(cls)


@st.composite
def _instances(draw: st.DrawFn, cls: type) -> Any:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls)]
    num_rows: dict[str, int] = {}
    for group in _groups(cls, names):
        num_rows |= dict.fromkeys(group, draw(st.integers(0, MAX_ROWS)))
    values = {name: draw(_values(name, hints[name], num_rows.get(name))) for name in names}
    for name, counts in CUT_BY.items():
        if name in values and counts in values:
            total = sum(unpack_int32(values[counts]))
            values[name] = draw(_natural_columns(total))
    _complete(draw, values)
    return cls(**values)


def _complete(draw: st.DrawFn, values: dict[str, Any]) -> None:
    """Draws what depends on other columns: log-probabilities on the ids, stop strings on the finishes."""
    if "stops" in values:
        num_stops = values["finishes"].count(Finish.STOP_STRING)
        values["stops"] = tuple(draw(st.lists(st.text(max_size=5), min_size=num_stops, max_size=num_stops)))
    ids = "token_ids"
    if "logprob_counts" in values:
        num_ids = len(values[ids]) // 4
        counts = draw(st.just([]) | st.lists(st.integers(0, 3), min_size=num_ids, max_size=num_ids))
        ids, values["logprob_counts"] = "logprob_ids", pack_int32(counts)
        values[ids] = draw(_natural_columns(sum(counts)))
    if "logprobs" in values:
        length = len(values[ids])
        values["logprobs"] = draw(st.binary(min_size=length, max_size=length))


def _groups(cls: type, names: list[str]) -> tuple[tuple[str, ...], ...]:
    if cls.__name__ in ROW_GROUPS:
        return ROW_GROUPS[cls.__name__]
    if not hasattr(cls, "check"):
        return ()
    cut = [name for name in names if CUT_BY.get(name) in names]
    return (tuple(name for name in names if name not in (*cut, *BESIDE_ROWS, *LOGPROB_COLUMNS)),)


def _naturals() -> st.SearchStrategy[int]:
    return st.integers(0, 2**31 - 1)


def _natural_columns(num_rows: int) -> st.SearchStrategy[bytes]:
    return st.lists(_naturals(), min_size=num_rows, max_size=num_rows).map(pack_int32)


def _values(name: str, hint: Any, num_rows: int | None) -> st.SearchStrategy[Any]:
    bounds: tuple[Any, ...] = ()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *rest = typing.get_args(hint)
        bounds = tuple(rest)
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        return st.none() | _values(name, inner, num_rows)
    if origin is tuple:
        least, most = (0, 3) if num_rows is None else (num_rows, num_rows)
        items = _values(name, typing.get_args(hint)[0], None)
        return st.lists(items, min_size=least, max_size=most).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=20), st.floats(allow_nan=False, allow_infinity=False), max_size=5)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    if dataclasses.is_dataclass(hint):
        return messages(typing.cast(type, hint))
    return _scalars(name, hint, bounds, num_rows)


def _scalars(name: str, hint: Any, bounds: tuple[Any, ...], num_rows: int | None) -> st.SearchStrategy[Any]:
    by_kind = {type(bound): bound for bound in bounds}
    if hint is int:
        limits = by_kind.get(Range, Range(-(2**63), 2**63 - 1))
        return st.integers(limits.low, limits.high)
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if hint is bool:
        return st.booleans()
    if hint is str:
        return st.text(max_size=min(by_kind.get(Limit, Limit(256)).most // 4, 12))
    assert hint is bytes
    if Exactly in by_kind:
        return st.binary(min_size=by_kind[Exactly].length, max_size=by_kind[Exactly].length)
    if Column not in by_kind:
        return st.binary(max_size=min(by_kind.get(Limit, Limit(64)).most, 64))
    least, most = (0, MAX_ROWS) if num_rows is None else (num_rows, num_rows)
    return st.lists(_column_items(name, by_kind[Column]), min_size=least, max_size=most).map(b"".join)


def _column_items(name: str, column: Column) -> st.SearchStrategy[bytes]:
    if name == "finishes":
        return st.sampled_from([bytes([finish]) for finish in Finish])
    if name == "samples":
        return st.sampled_from([b"\0", b"\1"])
    if column.is_natural:
        numbers = st.integers(0, 3) if name in CUT_BY.values() else _naturals()
        return numbers.map(lambda number: number.to_bytes(4, "little"))
    return st.binary(min_size=column.item_bytes, max_size=column.item_bytes)

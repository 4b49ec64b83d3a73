"""1.0 where an integer is wanted: taken for one, at any depth, and nothing else is changed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.api_error import ApiError
from services.tokenizer.native_schema import GENERATE_FORM
from services.tokenizer.openai_schema import CHAT_FORM, COMPLETION_FORM
from services.tokenizer.request_body import convert
from services.tokenizer.whole_numbers import with_whole_numbers


class One(msgspec.Struct, tag="one", tag_field="type"):
    count: int


class Two(msgspec.Struct, tag="two", tag_field="type"):
    count: float


class Body(msgspec.Struct):
    n: Annotated[int, msgspec.Meta(ge=1, le=9)] | None = None
    share: float | None = None
    ids: list[int | list[int]] | None = None
    either: int | float | None = None
    anything: Any = None
    biases: dict[str, int] | None = None
    parts: list[One | Two] | None = None
    word: Literal["a"] | None = None


def same(value: object, other: object) -> bool:
    """Equal, and of the same types all through."""
    return repr(value) == repr(other)


@pytest.mark.parametrize(
    ("fields", "mended"),
    [
        ({"n": 1.0}, {"n": 1}),
        ({"n": 1e3}, {"n": 1000}),
        ({"n": 1.5}, {"n": 1.5}),
        ({"n": -0.0}, {"n": 0}),
        ({"share": 1.0, "either": 2.0, "anything": [3.0]}, {"share": 1.0, "either": 2.0, "anything": [3.0]}),
        ({"ids": [1.0, [2.0, 3], 4.5]}, {"ids": [1, [2, 3], 4.5]}),
        ({"biases": {"7": 5.0, "8": "x"}}, {"biases": {"7": 5, "8": "x"}}),
        (
            {"parts": [{"type": "one", "count": 1.0}, {"type": "two", "count": 1.0}, {"type": "three", "count": 1.0}]},
            {"parts": [{"type": "one", "count": 1}, {"type": "two", "count": 1.0}, {"type": "three", "count": 1.0}]},
        ),
        ({"unknown": 1.0, "n": "1", "word": 1.0}, {"unknown": 1.0, "n": "1", "word": 1.0}),
    ],
)
def test_whole_numbers_become_integers_where_these_are_wanted(fields: dict[str, Any], mended: dict[str, Any]) -> None:
    assert same(with_whole_numbers(fields, Body), mended)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["n", "share", "ids", "anything", "biases", "parts", "x"]), JSON))
def test_values_stay_the_same_whatever_comes(fields: dict[str, Any]) -> None:
    mended = with_whole_numbers(fields, Body)
    assert mended == fields
    assert same(with_whole_numbers(mended, Body), mended)


def test_bodies_take_them_and_name_what_is_no_whole_number() -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert convert({**chat, "n": 2.0, "max_tokens": 1e1, "temperature": 1}, CHAT_FORM.kind).n == 2
    assert convert({"prompt": [1.0, 2.0]}, COMPLETION_FORM.kind).prompt == [1, 2]
    native = convert({"input_ids": [1.0], "sampling_params": {"max_new_tokens": 4.0}}, GENERATE_FORM.kind)
    assert native.input_ids == [1]
    with pytest.raises(ApiError, match="n: expected int") as error:
        convert({**chat, "n": 1.5}, CHAT_FORM.kind)
    assert error.value.param == "n"
    with pytest.raises(ApiError, match="n: expected int") as error:
        convert({**chat, "n": 0.0}, CHAT_FORM.kind)

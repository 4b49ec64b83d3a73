"""Tokenizer process: which numbers of a schema the grammar library keeps exactly.

It reads a number as a double, quickly: the result is the nearest one only while the digits are a whole number below
2**53 and the power of ten is small. Whole numbers it holds in 64 bits, but those beyond 2**53 were doubles before.
A `multipleOf` it makes a whole number and a power of ten, by multiplying the double by ten until nothing is behind the
point; several that concern one value become their least common multiple. Whether that fits its 32 bits it does not see.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal

from services.tokenizer.json_schema_keywords import NUMBERS

MOST_EXACT = 2**53 - 1
"""The largest whole number to which one can be added without loss."""

_MOST_POWER = 22  # 10**22 is the largest power of ten that is a double
_MOST_MULTIPLE = (2**32 - 1) // 10  # the library multiplies remainders by ten, in 32 bits


def is_exact(value: int | float) -> bool:
    """Whether the library keeps a number as it is; a float that is whole counts as whole."""
    if isinstance(value, int) or value.is_integer():
        return abs(value) <= MOST_EXACT
    digits, power = _digits(value)
    return digits <= MOST_EXACT and power <= _MOST_POWER


def holds_inexact(value: object) -> bool:
    """Whether a JSON value has a number in it that would be changed."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, int | float) and not is_exact(one):
            return True
    return False


def is_exact_multiple(value: int | float) -> bool:
    """Whether the library's fraction is this `multipleOf`, above 0; for 0.07 it is not."""
    double, power = float(value), 0
    while not double.is_integer():
        double, power = double * 10, power + 1
    return 0 < double <= _MOST_MULTIPLE and Decimal(int(double)).scaleb(-power) == Decimal(repr(value))


def common_multiple(values: set[int | float]) -> int:
    """The least common multiple of some `multipleOf`, as a whole number of their smallest decimal place."""
    fractions = [_digits(value) for value in values]
    power = max(power for _, power in fractions)
    return math.lcm(*(digits * 10 ** (power - own) for digits, own in fractions))


def fits_together(values: set[int | float]) -> bool:
    """Whether the library can hold some `multipleOf` of one value together."""
    return len(values) < 2 or common_multiple(values) <= _MOST_MULTIPLE


def without_inexact(schema: object) -> object:
    """A copy of a schema without the bounds, constants and choices whose numbers would be changed."""
    if isinstance(schema, list):
        return [without_inexact(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {name: without_inexact(value) for name, value in schema.items() if not _is_lost(name, value)}


def _is_lost(name: str, value: object) -> bool:
    if name in NUMBERS:
        return isinstance(value, int | float) and not is_exact(value)
    return name in ("const", "enum") and holds_inexact(value)


def _digits(value: int | float) -> tuple[int, int]:
    """The digits of a positive number and how many of them are behind the point; the sign is dropped."""
    decimal = Decimal(repr(int(value) if float(value).is_integer() else value))
    _, digits, exponent = decimal.as_tuple()
    assert isinstance(exponent, int)
    return int("".join(map(str, digits))), -exponent

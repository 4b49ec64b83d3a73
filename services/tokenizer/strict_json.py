"""Tokenizer process: a request body to a JSON object, strictly.

What lenient parsers let through and what then breaks far from the request is refused here: NaN and infinities, numbers
beyond a float, duplicate keys, halves of surrogate pairs, bytes that are no UTF-8, a byte order mark, endless nesting,
endless digits, millions of values (a list of a million empty lists is small on the wire and huge in memory, and the
loop stands still while it is built). Owns nothing.
"""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn

from services.tokenizer.api_error import ApiError, Code

MAX_VALUES = 200_000
"""Values, less the outermost, as they are counted before anything is built: commas and opening brackets."""

_MAY_SPELL_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def decode_object(body: bytes) -> dict[str, object]:
    """The JSON object in a request body.

    Raises:
        ApiError: 400 `invalid_json` with what is wrong and where; 413 for more values than any request needs.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        problem = f"the body holds more than {MAX_VALUES} commas and opening brackets"
        raise ApiError(413, problem, code=Code.TOO_MANY_VALUES)
    try:
        value = _DECODER.decode(body.decode("utf-8"))
        if _MAY_SPELL_SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} is not UTF-8") from None
    except UnicodeEncodeError:
        raise _invalid("a text holds half of a surrogate pair") from None
    except RecursionError:
        raise _invalid("nested too deeply") from None
    except (json.JSONDecodeError, _RefusedError) as error:
        raise _invalid(str(error)) from None
    except ValueError:
        raise _invalid("a number has too many digits") from None
    if not isinstance(value, dict):
        raise _invalid("expected an object")
    return value


class _RefusedError(ValueError):
    """Something that the parser would take and we do not."""


def _invalid(problem: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {problem}", code=Code.INVALID_JSON)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _RefusedError(f"the number {text[:32]} is out of range")
    return value


def _no_constant(name: str) -> NoReturn:
    raise _RefusedError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _RefusedError(f"the key {name[:64]!r} appears twice")
    return fields


_DECODER = json.JSONDecoder(
    parse_float=_finite_float, parse_constant=_no_constant, object_pairs_hook=_no_duplicates, strict=True
)

"""The sampling defaults that a model's authors publish in generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.model_files.errors import ModelFileError
from services.model_files.source import ModelFiles


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets for a field that it omits; None means that the model says nothing.

    The ranges are those of a request: temperature 0 to 10 (0 is greedy), top_p 0 to 1 (0 is greedy), top_k from -1 up
    (-1 and 0 turn it off), min_p 0 to 1.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None


def load_sampling_defaults(files: ModelFiles, source: Literal["auto", "none"] = "auto") -> SamplingDefaults:
    """Read the defaults; `none` (the flag --generation-config none) leaves all of them to the API's own.

    Lengths such as `max_new_tokens` are not taken: how long an answer may be is the client's and the operator's choice.

    Raises:
        ModelFileError: a field has the wrong type or lies outside its range.
    """
    if source == "none":
        return SamplingDefaults()
    top_k = _number(files, "top_k", lambda value: value >= -1 and value == int(value))
    return SamplingDefaults(
        temperature=_number(files, "temperature", lambda value: 0 <= value <= 10),
        top_p=_number(files, "top_p", lambda value: 0 <= value <= 1),
        top_k=None if top_k is None else int(top_k),
        min_p=_number(files, "min_p", lambda value: 0 <= value <= 1),
    )


def _number(files: ModelFiles, key: str, is_legal: Callable[[float], bool]) -> float | None:
    value = files.generation_config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not is_legal(value):
        raise ModelFileError(_file(files), f"field {key}: {value!r} is no legal value")
    return float(value)


def _file(files: ModelFiles) -> Path:
    return files.path / "generation_config.json" if files.kind == "folder" else files.path

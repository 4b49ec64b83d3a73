"""The rules of `LogitRules` as the message describes them, one id at a time: what the tables must agree with."""

from __future__ import annotations

import math

import numpy as np

from services.wire.columns import pack_float32, pack_int32, split_by_counts, unpack_float32, unpack_int32
from services.wire.request_params import LogitRules


def rules(
    *,
    frequency: float = 0.0,
    presence: float = 0.0,
    repetition: float = 1.0,
    min_tokens: int = 0,
    stops: list[int] | None = None,
    biases: dict[int, float] | None = None,
    allowed: list[int] | None = None,
    bad_words: list[list[int]] | None = None,
) -> LogitRules:
    """A message from plain values."""
    words = bad_words or []
    return LogitRules(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_tokens=min_tokens,
        stop_token_ids=pack_int32(stops or []),
        bias_ids=pack_int32(biases or {}),
        biases=pack_float32((biases or {}).values()),
        allowed_token_ids=pack_int32(allowed or []),
        bad_word_counts=pack_int32(len(word) for word in words),
        bad_word_ids=pack_int32(token_id for word in words for token_id in word),
    )


def ruled(logits: list[float], wanted: LogitRules, prompt: list[int], output: list[int]) -> list[float]:
    """The logits of the next token; -inf for an id that must not come. Sums are float32, as those of the tables."""
    allowed = unpack_int32(wanted.allowed_token_ids)
    values = [value if not allowed or at in allowed else -math.inf for at, value in enumerate(logits)]
    for token_id, bias in zip(unpack_int32(wanted.bias_ids), unpack_float32(wanted.biases), strict=True):
        if token_id < len(values):
            values[token_id] = float(np.float32(values[token_id]) + np.float32(bias))
    for token_id in set(prompt + output):
        factor = np.float32(wanted.repetition_penalty)
        value = np.float32(values[token_id])
        values[token_id] = float(value / factor if value > 0 else value * factor)
    for token_id in set(output):
        times = np.float32(output.count(token_id))
        value = np.float32(values[token_id]) - times * np.float32(wanted.frequency_penalty)
        values[token_id] = float(value - np.float32(wanted.presence_penalty))
    if len(output) < wanted.min_tokens:
        for token_id in unpack_int32(wanted.stop_token_ids):
            if token_id < len(values):
                values[token_id] = -math.inf
    for word in split_by_counts(unpack_int32(wanted.bad_word_ids), unpack_int32(wanted.bad_word_counts)):
        if word and word[-1] < len(values) and output[len(output) - len(word) + 1 :] == word[:-1]:
            values[word[-1]] = -math.inf
    return values

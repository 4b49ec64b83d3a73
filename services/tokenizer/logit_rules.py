"""Tokenizer process: the fields that change logits, from what a client wrote to the rules that the worker applies.

None for the many requests that use none of them: then nothing of this costs anything, here or in the worker.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

from services.tokenizer.api_error import bad_field
from services.tokenizer.prompts import PromptMaker
from services.tokenizer.request_limits import ServedModel, check_token_ids, min_tokens, stop_token_ids
from services.tokenizer.sampling_body import SamplingBody
from services.wire.columns import pack_float32, pack_int32
from services.wire.request_params import LogitRules

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class RuleMaker:
    """Makes rules for one model."""

    def __init__(self, model: ServedModel, prompts: PromptMaker) -> None:
        self._model = model
        self._prompts = prompts

    async def rules(self, body: SamplingBody) -> LogitRules | None:
        """What is asked of the logits, by fields whose ids were checked; None for nothing.

        Raises:
            ApiError: 400 naming the field, 503 when too many long texts wait to be encoded.
        """
        num_held_open = min_tokens(body, self._model)
        biases = bias_of_ids(body.logit_bias or {}, self._model)
        bad_words = await self._bad_words(body.bad_words or ())
        rules = LogitRules(
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            min_tokens=num_held_open,
            stop_token_ids=pack_int32(stop_token_ids(body, self._model)) if num_held_open else b"",
            bias_ids=pack_int32(biases),
            biases=pack_float32(biases.values()),
            allowed_token_ids=pack_int32(sorted(set(body.allowed_token_ids or ()))),
            bad_word_counts=pack_int32(map(len, bad_words)),
            bad_word_ids=pack_int32(token_id for word in bad_words for token_id in word),
        )
        return None if rules == _NO_RULES else rules

    async def _bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Each word as it begins a text and as it follows a blank: two spellings, two runs of ids."""
        found: dict[tuple[int, ...], None] = {}
        for index, word in enumerate(words):
            bare = word.lstrip(" ")
            for spelling in dict.fromkeys((word, bare, f" {bare}")):
                ids = await self._prompts.text_ids(spelling, f"bad_words[{index}]", add_special_tokens=False)
                if ids:
                    found[tuple(ids)] = None
            await asyncio.sleep(0)  # short texts are encoded on the loop: others get their turn
        return list(found)


_NO_RULES = LogitRules()


def bias_of_ids(logit_bias: Mapping[str, float], model: ServedModel) -> dict[int, float]:
    """Biases by id, without those that change nothing.

    Raises:
        ApiError: 400: a key is no id of the vocabulary.
    """
    biases: dict[int, float] = {}
    for key, bias in logit_bias.items():
        if not _TOKEN_ID.fullmatch(key):
            raise bad_field(f"logit_bias.{key[:64]}", "the key is no token id")
        check_token_ids((int(key),), model, f"logit_bias.{key}")
        if bias:
            biases[int(key)] = bias
    return biases

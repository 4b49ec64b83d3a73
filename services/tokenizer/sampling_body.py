"""Tokenizer process: what a client may say about how its answers are drawn, cut and shown, whatever the API.

Types and ranges are in the struct; what one field says about another, and what the operator limits, is checked behind
it. Every error is a 400 that names its field. Owns nothing; knows no model.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from services.runtime.config import Settings
from services.tokenizer.api_error import bad_field
from services.wire.request_params import NO_LOGPROBS

MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_BYTES = 1024
MAX_TIMEOUT_S = 86_400
_INT32 = 2**31 - 1

StopString: TypeAlias = Annotated[str, Meta(min_length=1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=_INT32)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=_INT32)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options` of a request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_event_ids: bool | None = None


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all APIs share. None: the client left it out."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Bias] | None = None
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Count | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    timings: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    priority: Annotated[int, Meta(ge=-_INT32, le=_INT32)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wanted_tokens(self) -> int | None:
        """How many tokens the client asks for: the newer field wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_name(self) -> str:
        """What the client calls the field of `wanted_tokens`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_choices(self) -> int:
        """Answers for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_logprobs(self) -> int:
        """How many of the likeliest tokens are told at each place of an answer; NO_LOGPROBS for none at all."""
        return NO_LOGPROBS

    @property
    def num_prompt_logprobs(self) -> int:
        """The same for the prompt."""
        return NO_LOGPROBS if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def has_echo(self) -> bool:
        """Whether the prompt's text comes before each answer."""
        return False

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_event_ids(self) -> bool:
        """Whether the events of a stream have ids."""
        return self.stream_options is not None and bool(self.stream_options.include_event_ids)

    @property
    def wants_timings(self) -> bool:
        """Whether the last chunk or the body tells how long each step took; it does unless the client says no."""
        return self.timings is not False

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


def check_sampling(body: SamplingBody, settings: Settings) -> None:
    """What one field says about another, and the operator's limits.

    Raises:
        ApiError: 400 naming the field.
    """
    if body.num_choices > settings.max_choices:
        raise bad_field("n", f"must be at most {settings.max_choices}")
    _check_texts(body, settings)
    _check_lengths(body)
    _check_counts(body, settings)
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "is only for stream: true")


def _check_texts(body: SamplingBody, settings: Settings) -> None:
    if len(body.stop_strings) > settings.max_stop_strings:
        raise bad_field("stop", f"must be at most {settings.max_stop_strings} texts")
    for index, text in enumerate(body.stop_strings):
        if len(text.encode()) > settings.max_stop_bytes:
            param = "stop" if isinstance(body.stop, str) else f"stop[{index}]"
            raise bad_field(param, f"must be at most {settings.max_stop_bytes} bytes")
    for index, word in enumerate(body.bad_words or ()):
        if len(word.encode()) > MAX_BAD_WORD_BYTES:
            raise bad_field(f"bad_words[{index}]", f"must be at most {MAX_BAD_WORD_BYTES} bytes")


def _check_lengths(body: SamplingBody) -> None:
    if body.wanted_tokens == 0 and not body.has_echo and body.prompt_logprobs is None:
        problem = "must be at least 1 unless the prompt itself is asked for: echo, prompt_logprobs"
        raise bad_field(body.limit_name, problem)
    if body.min_tokens and body.wanted_tokens is not None and body.min_tokens > body.wanted_tokens:
        raise bad_field("min_tokens", f"must be at most {body.limit_name}, {body.wanted_tokens}")
    if body.truncate_prompt_tokens == 0:
        raise bad_field("truncate_prompt_tokens", "must be at least 1, or -1 for as many as fit")


def _check_counts(body: SamplingBody, settings: Settings) -> None:
    if body.logit_bias and len(body.logit_bias) > settings.max_logit_bias:
        raise bad_field("logit_bias", f"must have at most {settings.max_logit_bias} entries")
    if body.prompt_logprobs is not None:
        check_num_logprobs(body.prompt_logprobs, "prompt_logprobs", settings)


def check_num_logprobs(number: int, param: str, settings: Settings) -> None:
    """A number of log-probabilities against the operator's limit.

    Raises:
        ApiError: 400 naming the field.
    """
    if number > settings.max_logprobs:
        raise bad_field(param, f"must be at most {settings.max_logprobs}")

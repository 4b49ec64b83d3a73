"""Tokenizer process: the body of POST /generate (SGLang's native route) and what its names are elsewhere.

`sampling_params` has SGLang's names; they become the fields that all routes share, and an error about one of those is
told with the name that the client used. Lists of prompts share one set of parameters. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from services.tokenizer.api_error import ApiError, Code, bad_field
from services.tokenizer.request_body import BodyForm
from services.tokenizer.sampling_body import Count, Penalty, Share, StopString, TokenId

DEFAULT_NEW_TOKENS = 128  # as in the reference
_INT32 = 2**31 - 1
_Value = TypeVar("_Value")

Text = Annotated[str, Meta(min_length=1)]


class NativeSampling(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling_params`. What is only ever null is not built."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Annotated[bool | None, Meta(description="Only true.")] = None
    no_stop_trim: bool | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    stream_interval: Annotated[Count | None, Meta(description="Only 1.")] = None
    stop_regex: None = None
    structural_tag: None = None
    custom_params: None = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /generate: a prompt as text or as ids, or a list of such prompts."""

    text: Text | Annotated[list[Text], Meta(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    model: str | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: Annotated[int, Meta(ge=0)] | list[Annotated[int, Meta(ge=0)]] | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None

    @property
    def is_list(self) -> bool:
        """Whether the client sent a list of prompts."""
        if self.input_ids is not None:
            return isinstance(self.input_ids[0], list)
        return isinstance(self.text, list)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts in the order given: all texts or all ids.

        Raises:
            ApiError: 400 naming the field: both or neither were given, or ids are mixed with lists.
        """
        if self.input_ids is not None and self.text is not None:
            raise bad_field("input_ids", "cannot be given together with text")
        if self.input_ids is not None:
            return _id_lists(self.input_ids)
        if self.text is None:
            raise bad_field("text", "is required, or input_ids", Code.MISSING_FIELD)
        return [self.text] if isinstance(self.text, str) else self.text

    @property
    def sampling(self) -> NativeSampling:
        """The parameters of all prompts.

        Raises:
            ApiError: 400: a list of them that differ.
        """
        return _the_one("sampling_params", self.sampling_params) or NativeSampling()

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answers' log-probabilities are wanted."""
        return bool(_the_one("return_logprob", self.return_logprob))

    @property
    def num_top(self) -> int:
        """How many of the likeliest tokens are told for each position."""
        return _the_one("top_logprobs_num", self.top_logprobs_num) or 0

    @property
    def logprobs_from(self) -> int:
        """The prompt's position from which log-probabilities are wanted; -1 for those of the answer alone."""
        start = _the_one("logprob_start_len", self.logprob_start_len)
        if start is not None and start < -1:
            raise bad_field("logprob_start_len", "must be at least -1")
        return -1 if start is None else start

    def rids(self, num_prompts: int) -> Sequence[str]:
        """The client's own names of its prompts; empty for none.

        Raises:
            ApiError: 400: not as many names as prompts.
        """
        if self.rid is None:
            return ()
        names = [self.rid] if isinstance(self.rid, str) else self.rid
        if len(names) != num_prompts:
            raise bad_field("rid", f"{len(names)} for {num_prompts} prompts")
        return names


_UNBUILT = {
    "input_embeds": (),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "modalities": (),
    "token_ids_logprob": (),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
    "background": (False,),
}
GENERATE_FORM = BodyForm(GenerateBody, _UNBUILT)

# SGLang's name -> the name that all routes share, where they differ
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}


def shared_fields(sampling: NativeSampling) -> dict[str, object]:
    """The fields that all routes share, without those that the client left out; `max_tokens` only if it is above 0."""
    values = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    fields = {_RENAMED.get(name, name): value for name, value in values.items() if value is not None}
    if fields.get("max_tokens") == 0:  # the prompt is computed and nothing else
        del fields["max_tokens"]
    return fields


def in_native_words(error: ApiError) -> ApiError:
    """An error about a field that all routes share, with the name that it has in `sampling_params`."""
    param = error.param or ""
    shared = param.split("[", 1)[0].split(".", 1)[0]
    names = {shared_name: name for name, shared_name in _RENAMED.items()}
    name = names.get(shared, shared)
    if name not in NativeSampling.__struct_fields__:
        return error
    place = f"sampling_params.{name}{param.removeprefix(shared)}"
    message = str(error.message)
    return ApiError(
        error.status,
        f"{place}: {message.removeprefix(f'{param}: ')}",
        code=error.code,
        param=place,
        retry_after_s=error.retry_after_s,
    )


def _id_lists(items: Sequence[int | list[int]]) -> list[list[int]]:
    ids = [item for item in items if isinstance(item, int)]
    lists = [item for item in items if isinstance(item, list)]
    if ids and lists:
        raise bad_field("input_ids", "must be a list of ids or a list of such lists")
    for index, item in enumerate(lists):
        if not item:
            raise bad_field(f"input_ids[{index}]", "must not be empty")
    return lists or [ids]


def _the_one(name: str, value: _Value | list[_Value] | None) -> _Value | None:
    """The value for all prompts; a list must hold the same one for each."""
    if not isinstance(value, list):
        return value
    if not value:
        return None
    if any(item != value[0] for item in value):
        raise bad_field(name, "must be the same for all prompts of a request", Code.UNSUPPORTED_VALUE)
    return value[0]

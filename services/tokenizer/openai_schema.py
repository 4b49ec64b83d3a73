"""Tokenizer process: what a client may ask for, checked field by field.

A body goes through three doors: names (known, without effect, known but not built, unknown), types and ranges, and what
one field says about another. Every error is a 400 that names its field. Owns nothing; knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Meta

from services.runtime.config import Settings
from services.tokenizer.api_error import Code, bad_field
from services.tokenizer.field_tables import (
    UNBUILT_IN_CHAT,
    UNBUILT_IN_COMPLETIONS,
    UNBUILT_IN_STREAM_OPTIONS,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_IN_STREAM_OPTIONS,
    Neutral,
    is_neutral,
)
from services.tokenizer.message_fields import unknown_message_keys

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 256
_MAX_IGNORED_NAMES = 32
_INT32 = 2**31 - 1

StopString = Annotated[str, Meta(min_length=1)]
Positive = Annotated[int, Meta(ge=1, le=_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
Share = Annotated[float, Meta(ge=0, le=1)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options` of a request."""

    include_usage: bool | None = None


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and completions share. None: the client left it out."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

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
    def num_choices(self) -> int:
        """Answers for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions. What a message holds is checked where it is rendered."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts in the order given: all texts or all ids.

        Raises:
            ApiError: 400: no prompt, an empty one, or a mixture.
        """
        items = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not items:
            raise bad_field("prompt", "must not be empty")
        ids = [item for item in items if isinstance(item, int)]
        if len(ids) == len(items):
            return [ids]
        texts = [item for item in items if isinstance(item, str)]
        id_lists = [item for item in items if isinstance(item, list)]
        if len(items) not in (len(texts), len(id_lists)):
            raise bad_field("prompt", "must be a text, a list of texts, a list of token ids or a list of such lists")
        for index, item in enumerate(items):
            if not item:
                raise bad_field("prompt" if isinstance(self.prompt, str) else f"prompt[{index}]", "must not be empty")
        return texts or id_lists


@dataclass(frozen=True)
class Ignored:
    """Names that nobody knows, or that the template does not show: the answer has them in `x-ignored-fields`."""

    names: tuple[str, ...]

    def with_dropped(self, names: Sequence[str], settings: Settings) -> Ignored:
        """These and names that are known, but not shown by the model's chat template.

        Raises:
            ApiError: 400 naming the first, with `--strict-fields`.
        """
        if names and settings.strict_fields:
            raise bad_field(names[0], "is not shown by this model's chat template", Code.UNSUPPORTED_FIELD)
        return Ignored((*self.names, *names))

    @property
    def header(self) -> str:
        """The names as a header value, without a character that could end the header."""
        return ", ".join(quote(name[:64], safe="[]") for name in self.names[:_MAX_IGNORED_NAMES])


def parse_chat(fields: Mapping[str, object], settings: Settings) -> tuple[ChatBody, Ignored]:
    """A chat request.

    Raises:
        ApiError: 400 naming the field.
    """
    ignored = _check_names(fields, _CHAT_FIELDS, UNBUILT_IN_CHAT)
    body = _convert(fields, ChatBody)
    if len(body.messages) > settings.max_messages:
        raise bad_field("messages", f"{len(body.messages)} messages, at most {settings.max_messages} are allowed")
    names = unknown_message_keys(body.messages)
    _check_sampling(body, settings)
    return body, _ignore([*ignored, *names], settings)


def parse_completion(fields: Mapping[str, object], settings: Settings) -> tuple[CompletionBody, Ignored]:
    """A completion request.

    Raises:
        ApiError: 400 naming the field.
    """
    ignored = _check_names(fields, _COMPLETION_FIELDS, UNBUILT_IN_COMPLETIONS)
    body = _convert(fields, CompletionBody)
    num_prompts = len(body.prompts)
    _check_sampling(body, settings)
    if num_prompts * body.num_choices > settings.max_prompts:
        raise bad_field("prompt", f"{num_prompts} prompts with n={body.num_choices}, at most {settings.max_prompts}")
    if body.echo and not isinstance(body.prompts[0], str):
        raise bad_field("echo", "needs the prompt as text", Code.UNSUPPORTED_VALUE)
    return body, _ignore(ignored, settings)


def _check_sampling(body: SamplingBody, settings: Settings) -> None:
    if body.num_choices > settings.max_choices:
        raise bad_field("n", f"must be at most {settings.max_choices}")
    for index, text in enumerate(body.stop_strings):
        if len(text.encode()) > MAX_STOP_BYTES:
            param = "stop" if isinstance(body.stop, str) else f"stop[{index}]"
            raise bad_field(param, f"must be at most {MAX_STOP_BYTES} bytes")
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "is only for stream: true")


def _check_names(fields: Mapping[str, object], built: frozenset[str], unbuilt: Mapping[str, Neutral]) -> list[str]:
    """The unknown names, those inside stream_options too."""
    ignored = _unknown_names(fields, built | WITHOUT_EFFECT, unbuilt, "")
    options = fields.get("stream_options")
    if isinstance(options, dict):
        known = frozenset(StreamOptions.__struct_fields__) | WITHOUT_EFFECT_IN_STREAM_OPTIONS
        ignored += _unknown_names(options, known, UNBUILT_IN_STREAM_OPTIONS, "stream_options.")
    return ignored


def _unknown_names(
    fields: Mapping[str, object], known: frozenset[str], unbuilt: Mapping[str, Neutral], prefix: str
) -> list[str]:
    unknown: list[str] = []
    for name, value in fields.items():
        if name in known:
            continue
        if name not in unbuilt:
            unknown.append(prefix + name)
        elif not is_neutral(value, unbuilt[name]):
            raise bad_field(prefix + name, "is not supported by this server", Code.UNSUPPORTED_FIELD)
    return unknown


def _ignore(names: list[str], settings: Settings) -> Ignored:
    if names and settings.strict_fields:
        raise bad_field(names[0][:128], "is not a known field", Code.UNKNOWN_FIELD)
    return Ignored(tuple(names))


Body = TypeVar("Body", ChatBody, CompletionBody)


def _convert(fields: Mapping[str, object], kind: type[Body]) -> Body:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        _raise_for(str(error))


_PROBLEM = re.compile(r"(?P<problem>.*?)(?: - at `\$\.?(?P<param>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")


def _raise_for(text: str) -> NoReturn:
    """Turns the library's "Expected `int`, got `str` - at `$.n`" into an error that names the field."""
    found = _PROBLEM.fullmatch(text)
    problem, param = (found["problem"], found["param"] or "") if found else (text, "")
    missing = _MISSING.match(problem)
    if missing:
        raise bad_field(".".join(filter(None, (param, missing[1]))), "is required", Code.MISSING_FIELD)
    raise bad_field(param, problem[:1].lower() + problem[1:].replace("`", ""))


_CHAT_FIELDS = frozenset(ChatBody.__struct_fields__)
_COMPLETION_FIELDS = frozenset(CompletionBody.__struct_fields__)

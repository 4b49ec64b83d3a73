"""Tokenizer process: an answer as Anthropic's Messages spell it, as a body and as the events of a stream.

    message_start
      content_block_start, content_block_delta ..., content_block_stop      once for each text, thought and call
    message_delta (stop reason, usage)
    message_stop

A stream begins before it is known how much of the prompt was cached: `message_start` counts all of it as input, and the
usage of `message_delta`, which takes its place, says how much of that came from the cache. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from services.tokenizer.answer_blocks import Block, BlockKind, blocks_of
from services.tokenizer.answer_parts import AnswerDelta, AnswerEnd, Part, Reasoning, Text, ToolCallStart
from services.tokenizer.api_error import ApiError, Code
from services.tokenizer.sse import named_event
from services.wire.finish import Finish

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NO_OVERLOAD = frozenset({Code.ABORTED, Code.BACKEND_LOST})  # of status 503 too, and nothing was too much


def messages_error_body(error: ApiError) -> bytes:
    """An error in Anthropic's form; the message names the field."""
    return msgspec.json.encode(_error(error))


class MessagesFormat:
    """The one answer of a request to /v1/messages."""

    def __init__(self, answer_id: str, model: str, num_prompt_tokens: int) -> None:
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
        self._num_prompt_tokens = num_prompt_tokens
        self._block: BlockKind | None = None
        self._num_blocks = 0
        self._end = AnswerEnd(Finish.NONE)

    def opening(self, choice: int) -> bytes:
        """The message without content, and the first ping."""
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
        message: dict[str, object] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return named_event("message_start", {"message": message}) + self.keep_alive()

    def delta(self, choice: int, delta: AnswerDelta) -> bytes:
        """More of a block, and the ends and beginnings of blocks."""
        return b"".join(map(self._part, delta.parts))

    def finish(self, choice: int, end: AnswerEnd) -> bytes:
        """The end of the last block; how the answer ended is told with the usage."""
        self._end = end
        return self._close_block()

    def ending(self, usage: Mapping[str, object]) -> bytes:
        """Why the answer ended, what it took, and the end."""
        delta = {"stop_reason": stop_reason(self._end), "stop_sequence": _stop_sequence(self._end)}
        last = {"delta": delta, "usage": messages_usage(usage)}
        return named_event("message_delta", last) + named_event("message_stop", {})

    def error(self, error: ApiError) -> bytes:
        """The event of an error; nothing follows it."""
        return named_event("error", _error(error))

    def keep_alive(self) -> bytes:
        """A ping."""
        return named_event("ping", {})

    def body(
        self, answers: Sequence[Sequence[AnswerDelta]], ends: Sequence[AnswerEnd], usage: Mapping[str, object]
    ) -> bytes:
        """The whole message."""
        [deltas], [end] = answers, ends
        return msgspec.json.encode(
            {
                **self._head,
                "content": [_content(block) for block in blocks_of(deltas)],
                "stop_reason": stop_reason(end),
                "stop_sequence": _stop_sequence(end),
                "usage": messages_usage(usage),
            }
        )

    def _part(self, part: Part) -> bytes:
        if isinstance(part, ToolCallStart):
            start = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
            return self._close_block() + self._open_block(BlockKind.CALL, start)
        if isinstance(part, Text):
            opened = self._continue_block(BlockKind.TEXT, {"type": "text", "text": ""})
            return opened + self._more({"type": "text_delta", "text": part.text})
        if isinstance(part, Reasoning):
            opened = self._continue_block(BlockKind.REASONING, {"type": "thinking", "thinking": "", "signature": ""})
            return opened + self._more({"type": "thinking_delta", "thinking": part.text})
        return self._more({"type": "input_json_delta", "partial_json": part.fragment})

    def _more(self, delta: Mapping[str, object]) -> bytes:
        return named_event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _continue_block(self, kind: BlockKind, start: Mapping[str, object]) -> bytes:
        return b"" if self._block is kind else self._close_block() + self._open_block(kind, start)

    def _open_block(self, kind: BlockKind, start: Mapping[str, object]) -> bytes:
        self._block = kind
        self._num_blocks += 1
        return named_event("content_block_start", {"index": self._num_blocks - 1, "content_block": start})

    def _close_block(self) -> bytes:
        if self._block is None:
            return b""
        self._block = None
        return named_event("content_block_stop", {"index": self._num_blocks - 1})


def stop_reason(end: AnswerEnd) -> str:
    """Anthropic's word for how an answer ended."""
    if end.finish is Finish.LENGTH:
        return "max_tokens"
    if end.finish is Finish.STOP_STRING:
        return "stop_sequence"
    return "tool_use" if end.is_for_tools else "end_turn"


def messages_usage(usage: Mapping[str, object]) -> dict[str, object]:
    """A usage in Anthropic's words: input tokens are those that the cache did not have."""
    details = usage["prompt_tokens_details"]
    cached = details["cached_tokens"] if isinstance(details, Mapping) else 0
    prompt_tokens = usage["prompt_tokens"]
    assert isinstance(cached, int)
    assert isinstance(prompt_tokens, int)
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _stop_sequence(end: AnswerEnd) -> str | None:
    return end.stop if end.finish is Finish.STOP_STRING and isinstance(end.stop, str) else None


def _content(block: Block) -> dict[str, object]:
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": block.text}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": call_input(block.text)}


def call_input(arguments: str) -> object:
    """The arguments of a call as an object; those that were cut off are given as they stand, under a name of ours."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {"_incomplete_json": arguments}
    return value if isinstance(value, dict) else {"_incomplete_json": arguments}


def _error(error: ApiError) -> dict[str, object]:
    kind = _ERROR_TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    if error.code in _NO_OVERLOAD:
        kind = "api_error"
    return {"type": "error", "error": {"type": kind, "message": message_with_field(error)}}


def message_with_field(error: ApiError) -> str:
    """The message of an error for a form that has no place of its own for the field at fault."""
    message = str(error.message)
    names_it = not error.param or message.startswith(f"{error.param}: ")
    return message if names_it else f"{error.param}: {message}"

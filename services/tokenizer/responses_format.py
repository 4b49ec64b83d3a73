"""Tokenizer process: an answer as OpenAI's Responses spell it, as a body and as the events of a stream.

    response.created, response.in_progress
      response.output_item.added
        response.content_part.added, response.output_text.delta ..., response.output_text.done, .content_part.done
      response.output_item.done                             the same for thoughts; for calls without content parts
    response.completed | .incomplete | .failed

Every event has the next `sequence_number`; the last one holds the whole response. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from services.tokenizer.answer_blocks import Block, BlockKind, blocks_of, is_whole_object
from services.tokenizer.answer_ids import AnswerKind
from services.tokenizer.answer_parts import AnswerDelta, AnswerEnd, Part, Reasoning, Text, ToolCallStart
from services.tokenizer.api_error import ApiError
from services.tokenizer.responses_schema import ResponsesBody
from services.tokenizer.sse import KEEP_ALIVE, named_event
from services.wire.finish import Finish

_PART_TYPES = {BlockKind.TEXT: "output_text", BlockKind.REASONING: "reasoning_text"}
_ITEM_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}


class ResponsesFormat:
    """The one answer of a request to /v1/responses."""

    def __init__(self, answer_id: str, created: int, model: str, body: ResponsesBody) -> None:
        """An answer of which nothing is known yet; its id is `resp_` and hexadecimal digits."""
        self._hex = answer_id.removeprefix(AnswerKind.RESPONSE)
        self._head = {"id": answer_id, "object": "response", "created_at": created, "model": model, **_echo(body)}
        self._blocks: list[Block] = []
        self._is_block_open = False
        self._num_events = 0
        self._end = AnswerEnd(Finish.NONE)

    def opening(self, choice: int) -> bytes:
        """The response without output."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, choice: int, delta: AnswerDelta) -> bytes:
        """More of an item, and the ends and beginnings of items."""
        return b"".join(map(self._part, delta.parts))

    def finish(self, choice: int, end: AnswerEnd) -> bytes:
        """The end of the last item."""
        self._end = end
        return self._close_block()

    def ending(self, usage: Mapping[str, object]) -> bytes:
        """The whole response."""
        status = _status(self._end)
        return self._event(f"response.{status}", response=self._whole(self._blocks, self._end, usage))

    def error(self, error: ApiError) -> bytes:
        """The response as far as it came, and why it failed; nothing follows it."""
        failed = self._response("failed", [self._item(*item, "incomplete") for item in enumerate(self._blocks)])
        told = {"code": "server_error", "message": f"{error.code}: {error.message}"}  # clients know but few codes
        return self._event("response.failed", response={**failed, "error": told})

    def keep_alive(self) -> bytes:
        """A comment."""
        return KEEP_ALIVE

    def body(
        self, answers: Sequence[Sequence[AnswerDelta]], ends: Sequence[AnswerEnd], usage: Mapping[str, object]
    ) -> bytes:
        """The whole response."""
        [deltas], [end] = answers, ends
        return msgspec.json.encode(self._whole(blocks_of(deltas), end, usage))

    def _whole(self, blocks: Sequence[Block], end: AnswerEnd, usage: Mapping[str, object]) -> dict[str, object]:
        status = _status(end)
        last = len(blocks) - 1
        items = [
            self._item(index, block, _item_status(block, end, is_last=index == last))
            for index, block in enumerate(blocks)
        ]
        reason = {"reason": "max_output_tokens"} if end.finish is Finish.LENGTH else None
        return {**self._response(status, items), "incomplete_details": reason, "usage": responses_usage(usage)}

    def _response(self, status: str, output: Sequence[object] = ()) -> dict[str, object]:
        return {
            **self._head,
            "status": status,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    def _item(self, index: int, block: Block, status: str) -> dict[str, object]:
        item: dict[str, object] = {"id": self._item_id(index, block), "status": status}
        if block.kind is BlockKind.CALL:
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **item, **call}
        content = [_content_part(block.kind, block.text)] if block.pieces else []
        if block.kind is BlockKind.REASONING:
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _item_id(self, index: int, block: Block) -> str:
        return f"{_ITEM_PREFIXES[block.kind]}_{self._hex}{index:04x}"

    def _part(self, part: Part) -> bytes:
        if isinstance(part, ToolCallStart):
            return self._close_block() + self._open_block(Block(BlockKind.CALL, part.call_id, part.name))
        if isinstance(part, Text):
            return self._continue_block(BlockKind.TEXT) + self._more("response.output_text.delta", part.text)
        if isinstance(part, Reasoning):
            return self._continue_block(BlockKind.REASONING) + self._more("response.reasoning_text.delta", part.text)
        return self._more("response.function_call_arguments.delta", part.fragment)

    def _more(self, name: str, text: str) -> bytes:
        block = self._blocks[-1]
        block.pieces.append(text)
        return self._event(name, **self._place(block), delta=text, **_no_logprobs(block.kind))

    def _place(self, block: Block) -> dict[str, object]:
        index = len(self._blocks) - 1
        place: dict[str, object] = {"item_id": self._item_id(index, block), "output_index": index}
        return place if block.kind is BlockKind.CALL else {**place, "content_index": 0}

    def _continue_block(self, kind: BlockKind) -> bytes:
        if self._is_block_open and self._blocks[-1].kind is kind:
            return b""
        return self._close_block() + self._open_block(Block(kind))

    def _open_block(self, block: Block) -> bytes:
        self._blocks.append(block)
        self._is_block_open = True
        index = len(self._blocks) - 1
        added = self._event(
            "response.output_item.added", output_index=index, item=self._item(index, block, "in_progress")
        )
        if block.kind is BlockKind.CALL:
            return added
        part = _content_part(block.kind, "")
        return added + self._event("response.content_part.added", **self._place(block), part=part)

    def _close_block(self) -> bytes:
        if not self._is_block_open:
            return b""
        self._is_block_open = False
        block, index = self._blocks[-1], len(self._blocks) - 1
        place, text = self._place(block), block.text
        if block.kind is BlockKind.CALL:
            done = self._event("response.function_call_arguments.done", **place, name=block.name, arguments=text)
        else:
            name = f"response.{_PART_TYPES[block.kind]}.done"
            done = self._event(name, **place, text=text, **_no_logprobs(block.kind))
            done += self._event("response.content_part.done", **place, part=_content_part(block.kind, text))
        item = self._item(index, block, _item_status(block, self._end, is_last=True))  # `_end` comes before the last
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, name: str, /, **fields: object) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event(name, {"sequence_number": number, **fields})


def responses_usage(usage: Mapping[str, object]) -> dict[str, object]:
    """A usage in the words of Responses; thoughts count as output, and are not counted apart."""
    of_prompt = usage["prompt_tokens_details"]
    cached = of_prompt["cached_tokens"] if isinstance(of_prompt, Mapping) else 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _status(end: AnswerEnd) -> str:
    return "incomplete" if end.finish is Finish.LENGTH or end.has_cut_call else "completed"


def _item_status(block: Block, end: AnswerEnd, *, is_last: bool) -> str:
    is_cut = is_last and end.finish is Finish.LENGTH
    if block.kind is BlockKind.CALL:
        is_cut |= not is_whole_object(block.text)
    return "incomplete" if is_cut else "completed"


def _content_part(kind: BlockKind, text: str) -> dict[str, object]:
    if kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _no_logprobs(kind: BlockKind) -> dict[str, object]:
    return {"logprobs": []} if kind is BlockKind.TEXT else {}


def _echo(body: ResponsesBody) -> dict[str, object]:
    """What a response repeats of its request; nothing of it is kept, so `store` is false."""
    text_format = body.text.format if body.text is not None else None
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"} if text_format is None else _without_nulls(text_format)},
        "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
        "tools": [{"parameters": None, "strict": None, **_without_nulls(tool)} for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": "disabled",
    }


def _without_nulls(value: msgspec.Struct) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(value)
    return {name: field for name, field in fields.items() if field is not None}

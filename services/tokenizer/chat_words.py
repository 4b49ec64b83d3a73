"""Tokenizer process: how OpenAI's chat form spells the parts of an answer, now and as it did before there were tools.

    tool_calls      a list, each with an index and an id
    function_call   the older spelling: one call, no id; for clients that speak of `functions`

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from services.tokenizer.answer_parts import AnswerEnd, Part, Reasoning, Text, ToolCallArguments, ToolCallStart
from services.tokenizer.openai_chunks import finish_reason

Call = tuple[ToolCallStart, str]
"""A whole call: its start and its arguments."""


class ChatWords:
    """The present spelling."""

    def delta_of(self, part: Part) -> Mapping[str, object]:
        """A part as the delta of a chunk."""
        match part:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case ToolCallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
            case ToolCallArguments(index, fragment):
                return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}

    def message_of(self, parts: Iterable[Part]) -> Mapping[str, object]:
        """A whole message; its content is null where there are only thoughts or calls."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: dict[int, tuple[ToolCallStart, list[str]]] = {}
        for part in parts:
            match part:
                case Text(text):
                    texts.append(text)
                case Reasoning(text):
                    thoughts.append(text)
                case ToolCallStart():
                    calls[part.index] = (part, [])
                case ToolCallArguments(index, fragment):
                    calls[index][1].append(fragment)
        content = "".join(texts) if texts or not (calls or thoughts) else None
        message: dict[str, object] = {"role": "assistant", "content": content}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message |= self.calls_of([(call, "".join(fragments)) for call, fragments in calls.values()])
        return message

    def calls_of(self, calls: Sequence[Call]) -> Mapping[str, object]:
        """The calls of a whole message, at least one."""
        return {
            "tool_calls": [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
                for call, arguments in calls
            ]
        }

    def reason_of(self, end: AnswerEnd) -> str:
        """Why an answer ended."""
        return finish_reason(end)


class LegacyChatWords(ChatWords):
    """The older spelling: an answer has one call at most."""

    def delta_of(self, part: Part) -> Mapping[str, object]:
        """A part as the delta of a chunk."""
        match part:
            case ToolCallStart(_, _, name):
                return {"function_call": {"name": name, "arguments": ""}}
            case ToolCallArguments(_, fragment):
                return {"function_call": {"arguments": fragment}}
            case _:
                return super().delta_of(part)

    def calls_of(self, calls: Sequence[Call]) -> Mapping[str, object]:
        """The call of a whole message."""
        call, arguments = calls[0]
        return {"function_call": {"name": call.name, "arguments": arguments}}

    def reason_of(self, end: AnswerEnd) -> str:
        """Why an answer ended."""
        reason = super().reason_of(end)
        return "function_call" if reason == "tool_calls" else reason


CHAT_WORDS, LEGACY_CHAT_WORDS = ChatWords(), LegacyChatWords()

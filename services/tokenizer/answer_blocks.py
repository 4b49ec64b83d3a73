"""Tokenizer process: the parts of a whole answer, put together: texts, thoughts and calls in the order of their begin.

What a body needs where a stream needs the parts themselves. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from services.tokenizer.answer_parts import AnswerDelta, Part, Reasoning, Text, ToolCallStart

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class BlockKind(Enum):
    """What a block holds."""

    TEXT = auto()
    REASONING = auto()
    CALL = auto()


@dataclass
class Block:
    """A text, a thought, or a call whose pieces are its arguments."""

    kind: BlockKind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, the thought, or the arguments as JSON text."""
        return "".join(self.pieces)


def is_whole_object(arguments: str) -> bool:
    """Whether the arguments of a call are a JSON object up to its end, and not only the beginning of one.

    What a parser gives is JSON as far as it goes, and `{}` for a call without any: so only the closing braces count.
    """
    bare = _STRING.sub("", arguments)
    return bool(bare) and '"' not in bare and bare.count("{") == bare.count("}")


def blocks_of(deltas: Iterable[AnswerDelta]) -> list[Block]:
    """The blocks of one answer; neighbouring pieces of text, and of thought, are one block."""
    blocks: list[Block] = []
    calls: dict[int, Block] = {}
    for delta in deltas:
        for part in delta.parts:
            _add(part, blocks, calls)
    return blocks


def _add(part: Part, blocks: list[Block], calls: dict[int, Block]) -> None:
    if isinstance(part, ToolCallStart):
        calls[part.index] = Block(BlockKind.CALL, part.call_id, part.name)
        blocks.append(calls[part.index])
    elif isinstance(part, Text | Reasoning):
        kind = BlockKind.TEXT if isinstance(part, Text) else BlockKind.REASONING
        if not blocks or blocks[-1].kind is not kind:
            blocks.append(Block(kind))
        blocks[-1].pieces.append(part.text)
    else:
        calls[part.index].pieces.append(part.fragment)

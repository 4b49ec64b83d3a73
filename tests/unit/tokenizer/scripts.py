"""Answers that the backend gives by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.wire.answers import TextChunks
from services.wire.finish import Finish
from services.wire.requests import Submit
from tests.unit.tokenizer.backend_peers import chunk

Script = Callable[[Submit], Sequence[TextChunks]]


def answering(pieces: Sequence[str], finish: Finish = Finish.LENGTH, cached: int = 0) -> Script:
    """Each piece is one token and one chunk; the last carries the finish."""

    def script(submit: Submit) -> list[TextChunks]:
        batches: list[TextChunks] = []
        offset = 0
        for index, piece in enumerate(pieces):
            is_last = index == len(pieces) - 1
            end = finish if is_last else Finish.NONE
            batches.append(chunk(submit, index, [1000 + index], offset, piece, end, cached))
            offset += len(piece.encode())
        return batches

    return script


OK = answering(["ok"])

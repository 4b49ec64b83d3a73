"""scheduler: what workers tell of prompts, on its way into the records of requests and out to their tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.scheduler.prompt_record import PromptPart
from services.scheduler.request import Request


class PromptParts:
    """The parts of one core that were kept and not told yet."""

    def __init__(self) -> None:
        self._untold: list[tuple[Request, PromptPart]] = []

    def take(self, parts: Iterable[PromptPart], open_requests: Mapping[bytes, Request]) -> None:
        """Keeps what a step told. A part that does not fit leaves its request incomplete, which will fail it."""
        for part in parts:
            request = open_requests.get(part.request_id)
            if request is None or request.attempt != part.attempt or request.prompt is None:
                continue
            if request.prompt.take(part):
                self._untold.append((request, part))

    def adopt(self, request: Request, sibling: Request | None) -> None:
        """What a sibling learned of the same prompt is told in the name of a request too, instead of computed again."""
        if request.prompt is None or sibling is None or sibling.prompt is None:
            return
        if request.submit.prompt_token_ids == sibling.submit.prompt_token_ids:
            parts = request.prompt.adopt(sibling.prompt, request.request_id, request.attempt)
            self._untold += [(request, part) for part in parts]
            request.peeked = (-1, 0, 0)  # the cache may lend more now

    def drain(self) -> list[tuple[Request, PromptPart]]:
        """What was kept since the last call, in order."""
        if not self._untold:
            return []
        untold, self._untold = self._untold, []
        return untold

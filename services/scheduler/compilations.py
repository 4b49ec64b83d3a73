"""scheduler: requests that wait for the worker to compile their grammar.

Each grammar that somebody waits for is asked for once, in the name of the first who does; the answer is for all who
wait by then. Nothing is remembered afterwards: the worker knows what it has compiled, and says so at once.
"""

from __future__ import annotations

from services.scheduler.request import Request
from services.wire.request_params import Grammar
from services.wire.steps import CompileGrammar, GrammarCompiled


class Compilations:
    """Waiting requests by their grammar, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[Grammar, dict[bytes, Request]] = {}
        self._asked: dict[tuple[bytes, int], Grammar] = {}  # in whose name
        self._unsent: list[CompileGrammar] = []

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __contains__(self, request: Request) -> bool:
        grammar = request.submit.sampling.grammar
        return grammar is not None and self._waiting.get(grammar, {}).get(request.request_id) is request

    def add(self, request: Request) -> None:
        """Lets a request wait; ValueError when it has no grammar."""
        grammar = request.submit.sampling.grammar
        if grammar is None:
            raise ValueError("a request without a grammar has nothing to wait for")
        if grammar not in self._waiting:
            self._waiting[grammar] = {}
            self._asked[request.request_id, request.attempt] = grammar
            self._unsent.append(CompileGrammar(request.request_id, request.attempt, grammar))
        self._waiting[grammar][request.request_id] = request

    def remove(self, request: Request) -> None:
        """Takes a request out; KeyError when it does not wait. With the last one its grammar is forgotten."""
        grammar = request.submit.sampling.grammar
        waiting = self._waiting[grammar] if grammar is not None else {}
        del waiting[request.request_id]
        if not waiting and grammar is not None:
            del self._waiting[grammar]
            self._asked = {name: asked for name, asked in self._asked.items() if asked != grammar}

    def answered(self, message: GrammarCompiled) -> list[Request]:
        """Who waits for this answer; the caller moves them on. Nobody when it comes too late."""
        grammar = self._asked.get((message.request_id, message.attempt))
        return [] if grammar is None else list(self._waiting[grammar].values())

    def drain(self) -> list[CompileGrammar]:
        """What is to be asked since the last call."""
        if not self._unsent:
            return []
        unsent, self._unsent = self._unsent, []
        return unsent

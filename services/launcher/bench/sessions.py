"""What a bench sends: sessions of turns, and the request body that a turn becomes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.launcher.bench.answers import Expected
from services.launcher.errors import CommandError

Message = Mapping[str, str]


@dataclass(frozen=True)
class Turn:
    """One request: a text, or token ids for a prompt of an exact length, and how long the answer shall be."""

    prompt: str | Sequence[int]
    output_tokens: int


@dataclass(frozen=True)
class Session:
    """Turns that follow each other, each sent with everything before it. `opening` are messages before the first."""

    turns: Sequence[Turn]
    opening: Sequence[Message] = ()


@dataclass(frozen=True)
class RequestForm:
    """How a turn is asked for: route, model, and the fields that are the same in all requests.

    With `ignores_eos` an answer must have exactly the tokens that were asked for.
    """

    model: str
    is_chat: bool
    ignores_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The route."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def expected(self, turn: Turn) -> Expected:
        """What the answer's usage must say. Only the length of a prompt of ids is known beforehand."""
        num_prompt = None if isinstance(turn.prompt, str) else len(turn.prompt)
        return Expected(turn.output_tokens, num_prompt, may_stop=not self.ignores_eos)

    def body(self, session: Session, answers: Sequence[str]) -> dict[str, Any]:
        """The request for the turn that follows these answers.

        Raises:
            CommandError: the session cannot be sent to this route.
        """
        turn = session.turns[len(answers)]
        request: dict[str, Any] = {
            "model": self.model,
            "max_tokens": turn.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignores_eos:
            request["ignore_eos"] = True
        prompt = self._messages(session, answers) if self.is_chat else self._prompt(session, answers)
        return {**request, ("messages" if self.is_chat else "prompt"): prompt, **self.extra}

    def _messages(self, session: Session, answers: Sequence[str]) -> list[Message]:
        messages = list(session.opening)
        for turn, answer in zip(session.turns, [*answers, None], strict=False):
            if not isinstance(turn.prompt, str):
                raise CommandError("token ids can be sent to the completions endpoint only")
            messages.append({"role": "user", "content": turn.prompt})
            if answer is None:
                break
            messages.append({"role": "assistant", "content": answer})
        return messages

    @staticmethod
    def _prompt(session: Session, answers: Sequence[str]) -> str | list[int]:
        if session.opening:
            raise CommandError("messages can be sent to the chat endpoint only (--endpoint chat)")
        turn = session.turns[len(answers)]
        if not isinstance(turn.prompt, str):
            if answers:
                raise CommandError("token ids cannot follow an answer")
            return list(turn.prompt)
        before = [f"{turn.prompt}{answer}\n" for turn, answer in zip(session.turns, answers, strict=False)]
        return "".join(before) + turn.prompt

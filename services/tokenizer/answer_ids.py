"""Tokenizer process: what answers are called: the kind of their route, then the id of the first of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class AnswerKind(StrEnum):
    """What an id begins with."""

    CHAT = "chatcmpl-"
    COMPLETION = "cmpl-"
    RESPONSE = "resp_"
    MESSAGE = "msg_"
    NATIVE = "gen-"
    EMBEDDING = "embd-"
    SCORE = "score-"


def id_headers(answer_id: str) -> Mapping[str, str]:
    """The headers that carry an id; Anthropic's clients look for another one."""
    headers = {"x-request-id": answer_id}
    return {**headers, "request-id": answer_id} if answer_id.startswith(AnswerKind.MESSAGE) else headers

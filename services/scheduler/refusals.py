"""scheduler: requests that are not taken, and what their clients are told."""

from __future__ import annotations

from services.scheduler.admission import RequestRefusedError
from services.wire.finish import Finish
from services.wire.requests import Refused, Submit

_ENDS = {
    Finish.ABORTED: (503, "aborted", "The request was ended by the operator."),
    Finish.TIMEOUT: (504, "timeout", "The time that the request may take is over."),
    Finish.BACKEND_LOST: (503, "backend_lost", "A process that the request needed is gone."),
}


def refused(submit: Submit, refusal: RequestRefusedError, retry_after_s: int) -> Refused:
    """The message for the tokenizer."""
    return Refused(
        submit.request_id, submit.attempt, refusal.status, refusal.code, str(refusal), refusal.param, retry_after_s
    )


def refusal_of_end(finish: Finish) -> RequestRefusedError:
    """What a client is told whose request ended before it was admitted."""
    status, code, text = _ENDS.get(finish, (500, "internal_error", "The server failed."))
    return RequestRefusedError(status, code, text)


def invalid_grammar(problem: str) -> RequestRefusedError:
    """A grammar that the worker could not compile; the tokenizer knows from which field it came."""
    return RequestRefusedError(400, "invalid_grammar", problem, "grammar")


def grammar_overdue(limit_s: float) -> RequestRefusedError:
    """A worker that says nothing about a grammar."""
    text = f"The grammar was not compiled within {limit_s:.0f} s; too many may be waiting."
    return RequestRefusedError(503, "grammar_timeout", text)

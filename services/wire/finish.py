"""Why an answer ended: a word of scheduler, worker, detokenizer and tokenizer alike."""

from __future__ import annotations

from enum import IntEnum


class Finish(IntEnum):
    """Why an answer ended. NONE in a row of a batch means that it goes on."""

    NONE = 0
    STOP_TOKEN = 1  # the last id is an end id or one of stop_token_ids; it counts, its text is not shown
    LENGTH = 2
    STOP_STRING = 3  # decided by the detokenizer
    ABORTED = 4
    NUMERICAL_ERROR = 5  # the logits of this row were not finite
    INTERNAL_ERROR = 6
    TIMEOUT = 7
    BACKEND_LOST = 8  # a process that the request needed died
    GRAMMAR_TOO_LARGE = 9  # its grammar could not be followed any further within the limits of a step

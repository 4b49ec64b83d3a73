"""What an operator asks of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from services.wire.fields import UInt31
from services.wire.forms import Limit


class ControlAction(IntEnum):
    """What an operator can ask of a scheduler."""

    FLUSH_CACHE = 1  # forget every cached prefix that nobody uses
    PAUSE = 2  # plan nothing more; requests keep their place
    RESUME = 3
    ABORT_GROUP = 4  # end the answers that share a group id
    ABORT_ALL = 5


@dataclass(frozen=True, slots=True)
class Control:
    """Tokenizer -> scheduler: an operator's wish, answered with `ControlDone` of the same serial.

    `group_id` is empty except for ABORT_GROUP.
    """

    serial: UInt31
    action: ControlAction
    group_id: Annotated[bytes, Limit(16)] = b""


@dataclass(frozen=True, slots=True)
class ControlDone:
    """Scheduler -> tokenizer: done; `count` is what it concerned: pages freed, answers ended, requests that wait."""

    serial: UInt31
    count: UInt31

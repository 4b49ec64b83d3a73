"""Tokenizer process: what an operator asked of the scheduler and was not told to be done yet. Pure but for its futures.

A wish is told by its serial. The scheduler does each at once, so whoever waits longer than a limit waits for a
scheduler that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.tokenizer.api_error import ApiError, Code, unavailable
from services.wire.controls import Control, ControlAction, ControlDone

CONTROL_LIMIT_S = 10.0
_MAX_SERIAL = 2**31 - 1


class ControlCalls:
    """The open wishes of one process."""

    def __init__(self, send: Callable[[Control], bool], limit_s: float = CONTROL_LIMIT_S) -> None:
        """`send` hands a message to the scheduler; False when its queue is full."""
        self._send = send
        self._limit_s = limit_s
        self._serial = 0
        self._open: dict[int, asyncio.Future[int]] = {}

    async def ask(self, action: ControlAction, group_id: bytes = b"") -> int:
        """Has something done; how much it concerned: pages, answers, waiting requests.

        Raises:
            ApiError: 503: the scheduler does not answer.
        """
        self._serial = self._serial % _MAX_SERIAL + 1
        serial = self._serial
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._open[serial] = done
        try:
            if not self._send(Control(serial, action, group_id)):
                raise unavailable(Code.OVERLOADED, "the scheduler does not keep up")
            async with asyncio.timeout(self._limit_s):
                return await done
        except TimeoutError:
            raise unavailable(Code.BACKEND_LOST, "the scheduler does not answer") from None
        finally:
            del self._open[serial]

    def take(self, message: ControlDone) -> bool:
        """The scheduler has done something; False when nobody waits for it any more."""
        done = self._open.get(message.serial)
        if done is None or done.done():
            return False
        done.set_result(message.count)
        return True

    def fail_all(self, error: ApiError) -> None:
        """The scheduler is gone: nobody needs to wait for it."""
        for done in self._open.values():
            if not done.done():
                done.set_exception(error)

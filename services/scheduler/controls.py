"""scheduler: what an operator asks for: an empty cache, a pause, the end of answers.

It decides nothing about who may ask: tokenizers do.
"""

from __future__ import annotations

from services.scheduler.answers import Answers
from services.scheduler.router import Router
from services.scheduler.workers import Workers
from services.wire.controls import Control, ControlAction, ControlDone
from services.wire.finish import Finish


class Controls:
    """Does an operator's wishes, each at once."""

    def __init__(self, router: Router, workers: Workers, answers: Answers) -> None:
        self._router = router
        self._workers = workers
        self._answers = answers

    def perform(self, message: Control, now_s: float) -> ControlDone:
        """Does what is wished; says how much it concerned: pages freed, requests that wait, answers ended."""
        match message.action:
            case ControlAction.FLUSH_CACHE:
                count = sum(core.flush_cache() for core in self._router.cores.values())
            case ControlAction.PAUSE | ControlAction.RESUME:
                self._workers.is_paused = message.action is ControlAction.PAUSE
                count = self._router.num_open
            case ControlAction.ABORT_GROUP | ControlAction.ABORT_ALL:
                is_of_all = message.action is ControlAction.ABORT_ALL
                count = self._abort(None if is_of_all else message.group_id, now_s)
        return ControlDone(message.serial, count)

    def _abort(self, group_id: bytes | None, now_s: float) -> int:
        """Ends the answers of a group, or all; their clients are told."""
        records = [
            record
            for record in self._router.open_records()
            if group_id is None or record.request.submit.group_id == group_id
        ]
        for record in records:
            self._answers.end(record, Finish.ABORTED, now_s)
        return len(records)

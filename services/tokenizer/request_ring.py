"""Tokenizer process: the records of open requests and of the last that ended, found by the id of any answer.

Reports of other processes land here, also those that come just after the end. Bounded: the oldest ended record goes.
"""

from __future__ import annotations

import re
from collections import OrderedDict

from services.tokenizer.request_record import RequestRecord
from services.wire.answers import HopReport

_ID = re.compile(r"(?:[A-Za-z0-9_.-]*[-_])?([0-9a-f]{32})")


class RequestRing:
    """Records by answer."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: how many ended requests are kept."""
        self._capacity = capacity
        self._by_answer: dict[bytes, RequestRecord] = {}
        self._ended: OrderedDict[str, RequestRecord] = OrderedDict()
        self.num_lost_reports = 0
        """Reports about requests that nobody remembers."""

    @property
    def num_ended(self) -> int:
        """Ended requests that are kept."""
        return len(self._ended)

    def add(self, record: RequestRecord) -> None:
        """A request whose answers have been asked for."""
        for answer in record.answers:
            self._by_answer[answer.request_id] = record

    def end(self, record: RequestRecord) -> None:
        """It has ended: it is kept as one of the last."""
        if not record.request_id:
            return
        self._ended[record.request_id] = record
        if len(self._ended) > self._capacity:
            _, oldest = self._ended.popitem(last=False)
            for answer in oldest.answers:
                del self._by_answer[answer.request_id]

    def take(self, report: HopReport) -> RequestRecord | None:
        """Files a report; its request, or None when nobody remembers it."""
        record = self._by_answer.get(report.request_id)
        if record is None:
            self.num_lost_reports += 1
        else:
            record.take(report)
        return record

    def find(self, name: str) -> RequestRecord | None:
        """The request of an answer by its id as clients know it (`chatcmpl-…`) or by the bare digits."""
        match = _ID.fullmatch(name)
        return self._by_answer.get(bytes.fromhex(match[1])) if match else None

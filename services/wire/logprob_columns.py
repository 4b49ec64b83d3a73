"""Columns of log-probabilities: an entry is an id and its value, an output id has some entries, a row some output ids.

The three columns of a batch are empty when nobody asked for log-probabilities, which is nearly always; else they hold
one count for each id of the batch, 0 for the ids of rows that did not ask. Rows are cut and joined as bytes: what
travels through a process that does not look at it is never unpacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.wire.columns import pack_int32, unpack_int32

ENTRY_BYTES = 4  # of an id, and of a value


@dataclass(frozen=True, slots=True)
class LogprobRun:
    """The log-probabilities of consecutive output ids.

    `counts` has the number of entries of each id; `ids` (int32) and `values` (float32, may be -inf) hold the entries.
    """

    counts: list[int]
    ids: bytes
    values: bytes

    @property
    def num_entries(self) -> int:
        """Entries of all its ids."""
        return len(self.ids) // ENTRY_BYTES

    def cut(self, first: int, end: int) -> LogprobRun:
        """Those of its ids [first, end), 0 <= first <= end."""
        if first == 0 and end >= len(self.counts):
            return self
        start_byte = ENTRY_BYTES * sum(self.counts[:first])
        counts = self.counts[first:end]
        end_byte = start_byte + ENTRY_BYTES * sum(counts)
        return LogprobRun(counts, self.ids[start_byte:end_byte], self.values[start_byte:end_byte])


class LogprobColumns(Protocol):
    """A checked message with columns of log-probabilities."""

    @property
    def logprob_counts(self) -> bytes:
        """Entries of each output id of the batch, int32; empty when nobody asked."""

    @property
    def logprob_ids(self) -> bytes:
        """The entries' ids, int32."""

    @property
    def logprobs(self) -> bytes:
        """The entries' values, float32."""


def runs_of_rows(batch: LogprobColumns, row_counts: Sequence[int]) -> Sequence[LogprobRun | None]:
    """A run for each row, whose numbers of output ids are `row_counts`; None for each when nobody asked."""
    if not batch.logprob_counts:  # nearly always: such a batch pays nothing
        return [None] * len(row_counts)
    return _split(unpack_int32(batch.logprob_counts), batch.logprob_ids, batch.logprobs, row_counts)


def _split(counts: Sequence[int], ids: bytes, values: bytes, row_counts: Iterable[int]) -> list[LogprobRun]:
    runs: list[LogprobRun] = []
    first = start_byte = 0
    for num_ids in row_counts:
        run_counts = list(counts[first : first + num_ids])
        end_byte = start_byte + ENTRY_BYTES * sum(run_counts)
        runs.append(LogprobRun(run_counts, ids[start_byte:end_byte], values[start_byte:end_byte]))
        first, start_byte = first + num_ids, end_byte
    return runs


def join_logprobs(runs: Sequence[LogprobRun | None], row_counts: Sequence[int]) -> tuple[bytes, bytes, bytes]:
    """The columns (counts, ids, values) of a batch from its rows; a row that did not ask is None."""
    counts: list[int] = []
    for run, num_ids in zip(runs, row_counts, strict=True):
        counts += [0] * num_ids if run is None else run.counts
    some = [run for run in runs if run is not None]
    return pack_int32(counts), b"".join(run.ids for run in some), b"".join(run.values for run in some)

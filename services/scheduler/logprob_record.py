"""scheduler: the log-probabilities of one request's output, kept beside its ids so that they can be sent again.

Only a request that asked for them has such a record. Pure bytes: what a value means is nobody's business here.
"""

from __future__ import annotations

from itertools import pairwise

from services.wire.logprob_columns import ENTRY_BYTES, LogprobRun


class LogprobRecord:
    """The entries of every output id so far.

    Args:
        num_before: output ids that an earlier attempt produced: their entries are the tokenizer's already, and empty
            here.
    """

    __slots__ = ("_ends", "_ids", "_values")

    def __init__(self, num_before: int) -> None:
        self._ends = [0] * (num_before + 1)  # how many entries there are up to each output index
        self._ids = bytearray()
        self._values = bytearray()

    @property
    def num_output(self) -> int:
        """Output ids with entries, those of `num_before` counted."""
        return len(self._ends) - 1

    def extend(self, run: LogprobRun) -> None:
        """Adds the entries of the next output ids."""
        end = self._ends[-1]
        for count in run.counts:
            end += count
            self._ends.append(end)
        self._ids += run.ids
        self._values += run.values

    def truncate(self, num_output: int) -> None:
        """Forgets the entries of the output ids from index `num_output` on."""
        del self._ends[num_output + 1 :]
        num_bytes = ENTRY_BYTES * self._ends[-1]
        del self._ids[num_bytes:], self._values[num_bytes:]

    def between(self, first_index: int, end_index: int) -> LogprobRun:
        """The entries of the output ids [first_index, end_index)."""
        ends = self._ends[first_index : end_index + 1]
        counts = [end - start for start, end in pairwise(ends)]
        cut = slice(ENTRY_BYTES * ends[0], ENTRY_BYTES * ends[-1])
        return LogprobRun(counts, bytes(self._ids[cut]), bytes(self._values[cut]))

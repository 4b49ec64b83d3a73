"""scheduler: a result beside the step that it belongs to: what can be taken as columns, and what row by row.

A result that says exactly one id for each request in lockstep is taken as it is; only those that have left since, or
whose id is one of their stop ids, are looked at. Any other result dissolves the lockstep and is read row by row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from services.scheduler.formation import March, marching_ids
from services.scheduler.lockstep import Lockstep
from services.scheduler.outcomes import TokenRun
from services.scheduler.radix_cache import TOKEN_BYTES
from services.scheduler.step_plan import FlightRow, StepInFlight
from services.scheduler.step_result import ResultError, RowResult, rows_of
from services.wire.columns import all_below, may_hold, unpack_int32
from services.wire.finish import Finish
from services.wire.steps import StepResult


@dataclass(slots=True)
class StepReading:
    """A result that is about to be taken.

    Attributes:
        flight: its step.
        column: the ids of those in lockstep; None when something about these is special.
        indexes: their output indexes.
        rows: the rows of the step that are to be taken one by one; complete after `march_on`.
        by_row: what the worker said of these.
    """

    flight: StepInFlight
    column: bytes | None
    indexes: bytes
    rows: Iterable[FlightRow]
    by_row: dict[int, RowResult]

    def march_on(self, lockstep: Lockstep, in_flight: Collection[StepInFlight]) -> list[TokenRun]:
        """Takes the ids of those in lockstep.

        Args:
            lockstep: the core's.
            in_flight: all steps in flight, this one among them.
        """
        if self.column is None:
            lockstep.dissolve(in_flight)
            return []
        runs: list[TokenRun] = []
        start = 0
        may_stop = may_hold(self.column, lockstep.stop_ids)
        for march in self.flight.marches:
            end = start + len(march)
            cut = slice(TOKEN_BYTES * start, TOKEN_BYTES * end)
            column, indexes = self.column[cut], self.indexes[cut]
            start = end
            if may_stop:
                self._let_go(march, unpack_int32(column), lockstep, in_flight)
            run = march.take(lockstep.clock, self.flight.step, column, indexes)
            if run:
                runs.append(run)
            if march.left:
                self._take_out(march, unpack_int32(column), unpack_int32(indexes))
        return runs

    def _let_go(self, march: March, ids: list[int], lockstep: Lockstep, in_flight: Collection[StepInFlight]) -> None:
        """Whose id may be the end leaves."""
        for place, (request, token_id) in enumerate(zip(march.formation.requests, ids, strict=True)):
            if token_id in request.stop_ids and place not in march.left:
                lockstep.leave(request, in_flight)

    def _take_out(self, march: March, ids: list[int], indexes: list[int]) -> None:
        """Puts those that have left with the rows that are taken one by one."""
        rows = list(self.flight.in_lockstep(march, sorted(march.left)))
        for place, (request, row, _, _) in zip(sorted(march.left), rows, strict=True):
            self.by_row[row] = (request.request_id, request.attempt, indexes[place], [ids[place]], Finish.NONE, None)
        self.rows = chain(rows, self.rows)


def read_result(flight: StepInFlight, result: StepResult, logits_width: int) -> StepReading:
    """Reads the result of a step; nothing is changed.

    Args:
        flight: the step.
        result: what the worker says of it.
        logits_width: ids that the worker can produce are [0, logits_width).

    Raises:
        ResultError: it does not hold together.
    """
    column = marching_ids(flight.marches, result)
    if column is None or not all_below(column, logits_width):
        return StepReading(flight, None, b"", flight.all_rows(), rows_of(result))
    indexes = result.first_indexes[: len(column)]
    if len(result.rows) == len(column):  # nearly always
        return StepReading(flight, column, indexes, flight.apart(), {})
    by_row = rows_of(result, len(column) // TOKEN_BYTES)
    if not by_row.keys().isdisjoint(unpack_int32(result.rows[: len(column)])):
        raise ResultError(f"result of step {result.step} names a row twice")
    return StepReading(flight, column, indexes, flight.apart(), by_row)

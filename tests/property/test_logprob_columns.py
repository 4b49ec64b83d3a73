"""Log-probability columns against lists of lists: cut, joined, kept, truncated."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.logprob_record import LogprobRecord
from services.wire.columns import pack_float32, pack_int32, unpack_float32, unpack_int32
from services.wire.logprob_columns import LogprobRun, join_logprobs, runs_of_rows

Entries = list[list[tuple[int, float]]]  # of consecutive ids

ENTRIES = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32, allow_nan=False)), max_size=4), max_size=6
)


@dataclass
class Columns:
    """Those of a message."""

    logprob_counts: bytes
    logprob_ids: bytes
    logprobs: bytes


def run_of(entries: Entries) -> LogprobRun:
    return LogprobRun(
        [len(each) for each in entries],
        pack_int32(token_id for each in entries for token_id, _ in each),
        pack_float32(value for each in entries for _, value in each),
    )


def entries_of(run: LogprobRun) -> Entries:
    pairs = iter(zip(unpack_int32(run.ids), unpack_float32(run.values), strict=True))
    entries = [[next(pairs) for _ in range(count)] for count in run.counts]
    assert next(pairs, None) is None
    return entries


@given(st.lists(st.tuples(ENTRIES, st.booleans()), max_size=6))
def test_rows_that_are_joined_are_cut_again(rows: list[tuple[Entries, bool]]) -> None:
    """Rows that did not ask come back as ids without entries."""
    row_counts = [len(entries) for entries, _ in rows]
    runs = [run_of(entries) if asks else None for entries, asks in rows]
    batch = Columns(*join_logprobs(runs, row_counts))
    again = runs_of_rows(batch, row_counts)
    if not batch.logprob_counts:
        assert again == [None] * len(rows)
        return
    assert [run and entries_of(run) for run in again] == [
        entries if asks else [[]] * len(entries) for entries, asks in rows
    ]


@given(ENTRIES, st.integers(0, 8), st.integers(0, 8))
def test_a_cut_is_a_slice(entries: Entries, first: int, num_ids: int) -> None:
    run = run_of(entries).cut(first, first + num_ids)
    assert entries_of(run) == entries[first : first + num_ids]
    assert run.num_entries == sum(map(len, entries[first : first + num_ids]))


@given(st.integers(0, 3), st.lists(st.tuples(ENTRIES, st.integers(0, 20)), max_size=5), st.integers(0, 20))
def test_a_record_is_a_list_that_grows_and_is_truncated(
    num_before: int, steps: list[tuple[Entries, int]], first: int
) -> None:
    record, model = LogprobRecord(num_before), [[] for _ in range(num_before)]  # type: tuple[LogprobRecord, Entries]
    for entries, num_kept in steps:
        record.extend(run_of(entries))
        model += entries
        record.truncate(num_kept)
        del model[num_kept:]
        assert record.num_output == len(model)
    first = min(first, len(model))
    assert entries_of(record.between(first, len(model))) == model[first:]

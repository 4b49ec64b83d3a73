"""gpu_worker: the sampler as a loop over rows; see `sampling.py` for who calls it."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.gpu_worker.cpu_loops.jit import (
    Ints,
    compiled,
    doubles,
    floats,
    int8s,
    int64s,
    integers,
    loop,
    num_threads,
    thread,
)
from services.gpu_worker.cpu_loops.probable import LANE_TOKENS, ONE, find_peaks, first_of_largest, keep_probable, weigh
from services.gpu_worker.cpu_loops.race import ALL, NUM_MASSES, draw
from services.gpu_worker.sampler import NUM_COLUMNS


def scratch_bytes(num_rows: int, vocab_size: int) -> int:
    """What a thread takes its notes in."""
    num_peaks = -(-vocab_size // LANE_TOKENS)
    return -(-(8 * (vocab_size + NUM_MASSES + num_rows) + 4 * (vocab_size + num_peaks)) // 64) * 64


@compiled
def _find_columns(column_of: Ints, num_rows: int, drawing_rows: Ints, num_drawn: int) -> None:
    """The column of each row, -1 of those that do not draw."""
    for row in range(num_rows):
        column_of[row] = -1
    for column in range(num_drawn):
        column_of[drawing_rows[column]] = column


@loop
def SAMPLE(pointer: Any) -> None:  # noqa: N802
    """Picks a token of each row of logits [rows, vocab]: token_ids [rows] int64 and is_failed [rows] int8.

    `columns` are those of `DrawnRows`, [NUM_COLUMNS, drawn]; the other rows are greedy.
    """
    logits, stride, rows, vocab, columns, drawn, token_ids, is_failed, scratch, scratch_size = integers(pointer, 10)
    ids, failed = int64s(token_ids, rows), int8s(is_failed, rows)
    whole, real = int64s(columns, NUM_COLUMNS * drawn), doubles(columns, NUM_COLUMNS * drawn)
    num_peaks = (vocab + LANE_TOKENS - 1) // LANE_TOKENS
    keys_at = scratch + thread() * scratch_size
    masses_at = keys_at + 8 * vocab
    columns_at = masses_at + 8 * NUM_MASSES
    weights_at = columns_at + 8 * rows
    peaks_at = weights_at + 4 * vocab
    keys, masses, column_of = int64s(keys_at, vocab), int64s(masses_at, NUM_MASSES), int64s(columns_at, rows)
    weights, peaks = floats(weights_at, vocab), floats(peaks_at, num_peaks)
    _find_columns(column_of, rows, whole, drawn)
    for row in range(thread(), rows, num_threads()):
        tokens = (logits + 4 * row * stride, peaks_at, vocab, num_peaks)
        values = floats(tokens[0], vocab)
        most = find_peaks(values, vocab, peaks, num_peaks)
        failed[row], ids[row] = not np.isfinite(most), 0
        column = column_of[row]
        if failed[row]:
            continue
        if column < 0:
            ids[row] = first_of_largest(tokens, most, keys)
            continue
        at = (whole[drawn + column], whole[2 * drawn + column])
        top_k, temperature = whole[3 * drawn + column], np.float32(real[4 * drawn + column])
        top_p, min_p = real[5 * drawn + column], real[6 * drawn + column]
        least = max(np.int64(1), np.int64(np.ceil(min_p * ONE)))
        total = weigh(values, vocab, most, temperature, weights)
        num = np.int64(ALL)
        if top_k > 0 or top_p < 1:
            num = keep_probable(tokens, weights, total, (most, temperature, top_k, top_p), keys)
        ids[row] = draw(keys, num, (weights_at, vocab), least, at, masses)

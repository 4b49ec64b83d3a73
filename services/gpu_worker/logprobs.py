"""gpu_worker: log-probabilities of the raw logits: of a token itself, and of the likeliest ones.

They are those of the model, before rules, grammar and temperature. Only rows that ask are looked at, in blocks of
bounded size. The likeliest come best first, equal ones by id. A NaN counts as probability 0; what cannot be
said is -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.row_lines import Picks
from services.gpu_worker.sampler import CHUNK, chunk_maxima
from services.gpu_worker.uploads import Int64s, to_host, upload_together
from services.wire.request_params import NO_LOGPROBS, SamplingParams

MAX_BLOCK = 2**22
"""Logits looked at at once: bounds the scratch memory to about 50 MB."""

_ID_BITS = 20  # an id in the low bits of a key
_LEAST_KEY = -(2**63)


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Of n tokens: own [n] float32; ids [n, k] int64 and values [n, k] float32 of the k likeliest, best first."""

    own: Tensor
    ids: Tensor
    values: Tensor

    def to_host(self) -> TopLogprobs:
        """The same on the host, perhaps only once the device has come this far."""
        return TopLogprobs(to_host(self.own), to_host(self.ids), to_host(self.values))


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of what some rows of a step have picked.

    Attributes:
        places: [n] their places in the step.
        num_top: [n] how many of the likeliest each wants.
        top: the values; own and likeliest.
    """

    places: Int64s
    num_top: Int64s
    top: TopLogprobs

    def to_host(self) -> RowLogprobs:
        """The same with the values on the host, perhaps only once the device has come this far."""
        return RowLogprobs(self.places, self.num_top, self.top.to_host())


@dataclass(frozen=True, slots=True)
class AskingRows:
    """The rows of a step that ask: [n] places and num_top as above, logit_rows on the device; the largest num_top."""

    places: Int64s
    num_top: Int64s
    logit_rows: Tensor
    width: int


class LogprobsTable:
    """How many log-probabilities rows [0, max_rows) want of each token."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._num_top = np.full(max_rows, NO_LOGPROBS, dtype=np.int64)
        self._device = device

    def set_row(self, row: int, params: SamplingParams) -> None:
        """Sets what a row wants from now on."""
        self._num_top[row] = params.num_logprobs

    def among(self, picks: Picks) -> AskingRows | None:
        """The rows of a step that ask; None if none does."""
        num_top = self._num_top[picks.rows]
        asks = num_top != NO_LOGPROBS
        if not asks.any():
            return None
        (logit_rows,) = upload_together([picks.logit_rows[asks]], self._device)
        return AskingRows(picks.places[asks], num_top[asks], logit_rows, int(num_top.max()))


def row_logprobs(logits: Tensor, token_ids: Tensor, rows: AskingRows) -> list[RowLogprobs]:
    """What the asking rows get, in blocks.

    Args:
        logits: [num_rows, vocab_size] float32, raw.
        token_ids: [num_rows] int64, picked, by row of the logits.
        rows: which ask.
    """
    found = []
    num_at_once = max(1, MAX_BLOCK // logits.shape[1])
    for start in range(0, len(rows.places), num_at_once):
        block = slice(start, start + num_at_once)
        logit_rows = rows.logit_rows[block]
        top = top_logprobs(logits.index_select(0, logit_rows), token_ids.index_select(0, logit_rows), rows.width)
        found.append(RowLogprobs(rows.places[block], rows.num_top[block], top))
    return found


def top_logprobs(logits: Tensor, token_ids: Tensor, width: int) -> TopLogprobs:
    """Log-probabilities of given tokens and of the likeliest ones.

    Args:
        logits: [n, vocab_size] float32; overwritten.
        token_ids: [n] int64.
        width: how many of the likeliest, >= 0; no more than the vocabulary come.
    """
    if not logits.is_cpu or bool(logits.amax(1).isnan().any()):  # a device is not asked: that would mean to wait for it
        logits.masked_fill_(logits.isnan(), -math.inf)
    totals = logits.logsumexp(1, keepdim=True)  # [n, 1]
    own = logits.gather(1, token_ids[:, None])
    values, ids = highest(logits, min(width, logits.shape[1]))
    return TopLogprobs(_difference(own, totals).squeeze(1), ids, _difference(values, totals))


def highest(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row, best first, equal ones by id, as float32 [n, width], and their ids, int64.

    In two levels: what is among the largest lies in one of the `width` chunks with the largest maxima, equal ones by
    place, so that whole rows are only read once.

    Args:
        logits: [n, vocab_size] float32 without NaN.
        width: at most vocab_size.
    """
    vocab_size = logits.shape[1]
    if not width:
        return logits[:, :0], torch.zeros((len(logits), 0), dtype=torch.int64, device=logits.device)
    maxima = chunk_maxima(logits)  # [n, num_chunks]
    chunk_ids = torch.arange(maxima.shape[1], device=logits.device).expand_as(maxima)
    chunks = _keys(maxima, chunk_ids).topk(min(width, maxima.shape[1]), dim=1).indices
    ids = (chunks[:, :, None] * CHUNK + torch.arange(CHUNK, device=logits.device)).flatten(1)
    is_real = ids < vocab_size  # the last chunk may be short
    values = logits.gather(1, ids.clamp(max=vocab_size - 1))
    places = _keys(values, ids).masked_fill_(~is_real, _LEAST_KEY).topk(width, dim=1).indices
    return values.gather(1, places), ids.gather(1, places)


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """Integers in the order of the values, and of falling ids where these are equal."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two are equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(torch.int64) << _ID_BITS) - ids


def _difference(logits: Tensor, totals: Tensor) -> Tensor:
    """The first less the second, -inf where that is not a number (of a row that fails)."""
    values = logits - totals
    return values.masked_fill_(values.isnan(), -math.inf)

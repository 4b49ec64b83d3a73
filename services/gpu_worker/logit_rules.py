"""gpu_worker: what requests want done to their logits before a token is picked (`wire.request_params.LogitRules`).

    biases -> repetition, frequency, presence penalty -> stop ids below min_tokens -> bad words -> ids not allowed

Bans come last and only take from a logit, so a list of allowed ids gives what it would give if it came first. Each rule
is a table with a line for each row that uses it; a step without such rows does not even look. All is elementwise or
touches each logit once: a row gets the same result alone and among others.

Ids that the model does not have change nothing: they could not come anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.added_logits import BAN, OUTSIDE_BAN, AddedLogits, Float32s
from services.gpu_worker.bad_words import BadWords
from services.gpu_worker.bit_masks import num_words, pack_ids, take_from_others
from services.gpu_worker.penalties import PenalizedRows, Penalties
from services.gpu_worker.row_lines import Picks, RowLines, TableLines, with_room
from services.gpu_worker.uploads import Int64s, int64_column, upload
from services.wire.columns import split_by_counts, unpack_int32
from services.wire.request_params import LogitRules


@dataclass(frozen=True, slots=True)
class StepRules:
    """The rows of one step that each rule concerns; None: no row."""

    biased: TableLines | None
    penalized: PenalizedRows | None
    held_open: TableLines | None
    with_bad_words: TableLines | None
    restricted: TableLines | None


class LogitRulesTable:
    """The rules of rows [0, max_rows)."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._has_rules = np.zeros(max_rows, dtype=np.bool_)
        self._biases = AddedLogits(max_rows, device)
        self._penalties = Penalties(max_rows, vocab_size, device)
        self._stops = AddedLogits(max_rows, device)
        self._min_tokens = np.zeros(max_rows, dtype=np.int64)
        self._bad_words = BadWords(max_rows, device)
        self._allowed_rows = RowLines(max_rows, device)
        self._allowed = torch.zeros((0, num_words(vocab_size)), dtype=torch.int32, device=device)

    def set_row(self, row: int, rules: LogitRules | None, token_ids: Int64s, num_prompt_tokens: int) -> None:
        """Sets the rules of a row from now on, after these tokens (prompt, then output; all of the vocabulary)."""
        if rules is None and not self._has_rules[row]:
            return
        self._has_rules[row] = rules is not None
        prompt, output = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
        self._penalties.set_row(row, rules, prompt, output)
        rules = rules or LogitRules()
        self._biases.set_row(row, *self._sums(int64_column(rules.bias_ids), np.frombuffer(rules.biases, dtype="<f4")))
        stops = self._known(int64_column(rules.stop_token_ids if rules.min_tokens else b""))
        self._stops.set_row(row, stops, np.full(len(stops), -BAN, dtype=np.float32))
        self._min_tokens[row] = rules.min_tokens
        words = split_by_counts(unpack_int32(rules.bad_word_ids), unpack_int32(rules.bad_word_counts))
        possible = [word for word in words if word and max(word) < self._vocab_size]
        self._bad_words.set_row(row, possible, output)
        self._set_allowed(row, rules)

    def among(self, picks: Picks) -> StepRules | None:
        """What concerns the rows of a step; None when no row has rules, as nearly always."""
        if not self._has_rules[picks.rows].any():
            return None
        is_open = picks.num_outputs < self._min_tokens[picks.rows]
        return StepRules(
            biased=self._biases.among(picks),
            penalized=self._penalties.among(picks),
            held_open=self._stops.among(picks.select(is_open)) if is_open.any() else None,
            with_bad_words=self._bad_words.among(picks),
            restricted=self._allowed_rows.among(picks),
        )

    def apply(self, logits: Tensor, rules: StepRules) -> None:
        """Changes the logits of a step, [num_rows, vocab_size] float32."""
        if rules.biased is not None:
            self._biases.apply(logits, rules.biased)
        if rules.penalized is not None:
            self._penalties.apply(logits, rules.penalized)
        if rules.held_open is not None:
            self._stops.apply(logits, rules.held_open)
        if rules.with_bad_words is not None:
            self._bad_words.apply(logits, rules.with_bad_words)
        if rules.restricted is not None:
            allowed = self._allowed.index_select(0, rules.restricted.lines)
            take_from_others(logits, rules.restricted.logit_rows, allowed, OUTSIDE_BAN)

    def keep(self, rules: StepRules, token_ids: Tensor) -> None:
        """Counts and remembers what was picked: [num_rows] int64, by row of the logits."""
        if rules.penalized is not None:
            self._penalties.keep(rules.penalized, token_ids.index_select(0, rules.penalized.at.logit_rows))
        if rules.with_bad_words is not None:
            self._bad_words.keep(rules.with_bad_words, token_ids.index_select(0, rules.with_bad_words.logit_rows))

    def append(self, row: int, token_ids: Int64s) -> None:
        """Counts and remembers ids that a row got without picking them."""
        if self._has_rules[row]:
            self._penalties.append(row, token_ids)
            self._bad_words.append(row, token_ids)

    def _set_allowed(self, row: int, rules: LogitRules) -> None:
        if not rules.allowed_token_ids:
            self._allowed_rows.give_back(row)
            return
        line = self._allowed_rows.take(row)
        self._allowed = with_room(self._allowed, self._allowed_rows.num_lines, self._allowed.shape[1])
        packed = pack_ids(self._known(int64_column(rules.allowed_token_ids)), self._vocab_size)
        self._allowed[line] = upload(packed, self._device)

    def _known(self, ids: Int64s) -> Int64s:
        """Those that the model has, each once."""
        unique: Int64s = np.unique(ids)
        return unique[unique < self._vocab_size]

    def _sums(self, ids: Int64s, values: Float32s) -> tuple[Int64s, Float32s]:
        """The ids that the model has, each once, and the sum of their values."""
        is_known = ids < self._vocab_size
        unique, places = np.unique(ids[is_known], return_inverse=True)
        sums = np.zeros(len(unique), dtype=np.float32)
        np.add.at(sums, places, values[is_known])
        return unique, sums

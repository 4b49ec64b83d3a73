"""gpu_worker: inputs of decode steps in memory that stays where it is, for what was recorded to read them.

Every row has one new token. Owns that memory; never decides what runs.
"""

from __future__ import annotations

import torch

from services.gpu_worker.kv_cache import KvCache
from services.gpu_worker.step_inputs import StepInputs


class StaticInputs:
    """Inputs in memory that stays where it is. Lines that no row of a step fills are padding."""

    def __init__(self, kv_cache: KvCache, num_lines: int, max_length: int) -> None:
        """All lines are padding: token 0 at position 0, in the first slot of the dummy page.

        Args:
            kv_cache: the pool that steps run over.
            num_lines: most rows of a step.
            max_length: most tokens of a row.
        """
        page_size, device = kv_cache.shape.page_size, kv_cache.keys.device
        self._max_length = max_length
        self._dummy_page = kv_cache.dummy_page_id
        self._dummy_slot = kv_cache.dummy_page_id * page_size
        self._ids = torch.zeros(num_lines, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._slots = torch.full_like(self._ids, self._dummy_slot)
        max_pages = -(-max_length // page_size)
        self._pages = torch.full((num_lines, max_pages), self._dummy_page, dtype=torch.int64, device=device)
        self._lines = torch.arange(num_lines, device=device)
        self._num_filled = 0

    def of(self, size: int) -> StepInputs:
        """The first `size` lines as a step; each may be as long as any row can be."""
        return StepInputs(
            input_ids=self._ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slots[:size],
            page_table=self._pages[:size],
            query_lengths=(1,) * size,
            context_lengths=(self._max_length,) * size,
            sample_indices=self._lines[:size],
        )

    def fill(self, inputs: StepInputs, size: int) -> None:
        """Takes a step's rows; what the step before left in the lines up to `size` becomes padding again."""
        num_rows, width = inputs.page_table.shape
        self._ids[:num_rows].copy_(inputs.input_ids)
        self._positions[:num_rows].copy_(inputs.positions)
        self._slots[:num_rows].copy_(inputs.slot_mapping)
        self._pages[:num_rows, :width].copy_(inputs.page_table)
        stale = slice(num_rows, min(self._num_filled, size))
        if stale.start < stale.stop:
            self._ids[stale].zero_()
            self._positions[stale].zero_()
            self._slots[stale].fill_(self._dummy_slot)
            self._pages[stale, 0].fill_(self._dummy_page)
        # Lines beyond `size` keep what they have; a larger step finds them stale.
        self._num_filled = max(num_rows, self._num_filled if self._num_filled > size else 0)

"""gpu_worker: decode attention for CPUs that reads keys and values where they lie, copying no context.

A decoding row has one query and a context scattered over pages. Seen as a sparse matrix

              slots of the pool (times key/value heads)
    row 0 h 0  . x x x . . . . . x x . . .        x: a slot of the row's context
    row 0 h 1  . x x x . . . . . x x . . .
    row 1 h 0  . . . . . x x x x . . . . x

the scores are a product of queries and keys *sampled* at the x (`torch.sparse.sampled_addmm`), and the result is a bag
of values weighted by the softmax of a line (`embedding_bag`). Both take any slots, so the page size does not matter,
and each line is summed by itself, so that a row's result is the same bit for bit whoever else is in the batch.

Measured on 2 cores, 16 rows of 300 tokens, 9 heads of 64 sharing 3: 0.76 ms a layer; a gather into one padded block
before the product 0.82, one product for each row over pages that happen to be neighbours 1.0, one for each page 10.6.
The lines take 16 bytes for each query head and context token while a step runs, under a hundredth of the pages' size.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from services.gpu_worker.attention.row_span import RowSpan
from services.gpu_worker.kv_cache import KvCache
from services.gpu_worker.step_inputs import StepInputs


def has_sparse_products(dtype: torch.dtype) -> bool:
    """Whether this build of torch can do the products for this dtype on the CPU.

    They are missing for half precisions, and in builds without the library that does them.
    """
    with warnings.catch_warnings():
        # Torch calls its compressed row format a beta once a process; the tests hold the results against the reference.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        index = torch.zeros(1, dtype=torch.int64)
        one = torch.ones(1, 1, dtype=dtype)
        lines = torch.sparse_csr_tensor(torch.tensor([0, 1]), index, one[0], (1, 1), check_invariants=False)
    try:
        product = torch.sparse.sampled_addmm(lines, one, one, beta=0.0)
        torch.embedding_bag(one, index, index, False, 0, False, product.values(), False)
    except RuntimeError:
        return False
    return True


class SparseDecode:
    """The decoding rows of one step under one window; built once, used by every layer that has this window.

    Attributes:
        tokens: [number of spans] int64, their places among the new tokens of the step.
    """

    def __init__(self, inputs: StepInputs, spans: Sequence[RowSpan], num_heads: int, kv_cache: KvCache) -> None:
        """Lays out the lines: for each row and head the slots of the row's span.

        Args:
            inputs: the step.
            spans: rows with one new token each.
            num_heads: query heads.
            kv_cache: the pool, for its sizes.
        """
        shape = kv_cache.shape
        self.tokens = torch.tensor([span.tokens.start for span in spans])
        num_lines = len(spans) * num_heads
        heads = torch.arange(num_heads) // (num_heads // shape.num_kv_heads)
        columns = []
        for span in spans:
            positions = torch.arange(span.first, span.end)
            slots = inputs.page_table[span.row, positions // shape.page_size] * shape.page_size
            slots += positions % shape.page_size
            columns.append((slots * shape.num_kv_heads + heads[:, None]).flatten())  # [num_heads * length]
        self._columns = torch.cat(columns)  # [num_entries]
        lengths = torch.tensor([span.length for span in spans]).repeat_interleave(num_heads)
        line_starts = torch.zeros(num_lines + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=line_starts[1:])
        self._bag_starts = line_starts[:-1]
        num_columns = (kv_cache.num_pages + 1) * shape.page_size * shape.num_kv_heads
        entries = torch.zeros(len(self._columns), dtype=shape.dtype)
        self._scores = torch.sparse_csr_tensor(
            line_starts, self._columns, entries, (num_lines, num_columns), check_invariants=False
        )
        self._weights = torch.empty_like(entries)
        self._softmax_blocks = self._blocks_by_row(spans, num_heads)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of the decoding rows.

        Args:
            queries: [num_tokens, num_heads, head_dim], all new tokens of the step.
            keys: [num_slots, num_kv_heads, head_dim], the layer's pool.
            values: likewise.

        Returns:
            [number of spans, num_heads, head_dim].
        """
        head_dim = queries.shape[-1]
        lines = queries[self.tokens].view(-1, head_dim)  # [num_spans * num_heads, head_dim]
        columns = keys.view(-1, head_dim).t()  # [head_dim, num_slots * num_kv_heads]
        torch.sparse.sampled_addmm(self._scores, lines, columns, beta=0.0, alpha=head_dim**-0.5, out=self._scores)
        for scores, weights in self._softmax_blocks:
            torch.softmax(scores, dim=-1, out=weights)
        bags, *_ = torch.embedding_bag(
            values.view(-1, head_dim), self._columns, self._bag_starts, False, 0, False, self._weights, False
        )
        return bags.view(len(self.tokens), -1, head_dim)

    def _blocks_by_row(self, spans: Sequence[RowSpan], num_heads: int) -> list[tuple[Tensor, Tensor]]:
        """Views [num_heads, length] of each row's scores and weights: lines of one length, so that softmax is dense."""
        blocks = []
        start = 0
        scores = self._scores.values()
        for span in spans:
            end = start + num_heads * span.length
            blocks.append((scores[start:end].view(num_heads, -1), self._weights[start:end].view(num_heads, -1)))
            start = end
        return blocks

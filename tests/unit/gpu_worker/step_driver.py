"""Runs rows through a ModelRunner step by step, as a scheduler would, keeping the logits of every token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from torch import Tensor

from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.gpu_worker.weights import LoadedModel, RunnableModel


@dataclass
class Row:
    """A request: its ids, its pages, and the logits of the tokens computed so far."""

    token_ids: list[int]
    page_ids: list[int]
    num_computed_tokens: int = 0
    logits: list[Tensor] = field(default_factory=list)

    def all_logits(self) -> Tensor:
        """[computed tokens, vocab_size]."""
        return torch.cat(self.logits)


class StepDriver:
    """A runner with its pool; pages are dealt from a shuffled pack, so that a row's are hardly ever neighbours."""

    def __init__(
        self,
        model: LoadedModel | RunnableModel,
        attention: AttentionBackend,
        page_size: int,
        num_tokens: int,
        shuffled: bool = True,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """A pool for `num_tokens` tokens, of the model's dtype unless another is given."""
        config, embedding = model.config, model.weights.embedding
        shape = KvCacheShape(
            config.num_layers, config.num_kv_heads, config.head_dim, page_size, kv_dtype or embedding.dtype
        )
        self.page_size = page_size
        self.device = embedding.device
        num_pages = -(-num_tokens // page_size)
        self.kv_cache = KvCache(shape, num_pages, self.device)
        self.runner = ModelRunner(config, model.weights, self.kv_cache, attention)
        self._free = list(range(num_pages))
        if shuffled:
            random.Random(5).shuffle(self._free)

    def add(self, token_ids: list[int], prefix_of: Row | None = None) -> Row:
        """A new row; with `prefix_of`, the whole pages that both share at the start are used and not computed again."""
        pages: list[int] = []
        if prefix_of is not None:
            pairs = zip(prefix_of.token_ids, token_ids, strict=False)
            num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            usable = min(num_shared, prefix_of.num_computed_tokens, len(token_ids) - 1)
            pages = prefix_of.page_ids[: usable // self.page_size]
        num_pages = -(-len(token_ids) // self.page_size)
        row = Row(token_ids, [*pages, *(self._free.pop() for _ in range(num_pages - len(pages)))])
        row.num_computed_tokens = len(pages) * self.page_size
        return row

    def step(self, *parts: tuple[Row, int]) -> None:
        """One forward pass: each row with so many of its next tokens."""
        rows = [
            StepRow(
                token_ids=row.token_ids[row.num_computed_tokens : row.num_computed_tokens + num_new],
                num_computed_tokens=row.num_computed_tokens,
                page_ids=row.page_ids,
                samples=True,
            )
            for row, num_new in parts
        ]
        inputs = build_step_inputs(rows, self.page_size, self.device)
        inputs = replace(inputs, sample_indices=torch.arange(inputs.num_tokens, device=self.device))
        logits = self.runner.forward(inputs)
        for (row, num_new), start in zip(parts, inputs.query_starts, strict=False):
            row.logits.append(logits[start : start + num_new])
            row.num_computed_tokens += num_new

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """The `num_tokens` likeliest ids after these, one by one."""
        row = self.add(token_ids + [0] * num_tokens)
        self.step((row, len(token_ids)))
        output: list[int] = []
        for index in range(len(token_ids), len(token_ids) + num_tokens):
            output.append(int(row.logits[-1][-1].argmax()))
            row.token_ids[index] = output[-1]
            self.step((row, 1))
        return output

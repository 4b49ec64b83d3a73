"""What must hold of replayed decode steps with any attention that can be recorded (tests of the kernels use it too)."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.decode_graphs import GraphLimits
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.models.operators import Operators
from services.gpu_worker.step_inputs import StepInputs, StepRow, build_step_inputs
from services.gpu_worker.weights import LoadedModel
from tests.unit.gpu_worker.recording_device import RecordingDevice

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES, MAX_LENGTH = 4, 60, 20


@dataclass
class Pair:
    """Two runners of one model, one of which replays; their pools hold the same numbers, and a mark in every slot."""

    eager: ModelRunner
    graphed: ModelRunner
    device: RecordingDevice

    def step(self, rows: list[StepRow]) -> tuple[Tensor, Tensor]:
        """The logits of both."""
        inputs = build_step_inputs(rows, PAGE_SIZE, CPU)
        return self.eager.forward(inputs), self.graphed.forward(inputs)

    def changed_slots(self, rows: list[StepRow]) -> set[int]:
        """The slots that a replayed step of these rows changes, in any layer, keys or values."""
        cache = self.graphed.kv_cache
        before = [pool.clone() for pool in (cache.keys, cache.values)]
        num_replays = self.device.num_replays
        self.graphed.forward(build_step_inputs(rows, PAGE_SIZE, CPU))
        assert self.device.num_replays == num_replays + 1
        is_changed = torch.zeros(NUM_PAGES + 1, PAGE_SIZE, dtype=torch.bool)
        for old, new in zip(before, (cache.keys, cache.values), strict=True):
            is_changed |= (old != new).flatten(3).any(3).any(0)
        return set(is_changed.flatten().nonzero().flatten().tolist())


def new_pair(
    model: LoadedModel,
    attention: AttentionBackend,
    device: RecordingDevice,
    max_rows: int,
    operators: Operators | None = None,
) -> Pair:
    """Records a ladder up to `max_rows` rows."""
    config = model.config
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, torch.float32)
    runners = [
        ModelRunner(config, model.weights, KvCache(shape, NUM_PAGES, CPU), attention, operators) for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(4)
    mark = torch.randn(runners[0].kv_cache.keys.shape, generator=generator)
    for runner in runners:
        runner.kv_cache.keys.copy_(mark)
        runner.kv_cache.values.copy_(mark.flip(0))
    runners[1].record_decode(GraphLimits(max_rows, MAX_LENGTH), device, lambda size: None)
    return Pair(runners[0], runners[1], device)


def decode_rows(count: int, seed: int = 0, is_same: bool = False) -> list[StepRow]:
    """Rows with one new token each, of mixed lengths; with `is_same` the same tokens, in pages of their own."""
    chance = random.Random(seed)
    pages = list(range(NUM_PAGES))
    chance.shuffle(pages)
    rows = []
    for _ in range(count):
        computed = 9 if is_same else chance.randrange(MAX_LENGTH)
        own = [pages.pop() for _ in range(computed // PAGE_SIZE + 1)]
        rows.append(StepRow([5 if is_same else chance.randrange(90)], computed, own, samples=True))
    return rows


def slots_of(rows: list[StepRow]) -> set[int]:
    """Where the new tokens of rows go."""
    return {
        row.page_ids[row.num_computed_tokens // PAGE_SIZE] * PAGE_SIZE + row.num_computed_tokens % PAGE_SIZE
        for row in rows
    }


def check_padding(pair: Pair, max_rows: int) -> None:
    """GPH-01: a padded step changes its rows' slots and the dummy page; growing and shrinking batches too."""
    dummy_slot = NUM_PAGES * PAGE_SIZE
    for seed, count in enumerate(min(max_rows, count) for count in [3, 8, 5, 7, 1, 3, 2, 6, 5, 4, 3]):
        rows = decode_rows(count, seed)
        changed = pair.changed_slots(rows)
        assert slots_of(rows) <= changed
        assert changed <= slots_of(rows) | {dummy_slot}, f"{count} rows"


def check_replay_is_eager(pair: Pair, max_rows: int, tolerance: float) -> None:
    """GPH-02: every batch size up to one more than the largest, mixed rows and equal ones."""
    for count in [*range(1, max_rows + 2), *range(max_rows + 1, 0, -1)]:
        for is_same in (False, True):
            num_replays = pair.device.num_replays
            rows = decode_rows(count, count, is_same)
            if is_same:
                _fill_alike(pair, rows)
            expected, found = pair.step(rows)
            assert pair.device.num_replays - num_replays == (count <= max_rows)
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
            assert torch.equal(found.argmax(-1), expected.argmax(-1))
            if is_same:
                torch.testing.assert_close(found, found[:1].expand_as(found), atol=tolerance, rtol=tolerance)


def _fill_alike(pair: Pair, rows: list[StepRow]) -> None:
    """Gives equal rows equal contexts."""
    for runner in (pair.eager, pair.graphed):
        for pool in (runner.kv_cache.keys, runner.kv_cache.values):
            for row in rows[1:]:
                pool[:, row.page_ids] = pool[:, rows[0].page_ids]


def mixed_inputs() -> StepInputs:
    """A chunk beside a decode."""
    return build_step_inputs(
        [StepRow([1, 2, 3], 0, [0], samples=True), StepRow([4], 5, [1, 2], samples=True)], PAGE_SIZE, CPU
    )

"""What requests may want beyond a token, on a device against the CPU: rules, log-probabilities, pooled hidden states.

Several steps are launched ahead of their results, with every table growing on the way. While they are launched, torch
is told to raise at anything that would wait for the device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.device.report import Outcome, held
from bench.random_checkpoints import Shape, write_checkpoint
from services.gpu_worker.attention import attention_for
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.held_rows import WorkerSizes
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.step_launcher import StepLauncher
from services.gpu_worker.weights import load_model
from services.gpu_worker.worker_state import WorkerState
from services.model_files.source import open_model
from services.wire.columns import pack_float32, pack_int32, unpack_float32, unpack_int32
from services.wire.request_params import LogitRules, PromptParams, SamplingParams, Task
from services.wire.steps import NewRow, StepPlan, StepResult

_SHAPE = Shape(vocab_size=4096)
_PAGE_SIZE, _PROMPT_TOKENS, _NUM_DECODES = 16, 24, 6
_PREFILLS = ((0, 10), (10, 14))  # start and count
_NO_RULES = LogitRules()
_WISHES: dict[str, tuple[LogitRules, int, PromptParams]] = {
    "plain": (_NO_RULES, -1, PromptParams()),
    "penalties": (LogitRules(0.6, 0.4, 1.3), 5, PromptParams()),
    "biases": (LogitRules(bias_ids=pack_int32(range(90)), biases=pack_float32([2.0] * 90)), 0, PromptParams()),
    "minimum": (LogitRules(min_tokens=4, stop_token_ids=pack_int32(range(2000))), 20, PromptParams()),
    "bad words": (
        LogitRules(bad_word_counts=pack_int32([2] * 999), bad_word_ids=pack_int32(range(1998))),
        -1,
        PromptParams(),
    ),
    "allowed": (LogitRules(allowed_token_ids=pack_int32(range(7, 4096, 9))), 3, PromptParams()),
    "prompt": (_NO_RULES, -1, PromptParams(num_logprobs=20)),
    "last": (_NO_RULES, -1, PromptParams(task=Task.EMBED_LAST)),
    "mean": (_NO_RULES, -1, PromptParams(task=Task.EMBED_MEAN)),
}


@dataclass
class _Found:
    """What all steps gave together."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    logprob_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    embeddings: list[float] = field(default_factory=list)

    def add(self, result: StepResult) -> None:
        """Takes the result of one step."""
        self.tokens += zip(unpack_int32(result.rows), unpack_int32(result.token_ids), strict=True)
        self.logprob_ids += unpack_int32(result.logprob_ids)
        self.logprobs += unpack_float32(result.logprobs)
        for piece in result.prompt_logprobs:
            self.prompt_logprobs += unpack_float32(piece.logprobs)
        for embedding in result.embeddings:
            self.embeddings += unpack_float32(embedding.values)


def check_wishes(device: torch.device) -> Iterator[Outcome]:
    """Runs the same plans on both, compares, and says whether anything waited for the device."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "tiny", "llama", _SHAPE)
        expected = _run(path, torch.device("cpu"))
        try:
            _run(path, device)  # what is set up once in a process may wait
            found = _run(path, device, may_wait=False)
        except RuntimeError as raised:
            if "synchroniz" not in str(raised):
                raise
            yield held("steps ahead wait for nothing", False, str(raised).splitlines()[0][:100])
            return
    yield held("steps ahead wait for nothing", True, f"{len(_PREFILLS) + _NUM_DECODES} steps launched together")
    num_different = sum(a != b for a, b in zip(expected.tokens, found.tokens, strict=True))
    yield held("rules", num_different == 0, f"{num_different} of {len(expected.tokens)} tokens differ")
    is_same = expected.logprob_ids == found.logprob_ids
    error = _largest_error(expected.logprobs, found.logprobs)
    yield held("log-probabilities", is_same and error < 1e-3, f"largest error {error:.1e}")
    error = _largest_error(expected.prompt_logprobs, found.prompt_logprobs)
    yield held("log-probabilities of prompts", error < 1e-3, f"largest error {error:.1e}")
    error = _largest_error(expected.embeddings, found.embeddings)
    yield held("pooled hidden states", error < 1e-3, f"largest error {error:.1e}")


def _run(path: Path, device: torch.device, may_wait: bool = True) -> _Found:
    model = load_model(open_model(path), device, torch.float32)
    config = model.config
    pages_of_row = -(-(_PROMPT_TOKENS + _NUM_DECODES + 1) // _PAGE_SIZE)
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, _PAGE_SIZE, torch.float32)
    kv_cache = KvCache(shape, pages_of_row * len(_WISHES), device)
    runner = ModelRunner(config, model.weights, kv_cache, attention_for(device, torch.float32), operators_for(device))
    state = WorkerState(WorkerSizes(len(_WISHES), 256, config.vocab_size, _PAGE_SIZE, kv_cache.num_pages), device)
    launcher = StepLauncher(runner, state)
    with nullcontext() if may_wait or device.type != "cuda" else _no_waiting(device):
        pending = [launcher.launch(plan) for plan in _plans(pages_of_row)]
    found = _Found()
    for step in pending:
        step.wait_copied()
        found.add(launcher.finish(step))
    return found


def _plans(pages_of_row: int) -> Iterator[StepPlan]:
    """Prompts in two chunks, then a token each of those that generate."""
    all_rows = list(range(len(_WISHES)))
    generating = [row for row, (_, _, prompt) in enumerate(_WISHES.values()) if prompt.task == Task.GENERATE]
    new_rows = tuple(_new_row(row, pages_of_row) for row in all_rows)
    for step, span in enumerate(_PREFILLS, start=1):
        is_last = span == _PREFILLS[-1]
        samples = [is_last and row in generating for row in all_rows]
        yield _plan(step, new_rows if step == 1 else (), [(row, *span) for row in all_rows], samples)
    for decode in range(_NUM_DECODES):
        spans = [(row, _PROMPT_TOKENS + decode, 1) for row in generating]
        yield _plan(1 + len(_PREFILLS) + decode, (), spans, [True] * len(generating))


def _new_row(row: int, pages_of_row: int) -> NewRow:
    rules, num_logprobs, prompt = list(_WISHES.values())[row]
    temperature = 1.0 if row % 2 else 0.0
    sampling = SamplingParams(
        temperature, 1.0, 0, 0.0, row, 0, rules=None if rules is _NO_RULES else rules, num_logprobs=num_logprobs
    )
    ids = pack_int32((31 * row + 7 * at) % _SHAPE.vocab_size for at in range(_PROMPT_TOKENS))
    pages = pack_int32(range(row * pages_of_row, (row + 1) * pages_of_row))
    return NewRow(row, row.to_bytes(16, "big"), 0, ids, _PROMPT_TOKENS, pages, sampling, prompt)


def _plan(
    step: int, new_rows: tuple[NewRow, ...], spans: Sequence[tuple[int, int, int]], samples: Sequence[bool]
) -> StepPlan:
    rows, starts, counts = (pack_int32(span[column] for span in spans) for column in range(3))
    return StepPlan(1, step, b"", new_rows, b"", b"", b"", rows, starts, counts, bytes(samples))


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """Torch raises at what would wait for the CUDA device."""
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _largest_error(expected: list[float], found: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(expected, found, strict=True)), default=0.0)

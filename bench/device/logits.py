"""Logits on a device against those of the plain reference on the CPU, over one course of prefill chunks and decodes."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.device.report import Outcome, held
from bench.random_checkpoints import FAMILIES, write_checkpoint
from services.gpu_worker.attention import attention_for
from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.attention.paged_cuda import PagedCudaAttention
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.kernels import with_fast_experts
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.gpu_worker.weights import LoadedModel, load_model
from services.model_files.source import open_model

CPU = torch.device("cpu")
MOST_DIFFERENCE = 1e-3  # float32, of logits some units wide
_PAGE_SIZE = 4
_LENGTHS = (70, 33, 5, 1)  # prompts of four rows; the longest reaches beyond Mistral's window
_CHUNK, _NUM_DECODES = 23, 6


def check_families(device: torch.device) -> Iterator[Outcome]:
    """Tiny random models of every family."""
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            yield _compare(f"logits, tiny {family}", write_checkpoint(Path(folder) / family, family), device)


def check_model(path: Path, device: torch.device) -> Iterator[Outcome]:
    """A real model."""
    yield _compare(f"logits, {path.name}", path, device)


def check_attention(device: torch.device) -> Iterator[Outcome]:
    """The implementation for CUDA devices against the reference, on the device itself, with small blocks too."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "mistral", "mistral")
        for dtype, most in ((torch.float32, MOST_DIFFERENCE), (torch.bfloat16, 0.25)):
            model = load_model(open_model(path), device, dtype)
            expected = course_logits(model, ReferenceAttention())
            for name, attention in (("", PagedCudaAttention()), (", small blocks", PagedCudaAttention(2000))):
                found = course_logits(model, attention)
                difference = float((found - expected).abs().max())
                dtype_name = str(dtype).removeprefix("torch.")
                yield held(
                    f"attention, {dtype_name}{name}", difference <= most, f"differs by {difference:.1e} (<= {most:g})"
                )


def course_logits(model: LoadedModel, attention: AttentionBackend) -> Tensor:
    """Logits after every chunk and decode of some rows, float32 on the CPU: [num_logits, vocab_size]."""
    config, dtype = model.config, model.weights.embedding.dtype
    device = model.weights.embedding.device
    chance = random.Random(1)
    pages = list(range(sum(-(-(length + _NUM_DECODES) // _PAGE_SIZE) for length in _LENGTHS)))
    chance.shuffle(pages)
    shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, _PAGE_SIZE, dtype)
    weights = with_fast_experts(model.weights, device)
    runner = ModelRunner(config, weights, KvCache(shape, len(pages), device), attention, operators_for(device))
    rows = []
    for length in _LENGTHS:
        ids = [chance.randrange(config.vocab_size) for _ in range(length + _NUM_DECODES)]
        rows.append((ids, [pages.pop() for _ in range(-(-len(ids) // _PAGE_SIZE))]))
    logits = []
    for parts in _course(len(rows)):
        step = [StepRow(rows[row][0][start:end], start, rows[row][1], True) for row, start, end in parts]
        logits.append(runner.forward(build_step_inputs(step, _PAGE_SIZE, device)).cpu())
    return torch.cat(logits)


def _course(num_rows: int) -> Iterator[list[tuple[int, int, int]]]:
    """Steps of (row, first token, end): every row prefills in chunks and then decodes, so steps are mixed."""
    at = [0] * num_rows
    ends = [length + _NUM_DECODES for length in _LENGTHS]
    while any(position < end for position, end in zip(at, ends, strict=True)):
        parts = []
        for row, length in enumerate(_LENGTHS):
            if at[row] < ends[row]:
                end = min(at[row] + _CHUNK, length) if at[row] < length else at[row] + 1
                parts.append((row, at[row], end))
                at[row] = end
        yield parts


def _compare(name: str, path: Path, device: torch.device) -> Outcome:
    files = open_model(path)
    expected = course_logits(load_model(files, CPU, torch.float32), ReferenceAttention())
    model = load_model(files, device, torch.float32)
    found = course_logits(model, attention_for(device, torch.float32))
    difference = float((found - expected).abs().max())
    figure = f"differs by {difference:.1e} (<= {MOST_DIFFERENCE:g}), largest logit {float(expected.abs().max()):.1f}"
    return held(name, difference <= MOST_DIFFERENCE, figure)

"""gpu_worker: the kernels of a model's steps, one by one, on numbers of the model's own shapes.

A model goes through its layers, and comes back to the first when the caches hold the last: so each case goes round
through matrices, or layers of the pool, that are together larger than caches, where the model has as many.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.attention import attention_for
from services.gpu_worker.eight_bits import multiplies_fp8
from services.gpu_worker.fp8 import E4M3
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.fused_sampler import sampler_for
from services.gpu_worker.kernels import rounding_for
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.projection import DenseProjection, Projection
from services.gpu_worker.products.four_bit import FourBitProjection, fits_four_bit
from services.gpu_worker.products.fp8 import FP8_SIDES, Fp8Projection
from services.gpu_worker.products.grid import GridProjection, fits_grid_loop
from services.gpu_worker.products.kernels import PackedProjection, has_fast_bfloat16, has_packed_float32
from services.gpu_worker.products.tiles import TileProjection, fits_tile_loop
from services.gpu_worker.sampling_table import SamplingTable
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.gpu_worker.weight_grid import GROUP, WeightGrid
from services.wire.request_params import SamplingParams

_ROUND_BYTES = 256 * 2**20  # of matrices, or of a pool, that a case goes round through at most
_OPERATIONS_OF_SMALL_ONES = 5  # of a number, about: memory bounds them by far

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Case:
    """One call of one kernel.

    Attributes:
        kernel: what it is.
        form: which of several ways.
        rows: new tokens, or rows of logits.
        context: tokens that each row attends to; 0 where it does not.
        num_bytes: that it must move at least.
        num_operations: that it must do.
        dtype: that it computes in, whose limit it is held against.
        run: does it, on other memory each time.
    """

    kernel: str
    form: str
    rows: int
    context: int
    num_bytes: int
    num_operations: int
    dtype: torch.dtype
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Place:
    """Where cases run: a model's shapes, a device, the dtype of activations."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype


def product_cases(place: Place, rows: Sequence[int]) -> Iterator[Case]:
    """The matrices of a layer, of experts those of one, in every form that this machine has."""
    config = place.config
    width = config.experts.intermediate_size if config.experts else config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "qkv": (queries + 2 * keys, config.hidden_size),
        "output": (config.hidden_size, queries),
        "gate_up": (2 * width, config.hidden_size),
        "down": (config.hidden_size, width),
    }
    for name, (num_outputs, num_inputs) in shapes.items():
        for form in _forms(place, num_outputs, num_inputs):
            matrices = _copies(form.make, config.num_layers)
            for num_rows in rows:
                x = torch.randn(num_rows, num_inputs, device=place.device).to(place.dtype)
                moved = matrices[0].num_bytes + num_rows * (num_inputs + num_outputs) * place.dtype.itemsize
                operations = 2 * num_rows * num_outputs * num_inputs
                run = _in_turn(matrices, functools.partial(_multiply, x))
                kernel = f"{name} {num_outputs}x{num_inputs}"
                yield Case(kernel, form.name, num_rows, 0, moved, operations, form.dtype, run)


def _multiply(x: Tensor, matrix: Projection) -> Tensor:
    return matrix(x)


@dataclass(frozen=True, slots=True)
class _Form:
    name: str
    dtype: torch.dtype
    make: Callable[[], Projection]


def _forms(place: Place, num_outputs: int, num_inputs: int) -> Iterator[_Form]:
    weight = torch.randn(num_outputs, num_inputs, device=place.device).to(place.dtype)
    yield _Form(f"plain {_name(place.dtype)}", place.dtype, lambda: DenseProjection(weight.clone()))
    sides_fit = num_outputs % FP8_SIDES == 0 and num_inputs % FP8_SIDES == 0
    if place.dtype == torch.bfloat16 and sides_fit and multiplies_fp8(place.device):
        yield _Form("fp8", E4M3, lambda: Fp8Projection(weight, None, rounding_for(place.device)))
    if place.device.type != "cpu" or place.dtype != torch.float32:
        return
    has_packed = {torch.float32: has_packed_float32(), torch.bfloat16: has_fast_bfloat16()}
    for dtype in (dtype for dtype, has in has_packed.items() if has):
        yield _Form(f"packed {_name(dtype)}", dtype, functools.partial(PackedProjection, weight, None, dtype))
    if fits_tile_loop(weight):
        yield _Form("bfloat16 tiles", torch.bfloat16, lambda: TileProjection(weight, None))
    if num_inputs % GROUP == 0:
        scales = torch.rand(num_outputs, num_inputs // GROUP)
        codes = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8)
        grid = WeightGrid(codes, scales, -8 * scales)
        if fits_four_bit(grid):
            yield _Form("4 bits", place.dtype, lambda: FourBitProjection(grid, None))
        if fits_grid_loop(grid):
            yield _Form("4 bits, own loop", place.dtype, lambda: GridProjection(grid, None))


def _copies(make: Callable[[], Projection], num_layers: int) -> list[Projection]:
    first = make()
    count = max(1, min(num_layers, _ROUND_BYTES // max(1, first.num_bytes)))
    return [first, *(make() for _ in range(count - 1))]


def _in_turn(things: Sequence[T], use: Callable[[T], object]) -> Callable[[], object]:
    """Uses one thing after the other, round and round."""
    turn = itertools.cycle(things)
    return lambda: use(next(turn))


def attention_cases(place: Place, page_size: int, rows: Sequence[int], contexts: Sequence[int]) -> Iterator[Case]:
    """Decodes of every number of rows and context, and prompts of so many tokens, by the worker's own backend."""
    for num_rows, context in itertools.product(rows, contexts):
        pages = -(-context // page_size)
        of_rows = [StepRow([1], context - 1, range(row * pages, (row + 1) * pages), True) for row in range(num_rows)]
        yield _attention(place, page_size, of_rows, "decode")
    for num_tokens in contexts:
        prompt = StepRow([1] * num_tokens, 0, range(-(-num_tokens // page_size)), True)
        yield _attention(place, page_size, [prompt], "prefill")


def _attention(place: Place, page_size: int, rows: Sequence[StepRow], kind: str) -> Case:
    config, dtype = place.config, place.dtype
    num_pages = sum(len(row.page_ids) for row in rows)
    shape = KvCacheShape(1, config.num_kv_heads, config.head_dim, page_size, dtype)  # of one layer
    num_layers = max(1, min(config.num_layers, _ROUND_BYTES // (shape.bytes_per_page * num_pages)))
    pool = KvCache(dataclasses.replace(shape, num_layers=num_layers), num_pages, place.device)
    for part in (pool.keys, pool.values):
        part.fill_(0.5)  # written: a pool that never was is no memory yet
    inputs = build_step_inputs(rows, page_size, place.device)
    step = attention_for(place.device, dtype, config.head_dim).begin_step(inputs, pool)
    queries = torch.randn(inputs.num_tokens, config.num_heads, config.head_dim, device=place.device).to(dtype)
    lengths = list(zip(inputs.query_lengths, inputs.context_lengths, strict=True))
    pairs = sum(new * (2 * length - new + 1) // 2 for new, length in lengths)
    moved = sum(inputs.context_lengths) * shape.bytes_per_page // page_size + 2 * queries.nbytes
    operations = 4 * pairs * config.num_heads * config.head_dim
    run = _in_turn(range(num_layers), lambda layer: step.attend(layer, queries, None))
    form, context = type(step).__name__, inputs.context_lengths[0]
    return Case(f"attention, {kind}", form, inputs.num_tokens, context, moved, operations, dtype, run)


def operator_cases(place: Place, rows: Sequence[int]) -> Iterator[Case]:
    """What a layer does between its products: the sum with its norm, and the gate."""
    config, operators = place.config, operators_for(place.device)
    weight = torch.ones(config.hidden_size, device=place.device, dtype=place.dtype)
    form = type(operators).__name__
    for num_rows in rows:
        hidden, added, both = (
            torch.randn(num_rows, width, device=place.device).to(place.dtype)
            for width in (config.hidden_size, config.hidden_size, 2 * config.intermediate_size)
        )
        norm = functools.partial(operators.add_norm, hidden, added, weight, config.rms_norm_eps)
        operations = _OPERATIONS_OF_SMALL_ONES * hidden.numel()
        yield Case("sum and norm", form, num_rows, 0, 4 * hidden.nbytes, operations, place.dtype, norm)
        gate = functools.partial(operators.gated, both)
        operations = _OPERATIONS_OF_SMALL_ONES * both.numel() // 2
        yield Case("gate", form, num_rows, 0, both.nbytes * 3 // 2, operations, place.dtype, gate)


def sampling_cases(place: Place, rows: Sequence[int]) -> Iterator[Case]:
    """Greedy rows, and such that draw from the most probable tokens."""
    for num_rows in rows:
        logits = 3 * torch.randn(num_rows, place.config.vocab_size, device=place.device)
        numbers = np.arange(num_rows, dtype=np.int64)
        for form, temperature in (("greedy", 0.0), ("temperature 0.7, top_p 0.9", 0.7)):
            table = SamplingTable(num_rows, place.device)
            wanted = [SamplingParams(temperature, 0.9, 0, 0.0, row, 0) for row in range(num_rows)]
            table.set_rows(range(num_rows), wanted)
            run = functools.partial(sampler_for(place.device), logits, table.groups(numbers, numbers))
            yield Case("sampling", form, num_rows, 0, logits.nbytes, logits.numel(), place.dtype, run)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Compiled loops against the plain torch way that each stands beside; products with codes against a naive sum."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.gpu_worker.attention.backend import StepAttention
from services.gpu_worker.attention.paged_cpu import PagedCpuAttention
from services.gpu_worker.cpu_loops import keeps_compiled, loops_problem
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.models.operators import PlainOperators
from services.gpu_worker.models.rotary import rotary_cos_sin
from services.gpu_worker.products.grid import GridProjection, fits_grid_loop, has_grid_loop
from services.gpu_worker.step_inputs import StepRow, build_step_inputs
from services.gpu_worker.weight_grid import GROUP, WeightGrid

CPU = torch.device("cpu")
EPS = 1e-5
LARGEST = 127.0 * 128
needs_loops = pytest.mark.skipif(bool(loops_problem()), reason=str(loops_problem()))
needs_products = pytest.mark.skipif(not has_grid_loop(), reason="this processor has no instructions for the loop")
rows_of_steps = st.sampled_from([0, 1, 2, 3, 7, 16, 33, 130])
seeds = st.integers(0, 2**31)


def random(seed: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@needs_loops
@settings(max_examples=60, deadline=None)
@given(rows=rows_of_steps, width=st.sampled_from([1, 8, 33, 576]), seed=seeds, has_heads=st.booleans())
def test_norms_are_the_plain_ones(rows: int, width: int, seed: int, has_heads: bool) -> None:
    loops, plain = operators_for(CPU), PlainOperators()
    weight = random(seed, width)
    x = random(seed + 1, rows, 5, width)[:, :3] if has_heads else random(seed + 1, rows, width)
    torch.testing.assert_close(loops.norm(x, weight, EPS), plain.norm(x, weight, EPS), rtol=1e-5, atol=1e-5)


@needs_loops
@settings(max_examples=60, deadline=None)
@given(rows=rows_of_steps, width=st.sampled_from([1, 8, 33, 576]), seed=seeds)
def test_a_sum_and_its_norm_are_the_plain_ones(rows: int, width: int, seed: int) -> None:
    hidden, addend, weight = random(seed, rows, width), random(seed + 1, rows, width), random(seed + 2, width)
    expected = PlainOperators().add_norm(hidden, addend, weight, EPS)
    computed = operators_for(CPU).add_norm(hidden, addend, weight, EPS)
    assert torch.equal(computed[0], expected[0])
    torch.testing.assert_close(computed[1], expected[1], rtol=1e-5, atol=1e-5)


@needs_loops
@settings(max_examples=60, deadline=None)
@given(
    rows=rows_of_steps, width=st.sampled_from([1, 8, 33, 1536]), seed=seeds, spread=st.sampled_from([0.1, 4.0, 60.0])
)
def test_gates_are_the_plain_ones(rows: int, width: int, seed: int, spread: float) -> None:
    gate_up = random(seed, rows, 2 * width) * spread
    torch.testing.assert_close(
        operators_for(CPU).gated(gate_up), PlainOperators().gated(gate_up.clone()), rtol=1e-5, atol=1e-6
    )


def check_rounded(computed: Tensor, expected: Tensor) -> None:
    """What was computed in float32 and rounded once: the expected number's neighbour now and then, as sums differ."""
    assert computed.dtype == torch.bfloat16
    torch.testing.assert_close(computed, expected.bfloat16(), rtol=2**-7, atol=1e-5)
    assert (computed == expected.bfloat16()).float().mean() > 0.99 or computed.numel() < 100


@needs_loops
@settings(max_examples=30, deadline=None)
@given(rows=rows_of_steps, width=st.sampled_from([1, 8, 33, 576]), seed=seeds)
def test_in_bfloat16_loops_compute_in_float32_and_round_once(rows: int, width: int, seed: int) -> None:
    loops, plain = operators_for(CPU), PlainOperators()
    gate_up = (4 * random(seed, rows, 2 * width)).bfloat16()
    check_rounded(loops.gated(gate_up), plain.gated(gate_up.float()))
    hidden, addend, weight = (
        random(seed, rows, width),
        random(seed + 1, rows, width).bfloat16(),
        random(seed + 2, width),
    )
    total, expected = plain.add_norm(hidden, addend.float(), weight, EPS)
    computed = loops.add_norm(hidden, addend, weight, EPS)
    assert torch.equal(computed[0], total)
    check_rounded(computed[1], expected)
    total, normed = plain.add_norm(random(seed, rows, width), addend, weight, EPS)
    assert torch.equal(total, computed[0])
    assert torch.equal(normed, expected.bfloat16())


@needs_loops
@pytest.mark.parametrize("broken", [math.nan, -math.nan, math.inf, -math.inf, 3.4e38, 1e-40])
def test_every_number_is_rounded_to_bfloat16_as_torch_does(broken: float) -> None:
    x = torch.tensor([broken, -broken, 1 + 2**-8, 1 + 3 * 2**-8, 1 - 2**-9]).repeat(2, 20)
    hidden, weight = torch.zeros(2, 100), torch.ones(100)
    total, normed = operators_for(CPU).add_norm(hidden, x.bfloat16(), weight, EPS)
    assert torch.equal(total.isnan(), x.bfloat16().isnan())
    expected = operators_for(CPU).norm(total, weight, EPS)
    assert torch.equal(normed.nan_to_num(7.0), expected.bfloat16().nan_to_num(7.0))


@needs_loops
@pytest.mark.parametrize("rows", [0, 1, 5, 2048])
def test_halves_become_bfloat16_as_torch_rounds_them(rows: int) -> None:
    from services.gpu_worker.attention.loop_decode import LoopAttention  # only where there is numba

    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    halves = every.repeat(2)[: rows * 32].view(rows, 2, 16)
    rounded = LoopAttention().rounded(halves)
    assert torch.equal(rounded.nan_to_num(7.0), halves.to(torch.bfloat16).nan_to_num(7.0))
    assert torch.equal(rounded.isnan(), halves.isnan())


@needs_loops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_smp_02_what_is_not_finite_stays_so_and_in_its_row(broken: float, dtype: torch.dtype) -> None:
    loops = operators_for(CPU)
    x, weight = random(1, 3, 64), random(2, 64)
    x[1, 7] = broken
    addend = random(3, 3, 64).to(dtype)
    for result in (loops.norm(x, weight, EPS), loops.add_norm(x.clone(), addend, weight, EPS)[1]):
        assert not result[1].isfinite().all()
        assert result[[0, 2]].isfinite().all()
    gated = loops.gated(x.to(dtype))
    assert torch.equal(gated.isfinite(), PlainOperators().gated(x.clone()).isfinite())


@needs_loops
def test_exponentials_are_right_to_two_units_of_the_last_place() -> None:
    x = torch.linspace(-86, 86, 400_001)
    # silu(-x) * (1 + exp(x)) / -x: the gate is the way to the loop's exponential.
    gate_up = torch.stack((-x, torch.ones_like(x)))[:, x != 0]
    gated = operators_for(CPU).gated(gate_up.flatten()[None])[0].double()
    exact = -gate_up[0].neg().double() / (1 + gate_up[0].neg().double().exp())
    assert float(((gated - exact) / exact).abs().max()) < 4e-7


def rotated(
    uses_loops: bool, rows: int, heads: tuple[int, int, int], qkv: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, KvCache, StepAttention]:
    num_heads, num_kv_heads, dim = heads
    pool = KvCache(KvCacheShape(2, num_kv_heads, dim, 4, dtype), 2 * rows, CPU)
    step_rows = [StepRow([1], 5 + row % 3, [rows + row, row], samples=True) for row in range(rows)]
    inputs = build_step_inputs(step_rows, 4, CPU)
    backend = PagedCpuAttention(dtype, computes_in=torch.float32, uses_loops=uses_loops)
    step = backend.begin_step(inputs, pool)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, dim, 2) / dim)
    cos_sin = rotary_cos_sin(frequencies, 1.5, inputs.positions, torch.float32)
    split = num_heads + num_kv_heads
    return step.write_rotated(1, qkv[:, :split], qkv[:, split:], cos_sin), pool, step


@needs_loops
@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 7, 40]),
    heads=st.sampled_from([(1, 1, 2), (4, 2, 8), (9, 3, 64), (6, 1, 80)]),
    seed=seeds,
)
def test_heads_are_turned_and_stored_as_the_plain_way_does(rows: int, heads: tuple[int, int, int], seed: int) -> None:
    qkv = random(seed, rows, heads[0] + 2 * heads[1], heads[2])
    expected, expected_pool, _ = rotated(False, rows, heads, qkv.clone())
    computed, pool, _ = rotated(True, rows, heads, qkv.clone())
    torch.testing.assert_close(computed, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(pool.keys, expected_pool.keys, rtol=1e-6, atol=1e-6)
    assert torch.equal(pool.values, expected_pool.values)


@needs_loops
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 2, 16), (6, 1, 80)])
def test_a_pool_in_half_precision_gets_what_rounding_leaves(heads: tuple[int, int, int]) -> None:
    qkv = random(5, 7, heads[0] + 2 * heads[1], heads[2])
    qkv[1, -1, :3] = torch.tensor([1e9, -1e9, math.inf])
    qkv[2, -1, 5] = math.nan
    _, expected, _ = rotated(False, 7, heads, qkv.clone(), torch.float16)
    _, pool, _ = rotated(True, 7, heads, qkv.clone(), torch.float16)
    assert torch.equal(pool.values.isnan(), expected.values.isnan())
    assert torch.equal(pool.values.nan_to_num(), expected.values.nan_to_num())
    assert pool.values.nan_to_num().abs().max() == torch.finfo(torch.float16).max
    torch.testing.assert_close(pool.keys.float(), expected.keys.float(), rtol=1e-3, atol=1e-6)


def random_grid(num_bits: int, num_rows: int, num_columns: int, seed: int) -> WeightGrid:
    generator = torch.Generator().manual_seed(seed)
    groups = (num_rows, num_columns // GROUP)
    codes = torch.randint(0, 2**num_bits, (num_rows, num_columns), generator=generator, dtype=torch.uint8)
    scales, minimums = ((torch.randn(groups, generator=generator) / 8).half().float() for _ in range(2))
    return WeightGrid(codes, scales, minimums if num_bits == 4 else -128 * scales, num_bits)


def naive_product(x: Tensor, grid: WeightGrid) -> Tensor:
    """Inputs rounded to 15 bits, group by group, or some groups of many rows to 8; then a plain sum in float64."""
    groups = x.view(len(x), x.shape[1] // GROUP, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, LARGEST / largest, 0.0)
    codes = (groups * inverse).round().double()
    if len(x) > 4 and grid.num_bits == 4 and low_parts_are_skipped():
        steps = largest / LARGEST
        is_coarse = steps.square() <= 0.999 * steps.square().mean(1, keepdim=True)
        codes = torch.where(is_coarse, ((codes + 64) / 128).floor() * 128, codes)
    rounded = codes * (largest / LARGEST).double()
    return rounded.view(x.shape) @ grid.values().double().T


def without_ties(x: Tensor) -> Tensor:
    """Numbers are left out whose code of 15 bits, rounded to either side, would decide about that of 8."""
    groups = x.view(len(x), x.shape[1] // GROUP, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    codes = (groups.double() / largest.clamp_min(1e-30) * LARGEST).remainder(128)
    return torch.where((codes - 63.5).abs() < 0.05, 0.0, groups).view(x.shape)


def low_parts_are_skipped() -> bool:
    from services.gpu_worker.cpu_loops.dot_tile import goes_by_groups

    return goes_by_groups()


@needs_products
@settings(max_examples=80, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 2, 3, 4, 5, 7, 16, 33, 130]),
    columns=st.sampled_from([32, 96, 576]),
    out=st.sampled_from([16, 48, 320]),
    num_bits=st.sampled_from([4, 8]),
    spread=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=seeds,
)
def test_a_product_with_codes_rounds_inputs_and_nothing_else(
    rows: int, columns: int, out: int, num_bits: int, spread: float, seed: int
) -> None:
    grid, x = random_grid(num_bits, out, columns, seed), without_ties(spread * random(seed + 1, rows, columns))
    x[:1, :GROUP] = 0
    bias = spread * random(seed + 2, out)
    assert fits_grid_loop(grid)
    expected = naive_product(x, grid) + bias
    largest = x.abs().max() if rows else 0.0
    # A number half-way between two codes may be rounded to either.
    allowed = 1e-5 * spread * columns + 2 * float(largest / LARGEST * grid.values().abs().max())
    torch.testing.assert_close(GridProjection(grid, bias)(x).double(), expected, rtol=1e-5, atol=allowed)


@needs_products
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("num_rows", [2, 7])
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-35])
def test_the_smallest_inputs_give_small_results(num_bits: int, num_rows: int, size: float) -> None:
    grid, x = random_grid(num_bits, 16, 96, 1), torch.full((num_rows, 96), size)
    computed = GridProjection(grid, None)(x)
    assert float(computed.abs().max()) <= 96 * 2 * size * float(grid.values().abs().max())


@needs_products
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("part", [127 * 128, 126 * 128 + 64, 126 * 128 + 63, -127 * 128, -126 * 128 - 64, -128])
def test_sums_hold_the_largest_codes_and_inputs(num_bits: int, part: int) -> None:
    grid = random_grid(num_bits, 16, 96, 1)
    grid.codes.fill_(2**num_bits - 1)
    x = torch.full((7, 96), part / LARGEST)
    x[:, ::GROUP] = math.copysign(1, part)  # so that the step of each group is the smallest
    expected = naive_product(x, grid)
    torch.testing.assert_close(GridProjection(grid, None)(x).double(), expected, rtol=1e-6, atol=1e-4)


@needs_products
def test_large_groups_of_many_rows_keep_their_low_parts() -> None:
    if not low_parts_are_skipped():
        pytest.skip("all groups keep theirs here")
    grid, x = random_grid(4, 16, 128, 1), without_ties(0.01 * random(2, 12, 128))
    x[:, GROUP : 2 * GROUP] *= 1000
    product = GridProjection(grid, None)
    few, many = torch.cat([product(x[first : first + 4]) for first in range(0, 12, 4)]), product(x)
    coarse = naive_product(x, grid)
    torch.testing.assert_close(many.double(), coarse, rtol=1e-5, atol=1e-4)
    exact = x.double() @ grid.values().double().T
    assert float((few - exact).norm()) < float((many - exact).norm()) < 1e-3 * float(exact.norm())
    for row in (0, 5, 11):  # whatever stands beside it
        assert torch.equal(product(x[[row] * 7])[0], many[row])


@needs_products
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_smp_02_a_broken_input_breaks_its_own_row_only(num_bits: int, broken: float) -> None:
    projection, x = GridProjection(random_grid(num_bits, 32, 64, 1), None), random(2, 6, 64)
    clean = projection(x)
    x[3, 40] = broken
    computed = projection(x)
    assert computed[3].isnan().all()
    others = [0, 1, 2, 4, 5]
    assert torch.equal(computed[others], clean[others])


@needs_products
def test_a_matrix_that_the_loop_cannot_take_is_told_from_one_that_it_can() -> None:
    assert not fits_grid_loop(random_grid(4, 24, 32, 1))
    large = random_grid(4, 16, 32, 1)
    assert not fits_grid_loop(WeightGrid(large.codes, large.scales * 1e6, large.minimums))
    assert not fits_grid_loop(WeightGrid(large.codes, large.scales * 1e-7, large.minimums))


@needs_products
@pytest.mark.parametrize("instructions", ["avx512vnni", "avxvnni", "avx2"])
def test_a_tile_is_the_same_with_whatever_instructions_a_processor_has(
    instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llvmlite.binding
    import numba

    from services.gpu_worker.cpu_loops import dot_tile

    if not llvmlite.binding.get_host_cpu_features().get(instructions, False):
        pytest.skip(f"this processor has no {instructions}")
    monkeypatch.setattr(dot_tile, "dot_instructions", lambda: instructions)
    tile = dot_tile.dot_tile

    @numba.njit  # type: ignore[untyped-decorator]
    def run(codes: int, scales: int, inputs: int, factors: int, sums: int, out: int) -> None:
        tile(8, 2, codes, scales, inputs, factors, sums, 3, out, 16)

    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (3, 8, 16, 4), generator=generator, dtype=torch.uint8)
    high = torch.randint(-127, 128, (2, 3, 32), generator=generator, dtype=torch.int8)
    low = torch.randint(-64, 65, (2, 3, 32), generator=generator, dtype=torch.int8)
    numbers = 128 * high.int() + low.int()
    inputs = torch.stack((high, low), dim=2)
    if dot_tile.takes_whole_inputs(8):
        inputs = numbers.to(torch.int16).view(2, 3, 8, 4)[..., [0, 2, 1, 3]].contiguous()
    scales, factors = random(4, 3, 16).half(), random(5, 2, 3)
    sums, out = numbers.sum(-1, dtype=torch.int32), torch.empty(2, 16)
    run(*(tensor.data_ptr() for tensor in (codes, scales, inputs, factors, sums, out)))
    weights = (codes.double() - 128).permute(0, 2, 1, 3).reshape(3, 16, 32)
    dots = torch.einsum("gok,rgk->rgo", weights, numbers.double())
    expected = (dots * factors[..., None].double() * scales[None].double()).sum(1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_where_nothing_can_be_written_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "unchanged")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not keeps_compiled.__wrapped__()
    assert os.environ["NUMBA_CACHE_DIR"] == "unchanged"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert keeps_compiled.__wrapped__()
    assert Path(os.environ["NUMBA_CACHE_DIR"]).is_relative_to(tmp_path)


def test_without_numba_everything_runs_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    loops_problem.cache_clear()
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None)
        assert loops_problem() == "numba is not installed"
        assert isinstance(operators_for(CPU), PlainOperators)
        assert not has_grid_loop()
        assert not fits_grid_loop(random_grid(4, 16, 32, 1))
    loops_problem.cache_clear()
    loops_problem()


def test_a_numba_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str) -> None:
        raise ImportError("Numba needs NumPy 2.3 or less")

    loops_problem.cache_clear()
    with monkeypatch.context() as broken:
        broken.setattr(importlib, "import_module", refuse)
        assert loops_problem() == "numba cannot be imported (Numba needs NumPy 2.3 or less)"
        assert isinstance(operators_for(CPU), PlainOperators)
        assert not has_grid_loop()
    loops_problem.cache_clear()
    loops_problem()

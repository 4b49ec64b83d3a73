"""Microseconds of the scheduler's pure core: matching a prompt, planning a step, taking its result.

    python -m bench.scheduler_core [--rows 256] [--steps 200]

A decode step is measured from `can_plan` to the `StepPlan` in memory, and from the `StepResult` to the columns of
`TokensProduced`; sockets and msgpack are not in it. Every figure is the median over the steps or repetitions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from bench.provenance import provenance
from services.scheduler.admission import CoreLimits
from services.scheduler.core import Core
from services.scheduler.radix_cache import RadixCache
from services.scheduler.token_batch import TokenBatch
from services.wire.columns import pack_int32, unpack_int32
from services.wire.request_params import SamplingParams, TextParams
from services.wire.requests import Submit
from services.wire.steps import StepPlan, StepResult

VOCAB_SIZE = 50_000
NUM_PROMPT_TOKENS = 8_000
REPETITIONS = 200


def microseconds(action: Callable[[], object]) -> float:
    start_ns = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - start_ns) / 1000


def match_us(page_size: int, num_turns: int) -> float:
    """A prompt that the tree holds, left there by a conversation of `num_turns` turns that branched after each."""
    cache = RadixCache(page_size)
    turn_tokens = NUM_PROMPT_TOKENS // num_turns // page_size * page_size
    ids = list(range(NUM_PROMPT_TOKENS))
    for turn in range(1, num_turns + 1):
        so_far = ids[: turn * turn_tokens]
        for branch in (so_far, so_far[:-page_size] + [VOCAB_SIZE + turn] * page_size):
            cache.insert(b"", pack_int32(branch), list(range(len(branch) // page_size)))
    key = pack_int32(ids)
    return statistics.median(microseconds(lambda: cache.match(b"", key)) for _ in range(REPETITIONS))


def new_submit(number: int, max_tokens: int) -> Submit:
    request_id = number.to_bytes(16, "big")
    return Submit(
        request_id=request_id,
        attempt=0,
        prompt_token_ids=pack_int32((number * 31 + i) % VOCAB_SIZE for i in range(64)),
        output_token_ids=b"",
        sampling=SamplingParams(0.0, 1.0, 0, 0.0, 1, 0),
        text=TextParams((), False, True, 0),
        max_tokens=max_tokens,
        stop_token_ids=pack_int32([VOCAB_SIZE - 1]),
        group_id=request_id,
        tenant="",
        cache_root=b"",
        priority=0,
        deadline_ms=0,
    )


def result_of(plan: StepPlan, requests: dict[int, tuple[bytes, int]]) -> StepResult:
    """What a worker that always samples id 7 answers; `requests` maps a row to (request id, next output index)."""
    for new_row in plan.new_rows:
        requests[new_row.row] = (new_row.request_id, 0)
    rows = [row for row, samples in zip(unpack_int32(plan.rows), plan.samples, strict=True) if samples]
    names = [requests[row] for row in rows]
    for row, (request_id, index) in zip(rows, names, strict=True):
        requests[row] = (request_id, index + 1)
    return StepResult(
        epoch=plan.epoch,
        step=plan.step,
        rows=pack_int32(rows),
        request_ids=b"".join(request_id for request_id, _ in names),
        attempts=pack_int32([0] * len(rows)),
        first_indexes=pack_int32(index for _, index in names),
        counts=pack_int32([1] * len(rows)),
        token_ids=pack_int32([7] * len(rows)),
        finishes=bytes(len(rows)),
        forward_us=0,
        step_us=0,
    )


def decode_us(num_rows: int, num_steps: int, page_size: int, num_waiting: int) -> tuple[float, float]:
    """Medians of planning a step of `num_rows` decodes, and of taking its result."""
    pages_per_request = -(-(64 + num_steps + 8) // page_size)
    num_pages = num_rows * pages_per_request
    limits = CoreLimits(
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=num_pages * page_size,
        vocab_size=VOCAB_SIZE,
        logits_width=VOCAB_SIZE,
        max_rows=num_rows,
        token_budget=num_rows * 65,
        chunk_tokens=num_rows * 64,
        max_waiting=10_000,
        plans_ahead=0,
    )
    core = Core(limits, epoch=1)
    for number in range(num_rows + num_waiting):
        core.submit(new_submit(number, num_steps + 5))
    requests: dict[int, tuple[bytes, int]] = {}
    plan_times, result_times = [], []
    for _ in range(num_steps):
        start_ns = time.perf_counter_ns()
        plan = core.plan_step() if core.can_plan() else None
        plan_times.append((time.perf_counter_ns() - start_ns) / 1000)
        assert plan is not None
        assert len(plan.samples) == num_rows
        result = result_of(plan, requests)
        start_ns = time.perf_counter_ns()
        take(core, result)
        result_times.append((time.perf_counter_ns() - start_ns) / 1000)
    return statistics.median(plan_times), statistics.median(result_times)


def take(core: Core, result: StepResult) -> None:
    batch = TokenBatch()
    outcome = core.take_result(result)
    for run in outcome.runs:
        batch.add_run(run)
    for item in outcome.rows:
        batch.add(item.request, item.first_index, item.token_ids, item.finish)
    batch.messages()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    for name, value in provenance().items():
        print(f"{name:9} {value}")
    print(f"\n{'match of 8,000 tokens':50} {'us':>8}")
    for page_size in (1, 16):
        for num_turns in (1, 20, 100):
            name = f"page size {page_size}, tree of {num_turns} turns"
            print(f"{name:50} {match_us(page_size, num_turns):8.1f}")
    print(f"\n{f'decode step of {arguments.rows} rows':50} {'plan us':>8} {'result us':>10} {'us/token':>9}")
    for page_size in (1, 16):
        for num_waiting in (0, 200):
            plan_us, result_us = decode_us(arguments.rows, arguments.steps, page_size, num_waiting)
            name = f"page size {page_size}, {num_waiting} waiting"
            print(f"{name:50} {plan_us:8.1f} {result_us:10.1f} {(plan_us + result_us) / arguments.rows:9.2f}")


if __name__ == "__main__":
    main()

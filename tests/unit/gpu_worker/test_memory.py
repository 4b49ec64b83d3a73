"""What the KV pool may take: the arithmetic, the refusals, and the limits of a host or container."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from services.gpu_worker import host_limits
from services.gpu_worker.kv_cache import KvCacheShape
from services.gpu_worker.memory import MemoryState, measure_memory, pool_size, shortage
from services.gpu_worker.process_set_up import choose_device
from services.runtime.capacity import asked_step_tokens
from services.runtime.config import Settings
from services.runtime.service import StartError

ROOT = Path(__file__).parents[3]
GIB = 2**30
SHAPE = KvCacheShape(num_layers=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float16)
PAGE = SHAPE.bytes_per_page  # 32 KiB


def on_cpu(total: int = 16 * GIB, available: int = 12 * GIB, activations: int = GIB) -> MemoryState:
    return MemoryState(total, available, weights=2 * GIB, activations=activations, is_cpu=True)


def on_cuda(total: int = 80 * GIB, available: int = 60 * GIB, activations: int = 2 * GIB) -> MemoryState:
    return MemoryState(total, available, weights=20 * GIB, activations=activations, is_cpu=False)


def pages(memory: MemoryState, context: int = 4096, **settings: float) -> int:
    return pool_size(memory, SHAPE, Settings(**settings), context).num_pages  # type: ignore[arg-type]


def test_a_cpu_pool_takes_at_most_a_quarter_of_the_memory() -> None:
    assert pages(on_cpu()) == 4 * GIB // PAGE - 1


def test_workers_on_one_cpu_share_its_memory_and_on_cuda_each_has_a_device() -> None:
    assert pages(on_cpu(), dp_size=2) == 2 * GIB // PAGE - 1
    assert pages(on_cpu(available=4 * GIB), dp_size=2, mem_fraction_static=0.75) == GIB // 2 // PAGE - 1
    assert pages(on_cuda(), dp_size=2) == pages(on_cuda())


def test_a_cpu_pool_leaves_room_for_a_step_when_little_is_free() -> None:
    assert pages(on_cpu(available=3 * GIB), mem_fraction_static=0.5) == GIB // 2 // PAGE - 1


def test_a_cuda_pool_fills_the_static_share_beside_the_weights() -> None:
    assert pages(on_cuda(), mem_fraction_static=0.75) == 40 * GIB // PAGE - 1


def test_a_cuda_pool_never_takes_what_a_step_needs() -> None:
    assert pages(on_cuda(activations=10 * GIB), mem_fraction_static=1.0) == 50 * GIB // PAGE - 1


def test_the_operator_s_number_of_tokens_decides() -> None:
    assert pages(on_cpu(), kv_cache_tokens=64) == 4
    assert pages(on_cpu(), kv_cache_tokens=65) == 5
    assert pages(on_cpu(available=3 * GIB), kv_cache_tokens=GIB // PAGE * 16) == GIB // PAGE


def test_a_pool_that_holds_less_than_the_context_is_told_in_one_line() -> None:
    asked = Settings(kv_cache_tokens=4096)
    assert shortage(4096, asked, 4096) == ""
    assert shortage(4096, asked, 8192) == (
        "the KV pool holds 4,096 tokens, less than the context of 8,192: no prompt and answer can be longer "
        "(raise --kv-cache-tokens, or set --max-model-len 4096)"
    )
    assert "(free memory for the pool, or" in shortage(4096, Settings(), 8192)


def test_too_many_tokens_are_refused_with_the_numbers() -> None:
    with pytest.raises(StartError, match=r"--kv-cache-tokens 2000000 takes 3\.81 GiB, but 2\.00 GiB are left \(of 16"):
        pages(on_cpu(available=3 * GIB), kv_cache_tokens=2_000_000)


@pytest.mark.parametrize("memory", [on_cpu(available=GIB), on_cuda(total=24 * GIB, available=GIB, activations=GIB)])
def test_too_little_for_one_request_is_refused_with_the_numbers(memory: MemoryState) -> None:
    with pytest.raises(StartError, match=r"512 tokens take 1\.0 MiB in pages of 16, there are 0\.0 MiB \(of .*1\.00 G"):
        pages(memory)


def test_a_short_context_needs_no_more_pool_than_itself() -> None:
    memory = on_cpu(total=16 * GIB, available=GIB + 8 * PAGE, activations=GIB)
    assert pages(memory, context=100, mem_fraction_static=1.0) == 7
    with pytest.raises(StartError, match="100 tokens"):
        pages(on_cpu(available=GIB + 7 * PAGE), context=100, mem_fraction_static=1.0)


def test_the_table_tells_all_four_parts() -> None:
    lines = pool_size(on_cpu(), SHAPE, Settings(), 4096).lines
    assert [line.split()[1] for line in lines] == ["weights", "KV", "activations", "free"]
    assert "2.00 GiB" in lines[0]
    assert "4.00 GiB" in lines[1]
    assert "131,071 pages of 16, 2,097,136 tokens" in lines[1]
    assert "1.00 GiB" in lines[2]
    assert "7.00 GiB" in lines[3]


def test_measuring_sees_what_a_step_takes_and_gives_back() -> None:
    def step() -> None:
        torch.ones(32 * 2**20, dtype=torch.uint8)
        torch.ones(64 * 2**20, dtype=torch.uint8)

    host_limits.keep_freed_memory()
    step()
    memory = measure_memory(torch.device("cpu"), 5, step)
    assert 60 * 2**20 <= memory.activations <= 200 * 2**20
    assert memory.weights == 5
    assert 0 < memory.available <= memory.total


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(), 300 + 256),
        (Settings(chunked_prefill_size=100, max_running_requests=8), 108),
        (Settings(chunked_prefill_size=-1, max_running_requests=8), 1000 + 8),
        (Settings(chunked_prefill_size=-1, max_running_requests=8, kv_cache_tokens=640), 640 + 8),
        (Settings(max_num_batched_tokens=77, max_running_requests=8), 77),
        (Settings(chunked_prefill_size=-1, max_running_requests=8, kv_cache_tokens=630, page_size=16), 640 + 8),
    ],
)
def test_the_token_budget_is_what_the_scheduler_computes(settings: Settings, expected: int) -> None:
    assert asked_step_tokens(settings, measured_chunk=300, context=1000) == expected


def test_a_cpu_is_chosen_where_it_is_asked_for() -> None:
    assert choose_device(Settings(device="cpu")).type == "cpu"


# ---------------------------------------------------------------- hosts and containers


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return folder


def test_cores_are_those_of_the_container(tmp_path: Path) -> None:
    own = len(os.sched_getaffinity(0))
    assert host_limits.num_cores(tmp_path) == own
    assert host_limits.num_cores(write(tmp_path / "free", cpu_dot_max="max 100000\n")) == own
    assert host_limits.num_cores(write(tmp_path / "half", cpu_dot_max="50000 100000\n")) == 1
    assert host_limits.num_cores(write(tmp_path / "many", cpu_dot_max="99900000 100000\n")) == own
    old = write(tmp_path / "old", cpu__cpu_dot_cfs_quota_us="100000\n", cpu__cpu_dot_cfs_period_us="100000\n")
    assert host_limits.num_cores(old) == 1
    free = write(tmp_path / "older", cpu__cpu_dot_cfs_quota_us="-1\n", cpu__cpu_dot_cfs_period_us="100000\n")
    assert host_limits.num_cores(free) == own


def test_what_threads_wait_for_their_cores_is_told_for_each(tmp_path: Path) -> None:
    write(tmp_path, **{"7__schedstat": "100 2500000000 3\n", "8__schedstat": "0 0 0\n", "9__schedstat": "\n"})
    assert host_limits.core_waits_s(tmp_path) == {"7": 2.5, "8": 0.0}
    assert host_limits.core_waits_s(tmp_path / "nothing") == {}


def test_the_age_of_this_process_is_read_whatever_it_is_called(tmp_path: Path) -> None:
    younger_s = time.monotonic()
    assert host_limits.process_age_s() > 0
    assert host_limits.process_age_s(tmp_path / "nothing") == 0.0
    ticks = int((time.clock_gettime(time.CLOCK_BOOTTIME) - 100) * os.sysconf("SC_CLK_TCK"))
    words = " ".join(["0"] * 18 + [str(ticks)] + ["0"] * 30)
    account = write(tmp_path / "process", stat=f"7 (a) b c) S {words}\n") / "stat"
    age_s = host_limits.process_age_s(account)
    assert 100 <= age_s <= 100.1 + time.monotonic() - younger_s


def test_memory_is_that_of_the_container(tmp_path: Path) -> None:
    host = host_limits.total_memory_bytes(tmp_path)
    assert host == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    small = write(tmp_path / "small", memory_dot_max=f"{GIB}\n", memory_dot_current=f"{GIB // 4}\n")
    assert host_limits.total_memory_bytes(small) == GIB
    assert host_limits.available_memory_bytes(small) == GIB - GIB // 4
    free = write(tmp_path / "free", memory_dot_max="max\n", memory_dot_current="4096\n")
    assert host_limits.total_memory_bytes(free) == host
    assert 0 < host_limits.available_memory_bytes(free) <= host
    old = write(tmp_path / "old", memory__memory_dot_limit_in_bytes=f"{GIB}", memory__memory_dot_usage_in_bytes="0")
    assert host_limits.available_memory_bytes(old) == min(GIB, host_limits.available_memory_bytes(tmp_path))


_COUNT_FAULTS = """
import resource, torch
from services.gpu_worker.host_limits import keep_freed_memory

def num_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(5 * 2**20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
num_faults()
print(num_faults(), keep_freed_memory(), num_faults(), num_faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    """In a process of its own: how a heap looks depends on all that it has held."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_FAULTS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    _, is_set, _, num_faults = done.stdout.split()
    assert is_set == "True"
    assert int(num_faults) < 100  # a block takes 1,280 pages


def test_workers_on_one_cpu_keep_to_cores_of_their_own() -> None:
    code = (
        "import os; from services.gpu_worker.host_limits import keep_to_share, share_of_cores\n"
        "cores = sorted(os.sched_getaffinity(0))\n"
        "threads = share_of_cores(len(cores))\n"
        "keep_to_share(len(cores) - 1, len(cores))\n"
        "assert (threads, os.sched_getaffinity(0)) == (1, {cores[-1]}), os.sched_getaffinity(0)\n"
        "keep_to_share(1, 2)\n"
        "assert os.sched_getaffinity(0) == {cores[-1]}  # more workers than cores: the system places them\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert host_limits.share_of_cores(10**6) == 1

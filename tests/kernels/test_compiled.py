"""Every kernel compiles to machine code for the devices that it is meant for, and fits into their shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SHARED_BYTES = {"80": 163 * 1024, "90": 227 * 1024}  # most that a program may have on A100, on H100 and H200
_KERNELS = {
    "_attend_split",
    "_join_splits",
    "_attend_block",
    "_rotate_and_write",
    "_add_norm",
    "_gated",
    "_multiply_tile",
    "_route",
    "_group",
    "_join",
}


@pytest.mark.timeout(400)
def test_every_kernel_compiles_for_real_devices(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    expected = {(name, target) for name in _KERNELS for target in _SHARED_BYTES} | {("_round_row", "90")}
    assert {(name, target) for name, target, _ in lines} == expected
    assert all(int(shared) <= _SHARED_BYTES[target] for _, target, shared in lines)

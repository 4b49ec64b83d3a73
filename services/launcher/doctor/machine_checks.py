"""The machine: Python, packages, processor, memory, accelerator, open files, disk."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.launcher.doctor.findings import Finding, failed, ok, warning
from services.launcher.model_facts import size_text

_LEAST_PYTHON = (3, 11)
_PACKAGES = (
    "aiohttp",
    "gguf",
    "jinja2",
    "msgpack",
    "msgspec",
    "prometheus_client",
    "tokenizers",
    "torch",
    "uvloop",
    "zmq",
)
_LEAST_FILES = 4096  # a connection is a file, and so is every link between processes
_GOOD_FILES = 65536
_LEAST_DISK_BYTES = 10**9
_LEAST_MEMORY_BYTES = 2 * 10**9
_NVIDIA_TIMEOUT_S = 20.0


def check_python() -> Finding:
    """The interpreter."""
    text = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    if sys.version_info < _LEAST_PYTHON:
        return failed("python", text, "use Python 3.11 or newer")
    return ok("python", text)


def check_packages() -> Finding:
    """What the processes import."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return failed("packages", f"not installed: {', '.join(missing)}", "install them: pip install -e '.[all]'")
    return ok("packages", "all that the processes import is installed")


def check_open_files() -> Finding:
    """How many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        is_low = hard != resource.RLIM_INFINITY and hard < _LEAST_FILES
        wanted = _GOOD_FILES if is_low or hard == resource.RLIM_INFINITY else min(hard, _GOOD_FILES)
        remedy = f"ulimit -n {wanted}, {'as root, or in limits.conf' if is_low else 'before the start'}"
        return warning("open files", f"{soft} for a process: so many connections at most", remedy)
    return ok("open files", f"{'no limit' if soft == resource.RLIM_INFINITY else soft} for a process")


def check_disk(directory: Path) -> Finding:
    """Room for models."""
    place = next(folder for folder in [directory, *directory.parents] if folder.exists())
    free = shutil.disk_usage(place).free
    text = f"{size_text(free)} free for models in {directory}"
    if not os.access(place, os.W_OK):
        return failed("disk", f"{place} cannot be written to", "choose another folder with --models-dir")
    if free < _LEAST_DISK_BYTES:
        return warning("disk", text, "make room, or choose another disk with --models-dir")
    return ok("disk", text)


def check_device(machine: Mapping[str, Any], wants_gpu: bool = True) -> Iterator[Finding]:
    """What a worker would run on, as the worker's own code told it (`services.gpu_worker.fit_check`)."""
    cores, total, available = machine["num_cores"], machine["total_bytes"], machine["available_bytes"]
    if machine["device_name"]:
        version = f"torch {machine['torch_version']}, CUDA {machine['cuda_version']}"
        yield ok("gpu", f"{machine['device_name']}, {size_text(available)} of {size_text(total)} free; {version}")
        return
    yield ok("processor", f"{cores} cores; torch {machine['torch_version']}")
    text = f"{size_text(available)} of {size_text(total)} free"
    if available < _LEAST_MEMORY_BYTES:
        yield warning("memory", text, "end other programs: a server for a small model takes about 2 GB")
    else:
        yield ok("memory", text)
    yield _no_gpu(machine["cuda_version"]) if wants_gpu else ok("gpu", "not used, as --device cpu says")


def _no_gpu(cuda_version: str) -> Finding:
    """Why there is no CUDA device: none, a torch without CUDA, or a driver that does not work."""
    driver = _nvidia_driver()
    if driver is None:
        return ok("gpu", "none: models run on the processor")
    if not driver:
        return failed("gpu", "nvidia-smi is here but finds no working driver", "install or restart the NVIDIA driver")
    if not cuda_version:
        return failed("gpu", f"{driver}, but torch is a build for the processor", "install a torch build with CUDA")
    return failed(
        "gpu", f"{driver}, but torch (for CUDA {cuda_version}) cannot use it",
        "install a driver that knows this CUDA, or a torch for an older one; in a container give it the device",
    )  # fmt: skip


def _nvidia_driver() -> str | None:
    """Name and driver of the first GPU; "" when the tool fails; None when there is no tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return ", driver ".join(part.strip() for part in found.splitlines()[0].split(",")) if found.strip() else ""

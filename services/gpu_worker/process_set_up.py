"""gpu_worker: the device, threads and memory of this process, of several on a host its share."""

from __future__ import annotations

import torch

from services.gpu_worker.host_limits import HostShare, keep_freed_memory, keep_to_share, share_of_cores
from services.runtime.config import Settings
from services.runtime.rank_place import RankPlace
from services.runtime.service import StartError


def set_up_process(settings: Settings, place: RankPlace | None = None) -> torch.device:
    """Finds the device, and sets up threads and memory of this process; StartError where the settings do not fit."""
    if settings.dp_rank >= settings.dp_size:
        raise StartError(f"--dp-rank must be less than --dp-size, {settings.dp_size}, not {settings.dp_rank}")
    share = HostShare.of(settings, place)
    device = choose_device(settings, share)
    set_up_threads(settings, device, share)
    keep_freed_memory()
    return device


def choose_device(settings: Settings, share: HostShare | None = None) -> torch.device:
    """The device; StartError when CUDA is asked for and there is none, or none for this one of several processes."""
    share = share or HostShare.of(settings, None)
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise StartError("--device cuda: torch finds no CUDA device (--device cpu runs everywhere)")
    is_cuda = has_cuda and settings.device != "cpu"
    if not is_cuda:
        return torch.device("cpu")
    if share.count > 1 and share.index >= torch.cuda.device_count():
        raise StartError(
            f"--dp-size {settings.dp_size}, --tp-size {share.count // settings.dp_size}: each worker, and each rank of "
            f"one, takes a CUDA device of its own, torch finds {torch.cuda.device_count()}"
        )
    return torch.device("cuda", share.index if share.count > 1 else torch.cuda.current_device())


def set_up_threads(settings: Settings, device: torch.device, share: HostShare | None = None) -> None:
    """Gives the CPU kernels their threads; a second pool beside them would only take their cores away.

    Processes on one CPU share its cores: each has a part of its own.
    """
    share = share or HostShare.of(settings, None)
    torch.set_num_threads(settings.num_threads or share_of_cores(share.count))
    if device.type == "cpu":
        keep_to_share(share.index, share.count)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)

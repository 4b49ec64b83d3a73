"""Which of several processes that share one model a process is: torchrun's variables, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.runtime.config import SettingsError, variables

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets, and whatever else starts processes for torch.distributed."""


@dataclass(frozen=True)
class RankPlace:
    """Which of the processes that share a model this one is, as torchrun tells its processes.

    Attributes:
        rank: in [0, size).
        size: processes of the group, >= 2.
        local_rank: which of those on this host.
        local_size: how many there are on this host.
        master_address: host of rank 0, where all of them meet.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    master_address: str


def rank_place(environment: Mapping[str, str] | None = None) -> RankPlace | None:
    """The place that torchrun, or what sets its variables, has given this process; None: it is alone.

    Raises:
        SettingsError: the variables contradict each other; names one.
    """
    environment = variables(*RANK_VARIABLES) if environment is None else environment
    if not environment.get("WORLD_SIZE") or _whole_number(environment, "WORLD_SIZE", 1) == 1:
        return None
    size, local_size = _whole_number(environment, "WORLD_SIZE", 1), _whole_number(environment, "LOCAL_WORLD_SIZE", 1)
    rank, local_rank = _whole_number(environment, "RANK"), _whole_number(environment, "LOCAL_RANK", 0)
    if not rank < size:
        raise SettingsError(f"RANK {rank} must be less than WORLD_SIZE {size}")
    if not local_rank < local_size <= size:
        raise SettingsError(f"LOCAL_RANK {local_rank} must be less than LOCAL_WORLD_SIZE {local_size}, at most {size}")
    master = environment.get("MASTER_ADDR", "")
    if not master or not environment.get("MASTER_PORT"):
        raise SettingsError(f"WORLD_SIZE is {size}, but MASTER_ADDR and MASTER_PORT do not say where the ranks meet")
    return RankPlace(rank, size, local_rank, local_size, master)


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that give a process its place in a group on this host, whose ranks meet at a port of it."""
    values = (str(rank), str(size), str(rank), str(size), "127.0.0.1", str(port))
    return dict(zip(RANK_VARIABLES, values, strict=True))


def _whole_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise SettingsError(f"{name} must be a whole number, not {text!r}")
    return int(text)

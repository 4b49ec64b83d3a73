"""gpu_worker: the processes that share one model, seen from one of them: meeting, collectives, commands, the end.

    rank 0     has the link to the scheduler, samples, and says before each thing that all must do what it is
    others     do it with their part of the model

Two groups of torch.distributed: one for tensors (NCCL on CUDA devices, else gloo), one of gloo for commands, small
lists of numbers. Nothing but numbers goes over either.

It owns the groups and the watch. It never looks into what it carries.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from services.gpu_worker.parallel.commands import (
    HEAD_NUMBERS,
    Command,
    Operation,
    first_frame,
    rest_of,
    whole_command,
)
from services.gpu_worker.parallel.network_interface import interface_of
from services.gpu_worker.parallel.watch import MEET_TIMEOUT_S, Lookout, Watch, WatchEvents, join_watch
from services.runtime.config import set_library_variable, variables
from services.runtime.rank_place import RankPlace
from services.runtime.service import EXIT_FAILURE, GroupLostError, StartError
from services.wire.endpoints import local_address_towards

COLLECTIVE_TIMEOUT_S = 30.0
"""The longest that one rank may wait for the others within a collective of tensors."""

_COMMANDS_TIMEOUT = timedelta(days=365)  # ranks wait for the next command; the watch says whether rank 0 lives
_LOOK_S = 0.05
_BLAME_S = 2.0  # how long an error waits for the watch to say who has caused it

logger = logging.getLogger(__name__)


class RankLostError(GroupLostError):
    """The group cannot go on: a rank is gone, or did not do what the others did."""


class RankGroup:
    """The group of this process. Made once, by `meet`."""

    def __init__(self, place: RankPlace, device: torch.device, store: Store, watch: Watch) -> None:
        """Makes the groups of torch.distributed; all ranks do so at the same time."""
        self.place = place
        self.device = device
        self._store = store
        self._watch = watch
        self._is_serving = False
        self._ending = threading.Event()
        """Whether rank 0 has said that it ends as it should."""
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("tensors", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=device if device.type == "cuda" else None,
        )
        self._commands: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=_COMMANDS_TIMEOUT)

    @property
    def is_leading(self) -> bool:
        """Whether this is rank 0."""
        return self.place.rank == 0

    # ------------------------------------------------------------ tensors: all ranks do the same at the same time

    def add_up(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over the ranks; the same bits on all of them."""
        dist.all_reduce(tensor)

    def share(self, tensor: Tensor) -> None:
        """Replaces a tensor by rank 0's."""
        dist.broadcast(tensor, 0)

    def collect(self, tensor: Tensor) -> list[Tensor]:
        """On rank 0 the tensors of all ranks, which have one shape; elsewhere nothing."""
        parts = [torch.empty_like(tensor) for _ in range(self.place.size)] if self.is_leading else None
        dist.gather(tensor, parts, 0)
        return parts or []

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        held = torch.tensor([number], dtype=torch.int64, device=self.device)
        dist.all_reduce(held, dist.ReduceOp.MIN)
        return int(held)

    # ------------------------------------------------------------ commands: from rank 0 to the others

    def send(self, command: Command) -> None:
        """Tells all other ranks what comes next."""
        self._watch.note_taken()
        dist.broadcast(first_frame(command), 0, group=self._commands)
        if (rest := rest_of(command)) is not None:
            dist.broadcast(rest, 0, group=self._commands)

    def receive(self) -> Command:
        """Waits for the next command; of one thread only."""
        first = torch.empty(HEAD_NUMBERS, dtype=torch.int64)
        dist.broadcast(first, 0, group=self._commands)
        rest = rest_of(first)
        if rest is not None:
            dist.broadcast(rest, 0, group=self._commands)
        return whole_command(first, rest)

    def note_taken(self) -> None:
        """This rank begins to do what a command says."""
        self._watch.note_taken()

    # ------------------------------------------------------------ start and end

    def agree(self, facts: dict[str, str], pump: Callable[[], None]) -> None:
        """Waits until all ranks are here, and compares what must be the same on them with rank 0's.

        Args:
            facts: by the name that people know it by.
            pump: called while it waits.

        Raises:
            StartError: one differs; names it.
        """
        if self.is_leading:
            for name, value in facts.items():
                self._store.set(f"fact/{name}", value)
            self._store.set("told", "")
            self._wait_for([f"agreed/{rank}" for rank in range(1, self.place.size)], pump)
            return
        self._wait_for(["told"], pump)
        for name, value in facts.items():
            leading = self._store.get(f"fact/{name}").decode()
            if leading != value:
                raise StartError(f"{name}: rank {self.place.rank} has {value}, rank 0 has {leading}")
        self._store.set(f"agreed/{self.place.rank}", "")

    def _wait_for(self, keys: list[str], pump: Callable[[], None]) -> None:
        while not self._store.check(keys):
            pump()
            time.sleep(_LOOK_S)  # until the others have written: a wait inside the store hears no signal

    def serve(self) -> None:
        """The start is over: nobody may be silent from here on. Rank 0 tells the others, whose command it is."""
        self._is_serving = True
        if self.is_leading:
            self.send(Command(Operation.SERVE))
        self._watch.be_strict()

    @property
    def is_ending(self) -> bool:
        """Whether rank 0 has said that all end."""
        return self._ending.is_set()

    def end(self) -> None:
        """Rank 0 has said so."""
        self._ending.set()

    def tell_stop(self) -> None:
        """This rank was told to stop; rank 0 decides. Safe in a signal handler."""
        self._watch.tell_stop()

    def lost(self, error: Exception) -> RankLostError:
        """The error to raise for one that came up in what all ranks do together.

        When it did because another rank has died, the watch ends this process meanwhile, and says which.
        """
        self._ending.wait(_BLAME_S)
        behind = self._watch.describe_behind()
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        return RankLostError(f"rank {self.place.rank} cannot go on: {first_line}" + (f" ({behind})" if behind else ""))

    def close(self) -> None:
        """This rank ends as it should: rank 0 when it wants to, the others once it has said so.

        Ranks that still start learn it from the watch, those that serve by a command too.
        """
        if self.is_leading and self._is_serving:
            self.send(Command(Operation.STOP))
        if not self.is_leading:
            self._ending.wait(_BLAME_S)
        self._watch.close()
        # Joins the threads of gloo: one that lets go of a tensor while the interpreter ends aborts the process.
        self._commands = None
        dist.destroy_process_group()


def meet(place: RankPlace, device: torch.device, on_stop: Callable[[], None]) -> RankGroup:
    """Waits for all ranks; they find each other through rank 0's host, as torchrun has told them.

    Args:
        place: of this process.
        device: where its part of the model will be.
        on_stop: called from a thread when another rank was told to stop.

    Raises:
        StartError: they did not come, or cannot reach each other.
    """
    _choose_interface(place.master_address)
    logger.info("rank %d of %d: waiting for the others at %s", place.rank, place.size, place.master_address)
    group: list[RankGroup] = []

    def end() -> None:
        for each in group:
            each.end()

    events = WatchEvents(on_lost=lambda what: _end_process(place, what), on_stop=on_stop, on_end=end)
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=MEET_TIMEOUT_S))))
        store = PrefixStore("tokenway", store)
        watch = _join(place, store, events)
        group.append(RankGroup(place, device, store, watch))
    except (RuntimeError, OSError) as error:
        problem = str(error).splitlines()[0]
        raise StartError(
            f"rank {place.rank} of {place.size} finds no way to the others, who meet at {place.master_address}: "
            f"{problem} (between hosts GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network interface)"
        ) from error
    logger.info("rank %d of %d: all are here", place.rank, place.size)
    return group[0]


def _join(place: RankPlace, store: Store, events: WatchEvents) -> Watch:
    if place.rank == 0:
        lookout = Lookout(place.master_address)
        store.set("watch", lookout.invitation)
        return lookout.wait(place.size, events)
    while not store.check(["watch"]):
        time.sleep(_LOOK_S)  # until rank 0 has written it: a wait inside the store hears no signal
    invitation = store.get("watch").decode()
    return join_watch(place.rank, place.master_address, invitation, events)


def _choose_interface(master_address: str) -> None:
    """Has gloo use the network that leads to rank 0, where nobody has named one: its own choice is the host's name."""
    if variables("GLOO_SOCKET_IFNAME"):
        return
    try:
        address = local_address_towards(socket.gethostbyname(master_address), 1)
    except OSError:
        return  # a name that is not known (yet): gloo chooses
    interface = interface_of(address)
    if interface is not None:
        set_library_variable("GLOO_SOCKET_IFNAME", interface)


def _end_process(place: RankPlace, what: str) -> None:
    """Ends this process at once: its main thread may wait for ever in a collective."""
    logger.error("gpu_worker ends: %s; a group of %d ranks ends as one", what, place.size)
    sys.stderr.flush()
    os._exit(EXIT_FAILURE)

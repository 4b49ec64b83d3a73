"""gpu_worker: a rank that is not rank 0: it loads its part of the model and does what rank 0 says.

It has no link to the scheduler, holds no request and samples nothing. What it owns is its part of the weights and of
the KV pool. Commands are received by a thread, so that the main thread can be told to stop while it waits.
"""

from __future__ import annotations

import gc
import logging
import threading
from queue import Empty, SimpleQueue

import torch

from services.gpu_worker.decode_graphs import GraphLimits
from services.gpu_worker.graph_warm_up import graph_device, record_graphs
from services.gpu_worker.memory import measure_memory
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.parallel.agreement import agreed_pages
from services.gpu_worker.parallel.commands import Command, Operation, packed_length, unpacked
from services.gpu_worker.parallel.group import RankGroup
from services.gpu_worker.start_stages import StartStages
from services.gpu_worker.start_up import ModelParts, load_parts
from services.runtime.service import Process, StartError

_LOOK_EVERY_S = 0.5

logger = logging.getLogger(__name__)


class LeaderEndedError(Exception):
    """Rank 0 ends as it should, and so does this rank."""


class Follower:
    """One rank at work."""

    def __init__(self, process: Process, group: RankGroup, parts: ModelParts) -> None:
        self._process = process
        self._group = group
        self._parts = parts
        self._runner = parts.runner(0)
        self._queue: SimpleQueue[Command | Exception] = SimpleQueue()

    @torch.inference_mode()
    def serve(self) -> None:
        """Does what rank 0 says until it says stop.

        Raises:
            RankLostError: the group cannot go on.
            StartError: its part of the pool or of the recordings cannot be had.
        """
        threading.Thread(target=self._receive, name="commands", daemon=True).start()
        while (command := self._next()).operation is not Operation.STOP:
            self._group.note_taken()
            try:
                self._do(command)
            except StartError:
                raise
            except Exception as error:
                raise self._group.lost(error) from error

    def _receive(self) -> None:
        """The thread: takes commands as they come."""
        command = Command(Operation.SERVE)
        while command.operation is not Operation.STOP:
            try:
                command = self._group.receive()
            except RuntimeError as error:  # rank 0 is gone
                self._queue.put(error)
                return
            self._queue.put(command)

    def _next(self) -> Command:
        while True:
            if self._process.pulse is not None:
                self._process.pulse.beat()
            self._process.end_with_parent()
            try:
                found = self._queue.get(timeout=_LOOK_EVERY_S)
            except Empty:
                if self._group.is_ending:  # before it served: it says no stop then
                    return Command(Operation.STOP)
                continue
            if isinstance(found, Command):
                return found
            error = self._group.lost(found)
            if self._group.is_ending:  # and was gone before its last command was read
                return Command(Operation.STOP)
            raise error from found

    def _do(self, command: Command) -> None:
        numbers, runner, group = command.numbers, self._runner, self._group
        match command.operation:
            case Operation.LAUNCH | Operation.REPLAY:
                tensor = torch.empty(packed_length(numbers), dtype=torch.int64, device=group.device)
                group.share(tensor)
                inputs = unpacked(numbers, tensor)
                if command.operation is Operation.REPLAY:
                    runner.states(inputs)
                else:
                    runner.hidden(inputs)
            case Operation.LOGITS:
                size, dtype = runner.config.hidden_size, self._parts.model.weights.embedding.dtype
                normed = torch.empty(numbers[0], size, dtype=dtype, device=group.device)
                group.share(normed)
                runner.logits(normed)
            case Operation.ZERO_PAGES:
                runner.zero_pages(numbers)
            case Operation.ZERO_SLOTS:
                runner.zero_slots(numbers)
            case Operation.MAKE_POOL:
                self._runner = self._with_pool(activations=numbers[0])
            case Operation.RECORD_DECODE:
                self._record(GraphLimits(*numbers))
            case Operation.SERVE:
                group.serve()

    def _with_pool(self, activations: int) -> ModelRunner:
        """Over as many pages as all ranks have room for; a step takes no more here than on rank 0, which samples."""
        num_bytes = self._parts.model.weights.num_bytes
        memory = measure_memory(self._group.device, num_bytes, lambda: None).with_activations(activations)
        parts, settings = self._parts, self._process.settings
        return parts.runner(agreed_pages(self._group, memory, parts.shape, settings, parts.max_model_len))

    def _record(self, limits: GraphLimits) -> None:
        device = graph_device(self._process.settings, self._runner)
        if device is None:
            raise StartError("rank 0 records CUDA graphs, this rank cannot")
        record_graphs(self._runner, limits, device, lambda: None)


def follow(process: Process, group: RankGroup) -> None:
    """Loads this rank's part and serves until rank 0 says stop."""

    def pump() -> None:
        if group.is_ending:
            raise LeaderEndedError

    process.on_stop = group.tell_stop
    if process.is_stopping:
        group.tell_stop()
    try:
        with StartStages() as stages:
            parts = load_parts(process.settings, pump, group, stages)
        gc.collect()
        gc.freeze()
        logger.info("rank %d has its part of the model and waits for rank 0", group.place.rank)
        Follower(process, group, parts).serve()
    except LeaderEndedError:
        logger.info("rank 0 has ended before the start was over")
    group.close()

"""scheduler: the workers and their cores: sizes, plans out, results in, and whether one is stuck.

Pure but for the port that it sends plans through; the shell brings the clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from services.runtime.capacity import step_tokens
from services.runtime.config import Settings
from services.runtime.histogram import TOKEN_BOUNDS, Histogram
from services.runtime.session import SILENCE_LIMIT_S
from services.scheduler.admission import CoreLimits
from services.scheduler.core import Core
from services.scheduler.core_counters import CoreCounters
from services.scheduler.membership import GreetingRefusedError, Peer
from services.scheduler.outcomes import Produced, StepOutcome
from services.scheduler.proposer import SpeculationLimits
from services.scheduler.router import Router
from services.scheduler.step_result import ResultError
from services.wire.members import WorkerCard
from services.wire.steps import StepResult
from services.wire.transport import RouterPort

LEAST_STALL_S = 10.0
_STALL_FACTOR = 10.0
ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PLAN_BOUNDS_S = (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)

logger = logging.getLogger(__name__)


def limits_of(card: WorkerCard, settings: Settings) -> CoreLimits:
    """The sizes of a core, from what the worker measured and what the operator set.

    Raises:
        ValueError: they cannot work together; names them.
    """
    max_rows = min(settings.max_running_requests, card.max_rows)
    max_model_len = min(settings.max_model_len or card.max_model_len, card.max_model_len)
    chunk_tokens = settings.chunked_prefill_size or card.chunk_tokens
    largest_prompt = min(max_model_len, card.num_pages * card.page_size)
    return CoreLimits(
        num_pages=card.num_pages,
        page_size=card.page_size,
        max_model_len=max_model_len,
        vocab_size=card.vocab_size,
        logits_width=card.logits_width,
        max_rows=max_rows,
        token_budget=step_tokens(settings, chunk_tokens, largest_prompt, max_rows),
        chunk_tokens=chunk_tokens,
        chunk_context=0 if settings.chunked_prefill_size else card.chunk_context,
        chunk_us=1000 * card.chunk_ms,
        chunk_limit_us=0 if settings.chunked_prefill_size else 1000 * card.chunk_limit_ms,
        max_waiting=settings.max_queued_requests,
        plans_ahead=settings.plans_ahead,
        caches_prefixes=settings.enable_prefix_caching,
        speculation=speculation_of(settings),
    )


def speculation_of(settings: Settings) -> SpeculationLimits | None:
    """What may be proposed; None when speculation is off."""
    if settings.speculation == "off":
        return None
    return SpeculationLimits(
        settings.speculation_tokens, settings.speculation_min_match, settings.speculation_step_tokens
    )  # fmt: skip


def stall_limit_s(card: WorkerCard, limits: CoreLimits) -> float:
    """How long no step may end while there is work: ten times what the largest step takes, and at least 10 s."""
    num_chunks = max(1.0, limits.token_budget / max(card.chunk_tokens, 1))
    return max(LEAST_STALL_S, _STALL_FACTOR * num_chunks * card.chunk_ms / 1000)


def check_alike(card: WorkerCard, other: WorkerCard) -> None:
    """Whether a worker can stand in for one that is here: an answer must not depend on who makes it.

    Raises:
        GreetingRefusedError: it cannot; says in what they differ.
    """
    own_sizes, other_sizes = (card.vocab_size, card.logits_width), (other.vocab_size, other.logits_width)
    if own_sizes != other_sizes or card.model_digest != other.model_digest:
        raise GreetingRefusedError(
            f"its model is not the one that the workers here serve (digest {card.model_digest or 'unknown'} of files, "
            f"vocabulary {card.vocab_size}; here {other.model_digest or 'unknown'}, {other.vocab_size}): "
            "start all workers of a group with the same --model"
        )
    if card.max_model_len != other.max_model_len:
        raise GreetingRefusedError(
            f"its context is {card.max_model_len} tokens, that of the workers here {other.max_model_len}: "
            "start all workers of a group with the same --max-model-len"
        )


class Workers:
    """Every worker that has shown its card.

    Args:
        router: where cores are kept.
        port: where plans go out.
        settings: the operator's.
        epoch: the scheduler's own.
        clock: for how long planning takes.
    """

    def __init__(
        self,
        router: Router,
        port: RouterPort,
        settings: Settings,
        epoch: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.left = CoreCounters()  # of workers that are gone
        self.left_evicted = 0
        self.step_rows = Histogram(ROW_BOUNDS)
        self.step_tokens = Histogram(TOKEN_BOUNDS)
        self.plan_seconds = Histogram(PLAN_BOUNDS_S)
        self.is_paused = False  # no plan goes out; requests keep their places and their pages
        self.router = router
        self._port = port
        self._settings = settings
        self._epoch = epoch
        self._clock = clock
        self._cards: dict[bytes, WorkerCard] = {}
        self._stall_limits_s: dict[bytes, float] = {}
        self._progress_s: dict[bytes, float] = {}

    def join(self, peer: Peer, now_s: float) -> None:
        """Makes the core of a worker that shows its card.

        Raises:
            GreetingRefusedError: its sizes and the settings cannot work together, or it serves another model or context
                than the workers that are here.
        """
        card = peer.card
        if card is None or peer.routing_id in self.router.cores:
            return
        for other in self._cards.values():
            check_alike(card, other)
        try:
            limits = limits_of(card, self._settings)
        except ValueError as error:
            raise GreetingRefusedError(str(error)) from error
        self._cards[peer.routing_id] = card
        self.router.add_worker(peer.routing_id, Core(limits, self._epoch), card.chunk_ms / max(card.chunk_tokens, 1))
        self._stall_limits_s[peer.routing_id] = stall_limit_s(card, limits)
        self._progress_s[peer.routing_id] = now_s
        logger.info(
            "%s joined: %d pages of %d tokens, context %d, %d rows, chunk %s, %d tokens a step",
            peer.name, limits.num_pages, limits.page_size, limits.max_model_len, limits.max_rows,
            limits.chunk_tokens if limits.is_chunked else "off", limits.token_budget,
        )  # fmt: skip

    def leave(self, peer: Peer, takers: list[bytes]) -> list[Produced]:
        """Takes a worker out. Others take what it had not begun; what it ran ends with BACKEND_LOST.

        What it counted is kept: counters never fall.
        """
        core = self.router.cores.get(peer.routing_id)
        if core is None:
            return []
        self.router.move_waiting(peer.routing_id, takers)
        self.left.add(core.counters)
        self.left_evicted += core.ledger.num_evicted_pages
        del self._cards[peer.routing_id], self._stall_limits_s[peer.routing_id], self._progress_s[peer.routing_id]
        return self.router.remove_worker(peer.routing_id)

    def take_result(self, peer: Peer, result: StepResult, now_s: float) -> StepOutcome:
        """Applies a result. One of a plan that a former scheduler made is dropped.

        Raises:
            ResultError: results of this worker are missing or do not fit its plans.
        """
        if result.epoch != self._epoch:
            self.router.num_stale += 1
            return StepOutcome([], [])
        core = self.router.cores.get(peer.routing_id)
        if core is None:
            raise ResultError("a result of a worker that never showed its card")
        outcome = core.take_result(result)
        self._progress_s[peer.routing_id] = now_s
        if not core.num_in_flight:
            peer.silence_limit_s = SILENCE_LIMIT_S
        return outcome

    def plan(self, peers: Iterable[Peer], now_s: float) -> list[Peer]:
        """Sends every worker the grammars to compile, and as many plans as it may have; none during a pause.

        Returns:
            Those that could not be reached.
        """
        unreachable = []
        for peer in peers:
            core = self.router.cores.get(peer.routing_id)
            if core is None:
                continue
            asks = core.grammar_asks()
            is_reached = not asks or all(self._port.send(peer.routing_id, ask) for ask in asks)
            if not is_reached or not self._plan_for(peer, core, now_s):
                unreachable.append(peer)
        return unreachable

    def stalled(self, peers: Iterable[Peer], now_s: float) -> list[Peer]:
        """Workers with plans in flight where no step has ended for too long."""
        return [
            peer
            for peer in peers
            if peer.routing_id in self.router.cores
            and self.router.cores[peer.routing_id].num_in_flight
            and now_s - self._progress_s[peer.routing_id] > self._stall_limits_s[peer.routing_id]
        ]

    def _plan_for(self, peer: Peer, core: Core, now_s: float) -> bool:
        while core.can_plan() and not self.is_paused:
            is_first = not core.num_in_flight
            begun_s = self._clock()
            plan = core.plan_step()
            self.plan_seconds.observe(self._clock() - begun_s)
            if plan is None:
                break
            self.step_rows.observe(len(plan.samples))
            self.step_tokens.observe(core.num_tokens_of_last_plan)
            if is_first:
                self._progress_s[peer.routing_id] = now_s
                peer.silence_limit_s = self._stall_limits_s[peer.routing_id]  # its loop waits for the step
            if not self._port.send(peer.routing_id, plan):
                return False
        return True

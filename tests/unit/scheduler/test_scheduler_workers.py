"""Several workers behind one scheduler, on real sockets: they join, drain, die, and must serve the same model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.scheduler.service import BackendLostError
from services.wire.finish import Finish
from services.wire.members import Goodbye, HandshakeRefused, Role, State, WorkerCard
from services.wire.requests import Admitted, Refused, Submit
from services.wire.steps import CompileGrammar, GrammarCompiled, StepPlan
from tests.unit.scheduler.fake_worker import FakeWorker, new_submit, solo_output
from tests.unit.scheduler.scheduler_group import (
    Peer,
    Pipeline,
    counter_of,
    id_of,
    last_load,
    run_all,
    running_pipeline,
    worker_card,
)

PROMPT = list(range(1, 12))
NARROW = worker_card(max_rows=1)


@dataclass
class Worker:
    """A worker of the group: its peer, its memory, and which requests it was given rows for."""

    peer: Peer
    memory: FakeWorker
    is_working: bool = True
    begun: list[bytes] = field(default_factory=list)

    def take_plan(self, message: object) -> None:
        if isinstance(message, StepPlan):
            self.begun += [new_row.request_id for new_row in message.new_rows]
            self.memory.run(message)
            if self.is_working:
                self.work_off()

    def work_off(self) -> None:
        while self.memory.results:
            self.peer.send(self.memory.results.popleft())
            self.peer.session.progress += 1


def new_worker(peer: Peer, card: WorkerCard) -> Worker:
    memory = FakeWorker(card.num_pages, card.page_size, card.max_rows, card.chunk_tokens + card.max_rows)
    worker = Worker(peer, memory)
    peer.on_message = worker.take_plan
    return worker


def join(pipeline: Pipeline, instance: str, card: WorkerCard) -> Worker:
    worker = new_worker(pipeline.group.join(Role.GPU_WORKER, instance, card), card)
    pipeline.group.pump(lambda: instance in members_of(pipeline))
    return worker


def members_of(pipeline: Pipeline) -> list[str]:
    return [member.instance for member in pipeline.tokenizer.session.members if member.role is Role.GPU_WORKER]


@contextmanager
def two_workers(card: WorkerCard, **settings: object) -> Iterator[tuple[Pipeline, Worker, Worker]]:
    with running_pipeline(card, **settings) as pipeline:
        first = new_worker(pipeline.gpu_worker, card)
        yield pipeline, first, join(pipeline, "b", card)


def submit_held(pipeline: Pipeline, workers: tuple[Worker, Worker], submits: list[Submit]) -> None:
    """Submits while no result comes back; returns when all are admitted and each worker has begun something."""
    for worker in workers:
        worker.is_working = False
    for submit in submits:
        pipeline.tokenizer.send(submit)
    pipeline.group.pump(lambda: len(pipeline.tokenizer.of(Admitted)) == len(submits))
    pipeline.group.pump(lambda: all(worker.begun for worker in workers))


def go_on(*workers: Worker) -> None:
    for worker in workers:
        worker.is_working = True
        worker.work_off()


def check_whole(pipeline: Pipeline, submits: list[Submit]) -> None:
    """Every answer is the one that it has alone: no token lost, none twice."""
    for submit in submits:
        answer = pipeline.answers[submit.request_id]
        assert (answer.token_ids, answer.finish) == solo_output(submit, 200)


def distinct(count: int, max_tokens: int = 20) -> list[Submit]:
    return [new_submit(number, [number] * 11, max_tokens) for number in range(1, count + 1)]


def test_a_worker_joins_while_serving_and_both_work() -> None:
    with running_pipeline() as pipeline:
        first = new_worker(pipeline.gpu_worker, worker_card())
        run_all(pipeline, distinct(1))
        second = join(pipeline, "b", worker_card(num_pages=32))
        pipeline.group.pump(lambda: last_load(pipeline).num_pages == 96)
        assert last_load(pipeline).max_total_tokens == 32 * 4  # what fits whichever worker gets it
        submits = [new_submit(number, [number] * 11, 20) for number in range(2, 10)]
        run_all(pipeline, submits)
        check_whole(pipeline, submits)
        assert len(first.begun) > 1
        assert second.begun
        pipeline.group.pump(lambda: counter_of(pipeline, "scheduler_admitted") == 9)


def test_a_draining_worker_ends_what_it_runs_and_others_take_the_rest() -> None:
    with two_workers(NARROW) as (pipeline, first, second):
        submits = distinct(6)
        submit_held(pipeline, (first, second), submits)
        pipeline.gpu_worker.session.set_state(State.DRAINING, time.monotonic())
        pipeline.group.pump(lambda: pipeline.gpu_worker.session.told_state is State.DRAINING)
        go_on(first, second)
        pipeline.group.pump(lambda: all(pipeline.finish_of(number) for number in range(1, 7)))
        check_whole(pipeline, submits)
        assert len(first.begun) == 1
        assert len(second.begun) == 5
        first.peer.send(Goodbye(first.peer.identity.epoch))
        pipeline.group.pump(lambda: members_of(pipeline) == ["b"])
        pipeline.group.peers.remove(first.peer)
        pipeline.group.mute_peers.append(first.peer)
        run_all(pipeline, [new_submit(7, PROMPT, 5)])
        assert pipeline.finish_of(7) is Finish.LENGTH
        pipeline.group.pump(lambda: counter_of(pipeline, "scheduler_moved_requests") == 2)
        assert pipeline.group.failure is None


def test_prc_01_what_a_dead_worker_ran_ends_and_what_it_had_not_begun_goes_on_elsewhere() -> None:
    with two_workers(NARROW) as (pipeline, first, second):
        submits = distinct(4)
        submit_held(pipeline, (first, second), submits)
        (lost,) = first.begun
        pipeline.group.leave(first.peer)
        go_on(second)
        pipeline.group.pump(lambda: all(pipeline.finish_of(number) for number in range(1, 5)))
        assert pipeline.answers[lost].finish is Finish.BACKEND_LOST
        check_whole(pipeline, [submit for submit in submits if submit.request_id != lost])
        assert pipeline.group.failure is None


def test_the_last_worker_ends_the_group() -> None:
    with two_workers(worker_card()) as (pipeline, first, second):
        pipeline.group.leave(first.peer)
        pipeline.group.pump(lambda: members_of(pipeline) == ["b"])
        assert pipeline.group.failure is None
        pipeline.group.leave(second.peer)
        pipeline.group.pump(lambda: pipeline.group.failure is not None)
        assert isinstance(pipeline.group.failure, BackendLostError)


def test_siblings_are_computed_by_one_worker_and_move_together() -> None:
    with two_workers(NARROW) as (pipeline, first, second):
        siblings = [new_submit(number, PROMPT, 12, group_id=1, choice=number) for number in range(1, 5)]
        submits = [*siblings, new_submit(9, [9] * 11, 60)]
        submit_held(pipeline, (first, second), submits)
        own, other = (first, second) if id_of(1) in first.begun else (second, first)
        assert other.begun == [id_of(9)]
        own.peer.session.set_state(State.DRAINING, time.monotonic())
        pipeline.group.pump(lambda: own.peer.session.told_state is State.DRAINING)
        go_on(first, second)
        pipeline.group.pump(lambda: all(pipeline.finish_of(number) for number in (1, 2, 3, 4, 9)))
        check_whole(pipeline, submits)
        assert own.begun == [id_of(1)]
        assert [pipeline.answer(number).cached_tokens for number in (3, 4)] == [8, 8]


def test_a_grammar_is_asked_for_where_its_request_runs_also_after_a_move() -> None:
    with two_workers(worker_card()) as (pipeline, first, second):
        submit = new_submit(1, PROMPT, 8, grammar="a+")
        pipeline.tokenizer.send(submit)
        pipeline.group.pump(lambda: bool(first.peer.of(CompileGrammar) or second.peer.of(CompileGrammar)))
        asked, other = (first, second) if first.peer.of(CompileGrammar) else (second, first)
        assert not other.peer.of(CompileGrammar)
        pipeline.group.leave(asked.peer)
        pipeline.group.pump(lambda: bool(other.peer.of(CompileGrammar)))
        assert not pipeline.tokenizer.of(Admitted)
        other.peer.send(GrammarCompiled(submit.request_id, submit.attempt))
        pipeline.group.pump(lambda: pipeline.finish_of(1) is Finish.LENGTH)
        assert len(pipeline.tokenizer.of(Admitted)) == 1
        check_whole(pipeline, [submit])


def test_a_request_is_refused_only_when_no_worker_has_room() -> None:
    with two_workers(NARROW, max_queued_requests=1) as (pipeline, first, second):
        submit_held(pipeline, (first, second), distinct(2))
        for submit in distinct(5)[2:]:
            pipeline.tokenizer.send(submit)
        pipeline.group.pump(lambda: len(pipeline.tokenizer.of(Admitted)) == 4 and bool(pipeline.tokenizer.of(Refused)))
        (refused,) = pipeline.tokenizer.of(Refused)
        assert (refused.status, refused.code) == (503, "queue_full")


def test_a_worker_of_another_model_or_context_is_told_why_and_the_group_goes_on() -> None:
    others = {
        "c": (worker_card(vocab_size=49), "its model is not the one"),
        "d": (worker_card(max_model_len=100), "its context is 100 tokens, that of the workers here 200"),
    }
    with running_pipeline() as pipeline:
        new_worker(pipeline.gpu_worker, worker_card())
        for instance, (card, words) in others.items():
            stranger = pipeline.group.join(Role.GPU_WORKER, instance, card)
            pipeline.group.mute(stranger)
            for message in stranger.session.messages_due(time.monotonic()):
                stranger.send(message)
            assert words in pipeline.group.hear(stranger, HandshakeRefused).reason
        pipeline.group.pump(lambda: members_of(pipeline) == ["a"])
        submits = distinct(2)
        run_all(pipeline, submits)
        check_whole(pipeline, submits)

"""The pure parts around the cores: records and routing, membership, load, deadlines, stalls."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from services.runtime.config import Settings
from services.scheduler import router as router_module
from services.scheduler import token_batch
from services.scheduler.core import Core
from services.scheduler.deadlines import Deadlines
from services.scheduler.load_report import FinishRate, LoadPacer, load_of
from services.scheduler.membership import GreetingRefusedError, Membership
from services.scheduler.policy import RemainderEstimate
from services.scheduler.router import RECORD_KEPT_S, Router
from services.scheduler.tenants import TenantShares
from services.scheduler.workers import Workers, limits_of, stall_limit_s
from services.wire.codec import decode, encode
from services.wire.columns import unpack_int32
from services.wire.endpoints import Identity
from services.wire.finish import Finish
from services.wire.members import Heartbeat, Hello, Role, State
from services.wire.messages import PROTOCOL_VERSION
from services.wire.requests import Submit
from tests.unit.scheduler.core_driver import EPOCH, Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit
from tests.unit.scheduler.scheduler_group import worker_card

PROMPT = list(range(1, 12))


class RoutedCores:
    """A router over driven cores; workers are called b"0", b"1", ..."""

    def __init__(self, num_workers: int) -> None:
        self.router = Router()
        self.drivers = [Driver(new_limits(64, 4)) for _ in range(num_workers)]
        self.workers = [str(number).encode() for number in range(num_workers)]
        for worker, driver in zip(self.workers, self.drivers, strict=True):
            self.router.add_worker(worker, driver.core, token_ms=1.0)

    def submit(self, submit: Submit, detokenizer: bytes = b"d") -> router_module.Record:
        return self.router.submit(submit, self.workers, b"t", detokenizer)

    def run(self, now_s: float = 0.0) -> None:
        for driver in self.drivers:
            while True:
                while driver.core.can_plan():
                    plan = driver.core.plan_step()
                    if plan is not None:
                        driver.worker.run(plan)
                if not driver.worker.results:
                    break
                for item in driver.core.apply_result(driver.worker.deliver()):
                    self.router.settle(item.request, now_s)


def test_requests_go_where_their_prefix_is_and_else_to_the_least_loaded() -> None:
    cores = RoutedCores(2)
    first = cores.submit(new_submit(1, PROMPT, 2))
    second = cores.submit(new_submit(2, [9] * 11, 2))
    assert {first.worker, second.worker} == {b"0", b"1"}
    cores.run()
    again = [cores.submit(new_submit(3, PROMPT, 2)), cores.submit(new_submit(4, [9] * 11, 2))]
    assert [record.worker for record in again] == [first.worker, second.worker]


def test_a_record_is_kept_until_acknowledged_or_old() -> None:
    cores = RoutedCores(1)
    router = cores.router
    records = [cores.submit(new_submit(number, PROMPT, 4)) for number in (1, 2)]
    router.acknowledge(records[0], 4)  # nothing has ended: an early word changes nothing
    cores.run(now_s=100.0)
    assert (router.num_open, router.num_records) == (0, 2)
    router.acknowledge(records[0], 3)
    assert router.is_awaited({b"t"})
    assert not router.is_awaited({b"other"})
    router.acknowledge(records[0], 4)
    assert router.find(records[0].request.request_id, 0) is None
    router.expire(100.0 + RECORD_KEPT_S - 1)
    assert router.num_records == 1
    router.expire(100.0 + RECORD_KEPT_S)
    assert router.num_records == 0


def test_ended_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MAX_ENDED_RECORDS", 3)
    cores = RoutedCores(1)
    for number in range(1, 8):
        cores.submit(new_submit(number, PROMPT, 2))
    cores.run()
    assert cores.router.num_records == 3
    assert cores.router.newest_attempt((7).to_bytes(16, "big")) is not None


def test_stale_messages_are_counted() -> None:
    cores = RoutedCores(1)
    record = cores.submit(new_submit(1, PROMPT, 2, attempt=3))
    assert cores.router.find(record.request.request_id, 3) is record
    assert cores.router.find(record.request.request_id, 2) is None
    assert cores.router.find(b"?" * 16, 0) is None
    assert cores.router.num_stale == 2


def test_open_answers_of_a_detokenizer_are_counted_until_they_end() -> None:
    cores = RoutedCores(1)
    records = [
        cores.submit(new_submit(number, PROMPT, 2), detokenizer) for number, detokenizer in ((1, b"a"), (2, b"b"))
    ]
    cores.submit(new_submit(3, PROMPT, 2), b"b")
    assert [cores.router.num_open_of(detokenizer) for detokenizer in (b"a", b"b", b"c")] == [1, 2, 0]
    cores.router.end(records[1], Finish.ABORTED)
    cores.router.settle(records[1].request, 0.0)
    cores.router.forget(records[1])
    assert cores.router.num_open_of(b"b") == 1
    cores.run()
    assert [cores.router.num_open_of(detokenizer) for detokenizer in (b"a", b"b")] == [0, 0]


def test_the_lowest_end_of_an_answer_wins_even_after_its_end() -> None:
    cores = RoutedCores(1)
    record = cores.submit(new_submit(1, PROMPT, 10))
    cores.run()
    assert not cores.router.stop_found(record, 11)
    assert cores.router.stop_found(record, 4)
    assert (record.request.num_output, record.request.finish) == (4, Finish.STOP_STRING)
    assert not cores.router.stop_found(record, 5)
    cores.router.acknowledge(record, 4)
    assert cores.router.num_records == 0


def test_a_worker_that_leaves_ends_all_its_requests() -> None:
    cores = RoutedCores(2)
    records = [cores.submit(new_submit(number, [number] * 9, 5)) for number in range(1, 7)]
    ended = cores.router.remove_worker(b"0")
    assert {item.request for item in ended} == {record.request for record in records if record.worker == b"0"}
    assert {item.finish for item in ended} == {Finish.BACKEND_LOST}
    assert cores.router.remove_worker(b"0") == []


def hello_of(identity: Identity, **changes: object) -> Hello:
    values: dict[str, object] = {
        "version": PROTOCOL_VERSION,
        "role": identity.role,
        "instance": identity.instance,
        "epoch": identity.epoch,
        "address": "ipc://somewhere",
        "state": State.READY,
    }
    return Hello(**(values | changes))  # type: ignore[arg-type]


def test_members_come_change_and_fall_silent() -> None:
    membership = Membership()
    identity = Identity(Role.DETOKENIZER, "a")
    assert membership.greet(identity.routing_id, hello_of(identity), 10.0) is None
    peer = membership.peers[identity.routing_id]
    assert membership.generation == 1
    assert membership.greet(identity.routing_id, hello_of(identity), 11.0) is None  # again: nothing has changed
    assert membership.generation == 1
    membership.hear(peer, Heartbeat(identity.epoch, State.DRAINING, 7, b"told"))
    assert (membership.generation, membership.roster().members[0].state) == (2, State.DRAINING)
    (telemetry,) = membership.telemetry(11.5)
    assert (telemetry.age_ms, telemetry.progress, telemetry.metrics) == (500, 7, b"told")
    assert telemetry.silence_limit_ms == 3000
    peer.silence_limit_s = 12.5  # it runs a step
    assert membership.telemetry(11.5)[0].silence_limit_ms == 12500
    peer.silence_limit_s = 3.0
    assert membership.silent(13.9) == []
    assert membership.silent(14.1) == [peer]
    membership.remove(peer)
    membership.remove(peer)
    assert (membership.generation, membership.roster().members) == (3, ())


def test_the_newest_process_of_an_instance_wins() -> None:
    membership = Membership()
    old, new, other = Identity(Role.TOKENIZER, "a"), Identity(Role.TOKENIZER, "a"), Identity(Role.DETOKENIZER, "a")
    membership.greet(old.routing_id, hello_of(old), 0.0)
    assert membership.greet(other.routing_id, hello_of(other), 0.0) is None
    replaced = membership.greet(new.routing_id, hello_of(new), 1.0)
    assert replaced is membership.peers[old.routing_id]


@pytest.mark.parametrize(
    ("routing_id", "changes", "reason"),
    [
        (b"tokenizer/a/00", {}, "no name"),
        (b"nonsense", {}, "no name"),
        (b"", {"version": PROTOCOL_VERSION + 1}, "the scheduler speaks"),
        (b"", {"instance": "b"}, "another process"),
        (b"", {"epoch": 1}, "another process"),
        (b"", {"role": Role.GPU_WORKER}, "another process"),
        (b"", {"role": Role.SCHEDULER}, "no name"),
    ],
)
def test_greetings_that_cannot_be_true_are_refused(routing_id: bytes, changes: dict[str, object], reason: str) -> None:
    identity = Identity(Role.TOKENIZER, "a")
    membership = Membership()
    with pytest.raises(GreetingRefusedError, match=reason):
        membership.greet(routing_id or identity.routing_id, hello_of(identity, **changes), 0.0)
    assert membership.peers == {}


def test_deadlines_come_out_in_order_and_once() -> None:
    deadlines = Deadlines()
    assert deadlines.next_s() == math.inf
    for due_s, name in ((3.0, b"c"), (1.0, b"a"), (2.0, b"b")):
        deadlines.add(due_s, name, 0)
    assert deadlines.pop_due(0.9) == []
    assert deadlines.pop_due(2.0) == [(b"a", 0), (b"b", 0)]
    assert deadlines.next_s() == 3.0
    assert deadlines.pop_due(9.0) == [(b"c", 0)]


def test_retry_after_is_the_time_to_serve_those_who_wait() -> None:
    rate = FinishRate()
    assert rate.retry_after_s(10, 0.0) == 10  # nothing has ever ended
    for step in range(1, 601):
        rate.count(step / 10)
    assert rate.at(60.0) == pytest.approx(10, rel=0.1)
    assert rate.retry_after_s(100, 60.0) == pytest.approx(10, abs=1)
    assert rate.retry_after_s(0, 60.0) == 1
    assert rate.retry_after_s(10**6, 60.0) == 60
    assert rate.at(120.0) < 0.1


def test_load_is_told_ten_times_a_second_while_it_changes_and_else_once() -> None:
    driver = Driver(new_limits(64, 4))
    pacer = LoadPacer()

    def load(idle_ms: int = 0) -> bool:
        return pacer.is_due(load_of([driver.core], State.READY, 1, idle_ms), now_s)

    now_s = 100.0
    assert load()
    now_s = 100.99
    assert not load(idle_ms=990)
    assert pacer.next_s() == 101.0
    now_s = 101.0
    assert load()
    driver.submit(new_submit(1, PROMPT, 2))
    now_s = 101.05
    assert not load()
    assert pacer.next_s() == pytest.approx(101.1)
    now_s = 101.11
    assert load()


def test_load_of_no_worker_is_zero_and_rows_that_are_free_are_room() -> None:
    empty = load_of([], State.STARTING, 2, 0)
    assert (empty.num_pages, empty.max_waiting, empty.max_total_tokens) == (0, 0, 0)
    core = Core(new_limits(10, 4, max_waiting=3, max_rows=8), EPOCH)
    load = load_of([core], State.READY, 2, 2**40)
    assert (load.max_waiting, load.num_pages, load.free_pages, load.max_total_tokens) == (11, 10, 10, 40)
    assert load.max_open == 11
    assert load.idle_ms == 2**31 - 1


def test_limits_follow_the_card_and_the_settings() -> None:
    card = worker_card(64, 4, max_model_len=200, max_rows=8, chunk_tokens=16)
    limits = limits_of(card, Settings())
    assert (limits.max_rows, limits.chunk_tokens, limits.token_budget) == (8, 16, 24)
    assert (limits.max_model_len, limits.max_total_tokens, limits.plans_ahead) == (200, 200, 1)
    settings = Settings(max_running_requests=4, chunked_prefill_size=-1, max_model_len=100, enable_prefix_caching=False)
    limits = limits_of(card, settings)
    assert (limits.max_rows, limits.is_chunked, limits.token_budget) == (4, False, 104)
    assert (limits.max_model_len, limits.caches_prefixes) == (100, False)
    assert limits_of(card, Settings(max_num_batched_tokens=50, max_running_requests=50)).token_budget == 50
    measured = replace(card, chunk_context=860, chunk_ms=240.0, chunk_limit_ms=300.0)
    assert limits_of(measured, Settings()).chunk_context == 860
    assert (limits_of(measured, Settings()).chunk_us, limits_of(measured, Settings()).chunk_limit_us) == (240e3, 300e3)
    kept = limits_of(measured, Settings(chunked_prefill_size=16))  # as it was set
    assert (kept.chunk_context, kept.chunk_limit_us) == (0, 0)
    whole = Settings(chunked_prefill_size=-1, max_running_requests=8, max_num_batched_tokens=207)
    with pytest.raises(ValueError, match=r"200 \+ 8 tokens: --max-num-batched-tokens is 207"):
        limits_of(card, whole)


def test_a_step_may_take_ten_times_what_the_card_says_and_at_least_ten_seconds() -> None:
    card = worker_card()
    assert stall_limit_s(card, limits_of(card, Settings())) == 10.0
    slow = type(card)(**{name: getattr(card, name) for name in card.__slots__} | {"chunk_ms": 2000.0})
    assert stall_limit_s(slow, limits_of(slow, Settings())) == pytest.approx(30.0)  # a step of 24 tokens, chunks of 16


def test_a_worker_is_stalled_only_while_a_plan_is_in_flight() -> None:
    class Sink:
        def send(self, peer: bytes, item: object) -> bool:
            return True

    router = Router()
    workers = Workers(router, Sink(), Settings(), EPOCH)  # type: ignore[arg-type]
    membership = Membership()
    identity = Identity(Role.GPU_WORKER, "a")
    membership.greet(identity.routing_id, hello_of(identity, worker=worker_card()), 0.0)
    peers = membership.of(Role.GPU_WORKER)
    workers.join(peers[0], 0.0)
    assert workers.plan(peers, 50.0) == []
    assert workers.stalled(peers, 100.0) == []
    router.submit(new_submit(1, PROMPT, 5), [identity.routing_id], b"t", b"d")
    assert workers.plan(peers, 100.0) == []
    assert peers[0].silence_limit_s == 10.0  # its loop waits for the step
    assert workers.stalled(peers, 109.0) == []
    assert workers.stalled(peers, 111.0) == peers


def test_tenants_start_level_and_are_forgotten_when_they_leave() -> None:
    shares = TenantShares()
    shares.enter("a").served_tokens += 100
    assert shares.enter("b").served_tokens == 100  # it did not wait for its turn before it came
    shares.enter("b").served_tokens += 5
    shares.enter("a")
    shares.leave("a")
    assert (shares.served_tokens("a"), shares.served_tokens("b")) == (100, 105)
    shares.leave("a")
    assert shares.enter("a").served_tokens == 105


def test_the_expected_remainder_covers_the_horizon_and_never_more_than_what_may_come() -> None:
    estimate = RemainderEstimate()
    assert estimate.expected_tokens(0) == 0
    assert estimate.expected_tokens(10) == 10
    assert estimate.expected_tokens(50) == 32
    assert estimate.expected_tokens(1000) == 300
    for _ in range(20):
        estimate.on_retraction()
    assert estimate.expected_tokens(1000) == 1000
    for _ in range(100_000):
        estimate.on_step()
    assert estimate.share == 0.1


def test_many_long_answers_sent_again_are_cut_into_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_batch, "MAX_IDS", 10)
    batch = token_batch.TokenBatch()
    assert batch.messages() == []
    cores = RoutedCores(1)
    sizes = [3, 6, 4, 25, 0]
    requests = [cores.submit(new_submit(number, PROMPT, 30)).request for number in range(1, 6)]
    for request, size in zip(requests, sizes, strict=True):
        batch.add(request, 0, list(range(size)), Finish.NONE)
    messages = batch.messages()
    assert [unpack_int32(message.counts) for message in messages] == [[3, 6, 4], [25], [0]]
    assert b"".join(message.request_ids for message in messages) == b"".join(request.request_id for request in requests)
    for message in messages:
        decode(encode(message))

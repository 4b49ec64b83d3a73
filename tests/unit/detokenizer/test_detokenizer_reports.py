"""How answers fare in the detokenizer: shares of turns, and the report at the end of each answer."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest

from services.detokenizer.decoders import Decoders
from services.detokenizer.incremental import TokenPieces
from services.detokenizer.turn_times import EndedAnswer, TurnTimes
from services.wire.answers import DecodeOpen, HopReport, TextChunks, TokensProduced
from services.wire.columns import pack_int32
from services.wire.endpoints import Identity, ipc_endpoint
from services.wire.finish import Finish
from services.wire.members import Heartbeat, Hello, Member, Role, State
from services.wire.request_params import TextParams
from services.wire.samples import unpack_samples
from tests.unit.detokenizer.peers import Group, Peer
from tests.unit.detokenizer.test_detokenizer_decoders import LEFT, A, B, Table, opening, produced


def test_a_turn_is_work_by_its_rows_and_waiting_for_the_rest() -> None:
    times = TurnTimes()
    times.add(0.3, 3)
    began = times.sums
    times.add(0.5, 1)
    times.add(1.0, 4)
    assert times.since(began) == pytest.approx((0.75, 0.75))
    assert times.sums == pytest.approx((0.85, 0.95))
    assert times.turn_rows.total == 8
    assert times.turn_seconds.total == pytest.approx(1.8)


def test_an_answer_that_ends_says_what_it_was() -> None:
    decoders = Decoders(TokenPieces(Table()))
    decoders.times.add(0.5, 2)
    decoders.open(opening(A, attempt=2), 1000.5)
    decoders.open(opening(B, stop=("two",)), 1001.5)
    decoders.advance(produced((A, 2, 0, [0, 2], Finish.NONE), (B, 0, 0, [0, 1, 2], Finish.NONE)))
    decoders.advance(produced((A, 2, 2, [], Finish.TIMEOUT)))
    outgoing = decoders.take_outgoing()
    assert outgoing.num_rows == 3
    assert outgoing.ended == [
        EndedAnswer(LEFT, B, 0, 1001.5, (0.25, 0.25), num_chunks=1, num_tokens=2),
        EndedAnswer(LEFT, A, 2, 1000.5, (0.25, 0.25), num_chunks=2, num_tokens=2),
    ]
    assert decoders.take_outgoing().ended == []


def test_its_tokenizer_gets_the_report_after_the_last_chunk(group: Group) -> None:
    tokenizer, request_id, before_us = group.tokenizers[0], secrets.token_bytes(16), int(1e6 * time.time())
    group.send(DecodeOpen(request_id, 3, tokenizer.identity.routing_id, TextParams((), False, True, 0)))
    for index, finish in enumerate([Finish.NONE, Finish.NONE, Finish.LENGTH]):
        row = (pack_int32([3]), pack_int32([index]), pack_int32([1]), pack_int32([216]))
        group.send(TokensProduced(request_id, *row, bytes([finish]), pack_int32([0])))
    report = tokenizer.wait_until(lambda arrived: next((one for one in arrived if isinstance(one, HopReport)), None))
    assert (report.request_id, report.attempt, report.role) == (request_id, 3, Role.DETOKENIZER)
    assert report.counters == {"chunks": 3, "tokens": 3}
    assert before_us <= report.started_unix_us <= int(1e6 * time.time())
    assert report.work_us > 0 <= report.wait_us


def test_a_report_waits_behind_its_chunks_for_a_tokenizer_that_is_not_connected_yet(smollm2_path: Path) -> None:
    group = Group(smollm2_path)
    late, request_id = Identity(Role.TOKENIZER, "late"), secrets.token_bytes(16)
    address = ipc_endpoint(group.run_dir, "late")
    try:
        group.scheduler.wait_until(lambda arrived: any(isinstance(item, Hello) for item in arrived) or None)
        group.scheduler.tell_roster([Member(late.role, late.instance, late.epoch, address, State.READY)])
        group.send(DecodeOpen(request_id, 0, late.routing_id, TextParams((), False, True, 0)))
        row = (pack_int32([0]), pack_int32([0]), pack_int32([1]), pack_int32([216]))
        group.send(TokensProduced(request_id, *row, bytes([Finish.LENGTH]), pack_int32([0])))
        group.scheduler.wait_until(lambda arrived: any(waiting_frames(item) == 2 for item in arrived) or None)
        peer = Peer(late, group.run_dir, "late")
        peer.start()
        group.tokenizers.append(peer)
        kinds = peer.wait_until(lambda arrived: [type(item) for item in arrived] if len(arrived) > 1 else None)
        assert kinds == [TextChunks, HopReport]
    finally:
        group.close()


def waiting_frames(message: object) -> float | None:
    """What a heartbeat says of the frames that wait for tokenizers."""
    if not isinstance(message, Heartbeat):
        return None
    named = [
        value
        for key, value in unpack_samples(message.metrics).items()
        if "outbox_frames" in key and key.endswith("tokenizer")
    ]
    return named[0] if named else None


def test_turns_and_links_are_told_in_heartbeats(group: Group) -> None:
    """Frames may wait for a connection that is not there yet, so what is told is that none wait in the end."""

    def told(arrived: object) -> dict[str, float] | None:
        for message in group.scheduler.received(Heartbeat):
            samples = {",".join(key.split("\x1f")[2:]): value for key, value in unpack_samples(message.metrics).items()}
            waiting = [
                samples.get(f"tokenway:detokenizer_outbox_frames,link={link}") for link in ("scheduler", "tokenizer")
            ]
            if samples.get("tokenway:detokenizer_batch_rows_sum", 0) >= 3 and waiting == [0, 0]:
                return samples
        return None

    samples = group.scheduler.wait_until(told)
    assert samples["tokenway:detokenizer_decode_seconds_count"] == samples["tokenway:detokenizer_batch_rows_count"] > 0

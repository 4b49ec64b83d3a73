"""The real process over real sockets: peers that repeat, reorder, lose, send garbage, leave, drain and die."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from services.runtime.service import HURRY_SIGNAL
from services.wire.answers import DecodeFailed, DecodeOpen, StopFound, TextChunks, TokensProduced
from services.wire.codec import encode
from services.wire.columns import pack_int32, split_by_counts, unpack_int32, unpack_request_ids
from services.wire.finish import Finish
from services.wire.members import Goodbye, HandshakeRefused, Heartbeat, Hello, Role, State
from services.wire.messages import PROTOCOL_VERSION
from services.wire.request_params import TextParams
from services.wire.requests import Resend
from services.wire.samples import unpack_samples
from tests.unit.detokenizer.peers import ROOT, Group, Peer

F_NUM = [216, 37, 28, 216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216]
F_NUM_TEXT = " 5, 6, 7, 8, 9, 10, "
Told = TypeVar("Told", DecodeFailed, Resend, StopFound)
Row = tuple[int, list[int], int, str, Finish, int]  # first index, ids, offset, text, finish, completion tokens


@pytest.fixture
def new_group(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[Group]:
    """A process of its own; flags come as the fixture's parameter."""
    group = Group(smollm2_path, *getattr(request, "param", ()))
    yield group
    group.close()


def new_request() -> bytes:
    return secrets.token_bytes(16)


def opening(request_id: bytes, tokenizer: Peer, attempt: int = 0, stop: tuple[str, ...] = ()) -> DecodeOpen:
    return DecodeOpen(request_id, attempt, tokenizer.identity.routing_id, TextParams(stop, False, True, 0))


def produced(
    request_id: bytes, first_index: int, ids: Sequence[int], finish: Finish = Finish.NONE, attempt: int = 0
) -> TokensProduced:
    return TokensProduced(
        request_id,
        pack_int32([attempt]),
        pack_int32([first_index]),
        pack_int32([len(ids)]),
        pack_int32(ids),
        bytes([finish]),
        pack_int32([0]),
    )


def rows_for(request_id: bytes, arrived: Sequence[object]) -> list[Row]:
    rows: list[Row] = []
    for message in arrived:
        if isinstance(message, TextChunks):
            runs = split_by_counts(unpack_int32(message.token_ids), unpack_int32(message.counts))
            columns = (
                unpack_int32(message.first_indexes),
                runs,
                unpack_int32(message.text_offsets),
                message.texts,
                map(Finish, message.finishes),
                unpack_int32(message.completion_tokens),
            )
            owners = unpack_request_ids(message.request_ids)
            rows += [row for owner, row in zip(owners, zip(*columns, strict=True), strict=True) if owner == request_id]
    return rows


def wait_for_end(tokenizer: Peer, request_id: bytes) -> list[Row]:
    """All rows of an answer, once its finish is there; checks that they follow each other."""

    def ended(arrived: Sequence[object]) -> list[Row] | None:
        rows = rows_for(request_id, arrived)
        return rows if rows and rows[-1][4] is not Finish.NONE else None

    rows = tokenizer.wait_until(ended)
    index = offset = 0
    for first_index, ids, text_offset, text, _, _ in rows:
        assert (first_index, text_offset) == (index, offset)
        index, offset = index + len(ids), offset + len(text.encode())
    return rows


def text_of(rows: list[Row]) -> str:
    return "".join(row[3] for row in rows)


def wait_for(group: Group, kind: type[Told], request_id: bytes) -> Told:
    def found(arrived: Sequence[object]) -> Told | None:
        return next((item for item in arrived if isinstance(item, kind) and request_id in item.request_ids), None)

    return group.scheduler.wait_until(found)


def check_that_it_serves(group: Group) -> None:
    request_id = new_request()
    group.send(opening(request_id, group.tokenizers[0]), produced(request_id, 0, F_NUM, Finish.LENGTH))
    assert text_of(wait_for_end(group.tokenizers[0], request_id)) == F_NUM_TEXT


def test_it_greets_when_it_can_work(group: Group) -> None:
    hello = group.scheduler.received(Hello)[0]
    assert (hello.role, hello.state, hello.address) == (Role.DETOKENIZER, State.READY, "")


def test_tokens_one_by_one_become_chunks_that_follow_each_other(group: Group) -> None:
    request_id = new_request()
    group.send(opening(request_id, group.tokenizers[0]))
    for index, token_id in enumerate(F_NUM):
        finish = Finish.LENGTH if index == len(F_NUM) - 1 else Finish.NONE
        group.send(produced(request_id, index, [token_id], finish))
    rows = wait_for_end(group.tokenizers[0], request_id)
    assert text_of(rows) == F_NUM_TEXT
    assert [token_id for row in rows for token_id in row[1]] == F_NUM
    assert rows[-1][4:] == (Finish.LENGTH, len(F_NUM))


def test_repeated_reordered_and_foreign_rows_change_nothing(group: Group) -> None:
    request_id = new_request()
    group.send(
        opening(request_id, group.tokenizers[0], attempt=1),
        produced(request_id, 0, F_NUM[:3], attempt=1),
        produced(request_id, 0, F_NUM[:3], attempt=1),
        produced(request_id, 3, [0], attempt=0),
        produced(request_id, 7, F_NUM[7:9], attempt=1),
        produced(request_id, 5, F_NUM[5:7], attempt=1),
    )
    resend = wait_for(group, Resend, request_id)
    assert resend == Resend(request_id, pack_int32([1]), pack_int32([3]))
    group.send(
        opening(request_id, group.tokenizers[0], attempt=0),
        produced(request_id, 2, F_NUM[2:], Finish.LENGTH, attempt=1),
        produced(request_id, 2, F_NUM[2:], Finish.LENGTH, attempt=1),
    )
    rows = wait_for_end(group.tokenizers[0], request_id)
    assert text_of(rows) == F_NUM_TEXT
    check_that_it_serves(group)
    assert len(rows_for(request_id, group.tokenizers[0].received(TextChunks))) == len(rows)


def test_an_answer_it_never_heard_of_is_asked_for_and_replayed(group: Group) -> None:
    request_id = new_request()
    group.send(produced(request_id, 4, F_NUM[4:6]))
    assert wait_for(group, Resend, request_id) == Resend(request_id, pack_int32([0]), pack_int32([0]))
    group.send(opening(request_id, group.tokenizers[0]), produced(request_id, 0, F_NUM, Finish.LENGTH))
    assert text_of(wait_for_end(group.tokenizers[0], request_id)) == F_NUM_TEXT


def test_garbage_frames_are_counted_and_dropped(group: Group) -> None:
    request_id = new_request()
    good = produced(request_id, 0, [1])
    garbage = [[b""], [b"\xff\xff"], [b"\x91\xcd\x27\x0f"], [b"a", b"b"], [b"\x80\x04K\x01."], [b"\x97" + b"\x90" * 9]]
    group.send(*garbage, Goodbye(3), Heartbeat(1, State.READY, 0), opening(request_id, group.tokenizers[0]), good)
    check_that_it_serves(group)

    def counted(arrived: Sequence[object]) -> bool | None:
        metrics = next(unpack_samples(item.metrics) for item in reversed(arrived) if isinstance(item, Heartbeat))
        counts = [value for name, value in metrics.items() if name.endswith("detokenizer_refused_messages_total")]
        return True if counts == [len(garbage) + 1] else None  # the Goodbye is a message, but none for us

    assert group.scheduler.wait_until(counted)


def test_stp_01_a_stop_string_is_told_to_the_scheduler_and_to_the_client(group: Group) -> None:
    request_id = new_request()
    group.send(opening(request_id, group.tokenizers[0], stop=("7, 8",)))
    for index, token_id in enumerate(F_NUM):
        group.send(produced(request_id, index, [token_id]))
    rows = wait_for_end(group.tokenizers[0], request_id)
    assert text_of(rows) == " 5, 6, "
    assert rows[-1][4:] == (Finish.STOP_STRING, 11)
    assert wait_for(group, StopFound, request_id) == StopFound(request_id, pack_int32([0]), pack_int32([11]))


def test_prc_05_an_answer_that_fails_leaves_the_others_alone(group: Group) -> None:
    bad, good = new_request(), [new_request() for _ in range(8)]
    tokenizer = group.tokenizers[0]
    group.send(*(opening(request_id, tokenizer) for request_id in good))
    group.send(opening(bad, tokenizer, stop=("",)))
    group.send(*(produced(request_id, 0, F_NUM, Finish.LENGTH) for request_id in (bad, *good)))
    assert wait_for(group, DecodeFailed, bad) == DecodeFailed(bad, pack_int32([0]))
    assert wait_for_end(tokenizer, bad)[-1][4] is Finish.INTERNAL_ERROR
    assert [text_of(wait_for_end(tokenizer, request_id)) for request_id in good] == [F_NUM_TEXT] * 8


def test_a_tokenizer_that_leaves_takes_its_answers_along_and_a_new_one_is_served(group: Group) -> None:
    leaving, staying = group.add_tokenizer(), group.tokenizers[0]
    lost, kept = new_request(), new_request()
    group.send(opening(lost, leaving), opening(kept, staying), produced(lost, 0, [19556]), produced(kept, 0, [19556]))
    leaving.wait_until(lambda arrived: rows_for(lost, arrived) or None)
    group.tokenizers.remove(leaving)
    leaving.stop()
    group.tell_roster()
    group.send(produced(lost, 1, [905], Finish.LENGTH), produced(kept, 1, [905], Finish.LENGTH))
    assert text_of(wait_for_end(staying, kept)) == "Hello world"
    new, request_id = group.add_tokenizer(), new_request()
    group.send(opening(request_id, new), produced(request_id, 0, [905], Finish.LENGTH))
    assert text_of(wait_for_end(new, request_id)) == " world"


def test_an_answer_for_a_tokenizer_that_is_not_there_is_given_back(group: Group) -> None:
    request_id = new_request()
    nobody = DecodeOpen(request_id, 0, b"tokenizer/nobody/0", TextParams((), False, True, 0))
    group.send(nobody, produced(request_id, 0, [1]))
    assert wait_for(group, DecodeFailed, request_id) == DecodeFailed(request_id, pack_int32([0]))
    check_that_it_serves(group)


def test_det_06_a_negative_id_is_refused_at_the_boundary(group: Group) -> None:
    request_id, token_id = new_request(), 0x01020304
    frame = encode(produced(request_id, 1, [token_id])).replace(pack_int32([token_id]), pack_int32([-1]))
    group.send(opening(request_id, group.tokenizers[0]), produced(request_id, 0, [19556]), [frame])
    group.send(produced(request_id, 1, [49152, 905], Finish.LENGTH))
    assert text_of(wait_for_end(group.tokenizers[0], request_id)) == "Hello world"


def test_a_scheduler_started_anew_is_greeted_and_served(new_group: Group) -> None:
    tokenizer, request_id = new_group.add_tokenizer(), new_request()
    new_group.send(opening(request_id, tokenizer, attempt=3), produced(request_id, 0, F_NUM[:5], attempt=3))
    tokenizer.wait_until(lambda arrived: rows_for(request_id, arrived) or None)
    new_group.scheduler.start_anew()
    new_group.scheduler.wait_until(lambda arrived: [item for item in arrived if isinstance(item, Hello)][1:] or None)
    again = new_request()
    new_group.send(opening(again, tokenizer), produced(again, 0, F_NUM, Finish.LENGTH))
    assert text_of(wait_for_end(tokenizer, again)) == F_NUM_TEXT
    new_group.send(produced(request_id, 5, F_NUM[5:], Finish.LENGTH, attempt=3))
    assert wait_for(new_group, Resend, request_id) == Resend(request_id, pack_int32([3]), pack_int32([0]))


def wait_for_draining(group: Group) -> None:
    def said(arrived: Sequence[object]) -> bool | None:
        states = [item.state for item in arrived if isinstance(item, Heartbeat)]
        return True if State.DRAINING in states else None

    assert group.scheduler.wait_until(said)


def test_sigterm_finishes_what_is_open_and_ends_with_0(new_group: Group) -> None:
    tokenizer, request_id = new_group.add_tokenizer(), new_request()
    new_group.send(opening(request_id, tokenizer), produced(request_id, 0, F_NUM[:5]))
    tokenizer.wait_until(lambda arrived: rows_for(request_id, arrived) or None)
    new_group.process.send_signal(signal.SIGTERM)
    wait_for_draining(new_group)
    new_group.send(produced(request_id, 5, F_NUM[5:], Finish.LENGTH))
    assert text_of(wait_for_end(tokenizer, request_id)) == F_NUM_TEXT
    new_group.scheduler.wait_until(lambda arrived: any(isinstance(item, Goodbye) for item in arrived) or None)
    assert new_group.exit_status()[0] == 0


def test_sigterm_ends_an_idle_process_also_when_the_scheduler_is_ending(new_group: Group) -> None:
    new_group.add_tokenizer()
    check_that_it_serves(new_group)
    new_group.scheduler.is_silent, new_group.scheduler.tells_states = True, False
    new_group.process.send_signal(signal.SIGTERM)
    assert new_group.exit_status()[0] == 0


@pytest.mark.parametrize("new_group", [("--drain-timeout-s", "0.2")], indirect=True)
def test_answers_that_outlive_the_drain_time_are_ended_for_their_clients(new_group: Group) -> None:
    tokenizer, request_id = new_group.add_tokenizer(), new_request()
    new_group.send(opening(request_id, tokenizer), produced(request_id, 0, F_NUM[:5]))
    tokenizer.wait_until(lambda arrived: rows_for(request_id, arrived) or None)
    new_group.process.send_signal(signal.SIGTERM)
    assert wait_for_end(tokenizer, request_id)[-1][4] is Finish.BACKEND_LOST
    assert wait_for(new_group, DecodeFailed, request_id) == DecodeFailed(request_id, pack_int32([0]))
    assert new_group.exit_status()[0] == 0


def test_hurried_without_open_answers_it_warns_of_nothing(new_group: Group) -> None:
    new_group.add_tokenizer()
    check_that_it_serves(new_group)
    new_group.process.send_signal(HURRY_SIGNAL)
    status, errors = new_group.exit_status()
    assert status == 0
    assert " W detokenizer/" not in errors


def test_a_silent_scheduler_ends_the_process_with_a_failure_in_one_line(new_group: Group) -> None:
    new_group.add_tokenizer()
    new_group.scheduler.is_silent = True
    status, errors = new_group.exit_status()
    assert status == 1
    assert errors.splitlines()[-1].endswith(" s")
    assert "detokenizer ends: the scheduler has been silent for" in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_a_refused_handshake_ends_the_process_with_the_reason(smollm2_path: Path) -> None:
    group = Group(smollm2_path)
    group.scheduler.refusal = HandshakeRefused(PROTOCOL_VERSION, "another model")
    status, errors = group.exit_status()
    group.close()
    assert status != 0
    assert "another model" in errors


def test_a_model_that_is_not_there_is_named_at_the_start(tmp_path: Path) -> None:
    group = Group(tmp_path / "nothing.gguf")
    status, errors = group.exit_status()
    group.close()
    assert status == 2
    assert "nothing.gguf" in errors


def test_it_imports_neither_torch_nor_a_tokenizer_library() -> None:
    code = "import sys, services.detokenizer.service; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "tokenizers", "transformers", "aiohttp", "safetensors"} & set(done.stdout.split())

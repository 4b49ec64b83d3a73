"""The watch of a group: who ends, falls silent or leaves is named to all others, and who ends as he should is not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from queue import Queue

import pytest

from services.gpu_worker.parallel import watch
from services.gpu_worker.parallel.watch import Lookout, Watch, WatchEvents, join_watch

PATIENCE_S = 20.0


class Rank:
    """One rank's watch, and what it has found."""

    def __init__(self) -> None:
        self.lost: Queue[str] = Queue()
        self.has_ended = threading.Event()
        self.is_told_to_stop = threading.Event()
        self.events = WatchEvents(self.lost.put, self.is_told_to_stop.set, self.has_ended.set)
        self.watch: Watch

    def said(self) -> str:
        """The next thing that it tells of somebody."""
        return self.lost.get(timeout=PATIENCE_S)


@pytest.fixture
def ranks() -> list[Rank]:
    """Rank 0, rank 1 and rank 2."""
    return meet(3)


def meet(size: int) -> list[Rank]:
    lookout = Lookout("127.0.0.1")
    found = [Rank() for _ in range(size)]
    invitation = lookout.invitation

    def join(rank: int) -> None:
        found[rank].watch = join_watch(rank, "127.0.0.1", invitation, found[rank].events)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    found[0].watch = lookout.wait(size, found[0].events)
    for thread in threads:
        thread.join()
    return found


def cut(rank: Rank) -> None:
    """Closes a rank's connections as the kernel does when a process dies."""
    for peer in rank.watch._peers:
        peer.has_ended = True  # it is dead: it hears nothing and tells nobody
    for peer in rank.watch._peers:
        peer.connection.shutdown(socket.SHUT_RDWR)


def close_all(ranks: list[Rank]) -> None:
    for rank in reversed(ranks):
        rank.watch.close()


def test_a_rank_that_dies_is_named_to_all(ranks: list[Rank]) -> None:
    cut(ranks[1])
    assert ranks[0].said() == "rank 1 has ended: its connection is closed"
    assert ranks[2].said() == "rank 1 is lost, as rank 0 tells"
    close_all(ranks)


def test_rank_0_that_dies_is_named(ranks: list[Rank]) -> None:
    cut(ranks[0])
    assert ranks[1].said() == ranks[2].said() == "rank 0 has ended: its connection is closed"
    close_all(ranks)


def test_a_silent_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENCE_LIMIT_S", 0.3)
    lookout, leader = Lookout("127.0.0.1"), Rank()
    port, token = lookout.invitation.split()
    with socket.create_connection(("127.0.0.1", int(port))) as silent:
        silent.sendall(watch._GREETING.pack(bytes.fromhex(token), 1))
        leader.watch = lookout.wait(2, leader.events)
        leader.watch.be_strict()
        assert leader.said() == "rank 1 has said nothing for 0.3 s"
        leader.watch.close()


def test_who_is_told_to_stop_tells_rank_0(ranks: list[Rank]) -> None:
    ranks[2].watch.tell_stop()
    assert ranks[0].is_told_to_stop.wait(PATIENCE_S)
    close_all(ranks)


def test_an_orderly_end_is_told_and_nobody_is_missed(ranks: list[Rank]) -> None:
    closing = threading.Thread(target=ranks[0].watch.close)
    closing.start()
    for rank in ranks[1:]:
        assert rank.has_ended.wait(PATIENCE_S)
        rank.watch.close()
    closing.join()
    assert all(rank.lost.empty() for rank in ranks)


def test_a_rank_that_leaves_unasked_is_named(ranks: list[Rank]) -> None:
    ranks[2].watch.close()
    assert ranks[0].said() == "rank 2 has left"
    close_all(ranks[:2])


def test_ranks_that_did_not_come_as_far_are_named(ranks: list[Rank]) -> None:
    for _ in range(3):
        ranks[0].watch.note_taken()
        ranks[2].watch.note_taken()
    wait_until(lambda: ranks[0].watch.describe_behind() == "rank 1 did not come as far")
    assert ranks[2].watch.describe_behind() == ""
    close_all(ranks)


def test_strangers_are_not_let_in() -> None:
    lookout, leader, follower = Lookout("127.0.0.1"), Rank(), Rank()
    port = int(lookout.invitation.split()[0])
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.sendall(watch._GREETING.pack(bytes(16), 1))
    silent = socket.create_connection(("127.0.0.1", port))
    silent.shutdown(socket.SHUT_WR)
    thread = threading.Thread(
        target=lambda: setattr(follower, "watch", join_watch(1, "127.0.0.1", lookout.invitation, follower.events))
    )
    thread.start()
    leader.watch = lookout.wait(2, leader.events)
    thread.join()
    assert stranger.recv(1) == silent.recv(1) == b""
    follower.watch.tell_stop()
    assert leader.is_told_to_stop.wait(PATIENCE_S)
    stranger.close()
    silent.close()
    close_all([leader, follower])


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MEET_TIMEOUT_S", 0.2)
    with pytest.raises(TimeoutError, match="of rank 1, 2 nothing came"):
        Lookout("127.0.0.1").wait(3, WatchEvents(lambda what: None))


def wait_until(is_so: Callable[[], bool]) -> None:
    changed = threading.Condition()
    with changed:
        assert changed.wait_for(is_so, 0) or any(changed.wait(0.05) or is_so() for _ in range(400))

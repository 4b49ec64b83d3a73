"""The bench of peers: which of them counts, what a line says, and that a peer that does not start is told."""

from __future__ import annotations

import argparse
import os
import random
import re
import socket
import sys
import time
from pathlib import Path

import pytest

from bench import peers, provenance
from bench.peer_servers import Contender, Load, OutOfTimeError, llama_server, over_http
from bench.peers import LOADS, Share, best_peer, estimate_s, summary
from services.launcher.errors import CommandError

RATE, FIRST_TOKEN = LOADS[0], LOADS[-1]
FOUND = {
    "tokenway": [20.0, 30.0, 40.0],
    "a.gguf": [10.0, 15.0, 10.0],
    "b.gguf": [9.0, 9.0, 99.0],
    "transformers": [99.0, 99.0, 99.0],
}


@pytest.fixture(autouse=True)
def free_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable tells threads what to do; those of the tests are told."""
    for name in [name for name in os.environ if name.startswith(("OMP_", "GOMP_", "KMP_"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_nothing_tells_the_threads_of_all_servers_how_to_wait(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "0")
    with pytest.raises(SystemExit):
        peers.main(["--llama-server", "nowhere", "--gguf", "nothing.gguf"])
    assert f"{name} is set" in capsys.readouterr().err


def test_the_best_of_the_files_counts_by_its_median() -> None:
    assert best_peer(RATE, FOUND) == "a.gguf"
    assert best_peer(FIRST_TOKEN, FOUND) == "b.gguf"


def test_a_ratio_is_the_median_of_those_within_a_round() -> None:
    name, unit, ours, others, ratio = summary(RATE, FOUND)
    assert (name, unit, ours) == (RATE.name, "output tok/s", "30.0")
    assert others == "a.gguf 10.0, b.gguf 9.0, transformers 99.0"
    assert ratio == "2.00 (a.gguf)"


def test_speculation_has_a_ratio_of_its_own_and_is_no_peer() -> None:
    found = {**FOUND, "tokenway --speculation ngram": [2 * figure for figure in FOUND["tokenway"]]}
    assert best_peer(RATE, found) == "a.gguf"
    assert summary(RATE, found)[-1] == "2.00 (a.gguf), speculating 4.00"


@pytest.mark.parametrize("chosen", LOADS)
def test_prompts_are_as_long_as_said_and_share_what_they_are_to_share(chosen: Load) -> None:
    sessions = chosen.sessions(5)
    assert len(sessions) == chosen.requests >= chosen.streams
    first, second = (list(session.turns[0].prompt) for session in sessions[:2])
    assert len(first) == len(second) == chosen.shared + chosen.prompt
    assert first[: chosen.shared] == second[: chosen.shared]
    assert first[chosen.shared :] != second[chosen.shared :]
    assert len(first) + chosen.output < chosen.tokens_of_a_slot


def test_a_peer_that_ends_at_once_is_told() -> None:
    program = Path(sys.executable)  # it knows none of these flags
    with pytest.raises(CommandError, match="llama-server ended with status"), llama_server(program, program, 1, RATE):
        pass


def test_each_workload_has_its_share_of_the_time() -> None:
    now_s = time.monotonic()
    assert Share(RATE, [RATE, *LOADS[1:]], now_s + 1000).has_room(1)
    assert not Share(RATE, [RATE], now_s - 1).has_room(1)
    assert 990 < Share(FIRST_TOKEN, [FIRST_TOKEN], now_s + 1000).left_s <= 1000


def test_the_estimate_grows_with_rounds_and_contenders() -> None:
    assert estimate_s(LOADS, 4, 5) == pytest.approx(20 * estimate_s(LOADS, 1, 1))
    assert 1800 < estimate_s(LOADS, 4, 5) < 3600


def test_a_server_that_does_not_answer_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peer_servers.Client.first_model", lambda client: "a model")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        run = over_http(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(CommandError, match=re.escape(RATE.name) + ": not done in the time"):
            run(RATE, 1, 0.05)


@pytest.mark.parametrize("num_done", [0, 1, 3])
def test_a_round_that_is_not_done_in_time_does_not_count(num_done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it do; without any the bench fails."""
    figures = iter(range(100))

    def first(_load: Load, _seed: int, _limit_s: float) -> float:
        return float(next(figures))

    def second(load: Load, _seed: int, _limit_s: float) -> float:
        if (figure := next(figures)) >= 2 * num_done:
            raise OutOfTimeError(load.name)
        return float(figure)

    contenders: dict[str, Contender] = {"tokenway": first, "a.gguf": second}
    monkeypatch.setattr(peers, "_contenders", lambda *_: contenders)
    share = Share(RATE, [RATE], time.monotonic() + 1000)
    options = argparse.Namespace(rounds=5)
    if num_done == 0:
        with pytest.raises(OutOfTimeError):
            peers.measure(RATE, share, options, random.Random(1))
    else:
        found = peers.measure(RATE, share, options, random.Random(1))
        ours = [2.0 * round_ for round_ in range(num_done)]
        assert found == {"tokenway": ours, "a.gguf": [figure + 1 for figure in ours]}


def test_a_command_is_written_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/a/bench/peers.py", "--out", "/a/b.json", "--gguf=/c/d.gguf", "bench/e.json", "--rounds=2", "x=/y"]
    monkeypatch.setattr(sys, "argv", words)
    command = provenance.provenance()["command"]
    assert command == "python -m bench.peers --out b.json --gguf=d.gguf bench/e.json --rounds=2 x=/y"

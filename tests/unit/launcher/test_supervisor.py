"""The supervisor over real children that misbehave."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(40)

_ROOT = Path(__file__).parents[3]
_WAIT_FOR_EVER = "import signal, os; print('up', os.getpid()); signal.pause()"
_DEAF = """
import os, signal
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: print("not now"))
print("up", os.getpid())
while True:
    signal.pause()
"""
_TALKS_AT_THE_END = """
import os, signal, sys
signal.signal(signal.SIGUSR2, lambda *_: (print("so long"), sys.exit(0)))
print("up", os.getpid())
signal.pause()
"""

_ENDS_WHEN_TOLD = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", os.getpid())
signal.pause()
"""


@dataclass
class Group:
    """A supervisor under test."""

    process: subprocess.Popen[bytes]
    lines: list[str] = field(default_factory=list)

    def read_until(self, pattern: str) -> re.Match[str]:
        """The first line from now on that matches; what was read is in `lines`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.decode(errors="backslashreplace").rstrip())
            if match := re.search(pattern, self.lines[-1]):
                return match
        raise AssertionError(f"no line like {pattern!r} in {self.lines}")

    def process_ids(self, count: int) -> list[int]:
        """The ids that `count` children print once they are up."""
        return [int(self.read_until(r"^up (\d+)")[1]) for _ in range(count)]

    def finish(self, timeout_s: float) -> int:
        """Waits for the end; returns the status, with the rest of the output in `lines`."""
        _, rest = self.process.communicate(timeout=timeout_s)
        self.lines += rest.decode(errors="backslashreplace").splitlines()
        return self.process.returncode


Start = Callable[..., Group]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a group: code of its children by name, in order of stopping; patience in seconds."""
    groups: list[Group] = []

    def start_group(
        *children: str, patience: tuple[float, float] = (20, 20), ignored: str = "", kind: str = ""
    ) -> Group:
        specs = [{"name": f"child-{i}", "code": code, "stop_order": i, "kind": kind} for i, code in enumerate(children)]
        command = [sys.executable, str(Path(__file__).with_name("run_supervisor.py")), json.dumps(specs)]
        if ignored:
            command = ["bash", "-c", f'trap "" {ignored}; exec "$@"', "bash", *command]
        process = subprocess.Popen(
            [*command, *map(str, patience)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(_ROOT)},
        )
        groups.append(Group(process))
        return groups[-1]

    yield start_group
    for group in groups:
        with suppress(ProcessLookupError):
            group.process.kill()
        group.process.wait()
        assert group.process.stderr is not None
        group.process.stderr.close()


def _is_gone(process_id: int) -> bool:
    try:
        process = psutil.Process(process_id)
        psutil.wait_procs([process], timeout=5)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_child_that_dies_at_start_ends_the_group_and_is_named(start: Start) -> None:
    group = start(_WAIT_FOR_EVER, "import sys; print('no such tensor', file=sys.stderr); sys.exit(3)")
    assert group.finish(10) == 1
    assert "tokenway: child-1 ended with status 3; the last it printed: no such tensor" in group.lines


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("terminate called after E\\n  what():  sizes differ", "what():  sizes differ"),
        ("a plain line", "Fatal Python error: Aborted"),
    ],
)
def test_of_a_dump_of_stacks_the_reason_is_quoted(start: Start, said: str, reason: str) -> None:
    crash = f"import faulthandler, os; faulthandler.enable(); print('{said}', flush=True); os.abort()"
    group = start(_WAIT_FOR_EVER, crash)
    assert group.finish(10) == 1
    assert f"tokenway: child-1 was killed by SIGABRT; the last it printed: {reason}" in group.lines


def test_a_child_that_says_why_it_cannot_start_is_quoted_once_with_status_2(start: Start) -> None:
    refusal = "import sys; print('tokenway tokenizer: /models/x: no config.json', file=sys.stderr); sys.exit(2)"
    group = start(refusal, refusal, refusal)
    assert group.finish(10) == 2
    assert group.lines == ["tokenway: cannot start: tokenizer: /models/x: no config.json"]


def test_prc_10_the_last_line_says_why_whatever_the_others_say_while_they_end(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    refusal = f"open({str(gate)!r}).read(); print('tokenway gpu_worker: /models/模型: is empty'); raise SystemExit(2)"
    group = start(refusal, _TALKS_AT_THE_END, _TALKS_AT_THE_END)
    group.process_ids(2)
    gate.write_text("go on")
    assert group.finish(10) == 2
    reason = "tokenway: cannot start: gpu_worker: /models/模型: is empty"
    assert [line for line in group.lines if not line.startswith("up")] == [reason, "so long", "so long", reason]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells when somebody else's child has ended")
def test_what_cannot_start_is_to_blame_for_what_has_died_of_it(start: Start, tmp_path: Path) -> None:
    gates = [tmp_path / "0", tmp_path / "1"]
    for gate in gates:
        os.mkfifo(gate)
    ends = "import os; print('up', os.getpid()); open({!r}).read(); print({!r}); raise SystemExit({})"
    victim = ends.format(str(gates[0]), "the other one is gone", 1)
    group = start(victim, ends.format(str(gates[1]), "tokenway gpu_worker: no such model", 2))
    ends_of_children = [os.pidfd_open(process_id) for process_id in group.process_ids(2)]
    group.process.send_signal(signal.SIGSTOP)  # both have ended when it looks
    for gate in gates:
        gate.write_text("go on")
    for end in ends_of_children:
        assert select.select([end], [], [], 20)[0]
        os.close(end)
    group.process.send_signal(signal.SIGCONT)
    assert group.finish(10) == 2
    assert group.lines[-1] == "tokenway: cannot start: gpu_worker: no such model"


def test_prc_01_the_last_line_names_the_child_that_died_in_service(start: Start) -> None:
    group = start(_TALKS_AT_THE_END, _TALKS_AT_THE_END)
    first, _ = group.process_ids(2)
    os.kill(first, signal.SIGKILL)
    assert group.finish(10) == 1
    assert "so long" in group.lines
    assert re.match(r"tokenway: child-\d was killed by SIGKILL", group.lines[-1])
    assert group.lines.count(group.lines[-1]) == 2


def test_a_child_that_was_told_to_end_leaves_while_another_of_its_kind_remains(start: Start) -> None:
    group = start(_ENDS_WHEN_TOLD, _ENDS_WHEN_TOLD, kind="worker")
    first, second = group.process_ids(2)
    os.kill(first, signal.SIGTERM)
    assert group.read_until(r"tokenway: child-\d has left")
    assert psutil.pid_exists(second)
    os.kill(second, signal.SIGTERM)  # the last of its kind: nobody could take its place
    assert group.finish(10) == 1
    assert re.match(r"tokenway: child-\d ended with status 0", group.lines[-1])


def test_a_child_that_fails_ends_the_group_though_another_of_its_kind_remains(start: Start) -> None:
    group = start(_WAIT_FOR_EVER, _WAIT_FOR_EVER, kind="worker")
    first, second = group.process_ids(2)
    os.kill(first, signal.SIGKILL)
    assert group.finish(10) == 1
    assert _is_gone(second)


def test_a_child_killed_later_ends_the_group_with_its_signal_named(start: Start) -> None:
    group = start(_WAIT_FOR_EVER, _WAIT_FOR_EVER)
    first, second = group.process_ids(2)
    os.kill(first, signal.SIGKILL)
    assert group.finish(10) == 1
    assert any(re.match(r"tokenway: child-\d was killed by SIGKILL", line) for line in group.lines)
    assert _is_gone(second)


def test_a_child_that_ends_with_status_0_unasked_is_a_failure_too(start: Start) -> None:
    group = start(_WAIT_FOR_EVER, "pass")
    assert group.finish(10) == 1
    assert "tokenway: child-1 ended with status 0" in group.lines


def test_prc_03_ctrl_c_ends_children_that_ignore_sigterm_within_5_s(start: Start) -> None:
    group = start(_DEAF, _DEAF)
    process_ids = group.process_ids(2)
    group.process.send_signal(signal.SIGINT)
    assert group.finish(5) == 130
    assert all(map(_is_gone, process_ids))


def test_prc_03_a_second_ctrl_c_kills_at_once(start: Start) -> None:
    group = start(_DEAF, _DEAF, patience=(100, 100))
    process_ids = group.process_ids(2)
    group.process.send_signal(signal.SIGTERM)
    group.read_until("not now")
    group.process.send_signal(signal.SIGINT)
    group.read_until("killing what is left")
    assert group.finish(2) == 0  # the stop that was asked for first decides
    assert all(map(_is_gone, process_ids))


def test_sigterm_drains_in_order_and_waits_for_the_first_before_it_asks_the_next(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    drains = f"""
import signal, sys
def drain(*_):
    print("draining")
    open({str(gate)!r}).read()
    print("drained")
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
{_WAIT_FOR_EVER}
"""
    serves = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("asked"), sys.exit(0)))
signal.signal(signal.SIGUSR1, lambda *_: print("still serving"))
print("up", os.getpid())
while True:
    signal.pause()
"""
    group = start(drains, serves)
    process_ids = group.process_ids(2)
    group.process.send_signal(signal.SIGTERM)
    group.read_until("^draining")
    for process_id in process_ids:
        if b"still serving" in b"".join(map(os.fsencode, psutil.Process(process_id).cmdline())):
            os.kill(process_id, signal.SIGUSR1)
    group.read_until("^still serving")
    assert "asked" not in group.lines
    gate.write_text("go on")
    assert group.finish(10) == 0
    assert group.lines[-2:] == ["drained", "asked"]


def test_sigterm_kills_what_does_not_drain_in_time_and_still_ends_with_status_0(start: Start) -> None:
    group = start(_DEAF, _WAIT_FOR_EVER, patience=(0.3, 5))
    process_ids = group.process_ids(2)
    group.process.send_signal(signal.SIGTERM)
    assert group.finish(5) == 0
    assert "tokenway: child-0 did not end in time and is killed" in group.lines
    assert all(map(_is_gone, process_ids))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_prc_03_a_killed_launcher_leaves_no_child_not_even_one_that_still_imports(start: Start) -> None:
    group = start(_WAIT_FOR_EVER, _DEAF)
    process_ids = group.process_ids(2)
    group.process.kill()
    assert all(map(_is_gone, process_ids))


def test_prc_03_what_a_child_had_started_ends_with_it(start: Start) -> None:
    forks = f"import signal, subprocess, sys; subprocess.Popen([sys.executable, '-uc', {_DEAF!r}]); {_WAIT_FOR_EVER}"
    group = start(forks, _WAIT_FOR_EVER)
    process_ids = group.process_ids(2)
    group.process.send_signal(signal.SIGINT)
    assert group.finish(5) == 130
    assert all(map(_is_gone, process_ids))


def test_garbage_and_endless_lines_are_passed_on_and_hurt_nobody(start: Start) -> None:
    garbage = r"""
import os, sys
os.write(2, b"\xff\xfe\x00\x1b[31m \xe4\xbd\xa0\xe5\xa5\xbd\n" + b"x" * 1_000_000 + b"\n" + "末行 🙂".encode())
sys.exit(7)
"""
    silent = "import signal; signal.pause()"  # a line of its own would come between the pieces of the long one
    group = start(silent, garbage)
    assert group.finish(10) == 1
    output = "\n".join(group.lines)
    assert r"\xff\xfe" in output
    assert output.count("x" * 1000) == 1000
    assert "tokenway: child-1 ended with status 7; the last it printed: 末行 🙂" in group.lines


def test_a_child_that_closes_its_output_costs_the_supervisor_nothing(start: Start) -> None:
    closes = "import os, select; os.close(1); os.close(2); select.select([], [], [], 1.5)"
    group = start(closes)
    assert group.process.stderr is not None
    group.process.stderr.read()
    _, status, usage = os.wait4(group.process.pid, 0)
    group.process.returncode = os.waitstatus_to_exitcode(status)
    assert group.process.returncode == 1
    assert usage.ru_utime + usage.ru_stime < 1.0


def test_a_log_that_nobody_reads_any_more_does_not_end_the_group(start: Start) -> None:
    talks = "import os, signal\nprint('up', os.getpid())\nfor _ in range(1000): print('x' * 1000)\nsignal.pause()"
    group = start(talks)
    (process_id,) = group.process_ids(1)
    assert group.process.stderr is not None
    group.process.stderr.close()
    os.kill(process_id, 0)
    group.process.send_signal(signal.SIGTERM)
    assert group.process.wait(10) == 0


@pytest.mark.parametrize(("ignored", "status"), [("", 130), ("HUP", 0)])
def test_a_hang_up_stops_the_group_unless_it_was_ignored_from_the_start(
    start: Start, ignored: str, status: int
) -> None:
    group = start(_WAIT_FOR_EVER, ignored=ignored)
    group.process_ids(1)
    group.process.send_signal(signal.SIGHUP)
    if ignored:
        group.process.send_signal(signal.SIGTERM)
    assert group.finish(10) == status

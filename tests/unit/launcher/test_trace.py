"""A request's way on the terminal, and where it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launcher.cli import main
from services.launcher.errors import CommandError
from services.launcher.trace_view import bar, trace_lines
from tests.unit.launcher.openai_server import openai_server

times = st.floats(0, 1e5)


def hop(name: str, role: str, start: float, wait: float, work: float, **counters: float) -> dict[str, Any]:
    return {
        "hop": name, "role": role, "instance": "0", "start_ms": start, "wait_ms": wait, "work_ms": work,
        "counters": counters,
    }  # fmt: skip


TRACE: dict[str, Any] = {
    "id": "chatcmpl-1", "route": "/v1/chat/completions", "status": 200, "tenant": "default",
    "started": "2026-01-01T00:00:00Z", "has_ended": True, "duration_ms": 100.0, "ttft_ms": 40.0,
    "hops": [hop("http", "tokenizer", 0, 0, 100), hop("tokenize", "tokenizer", 1, 0.5, 4)],
    "answers": [
        {
            "request_id": "ab", "finish": "stop", "prompt_tokens": 40, "cached_tokens": 32, "output_tokens": 12,
            "hops": [
                hop("queue", "scheduler", 5, 15, 0),
                hop("prefill", "gpu_worker", 20, 0, 20, chunks=1, pages=3, forward_us=5e6, retractions=0),
                hop("decode", "gpu_worker", 40, 10, 50, steps=12),
            ],
        }
    ],
}  # fmt: skip


def test_a_trace_has_a_row_and_a_bar_for_each_hop() -> None:
    lines = trace_lines(TRACE, 100)
    assert lines[0] == "chatcmpl-1: /v1/chat/completions, status 200, 100.0 ms, first token after 40.0 ms"
    assert lines[3] == "prompt 40 tokens, 32 of them cached; 12 tokens out; stop"
    rows = {line.split()[0]: line for line in lines[4:]}
    assert list(rows) == ["HOP", "http", "tokenize", "queue", "prefill", "decode"]
    assert rows["prefill"].split("|")[0].split()[2:] == ["0", "0.0", "20.0", "pages", "3,", "chunks", "1"]
    bars = {name: line.split("|")[1] for name, line in rows.items() if name != "HOP"}
    width = len(bars["http"])
    assert {len(drawn) for drawn in bars.values()} == {width}
    assert bars["http"] == "█" * width
    assert bars["queue"].strip() == "░" * round(0.15 * width)
    assert bars["decode"].strip() == "░" * round(0.1 * width) + "█" * round(0.5 * width)
    assert bars["decode"].index("░") >= bars["prefill"].index("█")
    assert max(map(len, lines)) <= 100


def test_a_narrow_terminal_gets_no_bars() -> None:
    assert not any("█" in line for line in trace_lines(TRACE, 40))


def test_a_request_that_runs_and_one_of_several_answers_are_told() -> None:
    answers = [TRACE["answers"][0], {**TRACE["answers"][0], "finish": None}]
    lines = trace_lines({**TRACE, "has_ended": False, "ttft_ms": None, "answers": answers}, 100)
    assert lines[0] == "chatcmpl-1: /v1/chat/completions, status 200, 100.0 ms, still running"
    assert "answer 0: prompt 40 tokens" in lines[3]
    assert any(line.startswith("answer 1: ") and line.endswith("not finished") for line in lines)
    assert sum(line.startswith("http") for line in lines) == 1
    assert any(line.startswith("http") for line in trace_lines({**TRACE, "answers": []}, 100))


@given(times, times, times, times, st.integers(1, 80))
def test_a_bar_is_as_wide_as_it_must_be_and_shows_all_that_took_time(
    start: float, wait: float, work: float, duration: float, width: int
) -> None:
    drawn = bar(hop("x", "y", start, wait, work), duration, width)
    assert len(drawn) == width
    assert drawn.strip(" ").strip("░").strip("█") == ""
    if width >= 2:
        assert ("░" in drawn) == (wait > 0) or work > 0
        assert not (wait + work > 0 and drawn.isspace())


@pytest.mark.parametrize("trace", [{}, {**TRACE, "answers": 5}, {**TRACE, "duration_ms": "x"}, {**TRACE, "hops": [1]}])
def test_what_is_no_trace_is_named(trace: dict[str, Any]) -> None:
    with pytest.raises(CommandError, match="not understood"):
        trace_lines(trace, 100)


def test_a_trace_is_asked_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server() as server:
        server.other["/trace/a%2Fb%20c"] = {**TRACE, "id": "a/b c\x1b[2J"}
        assert main(["trace", "a/b c", "--url", server.url, "--api-key", "k"]) == 0
        assert server.headers[-1]["authorization"] == "Bearer k"
        shown = capsys.readouterr().out
        assert main(["trace", "a/b c", "--url", server.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["answers"] == TRACE["answers"]
        assert shown.startswith("a/b c\ufffd[2J: /v1/chat/completions")
        assert main(["trace", "unknown", "--url", server.url]) == 2
    error = capsys.readouterr().err
    assert error == f"tokenway: {server.url}: status 404: there is no /trace/unknown here\n"


def test_without_a_server_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "x", "--run-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("tokenway: no server of this user runs here")
    (tmp_path / "control-0.sock").touch()
    assert main(["trace", "x", "--run-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"tokenway: cannot reach {tmp_path}/control-0.sock: Connection refused\n"

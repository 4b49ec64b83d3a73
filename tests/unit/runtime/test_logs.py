"""Log lines: whatever a client sent, one event is one line and looks like nothing else (security rule 20)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.logs import _JsonFormatter, _TextFormatter, about, request_of_task, set_up_logging
from services.wire.endpoints import Identity
from services.wire.members import Role

IDENTITY = Identity(Role.TOKENIZER, "t-1")
HOSTILE = "a\r\n2026-01-01T00:00:00.000Z I tokenizer/t-1 forged\x1b[31m\x00\u2028\u202e\x85 世界 👋"


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_text_lines_name_time_level_process_and_event(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(IDENTITY, "info", "text")
    logging.getLogger("x").debug("not shown")
    logging.getLogger("x").warning("queue of %d requests, 世界 👋", 7)
    [line] = lines(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z W tokenizer/t-1 queue of 7 requests, 世界 👋", line)


def test_hostile_text_stays_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(IDENTITY, "info", "text")
    logging.getLogger("x").info("model %s", HOSTILE)
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert output.endswith("\n")
    assert output[:-1].isprintable()
    assert r"a\r\n2026" in output
    assert "世界 👋" in output


def test_a_traceback_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(IDENTITY, "info", "text")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("x").exception("failed")
    first, *rest = capsys.readouterr().err.removesuffix("\n").split("\n")
    assert first.endswith("E tokenizer/t-1 failed")
    assert len(rest) >= 3
    assert all(line.startswith("  | ") and line.isprintable() for line in rest)


def test_json_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(IDENTITY, "warning", "json")
    logging.getLogger("x").info("not shown")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("x").exception("model %s", HOSTILE)
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert output.isascii()
    entry = json.loads(output)
    assert entry["event"] == f"model {HOSTILE}"
    assert (entry["level"], entry["role"], entry["instance"]) == ("error", "tokenizer", "t-1")
    assert HOSTILE in entry["trace"]
    assert set(entry) == {"time", "level", "role", "instance", "event", "trace"}


@given(st.text(alphabet=st.characters(), max_size=30))
def test_any_text_is_one_printable_line_and_valid_json(text: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s", (text,), None)
    assert _TextFormatter(IDENTITY).format(record).isprintable()
    line = _JsonFormatter(IDENTITY).format(record)
    assert "\n" not in line
    assert json.loads(line)["event"] == text


def test_setting_up_twice_does_not_log_twice(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(IDENTITY, "info", "json")
    set_up_logging(IDENTITY, "info", "text")
    logging.getLogger("x").info("once")
    assert len(lines(capsys)) == 1


def test_a_line_about_a_request_carries_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(IDENTITY, "info", "json")
    logger = logging.getLogger("x")
    logger.info("row failed", extra=about(bytes(range(16))))
    token = request_of_task.set("chatcmpl-1")
    logger.info("in its task")
    logger.info("another's", extra=about("chatcmpl-2"))
    request_of_task.reset(token)
    logger.info("nobody's")
    ids = [json.loads(line).get("request_id") for line in lines(capsys)]
    assert ids == ["000102030405060708090a0b0c0d0e0f", "chatcmpl-1", "chatcmpl-2", None]
    logger.info("ended", extra=about("chatcmpl-1", status=200, ttft_ms=None, event="forged"))
    [line] = lines(capsys)
    entry = json.loads(line)
    assert (entry["status"], entry["ttft_ms"], entry["event"]) == (200, None, "ended")
    set_up_logging(IDENTITY, "info", "text")
    logger.info("row failed", extra=about("chatcmpl-3\n"))
    [line] = lines(capsys)
    assert line.endswith("I tokenizer/t-1 [chatcmpl-3\\n] row failed")

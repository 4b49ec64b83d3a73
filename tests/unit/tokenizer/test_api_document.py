"""docs/api.md says what the code does: routes, fields, error codes, metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from services.runtime import metric_texts
from services.runtime.config import Settings
from services.tokenizer import (
    answer_sinks,
    field_tables,
    health,
    http_connection,
    lingering,
    message_fields,
    sampling_body,
    strict_json,
)
from services.tokenizer.api_error import ApiError, Code, finish_error
from services.tokenizer.openai_schema import ChatBody, CompletionBody
from services.tokenizer.routes import ROUTES
from services.tokenizer.service import BALANCER_NOTICE_S
from services.wire.finish import Finish
from tests.unit.tokenizer.backend_peers import Server
from tests.unit.tokenizer.http_client import request

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SOURCES = sorted((ROOT / "services" / "tokenizer").glob("*.py"))


def table(title: str) -> list[list[str]]:
    """The rows of the first table under a heading, cell by cell."""
    section = re.split(r"\n#+ ", DOCUMENT.split(f" {title}\n", 1)[1])[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def code(cell: str) -> str:
    return cell.strip("`")


def test_the_routes_are_those_of_the_code() -> None:
    declared = {(path, route.method) for path, route in ROUTES.items()}
    assert {(code(path), method) for method, path, _ in table("Routes")} == declared


def test_the_built_fields_are_those_of_the_schema() -> None:
    documented = {(code(name), where) for name, where, _, _ in table("Built")}
    chat, completions = set(ChatBody.__struct_fields__), set(CompletionBody.__struct_fields__)
    assert documented == (
        {(name, "both") for name in chat & completions}
        | {(name, "chat") for name in chat - completions}
        | {(name, "completions") for name in completions - chat}
    )


def test_the_unbuilt_fields_and_their_neutral_values_are_those_of_the_tables() -> None:
    documented = {
        (code(name), where): tuple(json.loads(value) for value in re.findall(r"`([^`]*)`", values))
        for name, where, values in table("Known and not built")
    }
    everywhere = field_tables.UNBUILT_EVERYWHERE
    tables = {
        "both": everywhere,
        "chat": {n: v for n, v in field_tables.UNBUILT_IN_CHAT.items() if n not in everywhere},
        "completions": {n: v for n, v in field_tables.UNBUILT_IN_COMPLETIONS.items() if n not in everywhere},
    }
    assert documented == {
        (name, where): tuple(values) for where, rows in tables.items() for name, values in rows.items()
    }


def test_the_fields_without_effect_are_those_of_the_code() -> None:
    section = DOCUMENT.split("### Accepted without effect\n", 1)[1].split("\n### ", 1)[0]
    outside, inside = section.split("in `stream_options`:")
    assert set(re.findall(r"`(\w+)`", outside)) == field_tables.WITHOUT_EFFECT
    assert set(re.findall(r"`(\w+)`", inside)) == field_tables.WITHOUT_EFFECT_IN_STREAM_OPTIONS


def test_the_message_keys_are_those_of_the_code() -> None:
    documented = {(code(name), kind) for name, kind, _ in table("Message keys")}
    kinds = {
        "built": message_fields.SHOWN,
        "not built": message_fields.UNBUILT,
        "without effect": message_fields.WITHOUT_EFFECT,
    }
    assert documented == {(name, kind) for kind, names in kinds.items() for name in names}
    assert len(documented) == sum(map(len, kinds.values()))


def test_no_field_is_in_two_tables() -> None:
    for unbuilt, body in (
        (field_tables.UNBUILT_IN_CHAT, ChatBody),
        (field_tables.UNBUILT_IN_COMPLETIONS, CompletionBody),
    ):
        built = set(body.__struct_fields__)
        assert not built & set(unbuilt)
        assert not field_tables.WITHOUT_EFFECT & (built | set(unbuilt))


def test_the_error_codes_are_those_that_the_code_can_give() -> None:
    assert {code(name) for _, name, _ in table("Errors")} == set(Code)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    assert set(re.findall(r"Code\.([A-Z_]+)", sources)) == set(Code.__members__)


def test_every_bad_end_has_a_documented_status() -> None:
    documented = {code(name): int(status) for status, name, _ in table("Errors")}
    for finish in set(Finish) - {Finish.NONE, Finish.STOP_TOKEN, Finish.STOP_STRING, Finish.LENGTH}:
        error = finish_error(finish)
        assert error is not None
        assert documented[error.code] == error.status


def test_every_metric_is_exported_with_its_line_of_help(server: Server) -> None:
    texts = {}
    for line in request(server.port, "GET", "/metrics").body.decode().splitlines():
        if line.startswith("# HELP tokenway:"):
            name, text = line.removeprefix("# HELP tokenway:").split(" ", 1)
            texts[name.removesuffix("_total")] = text
    del texts["scheduler_things"]  # the test's own backend
    assert texts == metric_texts.OF_TOKENIZER


@pytest.mark.parametrize(
    ("number", "value"),
    [
        ("within the last 3 s", health.RECENT_S),
        ("\nat most 5 s", health.PROBE_LIMIT_S),
        ("1 to 4,096 (`--max-messages`)", Settings().max_messages),
        ("at most 1,024 answers (`--max-prompts`)", Settings().max_prompts),
        ("1 to 8 (`--max-choices`)", Settings().max_choices),
        ("over 16 MiB (`--max-body-bytes`)", Settings().max_body_bytes // 2**20),
        ("more than 10 s (`--head-timeout-s`)", Settings().head_timeout_s),
        ("more than 30 s (`--body-timeout-s`)", Settings().body_timeout_s),
        ("\n  60 s (`--write-timeout-s`)", Settings().write_timeout_s),
        ("(`--drain-timeout-s`, 30 s)", Settings().drain_timeout_s),
        ("up to 16, each 1 to 1,024 bytes", Settings().max_stop_strings),
        ("up to 256 ids", sampling_body.MAX_STOP_TOKEN_IDS),
        ("at most 1,024 (`--max-logit-bias`)", Settings().max_logit_bias),
        ("at most 20 (`--max-logprobs`); needs", Settings().max_logprobs),
        ("up to 256 texts", sampling_body.MAX_BAD_WORDS),
        ("at most 1,024 bytes, whose last", sampling_body.MAX_BAD_WORD_BYTES),
        ("at most 86,400: seconds", sampling_body.MAX_TIMEOUT_S),
        ("over 64 headers (`--max-headers`)", Settings().max_headers),
        ("over 8 KiB (`--max-header-bytes`)", Settings().max_header_bytes // 1024),
        ("over 32 KiB (`--max-head-bytes`)", Settings().max_head_bytes // 1024),
        ("closed after 75 s", http_connection.IDLE_S),
        ("\nquiet for 1 s,", lingering.QUIET_S),
        ("after 10 s at most. What is no request", lingering.LONGEST_S),
        ("more than\n200,000 commas and opening brackets together", strict_json.MAX_VALUES),
        ("over 200,000 commas and opening brackets in the body", strict_json.MAX_VALUES),
        ("more than 1,048,576 characters wait", answer_sinks.MAX_PENDING_CHARACTERS),
        ("connections for 2 s more", BALANCER_NOTICE_S),
    ],
)
def test_the_numbers_in_the_text_are_those_of_the_code(number: str, value: float) -> None:
    assert number in DOCUMENT
    assert f"{value:,.0f}" in number


def test_what_is_not_to_be_sent_again_is_that_of_the_code() -> None:
    [sentence] = re.findall(r"again: ([^:]*) have `x-should-retry: false`", DOCUMENT)
    told = set(re.findall(r"`(\w+)`", sentence))
    assert told == {name for name in Code if "x-should-retry" in ApiError(500, "", code=name).headers()}


def test_ranges_in_the_schema_are_documented() -> None:
    schema = msgspec.json.schema(CompletionBody)["$defs"]["CompletionBody"]["properties"]
    temperature = next(kind for kind in schema["temperature"]["anyOf"] if kind["type"] == "number")
    assert (temperature["minimum"], temperature["maximum"]) == (0, 10)
    built = {code(name): meaning for name, _, meaning, _ in table("Built")}
    assert built["temperature"].startswith("0 to 10")

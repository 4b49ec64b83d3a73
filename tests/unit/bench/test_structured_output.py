"""The measurement of structured output: its schemas, how it judges answers and timers."""

from __future__ import annotations

import json
import math

import jsonschema
import pytest
from llguidance import LLMatcher

from bench import structured_output as bench
from bench.metric_samples import Histogram, histogram_between, read_samples
from bench.real_schemas import SCHEMAS
from services.gpu_worker.grammar_text import library_grammar
from services.tokenizer.json_schema_check import SchemaLimits, checked_schema
from services.tokenizer.structured_output import json_grammar

LIMITS = SchemaLimits(max_bytes=256 * 1024, max_properties=5000, max_depth=32)


def test_there_are_enough_schemas() -> None:
    assert len(SCHEMAS) >= 20
    assert len({json.dumps(schema, sort_keys=True) for _, schema in SCHEMAS.values()}) == len(SCHEMAS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_is_taken_and_its_answers_end(name: str) -> None:
    schema = SCHEMAS[name][1]
    jsonschema.Draft202012Validator.check_schema(schema)
    text = library_grammar(json_grammar(checked_schema(schema, name, LIMITS), is_compact=True))
    assert LLMatcher.validate_grammar_with_warnings(text) == (False, [])
    _assert_bounded(schema)


def _assert_bounded(schema: object) -> None:
    if isinstance(schema, list):
        for item in schema:
            _assert_bounded(item)
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "string":
        assert schema.keys() & {"maxLength", "pattern", "format"}
    if schema.get("type") == "array":
        assert "maxItems" in schema or schema.get("items") is False
    for value in schema.values():
        _assert_bounded(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a":0.07}', ""),
        ('{"a":0.075}', "multiple"),
        ('{"a":"x"}', "not of type"),
        ('{"a":0.07', "Expecting"),
        ("", "Expecting"),
    ],
)
def test_answers_are_judged_by_a_validator(text: str, problem: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0.01}}, "required": ["a"]}
    found = bench.problem_of(text, schema)
    assert problem in found
    assert bool(problem) == bool(found)


def outcome(finish: str = "stop", problem: str = "") -> bench.Outcome:
    return bench.Outcome("invoice", finish, problem, 10)


def cost(mask_ms: float, step_ms: float) -> bench.MaskCost:
    return bench.MaskCost(16, mask_ms, mask_ms, 0.0, step_ms, 100)


def test_what_fails_is_said() -> None:
    good = [outcome()] * 95 + [outcome("length")] * 5
    assert bench.failures(good, [cost(5, 100)]) == []
    assert bench.failures([*good, outcome("length")], []) == ["only 95 of 101 answers end with stop"]
    assert bench.failures([outcome(problem="no number")], []) == ["invoice: no number"]
    assert len(bench.failures(good, [cost(5.1, 100), cost(math.nan, math.nan)])) == 2


def test_the_tables_name_schemas_and_rows() -> None:
    assert "| invoice |       2 |               1 |" in bench.answers_table([outcome(), outcome("length")])
    assert "| 16 " in bench.costs_table([cost(5, 100)])
    assert "5.0 %" in bench.costs_table([cost(5, 100)])


BEFORE = """# HELP tokenway:worker_step_seconds time
tokenway:worker_step_seconds_bucket{le="0.1",role="gpu_worker"} 10.0
tokenway:worker_step_seconds_bucket{le="0.2",role="gpu_worker"} 10.0
tokenway:worker_step_seconds_bucket{le="+Inf",role="gpu_worker"} 10.0
tokenway:worker_step_seconds_sum{role="gpu_worker"} 1.0
"""
AFTER = """tokenway:worker_step_seconds_bucket{le="0.1",role="gpu_worker"} 14.0
tokenway:worker_step_seconds_bucket{le="0.2",role="gpu_worker"} 22.0
tokenway:worker_step_seconds_bucket{le="+Inf",role="gpu_worker"} 22.0
tokenway:worker_step_seconds_sum{role="gpu_worker"} 2.5
tokenway:worker_step_seconds_count{role="gpu_worker"} 22.0
"""


def test_timers_are_read_as_what_grew_between_two_looks() -> None:
    found = histogram_between(read_samples(BEFORE), read_samples(AFTER), "tokenway:worker_step_seconds")
    assert (found.count, found.mean) == (12.0, 0.125)
    assert found.quantile(0.5) == pytest.approx(0.1 + 0.1 * 2 / 8)
    assert found.quantile(0.1) == pytest.approx(0.1 * 1.2 / 4)
    assert math.isnan(Histogram((), 0.0).mean)
    assert math.isnan(Histogram(((0.1, 0.0), (math.inf, 0.0)), 0.0).quantile(0.5))
    assert Histogram(((0.1, 0.0), (math.inf, 4.0)), 4.0).quantile(0.5) == 0.1


def test_a_request_asks_for_its_schema() -> None:
    body = bench.chat_body("tool_call", 7)
    assert body["response_format"]["json_schema"]["schema"] == SCHEMAS["tool_call"][1]
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (1, 2000, 7)


@pytest.mark.parametrize("arguments", [["--requests", "0"], ["--streams", "0"], ["--seconds", "-1"]])
def test_senseless_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_arguments(arguments)

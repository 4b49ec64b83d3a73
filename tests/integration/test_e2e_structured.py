"""Structured output against the real model: answers keep to their grammars, whatever becomes of their requests."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench.real_schemas import SCHEMAS
from bench.structured_output import chat_body, problem_of
from tests.integration.client import CHAT, HI, TEXT, Client, Json
from tests.integration.server import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PERSON: Json = {
    "type": "object",
    "properties": {
        "firstName": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "日本": {"enum": ["はい", "いいえ", "😀"]},
    },
    "required": ["firstName", "age", "日本"],
}


def schema_format(schema: object) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def person(client: Client, **fields: Any) -> str:
    answer = client.ask(CHAT, messages=HI, response_format=schema_format(PERSON), **fields)
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), PERSON | {"additionalProperties": False})
    return answer.text


# ------------------------------------------------------------ answers


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_fits_its_schema_streamed_or_not(page_1: Client, temperature: int) -> None:
    fields = {"messages": HI, "response_format": schema_format(PERSON), "temperature": temperature, "seed": 5}
    answer = page_1.ask_both(CHAT, **fields)
    jsonschema.validate(json.loads(answer.text), PERSON)
    assert answer.finish_reason == "stop"
    assert " " not in re.sub(r'"[^"]*"', "", answer.text)


def test_many_schemas_at_once_beside_free_text(page_1: Client) -> None:
    names = ["address", "tool_call", "movie_review", "settings_patch", "bank_transfer", "translation"]

    def ask(index: int) -> str:
        if index >= len(names):
            return page_1.ask(TEXT, prompt="Once upon a time", max_tokens=48, seed=index, ignore_eos=True).finish_reason
        answer = page_1.ask(CHAT, **chat_body(names[index], index))
        return problem_of(answer.text, SCHEMAS[names[index]][1]) if answer.finish_reason == "stop" else "length"

    with ThreadPoolExecutor(9) as pool:
        found = list(pool.map(ask, range(9)))
    assert found[len(names) :] == ["length"] * 3
    assert found[: len(names)].count("") >= len(names) - 1
    assert set(found[: len(names)]) <= {"", "length"}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["yes", "no", "日本"]}, "yes|no|日本"),
        ({"structured_outputs": {"choice": ["only this one"]}}, "only this one"),
        ({"regex": "[0-9]{4}-[0-9]{2}"}, "[0-9]{4}-[0-9]{2}"),
        ({"guided_regex": "(é|日|😀){3}"}, "[é日😀]{3}"),
        ({"ebnf": 'root ::= "<" [a-f]{2} ">" | "no"'}, "<[a-f]{2}>|no"),
        ({"guided_grammar": 'root ::= "(" inner ")"\ninner ::= "x" | "(" inner ")"'}, r"\(+x\)+"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 400}, r"\{.*\}"),
    ],
    ids=["choice", "one", "regex", "unicode", "ebnf", "recursive", "object"],
)
def test_every_kind_of_grammar(page_1: Client, fields: Json, pattern: str) -> None:
    answer = page_1.ask(CHAT, **{"messages": HI, "temperature": 0.6, "seed": 11, "max_tokens": 60, **fields})
    if answer.finish_reason == "stop":
        assert re.fullmatch(pattern, answer.text, re.DOTALL), answer.text
    else:
        assert answer.finish_reason == "length"
        assert fields.keys() & {"guided_grammar", "response_format"}  # these have no longest answer


def test_siblings_and_text_completions(page_1: Client) -> None:
    answer = page_1.ask(TEXT, prompt="Heads or tails? ", n=3, guided_choice=["heads", "tails"], seed=1)
    assert set(answer.texts) <= {"heads", "tails"}
    assert answer.finish_reasons == ["stop"] * 3


def test_log_probabilities_come_for_every_id_of_a_structured_answer(page_1: Client) -> None:
    body = {"messages": HI, "response_format": schema_format(PERSON), "seed": 5, "logprobs": True, "top_logprobs": 2}
    choice = page_1.request("POST", CHAT, body).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    data = b"".join(bytes(entry["bytes"]) for entry in entries if entry["token"] != "<|im_end|>")
    assert data.decode() == choice["message"]["content"]


def test_an_answer_is_the_same_with_and_without_jumping_ahead_and_after_retractions(smollm2_path: Path) -> None:
    texts = []
    for settings in ({"jump_ahead": "true"}, {"jump_ahead": "false"}, {"kv_cache_tokens": 256, "plans_ahead": 2}):
        with running(smollm2_path, num_threads=1, page_size=1, **settings) as server:
            ask = functools.partial(person, Client(server), temperature=0.7)
            with ThreadPoolExecutor(4) as pool:
                texts.append(list(pool.map(lambda seed, ask=ask: ask(seed=seed), range(4))))
    assert texts[0] == texts[1] == texts[2]


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format({"type": "notatype"})}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"$ref": "#/$defs/nowhere"})}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"const": "x" * 1_000_000})}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"type": "string", "pattern": "("})}, "response_format.json_schema.schema"),
        ({"regex": "("}, "regex"),
        ({"ebnf": "root ::= missing"}, "ebnf"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
    ids=["type", "reference", "large", "pattern", "regex", "ebnf", "two", "endless"],
)
def test_str_01_a_bad_grammar_is_refused_with_the_reason_and_the_server_lives(
    page_1: Client, fields: Json, param: str
) -> None:
    for stream in (False, True):
        error = page_1.refused(CHAT, {"messages": HI, "stream": stream, **fields})
        assert error["param"] == param
        assert error["message"]
    assert page_1.ask(CHAT, messages=HI, max_tokens=1, temperature=0).text == "Hello"


def test_str_01_a_grammar_that_grows_too_large_is_a_400_and_others_go_on(page_1: Client) -> None:
    """Some show it when they are compiled, some in the middle of an answer."""
    numbers = {"type": "array", "minItems": 60_000, "items": {"const": 1}}
    for fields in (
        {"guided_regex": "(a{1000}){1000}"},
        {"guided_json": numbers},
        {"guided_regex": "(.*[a-m].{60}){3}", "max_tokens": 400, "n": 3, "temperature": 1.5, "seed": 3},
    ):
        error = page_1.refused(CHAT, {"messages": HI, **fields})
        assert error["code"] == "invalid_grammar"
        assert error["message"].startswith(f"{next(iter(fields))}: ")
        assert "too much" in error["message"]
    assert page_1.ask(CHAT, messages=HI, guided_choice=["yes", "no"]).text in ("yes", "no")


def test_min_tokens_adds_nothing_behind_a_whole_sentence(page_1: Client) -> None:
    for fields in ({"guided_choice": ["Paris"]}, {"guided_regex": "abc"}):
        short = page_1.ask(CHAT, messages=HI, skip_special_tokens=False, **fields)
        held = page_1.ask(CHAT, messages=HI, skip_special_tokens=False, min_tokens=10, max_tokens=40, **fields)
        assert (held.text, held.finish_reason) == (short.text, "stop")
        assert held.completion_tokens == short.completion_tokens < 10
    only_end = page_1.ask(CHAT, messages=HI, min_tokens=5, allowed_token_ids=[2])
    assert (only_end.finish_reason, only_end.completion_tokens) == ("stop", 1)


def test_str_02_response_format_shapes(page_1: Client) -> None:
    for wrong in ({"type": "json_schema", "schema": {}}, {"type": "xml"}, "json_object"):
        assert page_1.refused(CHAT, {"messages": HI, "response_format": wrong})["param"].startswith("response_format")
    for neutral in ({"type": "text"}, None):
        assert page_1.ask(CHAT, messages=HI, response_format=neutral, max_tokens=1, temperature=0).text == "Hello"


@pytest.fixture(scope="module")
def strict(smollm2_path: Path) -> Iterator[Client]:
    """A server on which compiling may take hardly any time or memory."""
    with running(smollm2_path, num_threads=1, grammar_timeout_s=0.05, max_schema_bytes=1_000_000) as server:
        yield Client(server)


def test_str_01_a_grammar_that_takes_too_long_is_refused_and_others_go_on(strict: Client) -> None:
    names = [f"property_{index}" for index in range(4000)]
    slow = {"type": "object", "properties": {n: {"type": "string", "maxLength": i + 1} for i, n in enumerate(names)}}
    error = strict.refused(CHAT, {"messages": HI, "response_format": schema_format(slow | {"required": names})})
    assert error["code"] == "invalid_grammar"
    assert "more than 0.05 s" in error["message"]
    assert strict.ask(CHAT, messages=HI, guided_choice=["yes", "no"]).text in ("yes", "no")

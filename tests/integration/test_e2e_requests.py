"""What a request may be, against the real model: prompts, fields, limits, refusals, and who is to blame for them.

Most cases are refused by the tokenizer process before anything is computed; what is answered has the real model's text.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.integration.client import CHAT, HELLO, HI, NUM, TEXT, Client

pytestmark = pytest.mark.timeout(600)
NUM_8 = " 5, 6, 7"


@pytest.fixture(autouse=True)
def _lives(quick: Client) -> None:
    """Every case begins with a server that answers; the last one is followed by the checks of the fixture itself."""
    assert quick.request("GET", "/live").status == 200


# ------------------------------------------------------------ prompts


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["Hi", ""]], ids=repr)
def test_tok_02_empty_prompts_are_refused(quick: Client, prompt: object) -> None:
    assert str(quick.refused(TEXT, {"prompt": prompt})["param"]).startswith("prompt")


@pytest.mark.parametrize("prompt", [[49152], [-1], [4294967296], [1.5], [True], [[1], [49152]]], ids=repr)
def test_tok_04_ids_out_of_range_are_refused(quick: Client, prompt: object) -> None:
    assert str(quick.refused(TEXT, {"prompt": prompt})["param"]).startswith("prompt")


def test_tok_04_the_last_id_of_the_vocabulary_is_taken(quick: Client) -> None:
    assert quick.ask(TEXT, prompt=[49151], max_tokens=1).completion_tokens == 1
    assert quick.request("GET", "/health").status == 200


def test_tok_05_prompt_forms_give_the_same_answers_in_order(quick: Client) -> None:
    ids = [[33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28], [28120, 905, 33662, 905, 33662, 905, 33662, 905, 33662]]
    for prompt in ([NUM, HELLO], ids):
        answer = quick.ask_both(TEXT, prompt=prompt, max_tokens=4)
        assert answer.texts == [" 5, ", " world hello world hello"]
        assert answer.prompt_tokens == 20
        twice = quick.ask_both(TEXT, prompt=prompt, max_tokens=4, n=2)
        assert twice.texts == [" 5, "] * 2 + [" world hello world hello"] * 2
        assert (twice.prompt_tokens, twice.completion_tokens) == (20, 16)


@pytest.mark.parametrize("num_tokens", [9000, 8192])
def test_tok_06_sse_06_a_prompt_over_the_context_is_refused_with_the_numbers(quick: Client, num_tokens: int) -> None:
    for body in ({"max_tokens": 1}, {}, {"stream": True}):
        error = quick.refused(TEXT, {"prompt": [81] * num_tokens, **body})
        assert str(num_tokens) in error["message"]
        assert "8192" in error["message"]


@pytest.mark.slow
def test_tok_06_a_prompt_that_leaves_one_token_gets_one(quick: Client) -> None:
    answer = quick.ask(TEXT, prompt=[81] * 8191, max_tokens=1)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (8191, 1, "length")
    again = quick.ask(TEXT, prompt=[81] * 8191, ignore_eos=True)
    assert (again.completion_tokens, again.finish_reason, again.cached_tokens) == (1, "length", 8190)


SURROGATE = b"a\\ud800b"


@pytest.mark.parametrize(
    "fields",
    [
        b'"messages": [{"role": "user", "content": "%b"}]',
        b'"messages": [{"role": "user", "content": [{"type": "text", "text": "%b"}]}]',
        b'"messages": [{"role": "user", "content": "x", "name": "%b"}]',
        b'"messages": [{"role": "user", "content": "x"}], "user": "%b"',
        b'"messages": [{"role": "user", "content": "x"}], "stop": "%b"',
        b'"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "%b"}}]',
        b'"prompt": "%b"',
        b'"prompt": "x", "stop": ["%b"]',
        b'"prompt": "x", "user": "%b"',
    ],
)
def test_tok_07_half_a_surrogate_pair_is_refused_wherever_it_stands(quick: Client, fields: bytes) -> None:
    path = CHAT if b"messages" in fields else TEXT
    assert quick.refused(path, b'{"max_tokens": 1, ' + fields.replace(b"%b", SURROGATE) + b"}")


def test_tok_09_huge_texts_stop_neither_a_stream_nor_health(quick: Client) -> None:
    with quick.open_stream(TEXT, prompt=NUM, max_tokens=48, ignore_eos=True) as reader, ThreadPoolExecutor(4) as pool:
        reader.next_json()
        posts = [pool.submit(quick.refused, TEXT, {"prompt": "word " * 800_000}) for _ in range(4)]
        while not all(post.done() for post in posts):
            assert quick.request("GET", "/health").status == 200
        assert len(reader.rest()) > 0
    for post in posts:
        assert "663552" in post.result()["message"]


# ------------------------------------------------------------ sampling fields


def test_smp_01_a_tiny_temperature_is_greedy(quick: Client) -> None:
    assert quick.ask(TEXT, prompt=NUM, max_tokens=8, temperature=1e-6, seed=1).text == NUM_8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("max_tokens", 2**70),
        ("top_k", 2**40),
        ("n", 10**9),
        ("n", 0),
        ("n", -1),
    ],
)
def test_smp_05_integers_too_large_are_refused(quick: Client, name: str, value: int) -> None:
    assert quick.refused(TEXT, {"prompt": NUM, name: value})["param"] == name
    assert quick.ask(TEXT, prompt=NUM, max_tokens=1).text == " "


def test_smp_06_top_p_0_is_greedy(quick: Client) -> None:
    for temperature in (0, 1):
        assert quick.ask(TEXT, prompt=NUM, max_tokens=8, top_p=0, temperature=temperature).text == NUM_8
    for top_p in (-0.1, 1.1):
        assert quick.refused(TEXT, {"prompt": NUM, "top_p": top_p})["param"] == "top_p"


def test_smp_08_top_k_conventions(quick: Client) -> None:
    assert quick.ask(TEXT, prompt=NUM, max_tokens=8, top_k=1, temperature=2).text == NUM_8
    off = [quick.ask(TEXT, prompt=NUM, max_tokens=8, top_k=k, temperature=2, seed=5) for k in (-1, 0, 49152, 10**6)]
    assert len({answer.text for answer in off}) == 1
    for top_k in (-2, 1.5, "3"):
        assert quick.refused(TEXT, {"prompt": NUM, "top_k": top_k})["param"] == "top_k"


@pytest.mark.parametrize(
    "field",
    [
        '"temperature": NaN', '"temperature": 1e999', '"temperature": -1', '"temperature": "0.7"',
        '"presence_penalty": -Infinity', '"presence_penalty": 5', '"repetition_penalty": 0', '"repetition_penalty": -1',
    ],
)  # fmt: skip
def test_smp_19_odd_numbers_are_refused(quick: Client, field: str) -> None:
    assert quick.refused(TEXT, f'{{"prompt": "x", {field}}}'.encode())


# ------------------------------------------------------------ limits


def test_sch_19_a_limit_of_nothing_or_less_is_refused(quick: Client) -> None:
    for limit in (0, -1):
        assert quick.refused(TEXT, {"prompt": NUM, "max_tokens": limit})["param"] == "max_tokens"
        assert quick.refused(CHAT, {"messages": HI, "max_tokens": limit})["param"] == "max_tokens"


def test_sch_19_one_is_exactly_one_token(quick: Client) -> None:
    answer = quick.ask_both(TEXT, prompt=NUM, max_tokens=1)
    assert (answer.text, answer.completion_tokens, answer.finish_reason) == (" ", 1, "length")


@pytest.mark.parametrize("limit", [8181, 8182, 8192, 10**6])
def test_sch_19_more_than_fits_is_taken_and_clamped(quick: Client, limit: int) -> None:
    answer = quick.ask(TEXT, prompt=NUM, max_tokens=limit, stop="7, 8")
    assert (answer.text, answer.completion_tokens) == (" 5, 6, ", 11)


# ------------------------------------------------------------ structure and tools


# ------------------------------------------------------------ what clients send


def test_api_01_the_newer_limit_wins(quick: Client) -> None:
    assert quick.ask(CHAT, messages=HI, max_completion_tokens=5).completion_tokens == 5
    assert quick.ask(CHAT, messages=HI, max_completion_tokens=5, max_tokens=9).completion_tokens == 5
    assert quick.refused(CHAT, {"messages": HI, "max_completion_tokens": 0})["param"] == "max_completion_tokens"


def test_api_02_unknown_fields_are_named_in_a_header(quick: Client) -> None:
    extra = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True, "user": "u"}
    messages = [{"role": "user", "content": "Hi", "id": 5, "name": "n"}]
    answer = quick.ask(CHAT, messages=messages, max_tokens=1, foo=1, **extra)
    assert answer.text == "Hello"
    assert set(answer.headers["x-ignored-fields"].split(", ")) == {"foo", "messages[].id"}
    assert quick.refused(CHAT, {"messages": HI, "audio": {"voice": "x"}})["param"] == "audio"


def test_api_03_null_is_the_same_as_absent(quick: Client) -> None:
    names = ["max_tokens", "stop", "n", "seed", "stream", "stream_options", "logit_bias", "tools", "top_p"]
    answer = quick.ask(CHAT, messages=HI, **dict.fromkeys([*names, "response_format"]))
    assert (answer.text, answer.finish_reason) == ("Hello! How can I assist you today?", "stop")
    assert quick.ask(CHAT, messages=HI, temperature=None, max_tokens=1).completion_tokens == 1


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'"x"', b"null", b"123", b'{"messages": "x"}'], ids=repr)
def test_api_04_malformed_bodies_are_refused(quick: Client, body: bytes) -> None:
    assert quick.refused(CHAT, body)


def test_api_04_other_content_types_are_415(quick: Client) -> None:
    for kind in ("text/plain", ""):
        assert quick.refused(CHAT, json.dumps({"messages": HI}).encode(), 415, Content_Type=kind)


def test_api_05_errors_have_one_form_and_the_official_client_reads_it(quick: Client) -> None:
    for method, path, status in (("GET", "/nowhere", 404), ("GET", CHAT, 405), ("POST", "/v1/models", 405)):
        response = quick.request(method, path)
        assert response.status == status
        assert response.error["message"]
    client = openai.OpenAI(base_url=f"{quick.server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model=client.models.list().data[0].id, prompt=NUM, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt=NUM)


def test_sse_06_what_is_known_before_the_first_token_is_a_status(quick: Client) -> None:
    error = quick.refused(TEXT, {"prompt": NUM, "temperature": -1, "stream": True})
    assert error["param"] == "temperature"


def test_sch_21_the_same_callers_id_twice_at_once_is_two_requests(quick: Client) -> None:
    with quick.connect() as first, quick.connect() as second:
        for connection, prompt in ((first, NUM), (second, HELLO)):
            body = {"prompt": prompt, "request_id": "same", "rid": "same", "max_tokens": 4, "temperature": 0}
            connection.send("POST", TEXT, body, X_Request_Id="same")
        answers = [connection.read_response().json() for connection in (first, second)]
    assert [answer["choices"][0]["text"] for answer in answers] == [" 5, ", " world hello world hello"]
    assert answers[0]["id"] != answers[1]["id"]

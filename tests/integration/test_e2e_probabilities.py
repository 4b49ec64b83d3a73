"""Rules for logits, log-probabilities and prompts' own, against the real model and through the whole server."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import openai
import pytest

from tests.integration.client import CHAT, HELLO, HI, NUM, NUM_TEXT, TEXT, Client, Json, PatientReader
from tests.unit.tokenizer.http_client import text_of

pytestmark = [pytest.mark.slow, pytest.mark.surface, pytest.mark.timeout(600)]
SEVEN = 39
# Values of the same weights in float32; the server's products are of 4-bit weights.
TOLERANCE = 0.03
PROMPT_VALUES = [-2.035, -0.632, -1.076, -1.839, -0.099, -0.440, -0.209, -0.077, -0.116, -0.103]


def body_of(client: Client, path: str, **body: object) -> Json:
    """The body of a request that must succeed, read by a parser that takes no infinities."""
    response = client.request("POST", path, {"temperature": 0, **body})
    assert response.status == 200, response.body
    value = json.loads(response.body, parse_constant=lambda name: pytest.fail(f"{name} in a body"))
    assert isinstance(value, dict)
    return value


def events_of(client: Client, path: str, **body: object) -> list[Json]:
    """The events of the same request streamed."""
    with client.connect() as connection:
        connection.send("POST", path, {"temperature": 0, "stream": True, **body})
        return PatientReader(connection).rest()


def columns_of(events: Sequence[Json], name: str) -> list[object]:
    """One column of a completion's log-probabilities, from all chunks."""
    found = [event["choices"][0]["logprobs"] for event in events if event["choices"]]
    return [value for logprobs in found if logprobs for value in logprobs[name]]


def close(found: Sequence[object], expected: Sequence[float | None]) -> bool:
    """Whether values are the same up to the rounding of products; None for places without one."""
    return len(found) == len(expected) and all(
        one is other is None
        or (isinstance(one, float) and other is not None and math.isclose(one, other, abs_tol=TOLERANCE))
        for one, other in zip(found, expected, strict=True)
    )


# ------------------------------------------------------------ rules


def test_smp_03_a_bias_keeps_a_token_out_of_a_greedy_answer(page_1: Client) -> None:
    for bias in ({"49152": 5}, {"-1": 5}, {"abc": 1}, {"5": "x"}, {"5": 101}):
        assert str(page_1.refused(TEXT, {"prompt": NUM, "logit_bias": bias})["param"]).startswith("logit_bias")
    asked = {"prompt": NUM, "max_tokens": 24, "logit_bias": {str(SEVEN): -100}}
    answer = page_1.ask_both(TEXT, **asked)
    assert answer.text.startswith(" 5, 6, ")
    assert "7" not in answer.text
    assert page_1.ask(TEXT, prompt=NUM, max_tokens=4, logit_bias={str(SEVEN): 100}).text == "7777"


def test_smp_12_penalties_change_a_greedy_answer_and_seeded_ones_stay_their_own(page_1: Client) -> None:
    plain = page_1.ask(TEXT, prompt=HELLO, max_tokens=12).text
    for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 2}):
        answer = page_1.ask_both(TEXT, prompt=HELLO, max_tokens=12, **penalty)
        assert answer.text != plain
        assert page_1.ask(TEXT, prompt=HELLO, max_tokens=12, **penalty).text == answer.text
    # Without output there is nothing to count: the first token is that of the plain answer, unless the prompt counts.
    first = page_1.ask(TEXT, prompt=NUM, max_tokens=1, frequency_penalty=2, presence_penalty=2)
    assert first.text == " "


def test_min_tokens_outlast_the_end_of_a_chat_and_stop_strings(page_1: Client) -> None:
    assert page_1.ask(CHAT, messages=HI).completion_tokens == 10
    assert page_1.ask_both(CHAT, messages=HI, min_tokens=14, max_tokens=20).completion_tokens >= 14
    assert page_1.ask(TEXT, prompt=NUM, stop="6", max_tokens=20).text == " 5, "
    assert "6" in page_1.ask(TEXT, prompt=NUM, stop="6", min_tokens=8, max_tokens=20).text


def test_bad_words_and_allowed_ids(page_1: Client) -> None:
    assert "7" not in page_1.ask_both(TEXT, prompt=NUM, max_tokens=16, bad_words=["7"]).text
    assert page_1.ask(TEXT, prompt=NUM, max_tokens=6, allowed_token_ids=[SEVEN]).text == "777777"


def test_stp_05_the_stop_string_and_what_stopped_it(page_1: Client) -> None:
    asked = {"prompt": NUM, "stop": ["7, 8"], "max_tokens": 40}
    assert page_1.ask_both(TEXT, **asked, include_stop_str_in_output=True).text == " 5, 6, 7, 8"
    assert body_of(page_1, TEXT, **asked)["choices"][0]["stop_reason"] == "7, 8"
    by_id = body_of(page_1, TEXT, prompt=NUM, stop_token_ids=[SEVEN], max_tokens=40)["choices"][0]
    assert (by_id["text"], by_id["finish_reason"], by_id["stop_reason"]) == (" 5, 6, ", "stop", SEVEN)


# ------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("temperature", [0, 2])
def test_smp_15_values_are_those_of_the_raw_logits(page_1: Client, temperature: float) -> None:
    body = body_of(page_1, TEXT, prompt=NUM, max_tokens=1, logprobs=5, temperature=temperature, seed=3)
    logprobs = body["choices"][0]["logprobs"]
    likeliest = dict(list(logprobs["top_logprobs"][0].items())[:5])
    assert list(likeliest)[:2] == [" ", " and"]
    assert close(list(likeliest.values()), [-0.077, -3.577, -5.007, -5.377, -5.411])


def test_smp_17_chats_and_completions_have_a_schema_each_and_one_entry_a_token(page_1: Client) -> None:
    chat = body_of(page_1, CHAT, messages=HI, logprobs=True, top_logprobs=2)
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == chat["usage"]["completion_tokens"] == 10
    text = b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode()
    assert text == chat["choices"][0]["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in content)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)
    streamed = [event["choices"][0]["logprobs"] for event in events_of(page_1, CHAT, messages=HI, logprobs=True)]
    entries = [entry for logprobs in streamed if logprobs for entry in logprobs["content"]]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in content]
    plain = body_of(page_1, CHAT, messages=HI, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in plain)
    whole = body_of(page_1, TEXT, prompt=NUM, max_tokens=8, logprobs=2)["choices"][0]
    assert set(whole["logprobs"]) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert "".join(whole["logprobs"]["tokens"]) == whole["text"]
    assert whole["logprobs"]["text_offset"] == list(range(8))
    events = events_of(page_1, TEXT, prompt=NUM, max_tokens=8, logprobs=2)
    assert columns_of(events, "tokens") == whole["logprobs"]["tokens"]
    assert columns_of(events, "text_offset") == whole["logprobs"]["text_offset"]


def test_smp_14_no_infinity_reaches_a_client(page_1: Client) -> None:
    body = body_of(page_1, TEXT, prompt=NUM, max_tokens=4, echo=True, logprobs=5, temperature=1, top_k=1)
    values = body["choices"][0]["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert all(-9999.0 <= value <= 0 for value in values[1:])
    bias = {str(token_id): -100 for token_id in range(1000)}
    body = body_of(page_1, CHAT, messages=HI, max_tokens=4, logprobs=True, top_logprobs=20, logit_bias=bias)
    content = body["choices"][0]["logprobs"]["content"]
    assert all(-9999.0 <= top["logprob"] <= 0 for entry in content for top in entry["top_logprobs"])


def test_sch_12_an_echo_has_the_same_prompt_entries_on_every_hit(page_1: Client) -> None:
    for prompt in (NUM, HELLO, NUM, HELLO, NUM):
        asked = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1}
        choice = body_of(page_1, TEXT, **asked)["choices"][0]
        values = choice["logprobs"]["token_logprobs"]
        assert "".join(choice["logprobs"]["tokens"][:-1]) == prompt
        if prompt == NUM:
            assert close(values[:-1], [None, *PROMPT_VALUES])
        events = events_of(page_1, TEXT, **asked)
        assert text_of(events) == choice["text"]
        assert close(columns_of(events, "token_logprobs"), values)


def test_sch_19_nothing_but_the_prompt(page_1: Client) -> None:
    body = body_of(page_1, TEXT, prompt=NUM, max_tokens=0, echo=True, logprobs=1)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (NUM, "length")
    assert close(body["choices"][0]["logprobs"]["token_logprobs"], [None, *PROMPT_VALUES])
    assert body["usage"]["completion_tokens"] == 0
    chat = body_of(page_1, CHAT, messages=HI, max_tokens=0, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == 31
    assert chat["choices"][0]["message"]["content"] == ""


def test_prompt_logprobs_and_ids_in_vllms_form(page_1: Client) -> None:
    asked = {"prompt": NUM, "max_tokens": 3, "prompt_logprobs": 2, "return_token_ids": True, "n": 2}
    body = body_of(page_1, TEXT, **asked, logprobs=0)
    for choice in body["choices"]:
        ids = choice["prompt_token_ids"]
        assert len(ids) == len(choice["prompt_logprobs"]) == 11
        assert choice["prompt_logprobs"][0] is None
        found = [
            entries[str(token_id)] for token_id, entries in zip(ids, choice["prompt_logprobs"], strict=True) if entries
        ]
        assert close([entry["logprob"] for entry in found], PROMPT_VALUES)
        assert "".join(entry["decoded_token"] for entry in found) == NUM[1:]
        assert len(choice["token_ids"]) == 3


def test_the_official_client_reads_log_probabilities(page_1: Client) -> None:
    client = openai.OpenAI(base_url=f"{page_1.server.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    with client:
        chat = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hi"}],
            temperature=0,
            logprobs=True,
            top_logprobs=2,
            max_tokens=4,
        )
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content[0].top_logprobs) == 2
        text = client.completions.create(model=model, prompt=NUM, temperature=0, logprobs=2, max_tokens=4)
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.text_offset == [0, 1, 2, 3]


# ------------------------------------------------------------ beside the answer


def test_timings_tell_the_queue_and_the_prefill(page_1: Client) -> None:
    timings = body_of(page_1, TEXT, prompt=HELLO, max_tokens=8)["timings"]
    assert timings["ttft_ms"] > 0
    assert timings["itl_ms"]["p50"] <= timings["itl_ms"]["p99"]
    assert timings["tokens_per_second"] > 0
    if timings["queue_ms"] is not None:  # the scheduler's word travels by another way and may come too late
        assert timings["queue_ms"] + (timings["prefill_ms"] or 0) <= timings["ttft_ms"]


def test_a_deadline_ends_an_answer(page_1: Client) -> None:
    asked = {"prompt": NUM, "max_tokens": 8000, "ignore_eos": True, "timeout_s": 0.5}
    assert page_1.refused(TEXT, asked, 504)["code"] == "timeout"
    with page_1.connect() as connection:
        connection.send("POST", TEXT, {**asked, "stream": True})
        events = PatientReader(connection).rest()
    assert events[-1]["error"]["code"] == "timeout"


def test_salts_separate_prefixes(page_1: Client) -> None:
    prompt = "the salt of the earth, " * 4
    for salt in ("one", "two"):
        cached = [page_1.ask(TEXT, prompt=prompt, max_tokens=1, cache_salt=salt).cached_tokens for _ in range(2)]
        assert cached[0] == 0
        assert cached[1] > 0


def test_a_request_with_every_rule_leaves_others_alone(page_1: Client) -> None:
    rules = {"frequency_penalty": 1, "logit_bias": {"5": 1}, "bad_words": ["x"], "min_tokens": 2, "logprobs": 3}
    with page_1.open_stream(TEXT, prompt=HELLO, max_tokens=40, **rules) as reader:
        reader.next_json()
        assert NUM_TEXT.startswith(page_1.ask(TEXT, prompt=NUM, max_tokens=24).text)
        assert reader.rest()

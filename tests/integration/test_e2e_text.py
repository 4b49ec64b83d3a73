"""The text of the real model, whole and streamed: characters cut apart, special tokens, stop strings and stop ids."""

from __future__ import annotations

import codecs
import json

import openai
import pytest

from tests.integration.client import BAD, CHAT, HELLO, HI, NUM, NUM_TEXT, TEXT, WAVE, Client, streamed

pytestmark = pytest.mark.timeout(600)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
REPLY_TO_HI = "Hello! How can I assist you today?"


# ------------------------------------------------------------ incremental detokenization


def test_det_01_emoji_of_three_tokens_come_whole(quick: Client) -> None:
    answer = quick.ask_both(TEXT, prompt=WAVE, max_tokens=24)
    assert answer.text == "👋🌍👋🌍👋🌍👋🌍"
    assert len(answer.pieces[0]) > 4
    assert not any(REPLACEMENT in piece for piece in answer.pieces[0])


def test_det_02_a_model_that_repeats_a_broken_character_is_streamed(quick: Client) -> None:
    answer = quick.ask_both(TEXT, prompt=BAD, max_tokens=24, ignore_eos=True)
    assert answer.text == 12 * REPLACEMENT
    assert len(answer.pieces[0]) >= 12 - 1


def test_det_03_a_limit_inside_a_character_shows_it_as_a_replacement(quick: Client) -> None:
    answer = quick.ask_both(TEXT, prompt=WAVE, max_tokens=5)
    assert answer.text == "👋" + REPLACEMENT
    assert answer.finish_reason == "length"
    assert answer.completion_tokens == 5


def test_det_03_the_body_of_a_cut_character_is_valid_utf_8_json(quick: Client) -> None:
    body = quick.request("POST", TEXT, {"prompt": WAVE, "max_tokens": 5, "temperature": 0}).body
    assert json.loads(codecs.decode(body, "utf-8"))["choices"][0]["text"] == "👋" + REPLACEMENT


@pytest.mark.parametrize(("prompt", "text"), [(HELLO, " world"), ("The capital of France is", " Paris")])
def test_det_08_the_leading_space_of_the_first_token_is_kept(quick: Client, prompt: str, text: str) -> None:
    answer = quick.ask_both(TEXT, prompt=prompt, max_tokens=1)
    assert (answer.text, answer.finish_reason, answer.completion_tokens) == (text, "length", 1)


def test_det_09_a_reply_ends_without_its_end_marker(quick: Client) -> None:
    answer = quick.ask_both(CHAT, messages=HI)
    assert (answer.text, answer.finish_reason) == (REPLY_TO_HI, "stop")


def test_det_09_special_tokens_are_shown_when_asked_for(quick: Client) -> None:
    fields = {"messages": HI, "ignore_eos": True, "max_tokens": 12}
    assert quick.ask_both(CHAT, **fields, skip_special_tokens=False).text.startswith(REPLY_TO_HI + "<|im_end|>\n")
    hidden = quick.ask_both(CHAT, **fields).text
    assert hidden.startswith(REPLY_TO_HI + "\n")
    assert "<|im_" not in hidden


# ------------------------------------------------------------ stop handling


def test_stp_01_stp_02_a_stop_string_over_several_tokens_is_found_and_never_shown(quick: Client) -> None:
    answer = quick.ask_both(TEXT, prompt=NUM, max_tokens=40, stop=["7, 8"])
    assert (answer.text, answer.finish_reason, answer.completion_tokens) == (" 5, 6, ", "stop", 11)
    assert "7" not in "".join(answer.pieces[0])


def test_stp_04_held_text_comes_out_at_the_limit(quick: Client) -> None:
    answer = quick.ask_both(TEXT, prompt=NUM, max_tokens=17, stop=["9, 1X"])
    assert (answer.text, answer.finish_reason) == (" 5, 6, 7, 8, 9, 1", "length")


def test_stp_05_include_stop_str_in_output(quick: Client) -> None:
    answer = quick.ask_both(TEXT, prompt=NUM, max_tokens=40, stop=["7, 8"], include_stop_str_in_output=True)
    assert (answer.text, answer.finish_reason) == (" 5, 6, 7, 8", "stop")


@pytest.mark.parametrize("stop", [None, []])
def test_stp_09_null_and_an_empty_list_mean_no_stop(quick: Client, stop: object) -> None:
    answer = quick.ask(TEXT, prompt=NUM, max_tokens=8, stop=stop)
    assert (answer.text, answer.finish_reason) == (" 5, 6, 7", "length")


@pytest.mark.parametrize("stop", ["", [""], ["", "7"], ["x"] * 17, [1], "x" * 100_000], ids=repr)
def test_stp_09_odd_stop_values_are_refused(quick: Client, stop: object) -> None:
    error = quick.refused(TEXT, {"prompt": NUM, "stop": stop})
    assert str(error["param"]).startswith("stop")


def test_stp_10_only_text_that_could_begin_a_stop_is_held_back(quick: Client) -> None:
    with quick.open_stream(TEXT, prompt=NUM, max_tokens=20, stop=["✿RESULT✿", "zzzzzzzzzz"]) as reader:
        assert reader.next_json()["choices"][0]["text"] == " "
        texts = [choice["text"] for event in reader.rest() for choice in event["choices"]]
    assert " " + "".join(texts) == " 5, 6, 7, 8, 9, 10, "
    assert all(texts[:-1])
    assert not texts[-1]


def test_stp_13_a_stop_id_counts_and_is_not_shown(quick: Client) -> None:
    answer = quick.ask_both(TEXT, prompt=NUM, max_tokens=40, stop_token_ids=[39])
    assert (answer.text, answer.finish_reason, answer.completion_tokens) == (" 5, 6, ", "stop", 8)


# ------------------------------------------------------------ the form of a stream


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_sse_07_sse_08_sse_10_first_and_last_chunk_of_a_stream(quick: Client, path: str) -> None:
    prompt = {"messages": HI} if path == CHAT else {"prompt": NUM}
    with quick.open_stream(path, **prompt, max_tokens=5, stream_options=None) as reader:
        events = reader.rest()
    choices = [event["choices"][0] for event in events]
    if path == CHAT:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert all(isinstance(choice["delta"]["content"], str) for choice in choices[:-1])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert choices[-1].get("text", "") == ""
    assert choices[-1].get("delta", {}) == {}
    assert len({(event["id"], event["model"], event["created"]) for event in events}) == 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}], ids=repr)
def test_sse_11_a_usage_chunk_only_when_asked_for(quick: Client, options: object) -> None:
    with quick.open_stream(TEXT, prompt=NUM, max_tokens=4, stream_options=options) as reader:
        events = reader.rest()
    is_wanted = options == {"include_usage": True}
    assert [event["choices"] == [] for event in events] == [False] * (len(events) - 1) + [is_wanted]
    assert all(event.get("usage") is None for event in events[:-1])
    assert (events[-1].get("usage") is not None) is is_wanted


def test_sse_11_stream_options_without_a_stream_are_refused(quick: Client) -> None:
    error = quick.refused(TEXT, {"prompt": NUM, "stream_options": {"include_usage": True}})
    assert error["param"] == "stream_options"


def test_sse_13_a_stream_read_byte_by_byte_is_the_same_as_in_large_pieces(quick: Client) -> None:
    texts = []
    for size in (1, 65536):
        with quick.connect() as connection:
            connection.send("POST", TEXT, streamed({"prompt": WAVE, "max_tokens": 12}))
            connection.read_head()
            while not connection.pending.endswith(b"0\r\n\r\n"):
                assert connection.fill(size)
            raw = connection.pending
        lines = [line.rstrip(b"\r\n") for line in raw.splitlines(keepends=True) if line.startswith(b"data: {")]
        choices = [choice for line in lines for choice in json.loads(line[6:])["choices"]]
        texts.append("".join(choice["text"] for choice in choices))
    assert texts == ["👋🌍👋🌍"] * 2


def test_sse_14_headers_tell_proxies_not_to_buffer(quick: Client) -> None:
    headers = quick.stream(TEXT, prompt=NUM, max_tokens=1).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers


def test_sse_18_the_reason_tells_a_limit_from_an_end(quick: Client) -> None:
    assert quick.ask_both(CHAT, messages=HI, max_tokens=5).finish_reason == "length"
    assert quick.ask_both(CHAT, messages=HI, max_tokens=60).finish_reason == "stop"
    assert quick.ask_both(TEXT, prompt=NUM, max_tokens=5).finish_reason == "length"
    assert quick.ask_both(TEXT, prompt=NUM, max_tokens=60, stop="7").finish_reason == "stop"


def test_met_06_the_token_that_ends_an_answer_is_counted_everywhere(quick: Client) -> None:
    before = quick.metric("generation_tokens_total", "tokenizer")
    answer = quick.ask_both(CHAT, messages=HI)
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == (REPLY_TO_HI, 31, 10)
    assert quick.ask_both(TEXT, prompt=NUM, max_tokens=40, stop_token_ids=[39]).completion_tokens == 8
    assert quick.metric("generation_tokens_total", "tokenizer") - before == 2 * (10 + 8)


@pytest.mark.parametrize("is_stream", [False, True])
def test_met_01_a_prompt_counts_once_for_all_its_choices(quick: Client, is_stream: bool) -> None:
    ask = quick.stream if is_stream else quick.ask
    answer = ask(TEXT, prompt=NUM, n=3, max_tokens=8, ignore_eos=True)
    assert answer.texts == [" 5, 6, 7"] * 3
    assert (answer.prompt_tokens, answer.completion_tokens, answer.usage["total_tokens"]) == (11, 24, 35)


# ------------------------------------------------------------ the official client


def test_the_official_client_streams_a_chat(quick: Client) -> None:
    client = openai.OpenAI(base_url=f"{quick.server.url}/v1", api_key="none", max_retries=0, timeout=240)
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hi"}], temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        "Hello! How can I assist you today?"
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (31, 10)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text"),
    [(NUM, 20, NUM_TEXT[:20]), (HELLO, 8, " world hello" * 4), (WAVE, 12, "👋🌍" * 2), (BAD, 8, "\ufffd" * 4)],
    ids=["F-NUM", "F-HELLO", "F-WAVE", "F-BAD"],
)
def test_the_official_client_gets_the_known_texts(quick: Client, prompt: str, max_tokens: int, text: str) -> None:
    client = openai.OpenAI(base_url=f"{quick.server.url}/v1", api_key="none", max_retries=0, timeout=240)
    model = client.models.list().data[0].id
    fields = {"ignore_eos": True}
    chunks = client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_body=fields
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == text

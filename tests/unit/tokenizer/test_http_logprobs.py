"""Log-probabilities, ids, usage, timings and event ids of answers: over HTTP, streamed and not, the same."""

from __future__ import annotations

import pytest

from services.wire.answers import HopReport, TextChunks
from services.wire.finish import Finish
from services.wire.members import Role
from services.wire.request_params import PromptParams
from services.wire.requests import Submit
from tests.sockets import wait_until
from tests.unit.tokenizer.backend_peers import Server, admitted_stream, chunk
from tests.unit.tokenizer.field_requests import CHAT, NUM, submits_of
from tests.unit.tokenizer.http_client import Connection, EventReader, Json, request, text_of
from tests.unit.tokenizer.logprob_chunks import Entries, prompt_logprobs, with_logprobs

TEXT_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
INFINITY = float("inf")
# "a", an emoji over four tokens, withheld text, an end id: what comes with each id
TOKENS: list[Entries] = [
    [(97, -0.5), (97, -0.5), (98, -1.0)],
    [(0xF0, -1.0), (97, -0.25), (0xF0, -1.0)],
    [(0x9F, -0.125), (0x9F, -0.125), (98, -INFINITY)],
    [(0x91, -0.5), (0x91, -0.5), (98, -1.0)],
    [(0x8B, -0.5), (0x8B, -0.5), (98, -1.0)],
    [(99, -2.0), (98, -0.5), (97, -0.75)],
    [(257, -0.5), (257, -0.5), (98, -1.0)],
]
IDS = [entries[0][0] for entries in TOKENS]
TEXTS = ["a", "", "", "", "👋", "c", ""]


def script(submit: Submit) -> list[TextChunks]:
    """One row an id; the last is an end id that has no text."""
    batches, offset = [], 0
    for index, (entries, text) in enumerate(zip(TOKENS, TEXTS, strict=True)):
        finish = Finish.STOP_TOKEN if index == len(TOKENS) - 1 else Finish.NONE
        row = chunk(submit, index, [entries[0][0]], offset, text, finish, cached=2)
        num_shown = submit.sampling.num_logprobs
        batches.append(with_logprobs(row, [entries[: 1 + num_shown]]) if num_shown >= 0 else row)
        offset += len(text.encode())
    return batches


def whole_and_events(server: Server, path: str, body: Json) -> tuple[Json, list[Json]]:
    """The same request not streamed and streamed."""
    server.backend.script = script
    asked = {**CHAT, "prompt": NUM, **body}
    response = request(server.port, "POST", path, asked)
    assert response.status == 200, response.body
    with Connection(server.port) as connection:
        connection.send("POST", path, {**asked, "stream": True})
        reader = EventReader(connection)
        assert reader.status == 200
        return response.json(), reader.rest()


def test_smp_17_and_15_a_chat_has_one_entry_for_each_token(server: Server) -> None:
    whole, events = whole_and_events(server, CHAT_PATH, {"logprobs": True, "top_logprobs": 2})
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [entries[0][1] for entries in TOKENS]
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == "a👋c"
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(TOKENS)
    assert content[2]["top_logprobs"][1]["logprob"] == -9999.0
    assert whole["usage"]["completion_tokens"] == len(content)
    streamed = [event["choices"][0]["logprobs"] for event in events if event["choices"]]
    assert [entry for found in streamed if found for entry in found["content"]] == content


def test_smp_17_a_chat_without_top_logprobs_has_the_tokens_own(server: Server) -> None:
    whole, _ = whole_and_events(server, CHAT_PATH, {"logprobs": True})
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * len(TOKENS)
    assert set(content[0]) == {"token", "logprob", "bytes", "top_logprobs"}


def test_smp_17_a_completion_has_four_columns(server: Server) -> None:
    whole, events = whole_and_events(server, TEXT_PATH, {"logprobs": 2})
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"][0] == "a"
    assert logprobs["tokens"][1] == "bytes:\\xf0"
    assert logprobs["token_logprobs"] == [entries[0][1] for entries in TOKENS]
    assert logprobs["top_logprobs"][5] == {"b": -0.5, "a": -0.75, "c": -2.0}
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    streamed = [event["choices"][0]["logprobs"] for event in events]
    for name, column in logprobs.items():
        assert [value for found in streamed if found for value in found[name]] == column


def test_logprobs_0_is_the_token_alone(server: Server) -> None:
    whole, _ = whole_and_events(server, TEXT_PATH, {"logprobs": 0})
    assert whole["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.5}


@pytest.mark.parametrize("path", [TEXT_PATH, CHAT_PATH])
def test_without_a_wish_there_are_none(server: Server, path: str) -> None:
    whole, events = whole_and_events(server, path, {})
    assert whole["choices"][0]["logprobs"] is None
    assert all(event["choices"][0]["logprobs"] is None for event in events)
    assert "token_ids" not in whole["choices"][0]


def test_stp_02_probabilities_of_withheld_text_come_with_it(server: Server) -> None:
    with Connection(server.port) as connection:
        submit, reader = admitted_stream(
            server.backend, connection, TEXT_PATH, {"prompt": NUM, "logprobs": 0, "stream": True}
        )
        server.backend.send_text(with_logprobs(chunk(submit, 0, [97], 0, ""), [[(97, -0.5)]]))
        server.backend.send_text(with_logprobs(chunk(submit, 1, [98], 0, "ab"), [[(98, -0.25)]]))
        first = reader.next_json()["choices"][0]
        assert (first["text"], first["logprobs"]["tokens"]) == ("ab", ["a", "b"])
        server.backend.send_text(with_logprobs(chunk(submit, 2, [99], 2, "", Finish.STOP_STRING), [[(99, -1.0)]]))
        last = reader.rest()[-1]["choices"][0]
        assert (last["finish_reason"], last["logprobs"]["tokens"]) == ("stop", ["c"])


@pytest.mark.parametrize("path", [TEXT_PATH, CHAT_PATH])
def test_ids_are_those_of_the_texts_they_come_with(server: Server, path: str) -> None:
    whole, events = whole_and_events(server, path, {"return_token_ids": True})
    assert whole["choices"][0]["token_ids"] == IDS
    assert [token_id for event in events for token_id in event["choices"][0].get("token_ids", [])] == IDS
    prompt_ids = (whole["choices"][0] if path == TEXT_PATH else whole)["prompt_token_ids"]
    assert len(prompt_ids) == whole["usage"]["prompt_tokens"]
    told = [(event["choices"][0] if path == TEXT_PATH else event).get("prompt_token_ids") for event in events]
    assert told == [prompt_ids, *[None] * (len(events) - 1)]


def test_ids_stand_for_texts_if_asked(server: Server) -> None:
    whole, _ = whole_and_events(server, CHAT_PATH, {"logprobs": True, "return_tokens_as_token_ids": True})
    assert whole["choices"][0]["logprobs"]["content"][1]["token"] == "token_id:240"
    whole, _ = whole_and_events(server, TEXT_PATH, {"logprobs": 1, "return_tokens_as_token_ids": True})
    assert whole["choices"][0]["logprobs"]["top_logprobs"][1] == {"token_id:97": -0.25, "token_id:240": -1.0}


# ---------------------------------------------------------------- the prompt's own


def answer_with_prompt(server: Server, num_choices: int = 1) -> None:
    """Plays the backend for one request: answers first, then the prompt's pieces, out of order."""
    submits = server.backend.take_submits(num_choices)
    server.backend.admit(*submits)
    for submit in submits:
        server.backend.send_text(*script(submit))
    first = submits[0]
    length = len(first.prompt_token_ids) // 4
    entries: list[Entries] = [[(first.prompt_token_ids[4 * i], -0.5), (65, -0.25)] for i in range(1, length)]
    server.backend.send(prompt_logprobs(first, 4, entries[3:]))
    server.backend.wait_for_resend(first, 0)
    server.backend.send(prompt_logprobs(first, 1, entries[:5]), prompt_logprobs(first, 3, entries[2:]))


@pytest.mark.parametrize("is_stream", [False, True])
def test_sch_12_an_echo_has_the_prompts_entries_first(server: Server, is_stream: bool) -> None:
    with Connection(server.port) as connection:
        body = {"prompt": NUM, "echo": True, "logprobs": 1, "stream": is_stream, "n": 2}
        connection.send("POST", TEXT_PATH, body)
        answer_with_prompt(server, 2)
        if is_stream:
            events = EventReader(connection).rest()
            found = [[e["choices"][0] for e in events if e["choices"][0]["index"] == index] for index in range(2)]
        else:
            found = [[choice] for choice in connection.read_response().json()["choices"]]
    for choices in found:
        assert "".join(choice["text"] for choice in choices) == f"{NUM}a👋c"
        assert "prompt_logprobs" not in choices[0]
        columns = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        logprobs = {name: [value for column in columns for value in column[name]] for name in columns[0]}
        assert logprobs["token_logprobs"][: len(NUM)] == [None, *[-0.5] * 10]
        assert logprobs["top_logprobs"][:2] == [None, {"A": -0.25, ",": -0.5}]
        assert logprobs["text_offset"] == [*range(11), 11, 12, 12, 12, 12, 13, 14]
        assert "".join(logprobs["tokens"][: len(NUM)]) == NUM


def test_sch_12_only_the_first_choice_asks_for_the_prompts_entries(server: Server) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": [NUM, "xy"], "prompt_logprobs": 3, "n": 2})
        submits = server.backend.take_submits(4)
        asks = [submit.prompt for submit in submits]
        assert asks == [PromptParams(num_logprobs=3), PromptParams(), PromptParams(num_logprobs=3), PromptParams()]


@pytest.mark.parametrize("path", [TEXT_PATH, CHAT_PATH])
@pytest.mark.parametrize("is_stream", [False, True])
def test_prompt_logprobs_are_vllms(server: Server, path: str, is_stream: bool) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", path, {**CHAT, "prompt": NUM, "prompt_logprobs": 1, "stream": is_stream})
        answer_with_prompt(server)
        if is_stream:
            events = EventReader(connection).rest()
            holders = [event if path == CHAT_PATH else event["choices"][0] for event in events]
            (holder,) = [holder for holder in holders if "prompt_logprobs" in holder]
            assert text_of(events) == "a👋c"
        else:
            body = connection.read_response().json()
            holder = body if path == CHAT_PATH else body["choices"][0]
    found = holder["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == (len(NUM) if path == TEXT_PATH else 21)
    own, likeliest = found[1].items()
    assert own[1]["logprob"] == -0.5
    assert own[1]["rank"] is None
    assert likeliest == ("65", {"logprob": -0.25, "rank": 1, "decoded_token": "A"})


def test_max_tokens_0_gives_the_prompts_entries_alone(server: Server) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": "xyz", "echo": True, "logprobs": 0, "max_tokens": 0})
        (submit,) = server.backend.take_submits()
        server.backend.admit(submit)
        server.backend.send(prompt_logprobs(submit, 1, [[(121, -0.5)], [(122, -INFINITY)]]))
        server.backend.send_text(chunk(submit, 0, [], 0, "", Finish.LENGTH))
        choice = connection.read_response().json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -9999.0]
    assert (choice["text"], choice["finish_reason"]) == ("xyz", "length")


def test_an_echo_of_ids_is_their_text(server: Server) -> None:
    server.backend.script = script
    body = {"prompt": [*"é".encode(), 256], "echo": True, "return_token_ids": True}
    choice = request(server.port, "POST", TEXT_PATH, body).json()["choices"][0]
    assert choice["text"].startswith("é<|")
    assert choice["text"].endswith("a👋c")
    assert choice["prompt_token_ids"] == [*"é".encode(), 256]


# ---------------------------------------------------------------- beside the answer


@pytest.mark.parametrize("path", [TEXT_PATH, CHAT_PATH])
@pytest.mark.parametrize("has_chunk", [False, True])
def test_every_chunk_tells_the_usage_so_far_if_asked(server: Server, path: str, has_chunk: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": has_chunk}
    server.backend.script = script
    with Connection(server.port) as connection:
        connection.send("POST", path, {**CHAT, "prompt": NUM, "stream": True, "stream_options": options})
        events = EventReader(connection).rest()
    shown = [event["usage"] for event in events if event.get("usage")]
    counts = [usage["completion_tokens"] for usage in shown]
    assert counts == sorted(counts)
    assert counts[-1] == len(IDS)
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in shown)
    texts = [event for event in events if event["choices"] and event["choices"][0]["finish_reason"] is None]
    assert all(event.get("usage") for event in texts[1 if path == CHAT_PATH else 0 :])
    assert bool(events[-1]["choices"]) != has_chunk


@pytest.mark.parametrize("path", [TEXT_PATH, CHAT_PATH])
def test_timings_are_in_the_last_chunk_or_the_body(server: Server, path: str) -> None:
    whole, events = whole_and_events(server, path, {})
    assert ["timings" in event for event in events] == [*[False] * (len(events) - 1), True]
    for timings in (whole["timings"], events[-1]["timings"]):
        assert set(timings) == {
            "queue_ms", "prefill_ms", "ttft_ms", "itl_ms", "cached_tokens", "tokens_per_second",
        }  # fmt: skip
        assert timings["queue_ms"] is timings["prefill_ms"] is None
        assert timings["ttft_ms"] > 0
        assert 0 <= timings["itl_ms"]["p50"] <= timings["itl_ms"]["p99"]
        assert timings["cached_tokens"] == 2
    whole, events = whole_and_events(server, path, {"timings": False})
    assert "timings" not in whole
    assert not any("timings" in event for event in events)


def test_queue_and_prefill_are_the_schedulers_own_word(server: Server) -> None:
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": NUM})
        (submit,) = server.backend.take_submits()
        server.backend.admit(submit)
        server.backend.send(HopReport(submit.request_id, 0, Role.SCHEDULER, "s", 1, 1500, 9000, {"prefill_us": 2500.0}))
        server.backend.send_text(*script(submit)[:-1])
        wait_until(lambda: request(server.port, "GET", "/live").status == 200)
        server.backend.send(prompt_logprobs(submit, 1, []))  # behind the report on the same link
        server.backend.send_text(script(submit)[-1])
        timings = connection.read_response().json()["timings"]
    assert (timings["queue_ms"], timings["prefill_ms"]) == (1.5, 2.5)


def test_every_answer_has_the_same_fingerprint(server: Server) -> None:
    whole, events = whole_and_events(server, CHAT_PATH, {})
    assert whole["system_fingerprint"].startswith("fp_")
    assert {event["system_fingerprint"] for event in events} == {whole["system_fingerprint"]}


@pytest.mark.parametrize("by_header", [False, True])
def test_events_have_ids_if_asked_and_they_name_a_place(server: Server, by_header: bool) -> None:
    server.backend.script = script
    ids = []
    for _ in range(2):
        with Connection(server.port) as connection:
            options = {} if by_header else {"include_event_ids": True}
            headers = {"Last_Event_ID": "x"} if by_header else {}
            body = {"prompt": NUM, "stream": True, "stream_options": options}
            connection.send("POST", TEXT_PATH, body, **headers)
            reader = EventReader(connection)
            lines = []
            while (event := reader.next()) != "data: [DONE]":
                lines.append(event.split("\n"))
            assert [[line.partition(" ")[0] for line in event] for event in lines] == [["id:", "data:"]] * len(lines)
            ids.append([event[0].removeprefix("id: ").split("/") for event in lines])
    for found in ids:
        assert len({request_id for request_id, _ in found}) == 1
        assert found[-1][1] == "3"  # characters of the one answer
        places = [int(place) for _, place in found]
        assert places == sorted(places)
    assert ids[0][0][0] != ids[1][0][0]


def test_no_event_has_an_id_unless_asked(server: Server) -> None:
    server.backend.script = script
    with Connection(server.port) as connection:
        connection.send("POST", TEXT_PATH, {"prompt": NUM, "stream": True})
        reader = EventReader(connection)
        reader.rest()
        assert b"\nid:" not in b"\n" + reader.body


def test_log_probabilities_are_asked_for_by_number(server: Server) -> None:
    asked = [{"logprobs": 3}, {"logprobs": 0}, {}]
    numbers = [submits_of(server, {"prompt": NUM, **body})[0].sampling.num_logprobs for body in asked]
    assert numbers == [3, 0, -1]

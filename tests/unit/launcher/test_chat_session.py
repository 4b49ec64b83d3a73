"""A chat with another server of the OpenAI API: what every command does, and what is said when something fails."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from services.launcher.chat.answer import Piece
from services.launcher.chat.answer_view import AnswerView
from services.launcher.chat.command import own_variables
from services.launcher.chat.conversation import Conversation
from services.launcher.chat.inputs import COMMANDS
from services.launcher.chat.session import ChatSession
from services.launcher.cli import main
from services.launcher.http.client import Client
from services.launcher.http.server_address import ServerAddress
from services.launcher.terminal import Terminal
from services.runtime.config import Settings
from tests.unit.launcher.openai_server import OpenAiServer, openai_server

ANSWER = "Hello 世界 👋🏽!"


@pytest.fixture
def server() -> Iterator[OpenAiServer]:
    with openai_server() as running:
        yield running


class Typed:
    """Inputs that were typed beforehand; an exception among them is what the person does then."""

    def __init__(self, inputs: Sequence[str | type[BaseException]]) -> None:
        self._inputs = iter(inputs)

    def read(self) -> str:
        entered = next(self._inputs, EOFError)
        if isinstance(entered, str):
            return entered
        raise entered


class Screen(io.StringIO):
    """A terminal that keeps what is written."""

    def isatty(self) -> bool:
        return True


def talk(server: OpenAiServer, *inputs: str | type[BaseException], system: str = "") -> str:
    """What is shown of a chat, without what a terminal does with it."""
    screen = Screen()
    session = ChatSession(
        Client(ServerAddress.parse(server.url)), Conversation("model-a", system), Terminal(screen, has_color=False)
    )
    session.run(Typed(inputs))
    return re.sub(r"\r\x1b\[K…?", "", screen.getvalue())


def questions(server: OpenAiServer) -> list[list[str]]:
    """The contents that each request had."""
    return [[message["content"] for message in body["messages"]] for body in server.asked]


def test_an_answer_is_shown_and_is_part_of_what_follows(server: OpenAiServer) -> None:
    shown = talk(server, "Hi", "And\nyou?", system="Be brief.")
    assert shown == f"{ANSWER}\n{ANSWER}\n\n"
    assert questions(server) == [["Be brief.", "Hi"], ["Be brief.", "Hi", ANSWER, "And\nyou?"]]
    assert server.asked[0]["model"] == "model-a"
    assert server.asked[0]["stream_options"] == {"include_usage": True}


def test_retry_undo_and_clear(server: OpenAiServer) -> None:
    shown = talk(server, "/undo", "/retry", "one", "/retry", "two", "/undo", "three", "/clear", "four")
    assert questions(server) == [["one"], ["one"], ["one", ANSWER, "two"], ["one", ANSWER, "three"], ["four"]]
    assert "tokenway: there is nothing to take back\ntokenway: there is no question to ask again\n" in shown
    assert "taken back: two\n" in shown
    assert "the conversation is forgotten\n" in shown


def test_system_messages_fields_and_models_are_shown_and_set(server: OpenAiServer) -> None:
    shown = talk(
        server, "/system", "/system Answer in 中文", "/set", "/set temperature 0.5", "/model", "/model model-b", "Hi",
        "/system none", "/set temperature default", "/model nope", "again",
    )  # fmt: skip
    assert questions(server)[0] == ["Answer in 中文", "Hi"]
    assert (server.asked[0]["temperature"], server.asked[0]["model"]) == (0.5, "model-b")
    assert questions(server)[1] == ["Hi", ANSWER, "again"]
    assert "temperature" not in server.asked[1]
    for line in (
        "system message: none", "system message: Answer in 中文", "every field has the server's own value",
        "temperature 0.5", "* model-a\n  model-b", "  model-a\n* model-b",
        "tokenway: the server has no model 'nope'; it has model-a, model-b",
    ):  # fmt: skip
        assert f"{line}\n" in shown


def test_statistics_are_shown_when_asked_for(server: OpenAiServer) -> None:
    server.usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
    shown = talk(server, "/stats", "Hi", "/stats", "/stats on", "Hi", "/stats off", "Hi", "/stats maybe")
    assert shown.startswith("nothing was asked yet\n")
    told = re.findall(r"^first token after \d+ ms; 4 tokens; [\d.]+ tok/s; prompt 9 tokens, 8 of them cached; ended by"
                      r" length$", shown, re.MULTILINE)  # fmt: skip
    assert len(told) == 4
    assert "tokenway: /stats, /stats on or /stats off\n" in shown


def test_a_conversation_is_saved_as_messages(server: OpenAiServer, tmp_path: Path) -> None:
    path = tmp_path / "Gespräch 你好.json"
    shown = talk(server, "/save", "Hi", f"/save {path}", f"/save {tmp_path}/none/x.json", system="S")
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "model": "model-a",
        "messages": [
            {"role": "system", "content": "S"}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": ANSWER},
        ],
    }  # fmt: skip
    assert f"written to {path}\n" in shown
    assert "tokenway: /save needs the name of a file\n" in shown
    assert "No such file or directory" in shown


def test_help_names_every_command_and_unknown_ones_are_named(server: OpenAiServer) -> None:
    shown = talk(server, "/help", "/nope", "/quit", "never asked")
    assert all(f"/{name}" in shown for name in COMMANDS)
    assert "tokenway: there is no command /nope; /help shows them\n" in shown
    assert not server.asked


def test_ctrl_c_at_the_prompt_says_how_to_leave(server: OpenAiServer) -> None:
    assert talk(server, KeyboardInterrupt, "Hi") == f"\nCtrl-D leaves\n{ANSWER}\n\n"


def test_a_refused_question_is_taken_back_and_the_chat_goes_on(server: OpenAiServer) -> None:
    server.refusal = (503, "the queue\nis full\x1b[2J")
    shown = talk(server, "Hi")
    assert shown == "tokenway: status 503: the queue is full\ufffd[2J\n\n"
    server.refusal = None
    talk(server, "Hi", "Hi again")
    assert questions(server)[-1] == ["Hi", ANSWER, "Hi again"]


def test_an_answer_that_breaks_off_is_kept_as_far_as_it_came(server: OpenAiServer) -> None:
    server.breaks_after = 2
    shown = talk(server, "Hi", "And?")
    assert shown == 2 * "Hello 世界\ntokenway: the engine has died\n" + "\n"
    assert questions(server)[1] == ["Hi", "Hello 世界", "And?"]


def test_a_retry_that_fails_leaves_the_earlier_answer(server: OpenAiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ChatSession(Client(ServerAddress.parse(server.url)), Conversation("m"), Terminal(Screen(), False))
    session.run(Typed(["Hi"]))
    server.refusal = (500, "no")
    session.run(Typed(["/retry"]))
    server.refusal = None
    session.run(Typed(["And?"]))
    assert questions(server)[-1] == ["Hi", ANSWER, "And?"]


def test_retry_asks_the_question_that_failed(server: OpenAiServer) -> None:
    session = ChatSession(Client(ServerAddress.parse(server.url)), Conversation("m"), Terminal(Screen(), False))
    session.run(Typed(["one"]))
    server.refusal = (500, "no")
    session.run(Typed(["two", "/retry"]))
    server.refusal = None
    session.run(Typed(["/retry", "three"]))
    assert questions(server)[-2:] == [["one", ANSWER, "two"], ["one", ANSWER, "two", ANSWER, "three"]]
    server.refusal = (500, "no")
    session.run(Typed(["four", "/clear"]))
    server.refusal = None
    asked = len(server.asked)
    session.run(Typed(["/retry"]))
    assert len(server.asked) == asked


def test_a_server_that_is_gone_is_named_in_one_line() -> None:
    with openai_server() as server:
        pass
    assert talk(server, "Hi") == f"tokenway: cannot reach {server.url}: Connection refused\n\n"


def test_thoughts_are_dim_on_a_terminal_and_left_out_elsewhere() -> None:
    pieces = [Piece("hm", True), Piece("so", True), Piece("Yes"), Piece(".")]
    screen, pipe = Screen(), io.StringIO()
    for view in (AnswerView(Terminal(screen, has_color=True)), AnswerView(Terminal(pipe))):
        for piece in pieces:
            view.show(piece)
        view.end()
    assert screen.getvalue() == "\r\033[K\033[2mhmso\033[0m\n\nYes.\033[0m\n"
    assert pipe.getvalue() == "Yes.\n"


# ---------------------------------------------------------------- what is piped in


def ask(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape"))))
    return main(["chat", *arguments])


def test_what_is_piped_in_is_asked_once(
    server: OpenAiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--url", f"{server.url}/v1/", "--system", "S", "--set", "top_p=0.5", "--set", "seed=7", "--api-key", "k-1"]
    assert ask(monkeypatch, "two\nlines\n", *words) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (f"{ANSWER}\n", "")
    assert questions(server) == [["S", "two\nlines"]]
    assert (server.asked[0]["model"], server.asked[0]["top_p"], server.asked[0]["seed"]) == ("model-a", 0.5, 7)
    assert {headers["authorization"] for headers in server.headers} == {"Bearer k-1"}


def test_the_key_of_openai_clients_is_used(server: OpenAiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    assert ask(monkeypatch, "Hi", "model-b", "--url", server.url) == 0
    assert server.headers[-1]["authorization"] == "Bearer from-the-environment"
    assert server.asked[0]["model"] == "model-b"


def test_a_server_that_listens_on_the_port_is_used(
    server: OpenAiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENWAY_PORT", server.url.rsplit(":", 1)[1])
    assert ask(monkeypatch, "Hi") == 0
    assert ask(monkeypatch, "Hi", "model-b") == 0
    assert [body["model"] for body in server.asked] == ["model-a", "model-b"]


def test_no_other_server_is_started_beside_one_that_wants_a_key(
    server: OpenAiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENWAY_PORT", server.url.rsplit(":", 1)[1])
    server.refusal = (401, "no key")
    assert ask(monkeypatch, "Hi") == 2
    error = f"tokenway: {server.url} wants a key, or another one: give it with --api-key\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize(
    ("text", "words", "reason"),
    [
        ("", ["--url", "URL"], "nothing was asked"),
        ("caf\udce9", ["--url", "URL"], "the standard input is not UTF-8: byte 3 begins no character"),
        ("Hi", ["--url", "URL", "--set", "heat=1"], "there is no field 'heat'"),
        ("Hi", ["--url", "ftp://x"], "--url ftp://x is not a http:// or https:// URL"),
        ("Hi", ["--url", "http://127.0.0.1:1"], "cannot reach http://127.0.0.1:1: Connection refused"),
        ("Hi", ["--url", "URL", "--api-key", "ключ"], "the API key holds characters"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line_with_status_2(
    text: str, words: list[str], reason: str, server: OpenAiServer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert ask(monkeypatch, text, *(server.url if word == "URL" else word for word in words)) == 2
    shown = capsys.readouterr()
    assert reason in shown.err
    assert (len(shown.err.splitlines()), shown.out) == (1, "")


def test_a_refusal_of_what_was_piped_in_is_status_2(
    server: OpenAiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refusal = (429, "too many")
    assert ask(monkeypatch, "Hi", "model-a", "--url", server.url) == 2
    assert capsys.readouterr().err == "tokenway: status 429: too many\n"


def test_an_own_server_has_the_persons_settings_but_for_model_and_port() -> None:
    variables = own_variables(Settings(model="m", port=9, device="cpu", num_threads=2))
    assert variables == {"TOKENWAY_DEVICE": "cpu", "TOKENWAY_NUM_THREADS": "2"}

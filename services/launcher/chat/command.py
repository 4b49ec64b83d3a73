"""`tokenway chat`: finds or starts a server, then talks: with a person at a terminal, or once with what is piped in."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from services.launcher.chat.conversation import Conversation
from services.launcher.chat.session import ChatSession
from services.launcher.command_parser import command_parser
from services.launcher.errors import CommandError
from services.launcher.http.client import Client, KeyWantedError
from services.launcher.http.response import ResponseError
from services.launcher.http.server_address import ServerAddress
from services.launcher.progress import local_url
from services.launcher.server_flags import add_server_flags, server_address
from services.launcher.terminal import Style, Terminal, harmless
from services.runtime.config import Settings, client_api_key, inherited_environment, load_settings

_LOOK_TIMEOUT_S = 5.0
_EXIT_INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command_parser(
        "chat",
        "Talks with a model. Without --url it uses the server on this machine's port, or starts one that ends with the "
        "chat. What is piped in is asked once, and the answer is all that is printed.",
        "tokenway chat smollm2:135m",
        "; /help shows what can be done in a chat.",
    )
    made.add_argument("model", nargs="?", default="", metavar="MODEL",
                      help="what to serve or, with --url, which of the server's models to ask")  # fmt: skip
    add_server_flags(made)
    made.add_argument("--system", default="", metavar="TEXT", help="system message")
    made.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a sampling field, such as "
                      "temperature=0.2; may be repeated")  # fmt: skip
    return made


def run(arguments: Sequence[str]) -> int:
    """Talks; the exit status.

    Raises:
        CommandError: there is no server and none can be started, or what was piped in was not answered.
    """
    options = parser().parse_args(arguments)
    conversation = Conversation("", options.system)
    for assignment in options.set:
        conversation.set_field(assignment.replace("=", " ", 1))
    question = None if sys.stdin.isatty() else _piped_in()
    with ExitStack() as stack:
        client, conversation.model = _server(options, stack)
        session = ChatSession(client, conversation, Terminal())
        if question is None:
            _talk(session, client, conversation.model)
            return 0
        return 0 if session.ask(question.strip("\n")) else _EXIT_INTERRUPTED


def _piped_in() -> str:
    """The standard input, whole; read before there is anybody to ask.

    Raises:
        CommandError: it is empty, or no text.
    """
    try:
        question = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"the standard input is not UTF-8: byte {error.start} begins no character") from None
    if not question.strip():
        raise CommandError("nothing was asked: the standard input is empty")
    return question.replace("\r\n", "\n")


def _talk(session: ChatSession, client: Client, model: str) -> None:
    from services.launcher.chat.history import History, history_path
    from services.launcher.chat.keyboard import Keyboard

    terminal = Terminal()
    terminal.line(terminal.styled(harmless(f"{model} at {client.address.url}; /help shows commands"), Style.DIM))
    history = History(history_path())
    session.run(Keyboard(terminal, history))
    if history.problem:
        terminal.line(terminal.styled(history.problem, Style.DIM))


def _server(options: argparse.Namespace, stack: ExitStack) -> tuple[Client, str]:
    """The server to talk with, and the model to ask it for."""
    if options.url:
        client = Client(server_address(options))
        return client, options.model or client.first_model()
    settings = load_settings([])
    address = ServerAddress.parse(local_url(settings.host, settings.port), options.api_key or client_api_key())
    names = _served(address)
    if names and (not options.model or options.model in names):
        return Client(address), options.model or names[0]
    client = Client(_own_server(options.model or settings.model, settings, stack))
    return client, client.first_model()


def _served(address: ServerAddress) -> list[str]:
    """The models of the server that listens there; none when nobody does, or something else.

    Raises:
        KeyWantedError: a server that wants a key: it should be used, not another one started beside it.
    """
    try:
        return Client(address, _LOOK_TIMEOUT_S).models()
    except KeyWantedError:
        raise
    except ResponseError:
        return []


def _own_server(model: str, settings: Settings, stack: ExitStack) -> ServerAddress:
    """Starts a server for this chat alone: on a free port of this machine, with a key that nobody else knows."""
    from services.launcher.own_server import OwnServer

    key = secrets.token_urlsafe(24)
    own = dataclasses.replace(settings, host="127.0.0.1", api_key=key, api_key_file="", tls_cert="", tls_key="")
    progress = Terminal(sys.stderr)
    progress.status(f"starting a server for {model}")
    try:
        server = OwnServer([model], inherited_environment() | own_variables(own), progress.status)
    finally:
        progress.clear_status()
    return ServerAddress.parse(stack.enter_context(server).url, key)


def own_variables(settings: Settings) -> dict[str, str]:
    """The variables for a server of a command's own: the person's settings, less those that its flags give."""
    given = ("TOKENWAY_MODEL", "TOKENWAY_PORT")
    return {name: value for name, value in settings.as_environment().items() if name not in given}

"""`tokenway render`: messages to the exact prompt, as text cut at its tokens and as ids."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.launcher.child_questions import ask_child
from services.launcher.command_parser import command_parser
from services.launcher.errors import CommandError
from services.launcher.http.client import Client
from services.launcher.models import model_on_disk
from services.launcher.server_flags import add_server_flags, server_address
from services.launcher.terminal import Style, Terminal, harmless
from services.launcher.token_pieces import token_pieces
from services.runtime.config import load_settings

_ROUTE = "/v1/chat/completions/render"
_CHILD = "services.tokenizer.render_prompt"
# Backgrounds of neighbouring tokens, dark enough for light text and light enough for dark text.
_PALETTE = ("\033[48;5;24m", "\033[48;5;58m", "\033[48;5;90m", "\033[48;5;23m")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command_parser(
        "render",
        "Shows the prompt that messages become: by a server with --url, else with the model's own files and no server. "
        "On a terminal each token has a background of its own.",
        "tokenway render messages.json --model smollm2:135m",
    )
    made.add_argument("file", metavar="FILE", help="JSON messages or a whole request body; `-` is the standard input")
    made.add_argument("--model", default="", help="model on this disk (default: the setting) or, with --url, its name")
    add_server_flags(made)
    made.add_argument("--json", action="store_true", help="print text, ids and the tokens' spellings as JSON")
    return made


def run(arguments: Sequence[str]) -> int:
    """Renders and prints; the exit status.

    Raises:
        CommandError: the file holds no messages, they cannot be rendered, or the model is not there; one line.
    """
    options = parser().parse_args(arguments)
    body = _read(options.file)
    found = _ask_server(options, body) if options.url else _ask_child(options, body)
    try:
        text, ids, spellings = str(found["text"]), list(found["token_ids"]), list(found["token_strs"])
    except (KeyError, TypeError):
        raise CommandError("the answer is not a rendered prompt") from None
    if options.json:
        print(json.dumps(found, ensure_ascii=False))
        return 0
    terminal = Terminal()
    if terminal.is_interactive:
        terminal.line(coloured(token_pieces(text, spellings), terminal))
    else:
        terminal.line(text)
    terminal.line()
    limit = found.get("max_model_len")
    count = f"{len(ids)} tokens" + (f" of at most {limit}" if limit else "")
    terminal.line(terminal.styled(count, Style.DIM))
    terminal.line(" ".join(map(str, ids)))
    return 0


def coloured(pieces: Sequence[str], terminal: Terminal) -> str:
    """The pieces with alternating backgrounds; line ends are shown, since tokens may hold several."""
    shown = []
    for index, piece in enumerate(pieces):
        lines = harmless(piece).split("\n")
        marked = [*(f"{line}⏎" for line in lines[:-1]), lines[-1]]
        shown.append("\n".join(terminal.styled(line, _PALETTE[index % len(_PALETTE)]) for line in marked))
    return "".join(shown)


def _read(name: str) -> dict[str, Any]:
    """The request body that a file stands for."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        value = json.loads(text)
    except OSError as error:
        raise CommandError(f"cannot read {name}: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise CommandError(f"{name} is not JSON") from None
    if isinstance(value, list):
        return {"messages": value}
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return value
    raise CommandError(f"{name} holds neither a list of messages nor an object with `messages`")


def _ask_server(options: argparse.Namespace, body: Mapping[str, Any]) -> Mapping[str, Any]:
    client = Client(server_address(options))
    response = client.post(_ROUTE, {**body, "model": options.model or client.first_model()})
    if response.status != 200:
        raise CommandError(f"{client.address.url}{_ROUTE}: {response.refusal()}")
    found = response.json()
    if not isinstance(found, dict):
        raise CommandError(f"{client.address.url} did not answer with an object")
    return found


def _ask_child(options: argparse.Namespace, body: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = load_settings([])
    model = options.model or settings.model
    path = model_on_disk(model, settings)
    if path is None:
        raise CommandError(f"model {model} is not on this disk: `tokenway models pull {model}` fetches it")
    question = json.dumps({name: value for name, value in body.items() if name != "model"})
    return ask_child(_CHILD, dataclasses.replace(settings, model=str(path)), question=question)

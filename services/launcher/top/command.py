"""`tokenway top`: reads the metrics of a group again and again and shows its stages."""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from services.launcher.command_parser import command_parser
from services.launcher.errors import CommandError
from services.launcher.http.client import Client, UnreachableError
from services.launcher.http.response import ResponseError
from services.launcher.http.server_address import ServerAddress
from services.launcher.running_servers import NO_SERVER, control_sockets
from services.launcher.server_flags import add_server_flags, server_address
from services.launcher.terminal import Terminal, harmless
from services.launcher.top.samples import Samples, Window
from services.launcher.top.view import View

_TIMEOUT_S = 10.0
_WINDOW_TEXTS = 6  # rates are over the last five intervals: a heartbeat brings numbers twice a second only


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command_parser(
        "top",
        "Shows the stages of a running server live: hardware, bound, time, rates, and the share "
        "of what the machine can do. Without --url the server of this user on this machine is asked. Ctrl-C ends it.",
        "tokenway top --url http://127.0.0.1:8000 --interval 1",
    )
    add_server_flags(made)
    made.add_argument("--run-dir", type=Path, metavar="DIR", help="run directory of the server to ask")
    made.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (default 2)")
    made.add_argument("--once", action="store_true", help="one look since the start, as without a terminal")
    made.add_argument("--json", action="store_true", help="one look as JSON")
    return made


class Screen(Protocol):
    """Where looks are shown, one over the other."""

    def update(self, renderable: Text, *, refresh: bool) -> None:
        """Shows this from now on."""


def run(arguments: Sequence[str]) -> int:
    """Looks and shows; the exit status.

    Raises:
        CommandError: there is no server, it does not answer, or its metrics are none of ours; one line.
    """
    options = parser().parse_args(arguments)
    if not 0.1 <= options.interval <= 3600:
        raise CommandError("--interval must be between 0.1 and 3600")
    client = Client(server_address(options) if options.url else _only_server(options.run_dir), _TIMEOUT_S)
    group = Group(client)
    view = group.look()
    if options.json:
        print(json.dumps(view.as_json(), ensure_ascii=False))
        return 0
    terminal = Terminal()
    if options.once or not terminal.is_interactive:
        for line in view.lines():
            terminal.line(line)
        return 0
    with Live(console=Console(), auto_refresh=False) as live:
        watch(group, view, live, lambda: time.sleep(options.interval))  # until the next look is due
    return 0


class Group:
    """A server that is asked again and again."""

    def __init__(self, client: Client, now_s: Callable[[], float] = time.monotonic) -> None:
        """Asks for the model's name.

        Args:
            client: of the server.
            now_s: the time, in seconds since some moment.

        Raises:
            ResponseError: it does not answer, or wants a key.
        """
        self._client = client
        self._now_s = now_s
        self._model = client.first_model()
        self._looks: deque[tuple[float, Samples]] = deque(maxlen=_WINDOW_TEXTS)

    def look(self) -> View:
        """What came since the looks before; with the first one, since the start.

        Raises:
            CommandError: it does not answer, or not with metrics of ours.
        """
        samples = Samples(self._client.text("/metrics"))
        at_s = self._now_s()
        before_s, before = self._looks[0] if self._looks else (None, None)
        self._looks.append((at_s, samples))
        window = Window(samples, before, None if before_s is None else at_s - before_s)
        return View.of(self._client.address.url, self._model, window)


def watch(group: Group, view: View, screen: Screen, wait: Callable[[], object]) -> None:
    """Shows look after look until it is interrupted. A server that does not answer is asked again, and it is said."""
    problem = ""
    while True:
        lines = [*view.lines(), *([f"\n{harmless(problem)}; trying again"] if problem else [])]
        screen.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
        wait()
        try:
            view, problem = group.look(), ""
        except ResponseError as error:
            problem = str(error)


def _only_server(run_dir: Path | None) -> ServerAddress:
    """The one server that runs here, by the first of its control sockets that answers."""
    found = control_sockets(run_dir)
    alive = {folder: address for folder, addresses in found.items() for address in addresses[::-1] if _answers(address)}
    if len(alive) > 1:
        raise CommandError(f"several servers run here; say which with --run-dir: {', '.join(map(str, alive))}")
    if not alive:
        raise CommandError(NO_SERVER)
    return next(iter(alive.values()))


def _answers(address: ServerAddress) -> bool:
    try:
        Client(address, _TIMEOUT_S).get("/live")
    except UnreachableError:  # its server is gone
        return False
    return True

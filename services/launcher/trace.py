"""`tokenway trace`: a request's way through the processes, as the servers of this user still know it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from services.launcher.command_parser import command_parser
from services.launcher.errors import CommandError
from services.launcher.http.client import Client, UnreachableError
from services.launcher.http.server_address import ServerAddress
from services.launcher.running_servers import NO_SERVER, control_sockets
from services.launcher.server_flags import add_server_flags, server_address
from services.launcher.terminal import Terminal, harmless
from services.launcher.trace_view import trace_lines

_TIMEOUT_S = 10.0
_NOT_FOUND = 404


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command_parser(
        "trace",
        "Shows where a request that ended lately, or still runs, spent its time: for each hop the process, the wait "
        "and the work. Without --url every server of this user on this machine is asked.",
        "tokenway trace chatcmpl-0123456789abcdef0123456789abcdef",
    )
    made.add_argument("id", metavar="ID", help="the answer's id, which is also its header x-request-id")
    add_server_flags(made)
    made.add_argument("--json", action="store_true", help="print all that the server tells, as JSON")
    made.add_argument("--run-dir", type=Path, metavar="DIR", help="run directory of the server to ask (default: all)")
    return made


def run(arguments: Sequence[str]) -> int:
    """Asks and prints; the exit status.

    Raises:
        CommandError: there is no server, or none knows the request.
    """
    options = parser().parse_args(arguments)
    of_folders = control_sockets(options.run_dir).values() if not options.url else [[server_address(options)]]
    addresses = [address for addresses in of_folders for address in addresses]
    if not addresses:
        raise CommandError(NO_SERVER)
    trace = _ask(addresses, options.id)
    if options.json:
        print(json.dumps(trace, ensure_ascii=False))
        return 0
    terminal = Terminal()
    for line in trace_lines(trace, terminal.columns if terminal.is_interactive else 120):
        terminal.line(harmless(line))
    return 0


def _ask(addresses: Sequence[ServerAddress], request_id: str) -> Mapping[str, Any]:
    """What the first server that knows the request tells of it; every tokenizer answers for its whole group."""
    path = f"/trace/{quote(request_id, safe='')}"
    problems = []
    for address in addresses:
        try:
            response = Client(address, _TIMEOUT_S).get(path)
        except UnreachableError as error:  # its server is gone
            problems.append(str(error))
            continue
        found = response.json() if response.status == 200 else None
        if isinstance(found, dict):
            return found
        problems.append(f"{address.url}: {response.refusal()}")
        if response.status != _NOT_FOUND:
            break
    raise CommandError(problems[-1])

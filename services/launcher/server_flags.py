"""The flags by which a command finds a server: `--url` and `--api-key`."""

from __future__ import annotations

import argparse

from services.launcher.http.server_address import ServerAddress
from services.runtime.config import client_api_key


def add_server_flags(parser: argparse.ArgumentParser, url: str = "") -> None:
    """Adds both flags; `url` is the address without the flag, "" when the command then does something else."""
    parser.add_argument("--url", default=url, help="the server, any that speaks the OpenAI API" + _default(url))
    parser.add_argument(
        "--api-key", metavar="KEY", default="", help="sent as a bearer token (default: the variable OPENAI_API_KEY)"
    )


def server_address(options: argparse.Namespace) -> ServerAddress:
    """The server that the flags name.

    Raises:
        CommandError: the URL is none, or the key cannot be sent.
    """
    return ServerAddress.parse(options.url, options.api_key or client_api_key())


def _default(url: str) -> str:
    return f" (default {url})" if url else ""
